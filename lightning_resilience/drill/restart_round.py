# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An agent of a simulated job joins a round of the rendezvous, and learns the name of one.

What it does in a complete round is shipped. The store of a round is a part of the job's, so it is
lost with that, and what an agent of an older round writes there later is told apart as the adapter
tells it, by the round's mark.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from lightning_resilience.core.joining import JoinFailure
from lightning_resilience.core.restart import mark_of_round
from lightning_resilience.drill.restart_inner import JoinFailedError
from lightning_resilience.drill.restart_plan import GRACE_S, JOIN_S
from lightning_resilience.drill.restart_watch import RENDEZVOUS_KEY
from lightning_resilience.protocols.effects import Get, Now, Sleep
from lightning_resilience.protocols.incarnation import ROUND_KEY, announce
from lightning_resilience.protocols.rendezvous_round import HERE, Round, name_of_round
from lightning_resilience.protocols.transform import transform


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.core.restart import IncarnationRecord
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.restart_inner import Inner, Place
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["NAMED_S", "NAMING_S", "join", "learn_name"]

NAMING_S: Final = min(GRACE_S, JOIN_S)
"""How long node 0 waits for the others in a round, in seconds."""

NAMED_S: Final = NAMING_S + NAMING_S
"""How long the others wait for its name, in seconds."""

_POLL_S: Final = 1.0


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


def learn_name(place: Place, keys: Keys, *, before: str) -> Protocol[IncarnationRecord]:
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
    of = Round(
        rank=place.rank,
        nodes=len(place.nodes),
        before=before,
        naming_s=NAMING_S,
        named_s=NAMED_S,
    )
    named = name_of_round(of, partial(announce, keys))
    return (yield from transform(named, _in_round(f"{place.store}lr/{mark}/")))


def _in_round(prefix: str) -> Any:  # noqa: ANN401 - what ``transform`` takes
    """Let effects on the round's own store be performed under its prefix: for ``transform``."""

    def perform(effect: Effect) -> Protocol[Any]:
        key: str = getattr(effect, "key", "")
        if key == ROUND_KEY or key.startswith(HERE):
            effect = replace(cast("Any", effect), key=prefix + key)
        return (yield effect)

    return perform
