# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C50: the ranks of a job noticed one rank's failure at their own collective timeouts.

``kubeflow/trainer#2000``: each ended at another moment, minutes later, with a transport error.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback

from tests import lightning_job
from tests.failing_ranks import (
    GROUP_TIMEOUT_S,
    PEERS_S,
    assert_clean,
    fail,
    failed_at_s,
    incident_in,
)
from tests.lightning_job import HANG_S, Job, store_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


@pytest.mark.parametrize(("ranks", "failing"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_all_ranks_stop_within_seconds_and_say_who_failed(
    ranks: int, failing: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Ranks in a collective stop although its timeout is far away, and name the rank and cause."""
    job = Job(
        folder=f"{tmp_path}/checkpoints",
        ranks=ranks,
        group_timeout_s=GROUP_TIMEOUT_S,
        steps=8,
        every=100,
        before=partial(fail, (failing,), 3),
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()
        incident = incident_in(port)

    assert_clean(reports)
    own = reports.pop(failing)
    assert (own["error"], own["text"]) == ("ValueError", f"a bad batch on rank {failing}")
    assert own["notes"] == []
    for report in reports:
        assert report["error"] == "PeerFailedError", running.told()
        assert f"Rank {failing} failed first, after step 3" in report["text"]
        assert f"ValueError: a bad batch on rank {failing}" in report["text"]
        assert report["ended_at_s"] - failed_at_s(running, failing) < PEERS_S
    assert (incident["rank"], incident["kind"], incident["step"]) == (failing, "error", 3)


class Blocks(Callback):
    """Takes its time on an exception, for as long as another rank has not ended.

    Args:
        failing: The rank that fails.
        home: Where the ranks' reports appear.
    """

    def __init__(self, failing: int, home: Path) -> None:
        self._failing = failing
        self._home = home

    def on_exception(self, trainer: Any, *_args: Any) -> None:
        """Block."""
        if trainer.global_rank != self._failing:
            return
        others = [rank for rank in range(trainer.world_size) if rank != self._failing]
        until_s = time.monotonic() + HANG_S / 2
        while time.monotonic() < until_s:
            if all((self._home / f"report-{rank}.json").exists() for rank in others):
                return
            time.sleep(0.05)


def fail_and_block(failing: int, home: Path, trainer: Any) -> None:
    """Let a rank fail, and stay in a callback that stands before all others."""
    trainer.callbacks.insert(0, Blocks(failing, home))
    fail((failing,), 3, trainer)


def test_others_are_told_before_anything_can_block(warm_python: WarmPython, tmp_path: Path) -> None:
    """A failing rank that hangs in the user's own callback holds nobody up."""
    job = Job(
        folder=f"{tmp_path}/checkpoints",
        ranks=4,
        group_timeout_s=GROUP_TIMEOUT_S,
        steps=8,
        every=100,
        before=partial(fail_and_block, 1, tmp_path / "job"),
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()

    own = reports.pop(1)
    assert own["error"] == "ValueError", running.told()
    assert [report["error"] for report in reports] == ["PeerFailedError"] * 3, running.told()
    assert all(report["ended_at_s"] - failed_at_s(running, 1) < PEERS_S for report in reports)
