# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Before a success is told: wait until every rank has come to the operation, within a bound.

Ranks without work report nothing, so nobody else would miss them. Whoever is about to tell a
success looks at the numbers of all of them once; while all is well they have long been there, and
that is all. Otherwise it looks again, ever less often, and shows meanwhile that it lives itself. A
rank that has not come for ``joint_timeout_s`` that were watched is lost, and the verdict names it.

The look decides nothing: the verdict goes through the same fence whatever it says. Where this
rank's own number is gone, the store has lost those of all. Then nobody is taken for absent, and the
fence calls the roll, which waits for all as well.

A failure waits for nobody: all that come later raise it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_resilience.core import lease, muster as core
from lightning_resilience.core.events import RanksLost, WorkAwaited
from lightning_resilience.core.waiting import is_time_to_speak
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import (
    Emit,
    MultiGet,
    Nonce,
    Now,
    Set,
    Sleep,
    WaitFor,
)
from lightning_resilience.protocols.joint_fence import arrive_again, decided


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Arrival, Joint, Member


__all__ = ["muster"]


@dataclass(slots=True)
class _Watch:
    """What is known of those who have not come.

    Attributes:
        absent: Who they are.
        silence: For how long they have been awaited; the version is always the same.
        spoken_at_s: When that was last said, or None.
        has_rung: Whether the verdict's bell has rung, and there is no verdict.
    """

    absent: tuple[int, ...]
    silence: lease.Silence | None = None
    spoken_at_s: float | None = None
    has_rung: bool = False


def muster(member: Member, joint: Joint, arrival: Arrival) -> Protocol[tuple[int, ...]]:
    """Wait until every rank has come.

    Args:
        member: Who this rank is.
        joint: The operation.
        arrival: How this rank came.

    Returns:
        Ranks that have not, in time. None where all have, where there is a verdict already, and
        where the fence will call the roll.

    Raises:
        JointUnavailableError: There will be no verdict.
    """
    # Whoever has reported has come.
    awaited = set(range(member.world_size)).difference(joint.workers)
    watch = _Watch(absent=tuple(sorted(awaited)))
    while watch.absent and not arrival.is_in_new_store:
        if (yield from _look(member, joint, arrival, watch=watch)):
            return ()
        if not watch.absent or watch.silence is None:
            break
        watched_s = watch.silence.watched_s
        if watched_s >= member.timeout_s:
            yield Emit(
                RanksLost(op=joint.op, seq=joint.seq, ranks=watch.absent, silent_s=member.timeout_s)
            )
            return watch.absent
        if watched_s >= member.beat_s:
            yield from _speak(joint, arrival, watch)
        yield from _wait(member, joint, watch, watched_s=watched_s)
    return ()


def _look(member: Member, joint: Joint, arrival: Arrival, *, watch: _Watch) -> Protocol[bool]:
    """Look who has come; return whether it does not matter any more."""
    keys = tuple(member.keys.joint("arrived", rank) for rank in watch.absent)
    sent_at_s: float = yield Now()
    final_key = member.keys.joint("final", joint.seq)
    own_key = member.keys.joint("arrived", member.rank)
    raw, mine, *numbers = yield MultiGet((final_key, own_key, *keys))
    seen_at_s: float = yield Now()
    if decided(member, joint, raw) is not None:
        return True
    if mine is None:
        yield from arrive_again(member, joint, arrival)
        return True
    arrived = dict(zip(watch.absent, numbers, strict=True))
    watch.absent = core.absent_ranks(arrived, seq=joint.seq)
    watch.silence = lease.listen(
        watch.silence,
        (),
        sent_at_s=sent_at_s,
        seen_at_s=seen_at_s,
        longest_gap_s=member.beat_s,
    )
    return False


def _speak(joint: Joint, arrival: Arrival, watch: _Watch) -> Protocol[None]:
    now_s: float = yield Now()
    voice_s = joint.patience.voice_s
    if is_time_to_speak(watch.spoken_at_s, wait_s=0.0, voice_s=voice_s, now_s=now_s):
        watch.spoken_at_s, elapsed_s = now_s, now_s - arrival.started_at_s
        yield Emit(
            WorkAwaited(op=joint.op, seq=joint.seq, elapsed_s=elapsed_s, workers=watch.absent)
        )


def _wait(member: Member, joint: Joint, watch: _Watch, *, watched_s: float) -> Protocol[None]:
    nonce: str = yield Nonce()
    # Or those who wait would take this rank for lost. One that is not heard is made good by the
    # next.
    with suppress(StoreUnavailableError):
        yield Set(member.keys.joint("beat", member.rank), nonce.encode())
    pause_s = core.next_look_s(watched_s, beat_s=member.beat_s)
    if watch.has_rung:
        # Its verdict was lost with the store, and a bell that stays rung is no busy loop.
        yield Sleep(pause_s)
    else:
        watch.has_rung = yield WaitFor(member.keys.joint("done", joint.seq), pause_s)
