# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks of a node that resume together: one of them reads, and another one where that one dies.

A node is a spool directory of its own here, as it is on a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters.lightning.loading import TorchLoad, on_cpu
from lightning_resilience.adapters.staging import SPOOL_VARIABLE
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.runtime.calls import Token
from lightning_resilience.runtime.system import SystemDice
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, Model, run_rank, store_server
from tests.single_rank import fit, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lightning_job import Running
    from tests.warm_python import Process, WarmPython


pytestmark = [
    pytest.mark.integration,
    # The checkpoint was made elsewhere.
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]

NODES = 2
HANG_S = 170.0
"""Eight ranks start on few cores."""
DISCOVERY = ("info", "ls", "isdir", "manifest_info", "manifest_cat_file")


def checkpoint_in(folder: Path) -> None:
    """Save a checkpoint of step 2, with its manifest."""
    fit(Job(folder=str(folder), steps=2, ranks=1, trainer={"default_root_dir": folder}))


# Two nodes ----------------------------------------------------------------------------------------


def run_on_a_node(job: Job, report: str) -> None:
    """Be one rank of a job on two nodes, as torchrun would start it."""
    rank, per_node = int(os.environ["RANK"]), job.ranks // NODES
    node = str(rank // per_node)
    os.environ |= {
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": str(NODES),
        SPOOL_VARIABLE: f"{os.environ['TMPDIR']}/node-{node}",
    }
    run_rank(job, report)


@pytest.fixture(scope="module")
def resumed(
    warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Running]]:
    """Resume on two nodes, with two ranks and with eight, where one rank may read at a time."""
    saved = tmp_path_factory.mktemp("before")
    checkpoint_in(saved)
    with contextlib.ExitStack() as servers:
        jobs = {}
        for ranks in (2, 8):
            home = tmp_path_factory.mktemp(f"ranks-{ranks}")
            shutil.copytree(saved, home / "checkpoints")
            folder = f"faulty://{home}/checkpoints"
            slow = Rule(operations=("read",), name="step=2", slow_s=0.2)
            jobs[ranks] = lightning_job.start(
                warm_python,
                Job(
                    folder=folder,
                    resume=f"{folder}/step=2.ckpt",
                    ranks=ranks,
                    group_timeout_s=90.0,
                    options={"breaker": {"max_concurrent": 1}},
                    trainer={"num_nodes": NODES, "devices": ranks // NODES},
                ),
                home / "job",
                port=servers.enter_context(store_server()),
                plan=FaultPlan.write(home / "plan", slow),
                function=run_on_a_node,
            )
            # One after the other: both would need all cores.
            codes = [report["code"] for report in jobs[ranks].wait(HANG_S)]
            assert codes == [0] * ranks, jobs[ranks].told()
        yield jobs


def readers_of(running: Running) -> list[int]:
    """Return which ranks have opened the checkpoint, in their order."""
    return [int(call["rank"]) for call in running.plan.calls("open", name="step=2")]


@pytest.mark.multiprocess
def test_each_node_opens_it_once(resumed: dict[int, Running]) -> None:
    """Eight ranks on two nodes, and two opens in all: its manifest is all that rank 0 looks at."""
    running = resumed[8]

    nodes = sorted(rank // 4 for rank in readers_of(running))

    assert nodes == [0, 1]
    assert running.steps() == [2, 4]


@pytest.mark.multiprocess
def test_what_is_asked_does_not_grow_with_the_ranks(resumed: dict[int, Running]) -> None:
    """The same questions for eight ranks as for two, none by a rank that does not read."""
    asked = {
        ranks: sorted(call["operation"] for call in running.plan.calls(*DISCOVERY, name="step=2"))
        for ranks, running in resumed.items()
    }
    readers = {0, *readers_of(resumed[8])}

    assert asked[8] == asked[2] != []
    assert {int(call["rank"]) for call in resumed[8].plan.calls(name="step=2")} <= readers


@pytest.mark.multiprocess
def test_no_more_ranks_read_at_once_than_may(resumed: dict[int, Running]) -> None:
    """With one slot, one reader has ended before the other begins."""
    reads = resumed[8].plan.calls("read", name="step=2")

    turns = [rank for rank, _ in groupby(read["rank"] for read in reads)]

    assert turns == [str(rank) for rank in readers_of(resumed[8])]


# A reader that dies -------------------------------------------------------------------------------

RANKS = 4
STALL_S = 6.0


def load_alone(url: str, spool: str, report: str) -> None:
    """Load as one rank of a node does, outside of a Trainer, and write down what was loaded."""
    load = TorchLoad(
        Storage({}, spool=lambda: spool, stall_timeout_s=STALL_S),
        url,
        nonce=SystemDice().nonce,
        options={"map_location": on_cpu, "weights_only": True},
        common="together",
    )
    token = Token()
    load.prepare(token)
    path = load.attempt(token) if load.needs_storage else None
    loaded = load.finish(path, token)
    load.close()
    Path(report).write_text(json.dumps(loaded["step"]), encoding="utf-8")


class Node:
    """The ranks of one node, of which the first reader does not come back from its second read."""

    def __init__(self, warm: WarmPython, home: Path) -> None:
        torch.save({"step": 7}, home / "a.ckpt")
        stuck = Rule(operations=("read",), name="a.ckpt", hang=True, first=2, last=2)
        self.plan = FaultPlan.write(home / "plan", stuck)
        self._home = home
        self._warm = warm
        self.ranks = [self._start(rank) for rank in range(RANKS)]

    def _start(self, rank: int) -> Process:
        return self._warm.start(
            load_alone,
            f"faulty://{self._home}/a.ckpt",
            str(self._home / "spool"),
            str(self._home / f"report-{rank}"),
            log=self._home / f"rank-{rank}.log",
            environment={**self.plan.environment, "RANK": str(rank)},
        )

    def reader(self) -> int:
        """Return the rank that is stuck, once one is."""
        self._warm.listen(lambda: bool(self._struck()), within_s=HANG_S)
        return int(self._struck()[0]["rank"])

    def _struck(self) -> list[dict[str, Any]]:
        return [call for call in self.plan.calls("read") if call["struck"]]

    def loaded(self, ranks: list[int]) -> list[int]:
        """Return what these ranks have loaded, once they have."""
        codes = [self.ranks[rank].wait(HANG_S) for rank in ranks]
        assert codes == [0] * len(ranks), [self.ranks[rank].text() for rank in ranks]
        return [json.loads((self._home / f"report-{rank}").read_text()) for rank in ranks]

    def opened(self) -> list[int]:
        """Return which ranks have opened the checkpoint."""
        return [int(call["rank"]) for call in self.plan.calls("open", name="a.ckpt")]

    def left(self) -> list[str]:
        """Return what was begun in the cache and has not ended."""
        return [path.name for path in (self._home / "spool" / "node-cache").glob(".*")]


@pytest.mark.multiprocess
def test_a_reader_that_is_killed_is_replaced_by_another_rank(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """At once, since the kernel takes its lock; one more read, and nothing is left of the first."""
    node = Node(warm_python, tmp_path)
    reader = node.reader()

    node.ranks[reader].signal(signal.SIGKILL)

    others = [rank for rank in range(RANKS) if rank != reader]
    assert node.loaded(others) == [7] * len(others)
    assert node.opened()[0] == reader
    assert len(node.opened()) == 2
    assert node.left() == []


@pytest.mark.multiprocess
def test_a_reader_that_is_stopped_is_replaced_and_may_come_back(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """It holds its lock, and shows no mark; afterwards it uses what the other one has made."""
    node = Node(warm_python, tmp_path)
    reader = node.reader()
    node.ranks[reader].signal(signal.SIGSTOP)

    others = [rank for rank in range(RANKS) if rank != reader]
    assert node.loaded(others) == [7] * len(others)

    node.plan.release()
    node.ranks[reader].signal(signal.SIGCONT)
    assert node.loaded([reader]) == [7]
    assert node.left() == []


# One rank -----------------------------------------------------------------------------------------


class Watching(Model):
    """A model that keeps a tensor of the checkpoint, and notes when a checkpoint is mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self.maps: dict[str, bool] = {}

    def _look(self, when: str) -> None:
        self.maps[when] = ".ckpt" in Path("/proc/self/maps").read_text(encoding="utf-8")

    def configure_optimizers(self) -> Any:
        """Train with state."""
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep something of it, as users do."""
        self.kept = checkpoint["state_dict"]["layer.weight"]
        self._look("restoring")

    def on_train_batch_start(self, *_args: Any) -> None:
        """Look before a step."""
        self._look("training")


@pytest.mark.parametrize("protocol", ["faulty://", ""], ids=["fetched", "on a local disk"])
def test_nothing_is_mapped_once_training_has_begun(
    protocol: str, faulty: Callable[..., Job]
) -> None:
    """While it is restored it is; the optimizer's state and a user's tensor are copied then."""
    models: list[Watching] = []

    def make() -> Watching:
        models.append(Watching())
        return models[-1]

    job = replace(faulty(), model=make)
    folder = job.folder.removeprefix("faulty://")
    fit_with(replace(job, folder=folder, steps=2))
    saved = torch.load(f"{folder}/step=2.ckpt", weights_only=True)

    trainer = fit_with(replace(job, resume=f"{protocol}{folder}/step=2.ckpt"))

    model = models[-1]
    assert model.maps == {"restoring": True, "training": False}
    assert torch.equal(model.kept, saved["state_dict"]["layer.weight"])
    assert trainer.global_step == 4


def fit_with(job: Job) -> Any:
    """Train with the job's own model; return the Trainer."""
    trainer = lightning_job.make_trainer(job)
    assert job.model is not None
    trainer.fit(job.model(), lightning_job.make_data(), ckpt_path=job.resume)
    return trainer


def test_a_restart_uses_what_was_fetched_before(faulty: Callable[..., Job]) -> None:
    """Its manifest says that it is the same, and nobody opens it again."""
    job = faulty(steps=2)
    fit(job)
    again = replace(job, resume=f"{job.folder}/step=2.ckpt", steps=4)

    counts = []
    for _ in range(2):
        fit(again)
        counts.append(len(plan_in_use().calls("open", name="step=2")))

    assert counts == [1, 1]
