# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A node's cache of checkpoints: one of its ranks makes a file, the others wait for that.

``core.node_cache`` has the rules. A file is made under a name of its own and appears by a rename.
Locks are ``flock``, which the kernel takes from a process that dies, however it does; where the
filesystem has none, every rank reads for itself.

=====================================  =============================================================
name in the cache                      what it is
=====================================  =============================================================
``<key>.ckpt``                         a checkpoint, complete and checked; or an empty file that
                                       says that the one which lies elsewhere was checked
``<key>.turn``, ``<key>.reading``      the two locks; the time of the second is the reader's mark
``<key>-<nonce>.refused``              why the reader of one load has refused it
``.resilience-<key>-<nonce>.staged``   what a reader has made so far
=====================================  =============================================================
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_resilience.adapters.staging import discard, is_staging_name, staging_name
from lightning_resilience.core.node_cache import (
    Kept,
    Limits,
    Step,
    Watch,
    is_usable,
    next_step,
    to_remove,
    watched,
)
from lightning_resilience.errors import CorruptCheckpointError
from lightning_resilience.runtime.system import SystemClock


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.ports import CancelToken


__all__ = ["NodeFile", "beside_runs", "make_room"]

_NAME: Final = ".node-cache"
_CLOCK: Final = "now"
"""An empty file, by whose time the filesystem tells its own."""
_POLL_S: Final = 0.02
_HELD: Final = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN})

_log = logging.getLogger(__name__)


def beside_runs(spool_directory: str) -> str:
    """Return the cache of this user on this node, in which all runs of it keep their checkpoints.

    A run without a name has a spool directory that no later start finds; what it has fetched must
    be found all the same, to be removed.

    Args:
        spool_directory: That of one run, made by ``staging.spool_directory``: the one that it is in
            belongs to this user alone.
    """
    return str(Path(spool_directory).with_name(_NAME))


class _Lock:
    """A lock of this node, as one attempt has it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._releasing = threading.Lock()

    def take(self) -> bool:
        """Take it where nobody has it; tell whether this attempt has it now."""
        if self._fd is not None:
            return True
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(fd, fcntl.LOCK_EX):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def mark(self) -> int | None:
        """Return the mark of another one who holds it; None where nobody does."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if _lock(fd, fcntl.LOCK_SH):
                fcntl.flock(fd, fcntl.LOCK_UN)
                return None
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def beat(self) -> None:
        """Show that its holder goes on."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path)

    def release(self) -> None:
        """Let go of it. Idempotent; any thread."""
        with self._releasing:
            fd, self._fd = self._fd, None
        if fd is not None:
            # Not by closing alone: a process that was forked meanwhile has it open as well.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        # Where there are no locks, nobody is kept from reading.
        return error.errno not in _HELD
    return True


class _BeatingToken:
    """A cancel token whose progress the other ranks of the node see as well."""

    def __init__(self, token: CancelToken, lock: _Lock) -> None:
        self._token = token
        self._lock = lock

    @property
    def cancelled(self) -> bool:
        """Whether the caller has abandoned the call."""
        return self._token.cancelled

    def progress(self) -> None:
        """Tell the caller, and the others."""
        self._token.progress()
        self._lock.beat()

    def raise_if_cancelled(self) -> None:
        """Raise once the caller has abandoned the call."""
        self._token.raise_if_cancelled()


class NodeFile:
    """One file of the cache, as one rank of the node needs it for one load.

    Args:
        directory: The cache; made where it is not there.
        key: From ``core.node_cache.cache_key``.
        expected: What rank 0 has seen of a checkpoint that is copied; None for a file that says
            that something was checked.
        load: A text that the ranks of one load have in common; empty where they have none.
        patience_s: After how long without a mark a reader counts as stopped or stuck, in seconds;
            less than ``stall_timeout_s``, or who waits would be taken for stalled as well.
        nonce: Makes names.
        shown: What it is, for the log.
    """

    def __init__(
        self,
        directory: str,
        key: str,
        *,
        expected: Inspection | None,
        load: str,
        patience_s: float,
        nonce: Callable[[], str],
        shown: str,
    ) -> None:
        self._shown = shown
        self._directory = Path(directory)
        self._key = key
        self._expected = expected
        self._load = load
        self._patience_s = patience_s
        self._nonce = nonce
        self._turn = _Lock(self._directory / f"{key}.turn")
        self._readings: list[_Lock] = []
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def path(self) -> str:
        """Where it is, once it is there."""
        return str(self._directory / f"{self._key}.ckpt")

    def settle(self, token: CancelToken) -> bool:
        """Wait until the file is there, or it is this rank's turn to ask the storage for it.

        Outside of a slot of the storage.

        Args:
            token: Told when a reader goes on, and asked whether the caller has given up.

        Returns:
            Whether it is there.

        Raises:
            CorruptCheckpointError: A reader has refused it.
        """
        step = self._await(self._turn, token)
        if token.cancelled:
            # Whoever has given up has let go of it already, and will not again.
            self._turn.release()
        token.raise_if_cancelled()
        return step is Step.USE

    def obtain(self, make: Callable[[str, CancelToken], None], token: CancelToken) -> None:
        """Have the file, made by this rank or by another one.

        Inside a slot of the storage: one attempt of several.

        Args:
            make: Makes it, complete and checked, under a name that it is given.
            token: Of the call; told of progress.

        Raises:
            CorruptCheckpointError: It is not what was saved.
            OSError: What the storage or this node's disk raised.
        """
        if self._readings:
            # An attempt that was abandoned is still there: it hangs, and others may do better.
            self.release()
        reading = _Lock(self._directory / f"{self._key}.reading")
        self._readings.append(reading)
        try:
            step = self._await(reading, token)
            if step is not Step.USE:
                reading.beat()
                self._make(make, _BeatingToken(token, reading), alone=step is Step.READ)
        finally:
            reading.release()
            self._readings.remove(reading)

    def release(self) -> None:
        """Let other ranks of the node have their turn. Idempotent."""
        self._turn.release()
        for reading in list(self._readings):
            reading.release()

    def remove(self) -> None:
        """Remove the file: nobody else will look for it."""
        locks = (self._directory / f"{self._key}.{name}" for name in ("turn", "reading"))
        for path in (Path(self.path), self._refused_path(), *locks):
            discard(str(path))

    def _await(self, lock: _Lock, token: CancelToken) -> Step:
        clock = SystemClock()
        reading = _Lock(self._directory / f"{self._key}.reading")
        watch, is_told = Watch(since_s=clock.now_s()), False
        while True:
            token.raise_if_cancelled()
            is_there, refusal = self._is_there(), self._refusal()
            is_settled = is_there or refusal is not None
            step = next_step(
                is_there=is_there,
                is_refused=refusal is not None,
                has_lock=not is_settled and lock.take(),
                silent_s=watch.silent_s(clock.now_s()),
                patience_s=self._patience_s,
            )
            if step is Step.REFUSE:
                raise CorruptCheckpointError(refusal or "")
            if step is not Step.WAIT:
                return step
            if not is_told:
                _log.info("load waits for another rank of this node: it reads %s", self._shown)
                is_told = True
            seen = watched(watch, reading.mark(), now_s=clock.now_s())
            if seen is not watch:
                token.progress()
            watch = seen
            clock.sleep(_POLL_S)

    def _is_there(self) -> bool:
        try:
            found = Path(self.path).stat()
        except FileNotFoundError:
            return False
        if not is_usable(found.st_size, expected=self._expected):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path)
        return True

    def _refused_path(self) -> Path:
        return self._directory / f"{self._key}-{self._load}.refused"

    def _refusal(self) -> str | None:
        if not self._load:
            return None
        try:
            return self._refused_path().read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _make(
        self, make: Callable[[str, CancelToken], None], token: CancelToken, *, alone: bool
    ) -> None:
        if alone:
            # Of readers that are dead, or were taken over; these find out by their rename.
            for left in self._directory.glob(staging_name(f"{self._key}-*")):
                discard(str(left))
        part = self._directory / staging_name(f"{self._key}-{self._nonce()}")
        try:
            make(str(part), token)
            token.raise_if_cancelled()
            self._appear(part, Path(self.path))
        except CorruptCheckpointError as error:
            self._refuse(str(error))
            raise
        finally:
            discard(str(part))

    def _refuse(self, text: str) -> None:
        # So that the others do not fetch it, one after the other, to find out the same.
        if self._load:
            part = self._directory / staging_name(f"{self._key}-{self._nonce()}")
            part.write_text(text, encoding="utf-8")
            part.replace(self._refused_path())

    @staticmethod
    def _appear(part: Path, path: Path) -> None:
        try:
            part.replace(path)
        except FileNotFoundError as error:
            # As a handle that went stale: another attempt finds what the other reader has made.
            message = "another reader has taken over, and removed what this one had made"
            raise OSError(errno.ESTALE, message, str(path)) from error


def make_room(directory: str, *, incoming_bytes: int, limits: Limits | None = None) -> None:
    """Remove what is too old, and what has to go for a file that comes in.

    Args:
        directory: The cache.
        incoming_bytes: Length of what comes in.
        limits: How much is kept.
    """
    place = Path(directory)
    now = place / _CLOCK
    now.touch()
    now_s = now.stat().st_mtime
    kept = [
        Kept(name=item.name, size_bytes=found.st_size, used_s=found.st_mtime)
        for item in place.iterdir()
        if (found := _stat(item)) is not None
    ]
    removed = to_remove(
        kept,
        now_s=now_s,
        incoming_bytes=incoming_bytes,
        free_bytes=shutil.disk_usage(place).free,
        limits=limits or Limits(),
    )
    for name in removed:
        discard(str(place / name))
    fetched = [name for name in removed if not is_staging_name(name)]
    if fetched:
        _log.info("removed from the cache of this node: %s", ", ".join(fetched))


def _stat(item: Path) -> os.stat_result | None:
    try:
        return item.lstat()
    except FileNotFoundError:
        return None
