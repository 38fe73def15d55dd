# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Does a living process of this node still use a directory?

Whoever stages files in one holds a shared lock on the directory itself, to its end: the kernel lets
go of it when the process dies, whatever it died of. Whoever clears up takes the lock for itself
alone, and leaves the directory as it is where it does not get it. A child that was forked holds
what its parent held.

At its end a process removes a directory that is empty, where no other holds it: each start without
a run id has one of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["held", "unless_held"]

_TRIES: Final = 3
_HELD_MAX: Final = 64
"""Every fit without a run id has a directory of its own; those of fits that are over are let go."""
_held: Final[dict[str, int]] = {}
_processes: Final[set[int]] = set()
"""Ids of processes that let go at their end; a forked child has its parent's here."""


def held(make: Callable[[], str]) -> str:
    """Make a directory and hold it as long as this process lives. Idempotent; any thread.

    It is removed when the process ends, where it is empty and nobody else holds it.

    Args:
        make: Makes the directory, where it is not there, and returns it.

    Returns:
        The directory. Where its filesystem knows no locks, nobody clears it up but its own run.

    Raises:
        BaseException: What ``make`` raises.
    """
    _let_go_at_the_end()
    directory = make()
    # Whoever has cleared up, or has ended, may have removed it before it was held.
    for _ in range(_TRIES):
        if directory in _held and _is_there(_held[directory], directory):
            return directory
        handle = _locked(directory, fcntl.LOCK_SH)
        if handle is not None and _is_there(handle, directory):
            _held[directory] = handle
            break
        if handle is not None:
            os.close(handle)
        elif Path(directory).is_dir():
            break
        directory = make()
    while len(_held) > _HELD_MAX:
        _let_go(next(iter(_held)))
    return directory


def _let_go_at_the_end() -> None:
    pid = os.getpid()
    if pid in _processes:
        return
    # A child holds what its parent held by the same handles, and removes none of that.
    _held.clear()
    _processes.add(pid)
    # Unlike what atexit runs, it is run in children of multiprocessing, too; in others' never.
    Finalize(None, _let_all_go, exitpriority=0)


def _let_all_go() -> None:
    for directory in list(_held):
        _let_go(directory)


def _let_go(directory: str) -> None:
    handle = _held.pop(directory, None)
    if handle is None:
        return
    # Order: nobody else may hold it, or begin to, while it is removed.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_there(handle, directory):
            Path(directory).rmdir()
    os.close(handle)


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
