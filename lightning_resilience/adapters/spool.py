# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The files of a spool: complete checkpoints on the node's own disk, each with a record beside it.

::

    <parent>/lightning-resilience-<uid>/<run id>/unpublished/<name>.checkpoint
                                                            /<name>.json
                                                            /owner
                                              damaged/<name>.checkpoint
                                                     /<name>.json

A checkpoint is a file or a directory. Its record is written last, and removed first, so that one
without a record is nothing. One that is not what its record says is set aside, and never removed.

Whoever uses a spool holds a lock on ``owner``, which the kernel lets go when its process dies: so a
later start takes over what a dead one has left, of whatever run, and never what a living one still
has.

What waits and what is published when is decided in ``core.spool``.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from lightning_resilience.adapters.tree_copies import discard_tree
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.spooled import SpoolEntry
from lightning_resilience.errors import StoreError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


__all__ = ["Kept", "SpoolDirectory", "left_behind"]

T = TypeVar("T")

_NAME: Final = "unpublished"
_ASIDE: Final = "damaged"
_TRIES: Final = 3
_FILE, _RECORD, _OWNER = ".checkpoint", ".json", "owner"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One spooled checkpoint.

    Args:
        name: Its name in the spool.
        file: Its file or directory on this node.
        entry: Its record.
    """

    name: str
    file: str
    entry: SpoolEntry


class SpoolDirectory:
    """One spool. One process at a time; its threads may share it.

    Args:
        parent: The node's directory of a run.
    """

    def __init__(self, parent: str) -> None:
        self._path = Path(parent) / _NAME
        self._lock: int | None = None

    def claim(self) -> bool:
        """Make this process the owner, if no living one is; whether it is now. Idempotent."""
        # Whoever had it may remove it between the opening and the lock; that happens once.
        for _ in range(_TRIES):
            if self._lock is not None:
                return True
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _locked(handle):
                os.close(handle)
                return False
            if _is_there(handle, self._path / _OWNER):
                self._lock = handle
            else:
                os.close(handle)
        return self._lock is not None

    def release(self) -> None:
        """Let another process have it, and remove it where nothing is in it. Idempotent."""
        handle, self._lock = self._lock, None
        if handle is None:
            return
        # Order: the lock last. Who has waited for it finds that its file has no name any more.
        if not self._names():
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(handle)

    @property
    def free_bytes(self) -> int:
        """What its disk has room for."""
        return shutil.disk_usage(self._path).free

    def file_of(self, name: str) -> str:
        """Return the file of a checkpoint, or its directory."""
        return str(self._path / f"{name}{_FILE}")

    def keep(self, name: str, write: Callable[[str], T], entry: Callable[[T], SpoolEntry]) -> Kept:
        """Write a checkpoint and its record.

        Args:
            name: A new name.
            write: Writes the file or directory that it is given the name of, complete and
                synchronised.
            entry: Makes its record.

        Raises:
            OSError: What the node's filesystem raised; nothing is left then.
        """
        file = self.file_of(name)
        try:
            made = entry(write(file))
            self._write_record(name, encode(made))
        except BaseException:
            discard_tree(file)
            raise
        return Kept(name=name, file=file, entry=made)

    def _write_record(self, name: str, data: bytes) -> None:
        record = self._record_of(name)
        unfinished = record.with_suffix(".new")
        try:
            with unfinished.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(record)
        finally:
            unfinished.unlink(missing_ok=True)
        directory = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def drop(self, name: str) -> None:
        """Remove a checkpoint. Idempotent."""
        self._record_of(name).unlink(missing_ok=True)
        discard_tree(self.file_of(name))

    def set_aside(self, name: str) -> str:
        """Move a damaged checkpoint to where nobody publishes it; return where that is."""
        aside = self._path.with_name(_ASIDE)
        aside.mkdir(mode=0o700, exist_ok=True)
        file, record = Path(self.file_of(name)), self._record_of(name)
        # Order: the record last. A file without one is removed by the next owner.
        file.replace(aside / file.name)
        record.replace(aside / record.name)
        return str(aside / file.name)

    def kept(self) -> list[Kept]:
        """Return all that is complete; what has a record that cannot be read is left alone."""
        found = []
        for name in self._names():
            record = self._record_of(name)
            try:
                entry = decode(SpoolEntry, record.read_bytes(), key=str(record))
            except (OSError, StoreError) as error:
                _log.warning("a spooled checkpoint is left as it is: %s", error)
                continue
            if Path(self.file_of(name)).exists():
                found.append(Kept(name=name, file=self.file_of(name), entry=entry))
        return sorted(found, key=lambda one: one.entry.number)

    def unfinished(self) -> list[Path]:
        """Return files without a record; where there is an owner, it may be writing them."""
        names = set(self._names())
        files = sorted(self._path.glob(f"*{_FILE}"))
        return [file for file in files if file.name.removesuffix(_FILE) not in names]

    def remove_unfinished(self) -> None:
        """Remove what has no record; the caller is the owner, so nobody writes it now."""
        for file in self.unfinished():
            discard_tree(str(file))
        for name in self._names():
            if not Path(self.file_of(name)).exists():
                self._record_of(name).unlink(missing_ok=True)

    def remove_torn(self) -> None:
        """Remove it all, where there is nothing complete in it and nobody has it."""
        if not self._names() and self.claim():
            self.remove_unfinished()
            self.release()

    def _names(self) -> list[str]:
        return sorted(
            record.name.removesuffix(_RECORD) for record in self._path.glob(f"*{_RECORD}")
        )

    def _record_of(self, name: str) -> Path:
        return self._path / f"{name}{_RECORD}"


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def left_behind(
    directory: str, wanted: Callable[[SpoolEntry], bool]
) -> Iterable[tuple[SpoolDirectory, Kept]]:
    """Yield what dead processes of this user have left on this node.

    Args:
        directory: The node's directory of this run; those of other runs are beside it.
        wanted: Tells whether a checkpoint is one that the caller takes over.
    """
    for run in sorted(Path(directory).parent.iterdir()):
        if not (run / _NAME).is_dir():
            continue
        spool = SpoolDirectory(str(run))
        if not any(wanted(kept.entry) for kept in spool.kept()):
            spool.remove_torn()
            continue
        if not spool.claim():
            continue
        # Read again, now that nobody else changes it.
        spool.remove_unfinished()
        for kept in spool.kept():
            if wanted(kept.entry):
                yield spool, kept
