# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C21: NFS answered ESTALE during a save, and every retry wrote to the same dead handle.

``huggingface/transformers#9732``, ``mindsdb/anton#383``: a stale handle stays stale; a file that is
opened again by its path is well.
"""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.events import AttemptFailed
from tests.real_guard import Rank


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken


def stale() -> OSError:
    """What the kernel says of a handle that its server has forgotten."""
    return OSError(errno.ESTALE, "Stale file handle")


class StaleHandles:
    """The handles of staged files, the first of which goes stale at one call.

    Args:
        monkeypatch: Undoes it.
        call: Name of the call in ``os`` that first finds it stale.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.opened: list[str] = []
        self.used_again: list[str] = []
        self._fds: set[int] = set()
        self._stale: set[int] = set()
        monkeypatch.setattr(os, "open", self._opening(os.open))
        monkeypatch.setattr(os, "close", self._closing(os.close))
        for name in ("write", "fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._using(name, getattr(os, name), fails=name == call))

    def _opening(self, inner: Callable[..., int]) -> Callable[..., int]:
        def opening(path: Any, *args: Any, **kwargs: Any) -> int:
            fd = inner(path, *args, **kwargs)
            if str(path).endswith(".staged") and "/.resilience/" not in str(path):
                self.opened.append(str(path))
                self._fds.add(fd)
            return fd

        return opening

    def _closing(self, inner: Callable[[int], None]) -> Callable[[int], None]:
        def closing(fd: int) -> None:
            self._fds.discard(fd)
            self._stale.discard(fd)
            inner(fd)

        return closing

    def _using(self, name: str, inner: Callable[..., Any], *, fails: bool) -> Callable[..., Any]:
        def using(fd: int, *args: Any) -> Any:
            if fd in self._stale:
                self.used_again.append(name)
                raise stale()
            if fails and fd in self._fds and len(self.opened) == 1:
                self._stale.add(fd)
                raise stale()
            return inner(fd, *args)

        return using


def save(folder: Path) -> tuple[Any, Rank]:
    """Save a checkpoint on a filesystem with paths, under a guard."""
    storage = Storage({}, spool=lambda: str(folder / "spool"))
    nonces = itertools.count()
    saving = StagedSave(
        storage,
        str(folder / "a.ckpt"),
        {"weights": torch.ones(1000)},
        nonce=lambda: f"n{next(nonces)}",
    )
    mine = Rank()
    return mine.call(saving.attempt), mine


def there(folder: Path) -> list[str]:
    """Return the files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_save_opens_its_file_again_by_path(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt has a file of its own; the stale handle is not touched any more."""
    handles = StaleHandles(monkeypatch, call)

    done, mine = save(tmp_path)
    monkeypatch.undo()

    (failed,) = mine.sink.emitted(AttemptFailed)
    assert (failed.failure, done.attempts) == ("transient", 2)
    assert len(handles.opened) == 2
    assert handles.used_again == []
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["weights"].sum() == 1000
    assert there(tmp_path) == [".resilience/a.ckpt.json", "a.ckpt"]


def test_a_directory_that_went_stale_is_found_again_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that fails so leaves nothing, and the file is staged and published anew."""
    inner, left = Path.replace, [stale()]

    def replace(path: Path, target: Path) -> Path:
        if left:
            raise left.pop()
        return inner(path, target)

    monkeypatch.setattr(Path, "replace", replace)

    done, _ = save(tmp_path)

    assert done.attempts == 2
    assert there(tmp_path) == [".resilience/a.ckpt.json", "a.ckpt"]


class StaleOnce(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """The first file that is opened for reading is stale when it is read."""

    cachable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reads: list[list[int]] = []

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode=mode, **kwargs)
        number, inner = len(self.reads), file.f.read
        self.reads.append([])

        def read(*args: Any) -> bytes:
            self.reads[number].append(1)
            if number == 0:
                raise stale()
            data: bytes = inner(*args)
            return data

        file.read = read
        return file


def test_a_read_opens_its_file_again_by_path(tmp_path: Path) -> None:
    """A file that is fetched whole is fetched from a handle that is new."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"weights")

    def run(_fs: Any, _operation: str, _path: str, work: Callable[[CancelToken], Any], /) -> Any:
        return Rank().call(work, reading=True).value

    fs = guarded(StaleOnce, run=run)

    data = fs.cat_file(str(path))

    assert data == b"weights"
    assert [len(reads) for reads in fs.reads] == [1, 1]
