# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C20: there is no space, or the quota is used up, although there seems to be space.

``NVIDIA-NeMo/Automodel#3390``, ``awslabs/awsome-distributed-ai#1225``,
``open-mmlab/mmdetection#12069``: the pointer to the newest checkpoint could not be written while
the checkpoint itself was complete; ten thousand steps were trained again, and the other ranks
waited for half an hour.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import JointError
from tests.lightning_job import Job
from tests.single_rank import fit, names


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint"),
]


class FullDisk:
    """A disk on which the nth file that a save stages, and all after it, find no space.

    Args:
        folder: Where the checkpoints are.
        monkeypatch: Replaces ``os.open`` and ``os.write``.
        error: What the system says.
    """

    def __init__(self, folder: str, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
        self.first = 0
        self._folder = folder
        self.files: list[str] = []
        self.refused = 0
        self._error = error
        self._open, self._write = os.open, os.write
        monkeypatch.setattr(os, "open", self._opened)
        monkeypatch.setattr(os, "write", self._written)

    def _opened(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        name = str(path)
        # What is tried before the first step has a folder of its own, and is no save.
        is_saved = name.startswith(self._folder) and "/preflight/" not in name
        if is_saved and name.endswith(".staged") and flags & os.O_CREAT:
            self.files.append(name)
        return self._open(path, flags, *args, **options)

    def _written(self, fd: int, data: Any) -> int:
        if self.first and len(self.files) >= self.first:
            self.refused += 1
            raise OSError(self._error, os.strerror(self._error))
        return self._write(fd, data)


@pytest.fixture
def job(tmp_path: Path, spool: Path) -> Job:
    """A job on a local directory."""
    del spool
    return Job(folder=str(tmp_path / "checkpoints"), ranks=1, checkpoint={"save_last": True})


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("what", ["checkpoint", "pointer"])
def test_it_is_tried_once_and_what_is_complete_can_be_loaded(
    what: str, error: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing unfinished stays on the full disk, and the error names the filesystem."""
    fit(job)
    disk = FullDisk(job.folder, monkeypatch, error)
    fit(replace(job, steps=6, resume="last"))
    # The checkpoint, its manifest, the last one, its manifest.
    assert len(disk.files) == 4
    disk.files.clear()
    disk.first = 1 if what == "checkpoint" else 3

    with pytest.raises(JointError, match="is full or its quota used up") as caught:
        fit(replace(job, steps=8, resume="last"))

    disk.first = 0
    folder = Path(job.folder)
    assert caught.value.outcome == "capacity"
    assert disk.refused == 1
    assert [path.name for path in folder.rglob("*.staged")] == []
    expected = ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    newest = "last.ckpt"
    if what == "pointer":
        expected.append("step=8.ckpt")
        newest = "step=8.ckpt"
    assert names(job) == ["last.ckpt", *expected]
    trainer = fit(replace(job, steps=10, resume=str(folder / newest)))
    assert trainer.global_step == 10
