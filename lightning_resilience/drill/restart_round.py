# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A complete round of a simulated rendezvous: its nodes find each other there, and learn its name.

It is what ``adapters.rendezvous_round`` does, in the same order: node 0 names a round once it has
seen all others in it, and whoever has waited for long enough, node 0 or another, gives it up. The
store of a round is a part of the job's, so it is lost with that, and what an agent of an older
round writes there later is told apart as the adapter tells it, by the round's mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.joining import JoinFailure
from lightning_resilience.core.restart import mark_of_round
from lightning_resilience.drill.restart_inner import JoinFailedError
from lightning_resilience.drill.restart_plan import GRACE_S, JOIN_S
from lightning_resilience.drill.restart_watch import RENDEZVOUS_KEY
from lightning_resilience.protocols.effects import CompareAndSet, Get, Now, Set, Sleep, WaitFor
from lightning_resilience.protocols.incarnation import (
    ROUND_KEY,
    announce,
    give_up,
    name_for,
    name_round,
    read_name,
)
from lightning_resilience.protocols.transform import transform


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.core.restart import IncarnationRecord
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.restart_inner import Inner, Place
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["NAMED_S", "NAMING_S", "join", "name_of_round"]

NAMING_S: Final = min(GRACE_S, JOIN_S)
"""How long node 0 waits for the others in a round, in seconds."""

NAMED_S: Final = NAMING_S + NAMING_S
"""How long the others wait for its name, in seconds."""

_POLL_S: Final = 1.0
_HERE: Final = "lr/here/"


def join(inner: Inner, process: Process) -> Protocol[Place]:
    """Join the next round, and wait until it is complete.

    Args:
        inner: The rendezvous.
        process: Of the agent that joins.

    Raises:
        JoinFailedError: The rendezvous is closed, or others have not come in time.
        StoreUnavailableError: The store did not answer.
    """
    yield Get(RENDEZVOUS_KEY)
    inner.leave(process)
    began_at_s: float = yield Now()
    now_s = began_at_s
    while now_s - began_at_s < JOIN_S:
        yield Get(RENDEZVOUS_KEY)
        place = inner.look(process)
        if place is not None:
            return place
        yield Sleep(_POLL_S)
        now_s = yield Now()
    inner.leave(process)
    raise JoinFailedError(JoinFailure.LATE)


def name_of_round(place: Place, keys: Keys, *, before: str) -> Protocol[IncarnationRecord]:
    """Return the name of the start of the workers that begins, once all its nodes are there.

    Args:
        place: The agent's place in the round.
        keys: Names of the job's keys.
        before: The incarnation before, as this agent knows it; empty for the first.

    Raises:
        RoundGivenUpError: A node has gone, or is very late: the round has to be made anew.
        StoreUnavailableError: So it has, because the store does not answer.
    """
    mark = mark_of_round(place.workers, before=before, is_static=False)
    prefix, nodes = f"{place.store}lr/{mark}/", len(place.nodes)
    yield Set(f"{prefix}{_HERE}{place.rank}", b"1")
    if place.rank:
        is_told = yield from _have_come([prefix + ROUND_KEY], within_s=NAMED_S)
        now_s: float = yield Now()
        waited_for = read_name(deadline_at_s=now_s) if is_told else give_up(nodes=nodes)
        return (yield from transform(waited_for, _in_round(prefix)))
    others = [f"{prefix}{_HERE}{rank}" for rank in range(1, nodes)]
    if not (yield from _have_come(others, within_s=NAMING_S)):
        return (yield from transform(give_up(nodes=nodes), _in_round(prefix)))
    mine = yield from name_for(nodes=nodes, before=before)
    yield from announce(keys, mine)
    found = yield from transform(name_round(mine), _in_round(prefix))
    yield from announce(keys, found)
    return found


def _have_come(keys: list[str], *, within_s: float) -> Protocol[bool]:
    now_s: float = yield Now()
    ends_at_s = now_s + within_s
    for key in keys:
        now_s = yield Now()
        if not (yield WaitFor(key, ends_at_s - now_s)):
            return False
    return True


def _in_round(prefix: str) -> Any:  # noqa: ANN401 - what ``transform`` takes
    """Let effects on the round's own store be performed under its prefix: for ``transform``."""

    def perform(effect: Effect) -> Protocol[Any]:
        match effect:
            case Get(key) if key == ROUND_KEY:
                return (yield Get(prefix + key))
            case Set(key, value) if key == ROUND_KEY:
                return (yield Set(prefix + key, value))
            case CompareAndSet(key, expected, desired) if key == ROUND_KEY:
                return (yield CompareAndSet(prefix + key, expected, desired))
        return (yield effect)

    return perform
