# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Show that this rank lives while its protocol works or waits.

A rank that is silent for ``joint_timeout_s`` is taken for lost. So sleeps, waits, and, by the
driver, calls are cut into pieces, and the beat's key is written wherever the last write is a beat
ago: also in a series of waits each of which is shorter than that. The beat comes from the protocol
itself and not from a thread beside it, because a thread would go on beating for a rank that hangs.

While it waits, a rank also looks after each beat whether its wait still matters: a key that
somebody else sets ends the wait (``OvertakenError``). Work that is under way is not cut short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import (
    Call,
    Get,
    Local,
    Nonce,
    Now,
    Set,
    Sleep,
    WaitFor,
)
from lightning_resilience.protocols.transform import transform


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.protocols.effects import Beat, Effect, Protocol


__all__ = ["End", "OvertakenError", "with_beat"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What a rank that waits looks out for.

    Args:
        key: Where it will be.
        has_come: Whether it is what was found there.
    """

    key: str
    has_come: Callable[[bytes], bool]


class OvertakenError(Exception):
    """What this rank was waiting for does not matter any more. Never leaves ``protocols``."""


def with_beat(inner: Protocol[T], beat: Beat, *, ends: End | None = None) -> Protocol[T]:
    """Run ``inner`` and write ``beat.key`` at least every ``beat.every_s`` seconds meanwhile.

    A beat that cannot be written is left out: the work is more important, and others notice a store
    that is away by themselves.

    Args:
        inner: The protocol.
        beat: Key and interval.
        ends: What ends every wait, or None.

    Returns:
        What ``inner`` returns.

    Raises:
        OvertakenError: That is there, and ``inner`` did not catch it.
    """
    return transform(inner, partial(_perform, pulse=_Pulse(beat=beat, ends=ends)))


@dataclass(slots=True, kw_only=True)
class _Pulse:
    """When this rank has last shown that it lives, on its own clock; None before the first wait."""

    beat: Beat
    ends: End | None
    shown_at_s: float | None = None

    def due_in_s(self, *, now_s: float) -> float:
        """Return after what time it has to show that again, in seconds, ≤ the beat's interval."""
        if self.shown_at_s is None:
            self.shown_at_s = now_s
        return self.shown_at_s + self.beat.every_s - now_s


def _perform(effect: Effect, *, pulse: _Pulse) -> Protocol[Any]:
    if isinstance(effect, Call) and effect.beat is None:
        return (yield replace(effect, beat=pulse.beat))
    if isinstance(effect, Sleep):
        yield from _in_pieces(effect.duration_s, Sleep, pulse)
        return None
    if isinstance(effect, WaitFor):
        return (yield from _in_pieces(effect.timeout_s, partial(WaitFor, effect.key), pulse))
    if isinstance(effect, Local) and isinstance(effect.effect, WaitFor):
        inner = effect.effect
        piece = partial(_wait_locally, inner.key)
        return (yield from _in_pieces(inner.timeout_s, piece, pulse))
    return (yield effect)


def _wait_locally(key: str, timeout_s: float) -> Local:
    return Local(WaitFor(key, timeout_s))


def _in_pieces(
    duration_s: float, piece: Callable[[float], WaitFor | Local | Sleep], pulse: _Pulse
) -> Protocol[bool]:
    remaining_s = duration_s
    while True:
        now_s: float = yield Now()
        due_in_s = pulse.due_in_s(now_s=now_s)
        if due_in_s > 0 and remaining_s <= due_in_s:
            return bool((yield piece(remaining_s)))
        if due_in_s > 0:
            if (yield piece(due_in_s)):
                return True
            remaining_s -= due_in_s
            now_s = yield Now()
        yield from _write(pulse, now_s=now_s)


def _write(pulse: _Pulse, *, now_s: float) -> Protocol[None]:
    # Also where it fails: a store that is away is not to be asked all the time.
    pulse.shown_at_s = now_s
    nonce: str = yield Nonce()
    try:
        yield Set(pulse.beat.key, nonce.encode())
    except StoreUnavailableError:
        return
    if pulse.ends is None:
        return
    raw: bytes | None = yield Get(pulse.ends.key)
    if raw is not None and pulse.ends.has_come(raw):
        message = f"{pulse.ends.key} is there"
        raise OvertakenError(message)
