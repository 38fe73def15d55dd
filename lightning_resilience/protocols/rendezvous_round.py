# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A round of the rendezvous that is complete: its nodes find each other there, and learn its name.

What torch's agents do next, to give the workers their ranks, waits for all nodes of the round, and
ends the agent where one of them has gone meanwhile. So node 0 names a round only when all others
have been seen in it; where one is not, the round is made anew, as where node 0 itself has gone.
Whoever has waited for long enough says so under the name's own key: the others, and one that only
comes then, begin anew at once instead of waiting in their turn.

All effects are on the round's own store, in which only its agents look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import Now, Set, WaitFor
from lightning_resilience.protocols.incarnation import (
    ROUND_KEY,
    give_up,
    name_for,
    name_round,
    read_name,
)


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.restart import IncarnationRecord
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["HERE", "Round", "name_of_round"]

HERE: Final = "lr/here/"
"""Under this and its number each node says that it has come to the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A complete round, as the agent of one of its nodes knows it.

    Args:
        rank: Number of its node in the round.
        nodes: How many nodes have part in it.
        before: The incarnation before, as this agent knows it; empty for the first.
        naming_s: How long node 0 waits for the others, in seconds.
        named_s: How long the others wait for its name, in seconds.
        is_repeated: Whether the next attempt is at the same round, which is never given up then.
    """

    rank: int
    nodes: int
    before: str
    naming_s: float
    named_s: float
    is_repeated: bool = False


def name_of_round(
    of: Round, announcing: Callable[[IncarnationRecord], Protocol[None]]
) -> Protocol[IncarnationRecord]:
    """Return the name of the start of the workers that begins, once all its nodes are there.

    Args:
        of: The round.
        announcing: Tells, in the job's store, which start is the present one.

    Raises:
        RoundGivenUpError: A node has gone, or is very late: the round has to be made anew.
        StoreUnavailableError: So it has, because a store does not answer; or the attempt has to be
            repeated, because a node has not come.
    """
    yield Set(f"{HERE}{of.rank}", b"1")
    if of.rank:
        if not (yield from _have_come([ROUND_KEY], within_s=of.named_s)):
            return (yield from _without_name(of))
        now_s: float = yield Now()
        return (yield from read_name(deadline_at_s=now_s))
    others = [f"{HERE}{rank}" for rank in range(1, of.nodes)]
    if not (yield from _have_come(others, within_s=of.naming_s)):
        return (yield from _without_name(of))
    record = yield from name_for(nodes=of.nodes, before=of.before)
    # Order: nobody begins before it is named, and then all can see that it is there.
    yield from announcing(record)
    found = yield from name_round(record)
    yield from announcing(found)
    return found


def _have_come(keys: list[str], *, within_s: float) -> Protocol[bool]:
    now_s: float = yield Now()
    ends_at_s = now_s + within_s
    for key in keys:
        now_s = yield Now()
        if not (yield WaitFor(key, ends_at_s - now_s)):
            return False
    return True


def _without_name(of: Round) -> Protocol[IncarnationRecord]:
    if of.is_repeated:
        message = f"not all {of.nodes} nodes have come within {of.naming_s:g} s"
        raise StoreUnavailableError(message)
    return (yield from give_up(nodes=of.nodes))
