# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C60: ``save_checkpoint`` was called on some of the ranks only, and the job hung.

``Lightning-AI/pytorch-lightning#19045`` and ``#10947``, ``alan-turing-institute/autocast#386``: the
call ends with a barrier, and under ``if trainer.is_global_zero`` the others never come. What the
user saw was a collective's timeout, half an hour later, that said nothing of the call.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import pytest

from tests import lightning_job
from tests.lightning_job import Job, store_server


if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

TIMEOUT_S = 2.0


class CallsBySome(lightning.pytorch.Callback):
    """Calls ``save_checkpoint`` after the first step, and on each rank as often as it is told.

    Args:
        folder: Where to.
        calls: How often, by rank.
    """

    def __init__(self, folder: str, *, calls: Mapping[int, int]) -> None:
        self.folder = folder
        self.calls = calls

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Call it."""
        if trainer.global_step == 1:
            for number in range(self.calls.get(trainer.global_rank, 0)):
                trainer.save_checkpoint(f"{self.folder}/mine-{number}.ckpt")


def add(trainer: Any, *, folder: str, calls: Mapping[int, int]) -> None:
    """Add that callback to a Trainer."""
    trainer.callbacks.insert(0, CallsBySome(folder, calls=calls))


def trained(
    warm: WarmPython, home: Path, *, ranks: int, calls: Mapping[int, int]
) -> lightning_job.Running:
    """A job in which ranks call as often as they are told, long before their group's timeout."""
    folder = f"{home}/files"
    job = Job(
        folder=folder,
        ranks=ranks,
        options={"joint": {"joint_timeout_s": TIMEOUT_S}},
        group_timeout_s=2 * lightning_job.HANG_S,
        before=partial(add, folder=folder, calls=calls),
    )
    with store_server() as port:
        running = lightning_job.start(warm, job, home, port=port)
        for process in running.ranks:
            process.wait(lightning_job.HANG_S)
    return running


@pytest.mark.parametrize(
    ("ranks", "calls", "absent"),
    [
        (2, {0: 1}, (1,)),
        (2, {1: 1}, (0,)),
        (4, {0: 1, 2: 1}, (1, 3)),
        (2, {0: 2, 1: 1}, (1,)),
        (2, {0: 1, 1: 2}, (0,)),
    ],
    ids=["rank 0 only", "rank 1 only", "two of four", "rank 0 twice", "rank 1 twice"],
)
def test_the_ranks_that_did_not_call_are_named(
    warm_python: WarmPython,
    tmp_path: Path,
    ranks: int,
    calls: dict[int, int],
    absent: tuple[int, ...],
) -> None:
    """Whoever has called too often raises within the bound, and says who has not come."""
    running = trained(warm_python, tmp_path, ranks=ranks, calls=calls)

    reports = [running.report(rank) for rank in range(ranks)]
    most = max(calls.values())
    for rank in (rank for rank, count in calls.items() if count == most):
        report = reports[rank]
        assert report["error"] == "JointError", running.told()
        assert (report["outcome"], report["first_rank"]) == ("lost", absent[0]), report
        assert f"rank {absent[0]} has not come to it within {TIMEOUT_S:.1f} s" in report["text"]
        assert "is_global_zero" in report["text"]
        if len(absent) > 1:
            assert f"Lost ranks: {', '.join(map(str, absent))}." in report["text"]
    assert all("error" in report for report in reports), running.told()
    assert [report["patched"] + report["threads"] for report in reports] == [[]] * ranks
