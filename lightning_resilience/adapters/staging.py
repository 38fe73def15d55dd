# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Files that are complete before anybody can see them.

A checkpoint is first written to a *staged* file: beside its target on a filesystem, where a rename
publishes it, or in the node's spool directory for object storage. It is streamed, so there is no
second copy in memory, and its length and digest are known when the last byte is written. It is
synchronised with its disk, unless its caller says that it does not outlast the process anyway.

A staged file's name holds nothing of its target's name. Lightning finds checkpoints by looking for
``last`` and ``hpc_ckpt_`` anywhere in a name, and must not find an unfinished one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from lightning_resilience.adapters.mounts import filesystem_kind, mount_point
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_resilience.core.manifest import Contents
    from lightning_resilience.ports import CancelToken


__all__ = [
    "SPOOL_VARIABLE",
    "Staged",
    "StagedWriter",
    "discard",
    "is_staging_name",
    "spool_directory",
    "stage",
    "staging_name",
    "synchronise",
]

SPOOL_VARIABLE = "LIGHTNING_RESILIENCE_SPOOL_DIR"
"""Environment variable that names where the spool directory is made."""

_PREFIX, _SUFFIX = ".resilience-", ".staged"
# Linux writes at most 2 GiB - 4 KiB in one call, and a mark of progress per call is wanted anyway.
_WRITE_BYTES = 16 * 2**20
_SYNCHRONISED_BYTES = 256 * 2**20
# macOS has no fdatasync.
_synchronise = getattr(os, "fdatasync", os.fsync)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_VOLATILE_KINDS = frozenset({"tmpfs", "ramfs"})
_NETWORK_KINDS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A complete file that nobody sees yet.

    Args:
        path: Where it is.
        size_bytes: Its length.
        digest: xxh3-128 of its bytes, ``xxh3-128:`` and 32 hexadecimal digits.
    """

    path: str
    size_bytes: int
    digest: str

    @property
    def contents(self) -> Contents:
        """Size and digest of its only file, which has the empty name."""
        return {"": (self.size_bytes, self.digest)}


class StagedWriter(io.RawIOBase):
    """An unbuffered binary file that knows its length and digest, and is told to stop.

    Unbuffered, because what is written to it comes in large pieces, and because a buffer would be
    written by ``close`` after the last check. The permissions are those of any new file (0666 less
    the umask). The name must be new.

    A write that failed is the last: a stale handle stays stale, and ``torch.save`` writes an end to
    its archive even then. The same error comes again, and the file cannot be finished.

    Args:
        path: Name of the staged file.
        token: Told of progress, and asked before each piece whether the caller has given up.
        durable: Whether the file is to outlast a crash of the node, and is synchronised with its
            disk; True by default, since what is published by a rename must be.
        on_growth: Told how many bytes are in the file, after each piece.

    Raises:
        OSError: With the name of the filesystem in its text where that is full.
    """

    def __init__(
        self,
        path: str,
        token: CancelToken | None = None,
        *,
        durable: bool = True,
        on_growth: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.size_bytes = 0
        self._token = token
        self._durable = durable
        self._on_growth = on_growth
        self._unsynced_bytes = 0
        self._error: OSError | None = None
        self._hash = xxhash.xxh3_128()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        with _naming_the_full(path):
            self._fd: int = os.open(path, flags, 0o666)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes are written."""
        return self.size_bytes

    def fileno(self) -> int:
        """Refuse: who writes past this object would leave length and digest wrong."""
        message = "a staged file is written through its write method only"
        raise io.UnsupportedOperation(message)

    def write(self, data: Any) -> int:
        """Write all of ``data``, in pieces."""
        if self._fd < 0:
            message = "write to a staged file that is finished"
            raise ValueError(message)
        self._raise_if_failed()
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            if self._token is not None:
                self._token.raise_if_cancelled()
            piece = view[position : position + _WRITE_BYTES]
            with self._remembering_failure():
                written = os.write(self._fd, piece)
            self._hash.update(piece[:written])
            position += written
            self.size_bytes += written
            self._synchronise_some(written)
            if self._on_growth is not None:
                self._on_growth(self.size_bytes)
            if self._token is not None:
                self._token.progress(written=written)
        return position

    def _synchronise_some(self, written: int) -> None:
        # One fsync of everything at the end may take minutes, and shows no progress meanwhile.
        self._unsynced_bytes += written
        if self._durable and self._unsynced_bytes >= _SYNCHRONISED_BYTES:
            self._unsynced_bytes = 0
            with self._remembering_failure():
                _synchronise(self._fd)

    @contextlib.contextmanager
    def _remembering_failure(self) -> Iterator[None]:
        try:
            with _naming_the_full(self.path):
                yield
        except OSError as error:
            self._error = error
            raise

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self) -> Staged:
        """Synchronise the file with its disk, if it is to be durable, and close it.

        Returns:
            What is staged, with length and digest.

        Raises:
            OSError: An earlier write failed, or the disk does now.
        """
        self._raise_if_failed()
        if self._durable:
            with _naming_the_full(self.path):
                os.fsync(self._fd)
        self._release()
        digest = f"xxh3-128:{self._hash.hexdigest()}"
        return Staged(path=self.path, size_bytes=self.size_bytes, digest=digest)

    def abandon(self) -> None:
        """Close and remove the file. Idempotent."""
        self._release()
        discard(self.path)

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def stage(
    write: Callable[[StagedWriter], object],
    path: str,
    token: CancelToken,
    *,
    durable: bool = True,
    on_growth: Callable[[int], object] | None = None,
) -> Staged:
    """Write a staged file, and leave nothing behind where that fails.

    Args:
        write: Writes everything to the file object that it is given, for example
            ``lambda file: torch.save(checkpoint, file)``.
        path: Name of the staged file, from ``ObjectStore.staging_path``. Its directory is made.
        token: The caller's token.
        durable: As for ``StagedWriter``.
        on_growth: As for ``StagedWriter``.

    Returns:
        The complete file with its length and digest.

    Raises:
        OSError: With the name of the filesystem in its text where that is full.
        CallTimeoutError: The caller has given up.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    writer = StagedWriter(path, token, durable=durable, on_growth=on_growth)
    try:
        write(writer)
        token.raise_if_cancelled()
        staged = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    token.progress()
    return staged


def synchronise(path: str) -> None:
    """Synchronise a staged file with its disk: it is to outlast this process.

    Raises:
        OSError: With the name of the filesystem in its text where that is full.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        with _naming_the_full(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def discard(path: str) -> None:
    """Remove a staged file, published or not. Idempotent: absent is success."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()


def staging_name(nonce: str) -> str:
    """Return the file name of what is staged under ``nonce``."""
    return f"{_PREFIX}{nonce}{_SUFFIX}"


def is_staging_name(name: str) -> bool:
    """Return True for a name that ``staging_name`` makes: never a checkpoint."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def spool_directory(option: str | None, *, environ: Mapping[str, str], run_id: str) -> str:
    """Make and return the node's own directory for staged files.

    The first that is set of: the option, ``LIGHTNING_RESILIENCE_SPOOL_DIR``, ``TMPDIR``,
    ``/var/tmp``; under it ``lightning-resilience-<uid>/<run id>``, for its owner only, because a
    checkpoint may be confidential and the place is often open to all.

    Args:
        option: The user's option, None or empty if not given.
        environ: Environment variables.
        run_id: Keeps runs apart; characters that do not belong in a name are replaced.

    Returns:
        Absolute path of the directory.

    Raises:
        ConfigError: The directory belongs to somebody else, or cannot be made.
        OSError: It could not be made this time, for a reason that is expected to pass.
    """
    source = "the spool directory option"
    base = option
    if not base:
        source, base = next(
            ((name, environ[name]) for name in (SPOOL_VARIABLE, "TMPDIR") if environ.get(name)),
            ("the default", "/var/tmp"),  # noqa: S108 - what is made below it is checked
        )
    owned = Path(base).expanduser().absolute() / f"lightning-resilience-{os.getuid()}"
    place = owned / (re.sub(r"[^A-Za-z0-9_-]", "_", run_id) or "_")
    try:
        owned.parent.mkdir(parents=True, exist_ok=True)
        for directory in (owned, place):
            _make_private(directory)
    except OSError as error:
        if classify(error).failure is FailureClass.TRANSIENT:
            raise
        message = (
            f"spool directory {place} (from {source}) cannot be used: {error.strerror or error}; "
            f"set {SPOOL_VARIABLE} to a directory on the node's own disk that you may write"
        )
        raise ConfigError(message) from error
    kind = filesystem_kind(str(place))
    if kind in _VOLATILE_KINDS | _NETWORK_KINDS:
        held = "memory" if kind in _VOLATILE_KINDS else "a network"
        _log.warning(
            "spool directory %s (from %s) is held in %s (%s): set %s to a local disk",
            *(place, source, held, kind, SPOOL_VARIABLE),
        )
    return str(place)


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link or a file", str(directory))
    if found.st_uid != os.getuid():
        message = f"it belongs to user id {found.st_uid}, not to {os.getuid()}"
        raise PermissionError(errno.EPERM, message, str(directory))
    if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        directory.chmod(stat.S_IRWXU)


@contextlib.contextmanager
def _naming_the_full(path: str) -> Iterator[None]:
    """Say which filesystem is full: the one of the staged file may not be the one expected."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        mount = mount_point(path)
        free = _free_bytes(mount)
        message = (
            f"{error.strerror}: the filesystem at {mount} is full or its quota used up "
            f"({free} bytes free for this user); make room there or stage elsewhere"
        )
        raise OSError(error.errno, message, path) from error


def _free_bytes(mount: str) -> str:
    try:
        state = os.statvfs(mount)
    except OSError:
        return "unknown"
    return str(state.f_bavail * state.f_frsize)
