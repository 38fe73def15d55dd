# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Resuming on storage that fails: all ranks load, or all raise the same error.

The process group's timeout is 6 s, and the outages are longer: a rank that waited in a collective
would be gone before they end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch

from lightning_resilience import JointError
from lightning_resilience.adapters.staging import SPOOL_VARIABLE
from tests import lightning_job
from tests.faulty_filesystem import VARIABLE, FaultPlan, Rule
from tests.lightning_job import (
    Job,
    Running,
    make_trainer,
    store_server,
)
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.warm_python import WarmPython


pytestmark = [
    pytest.mark.integration,
    # The checkpoint was made elsewhere.
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]

GROUP_TIMEOUT_S = 6.0
OUTAGE_S = 8.0
"""Longer than the process group's timeout."""
DEADLINE_S = 6.0
Jobs: TypeAlias = "dict[str, Running]"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2, as Lightning itself writes it."""
    folder = tmp_path_factory.mktemp("before")
    fit(
        Job(
            folder=str(folder), steps=2, ranks=1, options=None, trainer={"default_root_dir": folder}
        )
    )
    return folder / "step=2.ckpt"


# Two ranks ----------------------------------------------------------------------------------------


class IllOnRankOne:
    """Faults for rank 1 only, on a node of its own; a class, so that its process can be sent it."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules

    def __call__(self, _trainer: Any) -> None:
        """Follow another plan in rank 1's process, with another node's cache."""
        if os.environ["RANK"] == "1":
            os.environ[SPOOL_VARIABLE] = f"{os.environ[VARIABLE]}-node-1"
            plan = FaultPlan.write(Path(f"{os.environ[VARIABLE]}-rank-1"), *self.rules)
            os.environ.update(plan.environment)


PLACES: dict[str, tuple[tuple[Rule, ...], dict[str, Any]]] = {
    "outage": ((Rule(operations=("open",), name="step=2", error="reset", lasting_s=OUTAGE_S),), {}),
    "given up": (
        (Rule(operations=("open",), name="step=2", error="reset", first=2),),
        {"options": {"retry": {"deadline_s": DEADLINE_S}}},
    ),
    "missing": ((), {"resume": "step=3.ckpt"}),
    "denied": ((), {"before": IllOnRankOne(Rule(operations=("open",), error="denied"))}),
    "killed": ((), {"before": IllOnRankOne(Rule(operations=("open",), hang=True))}),
}


@pytest.fixture(scope="module")
def ill(
    warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[Jobs]:
    """Start one job for each place, all at the same time: they spend theirs waiting."""
    with contextlib.ExitStack() as servers:
        jobs = {}
        for place, (rules, options) in PLACES.items():
            home = tmp_path_factory.mktemp(place)
            folder = f"faulty://{home}/checkpoints"
            (home / "checkpoints").mkdir()
            shutil.copy(checkpoint, home / "checkpoints")
            resume = f"{folder}/{options.get('resume', 'step=2.ckpt')}"
            jobs[place] = lightning_job.start(
                warm_python,
                Job(
                    folder=folder, group_timeout_s=GROUP_TIMEOUT_S, **{**options, "resume": resume}
                ),
                home / "job",
                port=servers.enter_context(store_server()),
                plan=FaultPlan.write(home / "plan", *rules),
            )
        yield jobs


def failed_alike(running: Running, op: str = "load") -> list[dict[str, Any]]:
    """Wait for the end of a job that is to fail with the same error on both ranks."""
    first, second = reports = running.wait()
    assert first["error"] == second["error"] == "JointError", running.told()
    assert first["text"] == second["text"]
    assert first["text"].startswith(f"{op} of faulty://")
    for report in reports:
        assert (report["patched"], report["threads"], report["step"]) == ([], [], 0)
    return reports


@pytest.mark.multiprocess
def test_an_outage_at_the_load_is_waited_for_by_all_ranks(ill: Jobs) -> None:
    """It lasts longer than the group's timeout, and then both ranks go on from the checkpoint."""
    running = ill["outage"]

    reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.steps() == [2, 4]
    opened = running.plan.calls("open", name="step=2")
    # Rank 0 looks at it, and one of the two, which are on one node, fetches it.
    assert [call["struck"] for call in opened].count(False) == 2
    assert opened[0]["struck"]
    histories = [report["breakers"]["faulty://:read"]["history"] for report in reports]
    assert histories[0] == histories[1]
    assert "open" in [state for _, state, _ in histories[0]]


@pytest.mark.multiprocess
def test_an_outage_without_an_end_ends_the_wait_of_all_ranks(ill: Jobs) -> None:
    """The one that reads gives up at its deadline, and so does the one that waits for it."""
    reports = failed_alike(ill["given up"])

    assert {report["outcome"] for report in reports} == {"transient"}
    began_s = ill["given up"].plan.calls("open", name="step=2")[0]["at_s"]
    assert all(report["ended_at_s"] - began_s >= DEADLINE_S for report in reports)


@pytest.mark.multiprocess
def test_a_missing_checkpoint_is_one_attempt_and_one_error_on_all_ranks(ill: Jobs) -> None:
    """It is a mistake and not an outage: asked for once by rank 0, and no circuit opens."""
    running = ill["missing"]

    reports = failed_alike(running, "resolve")

    assert (
        "First cause, permanent, on rank 0 after 1 attempt: FileNotFoundError"
        in (reports[0]["text"])
    )
    assert reports[0]["causes"][0].startswith("FileNotFoundError"), reports[0]
    for report in reports:
        history = report["breakers"]["faulty://:read"]["history"]
        assert "open" not in [state for _, state, _ in history]
    asked = running.plan.calls("info", name="step=3")
    assert [call["rank"] for call in asked] == ["0"]


@pytest.mark.multiprocess
def test_one_rank_that_cannot_read_fails_all(ill: Jobs) -> None:
    """The other has loaded the checkpoint, and raises the same error with the first one's cause."""
    reports = failed_alike(ill["denied"])

    assert [report["first_rank"] for report in reports] == [1, 1]
    assert "AccessDenied" in reports[0]["text"]
    assert [bool(report["causes"]) for report in reports] == [False, True]


@pytest.mark.multiprocess
def test_a_rank_that_is_killed_while_loading_is_named(ill: Jobs) -> None:
    """The other waits for its sign of life, and then says whose is missing."""
    running = ill["killed"]
    plan = FaultPlan(f"{running.plan.folder}-rank-1")
    running.until(lambda: bool(plan.calls("open")), what="rank 1 loads")

    running.ranks[1].signal(signal.SIGKILL)

    report = running.wait()[0]
    assert (report["error"], report["outcome"], report["first_rank"]) == ("JointError", "lost", 1)
    assert "rank 1 gave no sign of life" in report["text"]


# One rank -----------------------------------------------------------------------------------------


@pytest.fixture
def resuming(faulty: Callable[..., Job], checkpoint: Path) -> Callable[..., Job]:
    """Make a job that goes on from the checkpoint of step 2, on storage with these faults."""

    def make(*rules: Rule, **options: Any) -> Job:
        made = faulty(*rules)
        folder = Path(made.folder.removeprefix("faulty://"))
        folder.mkdir(exist_ok=True)
        shutil.copy(checkpoint, folder)
        return faulty(*rules, **{"resume": f"{made.folder}/step=2.ckpt", **options})

    return make


def test_a_load_gives_what_lightnings_own_gives(
    resuming: Callable[..., Job], checkpoint: Path
) -> None:
    """The same weights, on the CPU, from the same file."""
    job = resuming(steps=2)

    trained = fit(job)

    layer = torch.load(checkpoint, weights_only=True)["state_dict"]["layer.weight"]
    assert torch.equal(trained.lightning_module.layer.weight, layer)
    assert trained.global_step == 2


def test_a_long_read_that_goes_on_is_no_stall(resuming: Callable[..., Job]) -> None:
    """Each piece is a mark of progress, so the whole may take longer than ``stall_timeout_s``."""
    slow = Rule(operations=("read",), name="step=2", slow_s=0.3)
    job = resuming(slow, options={"retry": {"stall_timeout_s": 0.8}})

    fit(job)

    reads = plan_in_use().calls("read", name="step=2")
    assert reads[-1]["at_s"] - reads[0]["at_s"] > 0.8
    # Once to look at it, and once to load it.
    assert len(plan_in_use().calls("open", name="step=2")) == 2


def test_a_reset_in_the_middle_is_repeated(resuming: Callable[..., Job]) -> None:
    """The whole file is fetched again."""
    # By then it is fetched: rank 0 has looked at the file before.
    job = resuming(Rule(operations=("read",), name="step=2", error="reset", first=6, last=6))

    fit(job)

    opened = plan_in_use().calls("open", name="step=2")
    assert len(opened) == 3
    reads = plan_in_use().calls("read", name="step=2")
    assert [read["struck"] for read in reads].index(True) == 5
    assert opened[1]["at_s"] < reads[5]["at_s"] < opened[2]["at_s"]
    assert names(job) == ["step=2.ckpt", "step=4.ckpt"]


def test_a_load_that_hangs_is_abandoned_and_made_again(resuming: Callable[..., Job]) -> None:
    """A read that does not come back is left behind at ``stall_timeout_s``."""
    hang = Rule(operations=("read",), name="step=2", hang=True, last=1)
    job = resuming(hang, options={"retry": {"stall_timeout_s": 0.5}})

    trained = fit(job)

    plan_in_use().release()
    assert trained.global_step == 4
    assert lightning_job.our_threads() == []


def test_what_is_no_checkpoint_has_a_small_limit(
    resuming: Callable[..., Job], tmp_path: Path
) -> None:
    """A file that cannot be read is fetched once, and the error is torch's."""
    job = resuming()
    (tmp_path / "checkpoints" / "step=2.ckpt").write_bytes(b"no checkpoint")

    with pytest.raises(JointError) as caught:
        fit(job)

    assert caught.value.outcome == "unknown"
    assert type(caught.value.__cause__).__name__ == "UnpicklingError"
    # Once to look at it, which cannot tell, and once to fetch it.
    assert len(plan_in_use().calls("open", name="step=2")) == 2


def test_a_strategy_with_a_load_of_its_own_keeps_it(resuming: Callable[..., Job]) -> None:
    """Only where the strategy does what Lightning's base does is it known what to replace."""
    base = type(make_trainer(resuming()).strategy)
    loaded: list[Any] = []

    def load_checkpoint(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.append(path)
        return base.load_checkpoint(self, path, *args, **kwargs)

    kind = type("LoadsItself", (base,), {"load_checkpoint": load_checkpoint})
    job = resuming(trainer={"strategy": kind("cpu")})

    fit(job)

    assert loaded == [job.resume]
    assert names(job) == ["step=2.ckpt", "step=4.ckpt"]
