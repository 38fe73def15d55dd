# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Repeat store operations while the shared store is away, for a bounded time.

Inside a joint operation nobody makes up a verdict: a rank that cannot read the store tries again,
with full jitter, until it has been away for ``patience_s``, and then gives up with the error it is
told to raise. Repeating is safe for everything but ``Add``: a read has no effect, a ``Set`` is
idempotent, and every compare-and-set carries a writer nonce, so that one whose answer was lost
answers "I won" the second time. ``Add`` is passed on and may fail.

Patience is for the whole protocol. Once it has ended, or an interruption has been thrown in, what
the protocol still wants to say is tried once and no more: nobody who presses Ctrl-C waits for a
store that is away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from lightning_resilience.core import backoff
from lightning_resilience.core.events import StoreLost, StoreReturned
from lightning_resilience.core.incident import is_stop
from lightning_resilience.core.waiting import VOICE_S, is_time_to_speak
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import (
    CompareAndSet,
    Delete,
    Draw,
    Emit,
    Get,
    MultiGet,
    Now,
    Set,
    Sleep,
    WaitFor,
)
from lightning_resilience.protocols.transform import transform


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["Persistence", "Witness", "with_persistence"]

T = TypeVar("T")

_REPEATABLE = (Get, MultiGet, Set, Delete, CompareAndSet, WaitFor)

# Retries on the store are load too, and must grow: constant ones collapsed the store in simulation.
_BASE_S: Final = 0.1
_CAP_S: Final = 5.0

# A look at a store that does not answer takes its pause and its timeout.
_LONGEST_LOOK_S: Final = 10.0
_BRIEF_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistence:
    """For how long to try, and what to raise then.

    Args:
        op: Name of the operation, for the events.
        patience_s: How long the store may be away, in seconds; 0 gives up at once.
        error: Makes the error to raise from the time that has passed and the store's last error.
        beat_key: Key whose writes are not repeated: a sign of life is worth nothing later.
        witness: Judges what the store says; None where nobody asks whether it is gone.
    """

    op: str
    patience_s: float
    error: Callable[[float, StoreUnavailableError], Exception]
    beat_key: str = ""
    witness: Witness | None = None


class Witness(ABC):
    """Judges whether a store that does not answer ever will."""

    @abstractmethod
    def has_answered(self) -> None:
        """Note that the store has answered."""

    @abstractmethod
    def has_failed(self, error: StoreUnavailableError, *, now_s: float) -> Exception | None:
        """Note a failure; return what to raise where the store is gone, or None."""


def with_persistence(inner: Protocol[T], persistence: Persistence) -> Protocol[T]:
    """Run ``inner`` and repeat its store operations while the store does not answer.

    Args:
        inner: The protocol. It may still see ``StoreUnavailableError`` from ``Add`` and from beats.
        persistence: For how long, and what follows.

    Returns:
        What ``inner`` returns.
    """
    return transform(inner, partial(_perform, persistence=persistence, rest=_Rest()))


@dataclass(slots=True)
class _Rest:
    """Whether there is patience left for what the protocol still does."""

    is_over: bool = False
    lost_for_s: float = 0.0
    verdict: Exception | None = None


def _perform(effect: Effect, *, persistence: Persistence, rest: _Rest) -> Protocol[Any]:
    try:
        return (yield from _try(effect, persistence, rest))
    except BaseException as error:
        rest.is_over = rest.is_over or is_stop(error) or not isinstance(error, Exception)
        raise


def _try(effect: Effect, persistence: Persistence, rest: _Rest) -> Protocol[Any]:
    try:
        value = yield effect
    except StoreUnavailableError as error:
        if not isinstance(effect, _REPEATABLE) or _is_beat(effect, persistence):
            raise
        if rest.is_over:
            _give_up(persistence, rest, error)
        return (yield from _repeat(effect, error, persistence, rest=rest))
    _note_answer(effect, value, persistence)
    return value


def _note_answer(effect: Effect, value: object, persistence: Persistence) -> None:
    # A wait that ends without its key may never have had a connection.
    is_answer = isinstance(effect, _REPEATABLE) and (value or not isinstance(effect, WaitFor))
    if persistence.witness is not None and is_answer:
        persistence.witness.has_answered()


def _is_beat(effect: Effect, persistence: Persistence) -> bool:
    return isinstance(effect, Set) and effect.key == persistence.beat_key


def _repeat(
    effect: Effect, first: StoreUnavailableError, persistence: Persistence, *, rest: _Rest
) -> Protocol[Any]:
    lost_at_s: float = yield Now()
    last = first
    elapsed_s = 0.0
    attempt = 0
    spoken_at_s: float | None = None
    again = _briefer(effect, persistence)
    _bear_witness(persistence, rest, first, now_s=lost_at_s)
    while elapsed_s < persistence.patience_s:
        attempt += 1
        draw: float = yield Draw()
        delay_s = backoff.delay_s(attempt, base_s=_BASE_S, cap_s=_CAP_S, draw=draw)
        now_s = lost_at_s + elapsed_s
        if is_time_to_speak(spoken_at_s, wait_s=_LONGEST_LOOK_S, voice_s=VOICE_S, now_s=now_s):
            spoken_at_s = now_s
            yield Emit(StoreLost(op=persistence.op, error=str(last), lost_for_s=elapsed_s))
        yield Sleep(min(delay_s, persistence.patience_s - elapsed_s))
        try:
            value = yield again
        except StoreUnavailableError as error:
            last = error
            elapsed_s = (yield Now()) - lost_at_s
            _bear_witness(persistence, rest, error, now_s=lost_at_s + elapsed_s)
        else:
            _note_answer(effect, value, persistence)
            lost_for_s = (yield Now()) - lost_at_s
            yield Emit(StoreReturned(op=persistence.op, lost_for_s=lost_for_s))
            return value
    rest.is_over, rest.lost_for_s = True, elapsed_s
    _give_up(persistence, rest, last)


def _briefer(effect: Effect, persistence: Persistence) -> Effect:
    # What the store has lost meanwhile is seen at the end of the wait.
    if persistence.witness is not None and isinstance(effect, WaitFor):
        return WaitFor(effect.key, min(effect.timeout_s, _BRIEF_S))
    return effect


def _bear_witness(
    persistence: Persistence, rest: _Rest, error: StoreUnavailableError, *, now_s: float
) -> None:
    if persistence.witness is not None:
        rest.verdict = persistence.witness.has_failed(error, now_s=now_s)
        if rest.verdict is not None:
            rest.is_over = True
            raise rest.verdict from error


def _give_up(persistence: Persistence, rest: _Rest, last: StoreUnavailableError) -> NoReturn:
    error = rest.verdict or persistence.error(rest.lost_for_s, last)
    if error is last:
        # Nothing is its own cause, and what has caused this one is not to be forgotten.
        raise error
    raise error from last
