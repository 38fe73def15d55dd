# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Run foreign code so that it can be abandoned.

A call to storage may never return: no exception, no progress, every accelerator idle. Python cannot
stop a thread, so a call that may hang runs in a daemon thread of its own, and its caller waits for
the end *or for the next sign of progress*. When neither comes for the timeout, the cancel token is
set and the call is left behind: its result is discarded, and it checks the token before it
publishes anything.

The caller waits in short pieces, because a lock's ``acquire`` in the main thread delays Python's
signal handlers only until the piece ends, and so an interruption takes effect within ``PIECE_S``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.moved import Moved
from lightning_resilience.errors import CallTimeoutError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken, Clock


__all__ = ["PIECE_S", "RunningCall", "Token"]

PIECE_S: Final = 0.2
"""Longest time that a waiting thread does not look around, in seconds."""


class Token:
    """The cancel token of one call; see ``ports.CancelToken``. Any thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self.marks = 0
        self.moved = Moved()
        # A file may be sent by one thread while another still writes it.
        self._lock = threading.Lock()

    def abandon(self) -> None:
        """Leave the call behind: it finds its token set, and nobody looks at its result."""
        self.cancelled = True

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Count a mark of progress, and what was moved since the last one."""
        self.marks += 1
        with self._lock:
            self.moved = self.moved.plus(written=written, sent=sent, read=read)

    def raise_if_cancelled(self) -> None:
        """Raise once the call was abandoned."""
        if self.cancelled:
            message = "The call was abandoned by its caller; it stops before it publishes anything."
            raise CallTimeoutError(message)


class RunningCall:
    """A call in its own daemon thread.

    Args:
        work: The foreign code.
        token: Its cancel token. The caller's, so that a call is abandoned also where the caller is
            interrupted while the thread is starting.
        clock: For the stall timeout.
        adopt: Runs in the new thread before the work, to take over what belongs to a thread (for
            example the current CUDA device).
        may_extend: Whether a mark of progress starts the timeout anew.
    """

    def __init__(
        self,
        work: Callable[[CancelToken], Any],
        *,
        token: Token,
        clock: Clock,
        adopt: Callable[[], None],
        may_extend: bool = True,
    ) -> None:
        self.token = token
        self._may_extend = may_extend
        self._clock = clock
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._marks = 0
        self._moved_at_s = clock.now_s()
        self._thread = threading.Thread(
            target=self._run, args=(work, adopt), name="lightning-resilience-call", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[CancelToken], Any], adopt: Callable[[], None]) -> None:
        try:
            adopt()
            self._value = work(self.token)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        finally:
            self._ended.set()

    def has_ended(self, *, within_s: float) -> bool:
        """Wait for the end, at most ``within_s`` seconds; True if it is over."""
        return self._ended.wait(within_s)

    def stalled_for_s(self) -> float:
        """Seconds since the last mark of progress that the caller has noticed."""
        if self._may_extend and self.token.marks != self._marks:
            self._marks = self.token.marks
            self._moved_at_s = self._clock.now_s()
        return self._clock.now_s() - self._moved_at_s

    def result(self) -> Any:  # noqa: ANN401 - whatever the work returns
        """Return what the work returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value
