# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Show that this rank lives while its protocol works or waits.

A rank that is silent for ``joint_timeout_s`` is taken for lost. So everything that may last longer
than a beat is cut into pieces of at most a beat, with a write of the beat's key in between: sleeps,
waits, and, by the driver, calls. The beat comes from the protocol itself and not from a thread
beside it, because a thread would go on beating for a rank that hangs.

While it waits, a rank also looks after each beat whether its wait still matters: a key that
somebody else sets ends the wait (``OvertakenError``). Work that is under way is not cut short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import Call, Get, Local, Nonce, Set, Sleep, WaitFor
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
    return transform(inner, partial(_perform, beat=beat, ends=ends))


def _perform(effect: Effect, *, beat: Beat, ends: End | None) -> Protocol[Any]:
    if isinstance(effect, Call) and effect.beat is None:
        return (yield replace(effect, beat=beat))
    if isinstance(effect, Sleep):
        return (yield from _sleep(effect.duration_s, beat, ends))
    if isinstance(effect, WaitFor):
        return (yield from _wait(effect, beat, WaitFor, ends=ends))
    if isinstance(effect, Local) and isinstance(effect.effect, WaitFor):
        return (yield from _wait(effect.effect, beat, _wait_locally, ends=ends))
    return (yield effect)


def _sleep(duration_s: float, beat: Beat, ends: End | None) -> Protocol[None]:
    remaining_s = duration_s
    while remaining_s > beat.every_s:
        yield Sleep(beat.every_s)
        remaining_s -= beat.every_s
        yield from _write(beat, ends)
    yield Sleep(remaining_s)


def _wait_locally(key: str, timeout_s: float) -> Local:
    return Local(WaitFor(key, timeout_s))


def _wait(
    effect: WaitFor,
    beat: Beat,
    piece: Callable[[str, float], WaitFor | Local],
    *,
    ends: End | None,
) -> Protocol[bool]:
    remaining_s = effect.timeout_s
    while remaining_s > beat.every_s:
        if (yield piece(effect.key, beat.every_s)):
            return True
        remaining_s -= beat.every_s
        yield from _write(beat, ends)
    found: bool = yield piece(effect.key, remaining_s)
    return found


def _write(beat: Beat, ends: End | None) -> Protocol[None]:
    nonce: str = yield Nonce()
    try:
        yield Set(beat.key, nonce.encode())
    except StoreUnavailableError:
        return
    if ends is None:
        return
    raw: bytes | None = yield Get(ends.key)
    if raw is not None and ends.has_come(raw):
        message = f"{ends.key} is there"
        raise OvertakenError(message)
