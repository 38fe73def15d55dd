# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C20: no space left, while there is room where the user looks: another disk or a quota is full.

``NVIDIA-NeMo/Automodel#3390``, ``awslabs/awsome-distributed-ai#1225``: where a load goes through a
disk of the node, an older copy there may be all that is in its way, and the error names no disk.
"""

from __future__ import annotations

import errno
import os
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters.lightning.loading import TorchLoad, on_cpu
from lightning_resilience.adapters.mounts import mount_point
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.outcome import FailureClass, classify
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Iterator


HOURS_AGO_S = 3 * 3600


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """Storage with a checkpoint, and a node with an older copy that nobody uses any more."""
    storage = Storage({}, spool=lambda: str(tmp_path / "spool"))
    torch.save({"step": 4}, tmp_path / "a.ckpt")
    storage.place("memory://").fs.pipe_file("/b/a.ckpt", (tmp_path / "a.ckpt").read_bytes())
    older = Path(storage.cache_directory, "older.ckpt")
    older.parent.mkdir(parents=True)
    older.write_bytes(bytes(10**6))
    now_s = older.stat().st_mtime
    os.utime(older, (now_s - HOURS_AGO_S, now_s - HOURS_AGO_S))
    yield storage
    storage.place("memory://").fs.store.clear()


def load(storage: Storage) -> Any:
    """Load it in one attempt."""
    numbers = count()
    work = TorchLoad(
        storage,
        "memory://b/a.ckpt",
        nonce=lambda: f"n{next(numbers)}",
        options={"map_location": on_cpu, "weights_only": True},
        common="1",
    )
    try:
        work.prepare(RecordingToken())
        return work.finish(work.attempt(RecordingToken()), RecordingToken())
    finally:
        work.close()


def test_an_older_copy_makes_room(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed before anything is written, since what comes in does not fit beside it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10))

    assert load(storage) == {"step": 4}

    assert not Path(storage.cache_directory, "older.ckpt").exists()


def test_the_disk_that_is_full_is_named_and_nothing_is_left_on_it(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that is not repeated blindly, with the mount point in its text."""

    def full(_fd: int, _data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)

    with pytest.raises(OSError, match="is full or its quota used up") as caught:
        load(storage)

    monkeypatch.undo()
    assert classify(caught.value, reading=True).failure is FailureClass.CAPACITY
    assert mount_point(storage.cache_directory) in str(caught.value)
    assert [path.name for path in Path(storage.cache_directory).glob(".*")] == []
    assert not any(Path(storage.cache_directory).glob("[!o]*.ckpt"))
