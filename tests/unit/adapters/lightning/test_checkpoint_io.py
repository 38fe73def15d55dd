# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One save: what it believes, and what it leaves behind."""

from __future__ import annotations

import errno
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.storage import Storage
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    import pytest


def staged_save(url: str, spool: Path) -> StagedSave:
    """A save of a small checkpoint."""
    spool.mkdir(exist_ok=True)
    numbers = count()
    storage = Storage({}, spool=lambda: str(spool))
    return StagedSave(storage, url, {"step": 7}, nonce=lambda: f"n{next(numbers)}")


def test_ending_a_save_asks_nothing_of_the_targets_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang, and whoever ends the save is the thread that trains."""
    save = staged_save(str(tmp_path / "run" / "a.ckpt"), tmp_path / "spool")
    save.attempt(RecordingToken())

    def hang(*_args: object, **_kwargs: object) -> NoReturn:
        raise AssertionError("the filesystem of the target was asked")

    monkeypatch.setattr(Path, "unlink", hang)
    save.close()

    assert torch.load(tmp_path / "run" / "a.ckpt") == {"step": 7}


def test_a_save_to_object_storage_leaves_no_staged_file(tmp_path: Path) -> None:
    """The staged file is kept for another attempt, and goes with the save."""
    save = staged_save("memory://bucket/a.ckpt", tmp_path / "spool")

    save.attempt(RecordingToken())
    kept = [path.name for path in (tmp_path / "spool").iterdir()]
    save.attempt(RecordingToken())
    save.close()

    assert kept == [".resilience-n0.staged"]
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_staged_file_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks have agreed by then how it has ended; this one alone would say something else."""
    save = staged_save("memory://bucket/a.ckpt", tmp_path / "spool")
    save.attempt(RecordingToken())

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    save.close()

    assert "Read-only file system" in caplog.text
    assert ".resilience-n0.staged" in caplog.text
