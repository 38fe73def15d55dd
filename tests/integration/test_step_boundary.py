# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What any rank asks for is acted on by all ranks between the same two steps, and costs nothing."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_resilience.adapters.lightning import boundary
from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.agenda import AgendaItem, AgendaKind
from lightning_resilience.errors import JointError
from tests import lightning_job
from tests.lightning_job import Job, find, store_server


if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

MANY = 4000
ACTED = "acted on "


class Asking(Callback):
    """Asks for something in a thread of its own, and tells what was acted on.

    What is asked for next waits until all before it was acted on, because two items of a kind are
    one where the second comes before that.

    Args:
        plan: What is asked for, by the number of items acted on: the ranks that ask, and for what.
        total: After how many items the job ends.
    """

    def __init__(self, plan: Mapping[int, list[tuple[int, AgendaKind]]], total: int) -> None:
        self._plan = dict(plan)
        self._total = total
        self._acted: list[tuple[int, str, int]] = []

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        """Register what all ranks do; nothing of ours has an action for these kinds."""
        for kind in (AgendaKind.FAIL, AgendaKind.SAVE):
            self._boundary(trainer).on(kind, partial(self._act, trainer))

    def _boundary(self, trainer: Any) -> Any:
        return find(trainer, "ResilienceCallback")._boundary

    def _act(self, trainer: Any, record: Any) -> None:
        self._acted.append((trainer.global_step, record.kind, record.rank))
        # A collective, which would hang or mix up two actions that are not the same.
        ranks = trainer.strategy.broadcast(record.rank)
        assert ranks == record.rank
        if len(self._acted) == self._total:
            os.write(1, f"{ACTED}{json.dumps(self._acted)}\n".encode())
            raise JointError(record.reason, op="agenda")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Ask, if it is time."""
        for rank, kind in self._plan.pop(len(self._acted), []):
            if rank == trainer.global_rank:
                item = AgendaItem(kind=kind, reason="because")
                thread = threading.Thread(target=self._boundary(trainer).ask, args=(item,))
                thread.start()
                thread.join()


def _ask(trainer: Any, *, asking: Asking) -> None:
    trainer.callbacks.append(asking)


def _ask_without_broadcast(trainer: Any, *, asking: Asking) -> None:
    vars(boundary)["has_broadcast"] = lambda _trainer: False
    trainer.callbacks.append(asking)


def acted(running: Running) -> list[list[tuple[int, str, int]]]:
    """Return what each rank has acted on: step, kind, and who asked."""
    lines = [
        line
        for process in running.ranks
        for line in process.text().splitlines()
        if line.startswith(ACTED)
    ]
    return [json.loads(line.removeprefix(ACTED)) for line in lines]


@pytest.mark.parametrize("before", [_ask, _ask_without_broadcast], ids=["new", "old"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_act_on_the_same_items_at_the_same_steps(
    ranks: int, before: Any, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Whoever asks, in whichever thread: each item once, on all ranks, and the error on all."""
    last = ranks - 1
    # Rank 0 first, because its ear must then turn away from what it listens for.
    plan = {
        0: [(0, AgendaKind.SAVE)],
        1: [(last, AgendaKind.SAVE)],
        2: [(last, AgendaKind.FAIL), (0, AgendaKind.SAVE)],
    }
    job = Job(
        folder=f"{tmp_path}/files",
        steps=MANY,
        every=MANY,
        ranks=ranks,
        group_timeout_s=20.0,
        before=partial(before, asking=Asking(plan, 4)),
    )
    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()

    assert [report["error"] for report in reports] == ["JointError"] * ranks, running.told()
    first, *others = acted(running)
    assert len(others) == ranks - 1
    assert all(other == first for other in others)
    kinds = [(kind, rank) for _, kind, rank in first]
    assert kinds[:2] == [("save", 0), ("save", last)]
    assert sorted(kinds[2:]) == [("fail", last), ("save", 0)]
    steps = [step for step, _, _ in first]
    assert steps == sorted(set(steps))


class Counting(Callback):
    """Counts what this rank asks of the shared store between two steps of the training."""

    def __init__(self) -> None:
        self._asked: list[str] = []

    def on_train_start(self, *_: Any) -> None:
        """Note every operation from now on, of any thread."""
        asked = self._asked
        for name in ("get", "multi_get", "set", "delete", "compare_and_set", "add"):
            inner = getattr(TorchStore, name)

            def noting(store: Any, *args: Any, _inner: Any = inner, _name: str = name) -> Any:
                asked.append(_name)
                return _inner(store, *args)

            setattr(TorchStore, name, noting)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Fail the training where anything was asked for."""
        assert self._asked == [], f"{self._asked} in step {trainer.global_step}"

    def on_train_end(self, *_: Any) -> None:
        """Make sure that it is not blind: the save at the end has asked for much."""
        assert "compare_and_set" in self._asked


def _count(trainer: Any) -> None:
    # Before ours, so that no save has been made when it looks.
    trainer.callbacks.insert(0, Counting())


def test_steps_in_which_nobody_wants_anything_ask_nothing_of_the_store(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Not one operation on any rank, and the weights are those of a training without us."""
    weights = []
    for name, options, before in (("with", {}, _count), ("without", None, None)):
        job = Job(
            folder=f"{tmp_path}/{name}",
            steps=150,
            every=150,
            group_timeout_s=20.0,
            options=options,
            before=before,
        )
        with store_server() as port:
            running = lightning_job.start(warm_python, job, tmp_path / f"job-{name}", port=port)
            reports = running.wait()
        assert [report["code"] for report in reports] == [0, 0], running.told()
        weights.append(torch.load(f"{tmp_path}/{name}/step=150.ckpt")["state_dict"])

    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
