# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C03: a job that is killed in the middle of a save leaves half a file under the final name.

``Lightning-AI/pytorch-lightning#688``, ``#19970``: the next start fails with an unexpected end of
the file, and what was there before is gone. fsspec writes into the directory for temporary files,
and where that is on another filesystem, moving the file is copying it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback

from tests import lightning_job
from tests.lightning_job import Job


if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

SHARED_MEMORY = Path("/dev/shm")


class DiesHalfway(Callback):
    """Lets the process be killed in the first write of the save point after step 4, after half."""

    def __call__(self, trainer: Any) -> None:
        """Join a Trainer."""
        # Not the one that the process has been forked with.
        tempfile.tempdir = None
        trainer.callbacks.insert(0, self)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Replace what our pipeline and what a move between filesystems writes with."""
        if trainer.global_step == 3:
            write, send = os.write, os.sendfile

            def half_written(fd: int, data: Any) -> int:
                write(fd, memoryview(data).cast("B")[: len(data) // 2])
                return die()

            def half_sent(out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
                send(out_fd, in_fd, offset, min(count, os.fstat(in_fd).st_size) // 2)
                return die()

            os.write, os.sendfile = half_written, half_sent


def die() -> int:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory for temporary files on another filesystem than the checkpoints'."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other filesystem")
    folder = SHARED_MEMORY / f"lightning-resilience-tests-{os.getpid()}"
    folder.mkdir()
    yield folder
    # The node's spool directory is in it as well: a start looks there for what was left.
    shutil.rmtree(folder)


def torn(folder: Path) -> list[str]:
    """Return the names of checkpoints that cannot be loaded."""
    return [path.name for path in folder.glob("*.ckpt") if not can_be_loaded(path)]


def can_be_loaded(path: Path) -> bool:
    """Tell whether ``torch.load`` raises nothing."""
    # Four types, depending on where the file ends.
    with contextlib.suppress(Exception):
        return bool(torch.load(path, weights_only=True))
    return False


@pytest.mark.parametrize("ours", [False, True], ids=["plain", "ours"])
def test_what_has_a_final_name_is_whole(
    *, ours: bool, elsewhere: Path, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Plain Lightning leaves half of one; with the callback the one before is still the last."""
    job = Job(
        folder=str(tmp_path / "checkpoints"),
        ranks=1,
        options={} if ours else None,
        checkpoint={"save_top_k": 1, "save_last": True},
        before=DiesHalfway(),
    )

    running = lightning_job.start(
        warm_python, job, tmp_path / "job", environment={"TMPDIR": str(elsewhere)}
    )
    (report,) = running.wait()

    assert report["code"] == -signal.SIGKILL, running.told()
    assert torn(tmp_path / "checkpoints") == ([] if ours else ["step=4.ckpt"])
    if ours:
        assert running.names() == ["last.ckpt", "step=2.ckpt"]
