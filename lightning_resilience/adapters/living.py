# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Does a living process of this node still use a directory?

Whoever stages files in one holds a shared lock on the directory itself, to its end: the kernel lets
go of it when the process dies, whatever it died of. Whoever clears up takes the lock for itself
alone, and leaves the directory as it is where it does not get it. A child that was forked holds
what its parent held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["held", "unless_held"]

_TRIES: Final = 3
_HELD_MAX: Final = 64
"""Every fit without a run id has a directory of its own; those of fits that are over are let go."""
_held: Final[dict[str, int]] = {}


def held(make: Callable[[], str]) -> str:
    """Make a directory and hold it as long as this process lives. Idempotent; any thread.

    Args:
        make: Makes the directory, where it is not there, and returns it.

    Returns:
        The directory. Where its filesystem knows no locks, nobody clears it up but its own run.

    Raises:
        BaseException: What ``make`` raises.
    """
    directory = make()
    # Whoever has cleared up may have removed it before it was held; that happens once.
    for _ in range(_TRIES):
        if directory in _held and _is_there(_held[directory], directory):
            return directory
        handle = _locked(directory, fcntl.LOCK_SH)
        if handle is None or _is_there(handle, directory):
            break
        os.close(handle)
        directory = make()
    else:
        return directory
    if handle is not None:
        _held[directory] = handle
    while len(_held) > _HELD_MAX:
        os.close(_held.pop(next(iter(_held))))
    return directory


@contextlib.contextmanager
def unless_held(directory: str) -> Iterator[bool]:
    """Have a directory for oneself within the block, in which nobody begins to use it.

    Yields:
        Whether that is so; False where a living process uses it, or that cannot be told.
    """
    handle = _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _locked(directory: str, kind: int) -> int | None:
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, kind)
    except OSError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _is_there(handle: int, directory: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), Path(directory).stat())
    except OSError:
        return False
