# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A node's cache of checkpoints: one of its ranks makes a file, the others wait for that.

``core.node_cache`` has the rules, and ``core.fetching`` the order of the steps. A file is made
under a name of its own and appears by a rename. Locks are ``flock``, which the kernel takes from a
process that dies, however it does; where the filesystem has none, every rank reads for itself.

=====================================  =============================================================
name in the cache                      what it is
=====================================  =============================================================
``<key>.ckpt``                         a checkpoint, complete and checked; or an empty file that
                                       says that the one which lies elsewhere was checked
``<key>.turn``, ``<key>.reading``      the two locks; the time of the second is the reader's mark
``<key>-<load>.refused``               why the reader of one load has refused it
``<key>-<load>.checked``               an empty file: a rank of that load has made or checked it
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_resilience.adapters.staging import discard, is_staging_name, staging_name
from lightning_resilience.core.fetching import Fetch, Lock, There, obtaining, settling
from lightning_resilience.core.node_cache import Kept, Limits, is_usable, to_remove
from lightning_resilience.core.pipeline import carry_out
from lightning_resilience.runtime.system import SystemClock


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.ports import CancelToken

    Check: TypeAlias = Callable[[str, CancelToken], None]


__all__ = ["NodeFile", "beside_runs", "make_room"]

_NAME: Final = ".node-cache"
_CLOCK: Final = "now"
"""An empty file, by whose time the filesystem tells its own."""
_REFUSED: Final = "refused"
_CHECKED: Final = "checked"
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

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Tell the caller, and the others."""
        self._token.progress(written=written, sent=sent, read=read)
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
        load: A text that the ranks of one load have in common, and no other load has.
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

    def settle(self, token: CancelToken, *, check: Check | None = None) -> bool:
        """Wait until the file is there, or it is this rank's turn to ask the storage for it.

        Outside of a slot of the storage.

        Args:
            token: Told when a reader goes on, and asked whether the caller has given up.
            check: Raises unless the file that it is given is what is loaded; None where nothing can
                be there that this load has not made.

        Returns:
            Whether it is there.

        Raises:
            CorruptCheckpointError: A reader has refused it.
        """
        reading = _Lock(self._directory / f"{self._key}.reading")
        hands = self._hands(token, reading, check=check)
        try:
            is_there = carry_out(settling(self._patience_s), hands)
        finally:
            if token.cancelled:
                # Whoever has given up has let go of it already, and will not again.
                self._turn.release()
        token.raise_if_cancelled()
        return is_there

    def obtain(
        self,
        make: Callable[[str, CancelToken], None],
        token: CancelToken,
        *,
        check: Check | None = None,
    ) -> None:
        """Have the file, made by this rank or by another one.

        Inside a slot of the storage: one attempt of several.

        Args:
            make: Makes it, complete and checked, under a name that it is given.
            token: Of the call; told of progress.
            check: As for ``settle``.

        Raises:
            CorruptCheckpointError: It is not what was saved.
            OSError: What the storage or this node's disk raised.
        """
        reading = _Lock(self._directory / f"{self._key}.reading")
        beating = _BeatingToken(token, reading)
        part = self._directory / staging_name(f"{self._key}-{self._nonce()}")
        hands: dict[Fetch, Callable[[Any], object]] = {
            **self._hands(token, reading, check=check),
            Fetch.GIVE_WAY: lambda _: self._give_way(reading),
            Fetch.SWEEP: lambda _: self._sweep(),
            Fetch.MAKE: lambda _: make(str(part), beating),
            Fetch.APPEAR: lambda _: self._appear(part, Path(self.path)),
            Fetch.REFUSE: self._refuse,
            Fetch.DISCARD: lambda _: discard(str(part)),
        }
        try:
            carry_out(obtaining(self._patience_s), hands)
        finally:
            self._readings.remove(reading)

    def release(self) -> None:
        """Let other ranks of the node have their turn. Idempotent."""
        self._turn.release()
        for reading in list(self._readings):
            reading.release()

    def remove(self) -> None:
        """Remove the file: nobody else will look for it."""
        locks = (self._directory / f"{self._key}.{lock.value}" for lock in Lock)
        told = (self._told_path(what) for what in (_REFUSED, _CHECKED))
        for path in (Path(self.path), *told, *locks):
            discard(str(path))

    def _hands(
        self, token: CancelToken, reading: _Lock, *, check: Check | None
    ) -> dict[Fetch, Callable[[Any], object]]:
        clock, seen = SystemClock(), _Lock(self._directory / f"{self._key}.reading")
        locks = {Lock.TURN: self._turn, Lock.READING: reading}
        pause = partial(self._pause, clock, [])
        return {
            Fetch.ASK: lambda _: token.raise_if_cancelled(),
            Fetch.LOOK: lambda _: self._look(is_checked=check is not None),
            Fetch.TAKE: lambda lock: locks[lock].take(),
            Fetch.MARK: lambda _: seen.mark(),
            Fetch.NOW: lambda _: clock.now_s(),
            Fetch.HEARD: lambda _: token.progress(),
            Fetch.PAUSE: pause,
            Fetch.BEAT: lambda _: reading.beat(),
            Fetch.RECHECK: lambda _: check and check(self.path, _BeatingToken(token, reading)),
            Fetch.DROP: lambda _: discard(self.path),
            Fetch.VOUCH: lambda _: self._told_path(_CHECKED).touch(),
            Fetch.RELEASE: lambda _: reading.release(),
        }

    def _pause(self, clock: SystemClock, told: list[str], _of: None, /) -> None:
        if not told:
            _log.info("load waits for another rank of this node: it reads %s", self._shown)
            told.append(self._shown)
        clock.sleep(_POLL_S)

    def _look(self, *, is_checked: bool) -> There:
        if not self._is_there():
            return There(refusal=self._refusal())
        if self._told_path(_CHECKED).exists():
            return There(is_there=True)
        return There(is_left=is_checked, refusal=self._refusal())

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

    def _told_path(self, what: str) -> Path:
        return self._directory / f"{self._key}-{self._load}.{what}"

    def _refusal(self) -> str | None:
        try:
            return self._told_path(_REFUSED).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _give_way(self, reading: _Lock) -> None:
        if self._readings:
            self.release()
        self._readings.append(reading)

    def _sweep(self) -> None:
        for left in self._directory.glob(staging_name(f"{self._key}-*")):
            discard(str(left))

    def _refuse(self, text: str) -> None:
        part = self._directory / staging_name(f"{self._key}-{self._nonce()}")
        part.write_text(text, encoding="utf-8")
        part.replace(self._told_path(_REFUSED))

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
