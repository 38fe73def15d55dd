# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C58: one rank's exception was hidden behind a save that waited for the other ranks.

``Lightning-AI/pytorch-lightning#20187``, ``#6430``: ``on_exception`` saved, which is a collective,
and every rank sat out the group's timeout before it raised a transport error.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests import lightning_job
from tests.failing_ranks import GROUP_TIMEOUT_S, PEERS_S, assert_clean, fail, failed_at_s
from tests.lightning_job import Job, store_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

HAS_NOTES = sys.version_info >= (3, 11)


def fail_with_another_callback(folder: str, failing: int, trainer: Any) -> None:
    """Save by Lightning's callback for this, and let a rank fail."""
    trainer.callbacks.append(OnExceptionCheckpoint(folder, "rescued"))
    fail((failing,), 3, trainer)


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "OnExceptionCheckpoint"])
@pytest.mark.parametrize(("ranks", "failing"), [(2, 0), (2, 1), (4, 2)])
def test_rank_zero_saves_alone_and_everybody_raises_within_seconds(
    ranks: int, failing: int, kind: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    """No rank waits for another: the checkpoint is there, and the exception is the user's own."""
    folder = f"{tmp_path}/checkpoints"
    by_model = kind == "ModelCheckpoint"
    job = Job(
        folder=folder,
        ranks=ranks,
        group_timeout_s=GROUP_TIMEOUT_S,
        steps=8,
        every=100,
        checkpoint={"save_on_exception": by_model},
        before=partial(fail, (failing,), 3)
        if by_model
        else partial(fail_with_another_callback, folder, failing),
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()

    assert running.names() == ["step=3.ckpt" if by_model else "rescued.ckpt"], running.told()
    assert running.steps() == [3]
    assert_clean(reports)
    assert all(report["ended_at_s"] - failed_at_s(running, failing) < PEERS_S for report in reports)
    own = reports.pop(failing)
    assert (own["error"], own["text"]) == ("ValueError", f"a bad batch on rank {failing}")
    assert own["notes"] == []
    assert [(report["error"], report["notes"]) for report in reports] == (
        [("PeerFailedError", [])] * (ranks - 1)
    )


def test_a_save_on_an_exception_that_fails_is_a_note(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Where rank 0's save fails as well, its exception stays the first one, with a note."""
    blocker = tmp_path / "checkpoints"
    blocker.write_text("a file where the directory should be", encoding="utf-8")
    job = Job(
        folder=str(tmp_path / "good"),
        group_timeout_s=GROUP_TIMEOUT_S,
        steps=8,
        every=100,
        before=partial(fail_with_another_callback, str(blocker), 0),
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        own, peer = running.wait()

    assert (own["error"], own["text"]) == ("ValueError", "a bad batch on rank 0"), running.told()
    assert len(own["notes"]) == HAS_NOTES
    assert all("failed as well" in note for note in own["notes"])
    assert peer["error"] == "PeerFailedError"
    assert_clean([own, peer])
