# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One operation of a guarded filesystem: through the guard, or straight on inside another.

A call of the user becomes one call of the ``Runner``, which decides about waiting and repetition.
What the operation calls in turn (``pipe`` opens, ``listdir`` lists) passes straight through, by a
mark that belongs to the thread in which the work runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lightning_resilience.core.evidence import without_credentials


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fsspec import AbstractFileSystem

    from lightning_resilience.ports import CancelToken


__all__ = ["Runner", "call_guarded", "set_default_runner", "shown", "token_inside", "working_for"]

T = TypeVar("T")


class Runner(Protocol):
    """Runs one operation of a filesystem: waits, and calls ``work`` as often as it sees fit.

    One with a true attribute ``travels`` is pickled together with the filesystem. Any other stays
    in its process.
    """

    def __call__(  # noqa: PLR0917 - one call of a filesystem, always the same four
        self,
        fs: AbstractFileSystem,
        operation: str,
        path: str,
        work: Callable[[CancelToken], T],
        /,
    ) -> T:
        """Return what ``work`` returned, or raise what the guard decided on.

        ``work`` may be called on any thread, and again after it has failed.
        """
        ...


class _Inside(threading.local):
    """The token of the guarded operation that this thread works for."""

    token: CancelToken | None = None


_inside = _Inside()
_default_runner: list[Runner] = []


class _NeverCancelled:
    """The token of work that nobody waits for with a timeout."""

    cancelled = False

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Nobody listens."""

    def raise_if_cancelled(self) -> None:
        """Never raises."""


def set_default_runner(run: Runner | None) -> None:
    """Set the runner of guarded filesystems that have none of their own.

    Args:
        run: The runner; None lets them call straight through.
    """
    _default_runner[:] = [] if run is None else [run]


def call_guarded(fs: AbstractFileSystem, operation: str, path: str, *, work: Callable[[], T]) -> T:
    """Call ``work`` straight from within a guarded operation, else let the guard call it.

    Args:
        fs: The guarded filesystem; its ``guard_run`` is the guard.
        operation: Name of the operation, as fsspec has it.
        path: What it is about, for events and errors.
        work: One attempt.
    """
    if _inside.token is not None:
        return work()

    def marked(token: CancelToken) -> T:
        with working_for(token):
            return work()

    run: Runner | None = fs.guard_run or next(iter(_default_runner), None)
    return marked(_NeverCancelled()) if run is None else run(fs, operation, path, marked)


@contextlib.contextmanager
def working_for(token: CancelToken) -> Iterator[None]:
    """Let this thread's operations pass straight through for the length of the block."""
    previous, _inside.token = _inside.token, token
    try:
        yield
    finally:
        _inside.token = previous


def token_inside() -> CancelToken:
    """Return the token of the operation that this thread works for."""
    return _inside.token or _NeverCancelled()


def shown(path: Any) -> str:
    """Return a path without credentials, or the first of several and their number."""
    if isinstance(path, (list, tuple, set, dict)):
        first = next(map(str, path), "")
        more = f" (and {len(path) - 1} more)" if len(path) > 1 else ""
        return without_credentials(first + more)
    return without_credentials(str(os.fspath(path) if isinstance(path, os.PathLike) else path))
