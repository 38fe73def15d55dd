# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's own rendezvous that may never return: bounded, and open to signals.

Torch's client of a store blocks in C++. It has no bound on most operations, so a server that is
frozen blocks it for ever, a new client of such a server blocks in its handshake, and Python runs no
signal handler meanwhile. So whatever may ask the store runs in a daemon thread, and the agent's
main thread waits for it in short pieces: it goes on to watch its workers, and hears a signal.

==================================  ================================================================
what is left behind                 then
==================================  ================================================================
a question                          its answer is the answer to the next one: one thread, however
                                    long the store is silent
what may change something           whoever leaves it behind severs the handler first, so nothing
                                    follows the one request that is under way
==================================  ================================================================

The time is counted in pieces, not by a clock: a process that was suspended has not waited.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from lightning_resilience.runtime.calls import PIECE_S, RunningCall, Token
from lightning_resilience.runtime.system import SystemClock


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken


__all__ = ["ASKED_S", "Question", "call", "no_sign"]

ASKED_S: Final = 5.0
"""How long an agent waits for an answer, in seconds; as long as for one of the job's store."""

T = TypeVar("T")


def _nothing() -> None:
    return None


def no_sign() -> float:
    """Tell nothing of progress."""
    return 0.0


def _started(work: Callable[[CancelToken], Any], token: Token) -> RunningCall:
    return RunningCall(work, token=token, clock=SystemClock(), adopt=_nothing)


def _silence(within_s: float) -> RendezvousConnectionError:
    message = (
        f"The store of the rendezvous has not answered within {within_s:g} s. Is its host up and "
        "reachable? The call is left behind."
    )
    return RendezvousConnectionError(message)


def _has_ended(running: RunningCall, within_s: float, sign: Callable[[], float]) -> bool:
    waited_s, last = 0.0, sign()
    while not running.has_ended(within_s=min(PIECE_S, within_s)):
        waited_s += PIECE_S
        now = sign()
        if now != last:
            waited_s, last = 0.0, now
        if waited_s >= within_s:
            return running.has_ended(within_s=0)
    return True


def call(
    work: Callable[[CancelToken], T],
    *,
    within_s: float,
    leave: Callable[[], None] = _nothing,
    sign: Callable[[], float] = no_sign,
) -> T:
    """Run what may change something, until it ends or has made no progress for too long.

    Args:
        work: The call. What it makes is dropped where nobody waits for it any more.
        within_s: How long it may go without progress, in seconds.
        leave: Called where it is left behind, also by a signal: lets nothing follow from it.
        sign: Returns what changes with each sign of progress.

    Raises:
        RendezvousConnectionError: No progress.
        BaseException: What it raises, and what a signal handler raises meanwhile.
    """
    token, has_ended = Token(), False
    try:
        running = _started(work, token)
        has_ended = _has_ended(running, within_s, sign)
    finally:
        if not has_ended:
            token.abandon()
            leave()
    if not has_ended:
        raise _silence(within_s)
    return cast("T", running.result())


class Question(Generic[T]):
    """What is asked again and again, and changes nothing. The agent's main thread.

    Args:
        work: The question.
        cut: Called where it has no answer in time: ends what it waits for, if that can be ended.
    """

    def __init__(self, work: Callable[[], T], *, cut: Callable[[], None] = _nothing) -> None:
        self._work = work
        self._cut = cut
        self._running: RunningCall | None = None

    def ask(self, *, within_s: float) -> T:
        """Return the answer; at once where an earlier question still has none.

        Args:
            within_s: How long to wait for it, in seconds.

        Raises:
            RendezvousConnectionError: No answer yet; a later call may have it.
            BaseException: What the question raises, and what a signal handler raises meanwhile.
        """
        late, self._running = self._running, None
        if late is not None:
            if not late.has_ended(within_s=0):
                self._running = late
                raise _silence(within_s)
            # What has failed says nothing of now: it may have been cut.
            with contextlib.suppress(Exception):
                return cast("T", late.result())
        running = self._running = _started(lambda _token: self._work(), Token())
        if not _has_ended(running, within_s, no_sign):
            # Once: whatever the handler uses later is not what this question waits on.
            self._cut()
            raise _silence(within_s)
        self._running = None
        return cast("T", running.result())
