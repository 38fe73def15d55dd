# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One file by its path, on a filesystem: what is there, its end, and the rename that makes it last.

A path may be on a disk of this machine or on one that is shared over a network.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from lightning_resilience.core.receipts import Receipt


__all__ = ["fsync_directory", "link_to_nothing", "remove", "seen", "seen_in"]

# Some filesystems cannot synchronise a directory; the rename is atomic there all the same.
_NO_DIRECTORY_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES})


def seen(path: str) -> Receipt | None:
    """Return the size of a file and what tells it from another, None where there is none.

    Raises:
        IsADirectoryError: A directory has that name.
        OSError: It cannot be told.
    """
    # Opening makes NFS ask its server; stat alone may be answered from the attribute cache.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "a directory has the checkpoint's name", path)
    return seen_in(found)


def seen_in(found: os.stat_result) -> Receipt:
    """Return what tells a file from another, and its size."""
    return Receipt(inode=found.st_ino, modified_s=found.st_mtime, size_bytes=found.st_size)


def link_to_nothing(path: str) -> str:
    """Return where a link points to that points to nothing, in words; empty for all else.

    Raises:
        OSError: It cannot be told.
    """
    link = Path(path)
    if not link.is_symlink() or link.exists():
        return ""
    return f"it is a link to {link.readlink()}, and nothing is there"


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it. Absent is success.

    Raises:
        OSError: What the filesystem raised.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return


def fsync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` last, where the filesystem can."""
    try:
        fd = os.open(directory, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(fd)
