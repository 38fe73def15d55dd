# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A round of the rendezvous that is complete: its nodes find each other there, and learn its name.

What torch's agents do next, to give the workers their ranks, waits for all nodes of the round, and
ends the agent where one of them has gone meanwhile. So node 0 names a round only when all others
have been seen in it; where one is not, the round is made anew, as where node 0 itself has gone.
Whoever has waited for long enough says so under the name's own key: the others, and one that only
comes then, begin anew at once instead of waiting in their turn.

They do so where only agents of this very round look, over a connection that is for nothing else: it
waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.incarnation import (
    ROUND_KEY,
    announce,
    give_up,
    name_for,
    name_round,
    read_name,
)


if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from lightning_resilience.adapters.agent_store import AgentStore
    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.restart import IncarnationRecord


__all__ = ["name_of_round"]

_HERE: Final = "lr/here/"


def name_of_round(
    info: RendezvousInfo,
    store: AgentStore,
    names: AgentStore,
    *,
    options: RendezvousOptions,
    before: str,
) -> IncarnationRecord:
    """Return the name of the start of the workers that begins, once all its nodes are there.

    Args:
        info: The round, as torch's handler has found it.
        store: The job's.
        names: A connection to the round's own; it is closed.
        options: Checked options.
        before: The incarnation before, as this agent knows it; empty for the first.

    Raises:
        RoundGivenUpError: A node has gone, or is very late: the round has to be made anew.
        StoreUnavailableError: So it has, because a store does not answer; or the rendezvous is a
            static one, and a node has not come.
    """
    nodes = info.world_size
    try:
        names.driver.store.set(f"{_HERE}{info.rank}", b"1")
        if info.rank == 0:
            others = [f"{_HERE}{rank}" for rank in range(1, nodes)]
            if not _have_come(names, others, within_s=options.naming_s):
                return _without_name(names, nodes, options=options)
            record = names.run(name_for(nodes=nodes, before=before))
            # Order: nobody begins before it is named, and then all can see that it is there.
            store.run(announce(store.keys(""), record))
            found = names.run(name_round(record))
            store.run(announce(store.keys(""), found))
            return found
        if not _have_come(names, [ROUND_KEY], within_s=options.named_s):
            return _without_name(names, nodes, options=options)
        return names.run(read_name(deadline_at_s=names.now_s()))
    finally:
        names.close()


def _have_come(names: AgentStore, keys: list[str], *, within_s: float) -> bool:
    ends_at_s = names.now_s() + within_s
    return all(names.driver.store.wait_for(key, ends_at_s - names.now_s()) for key in keys)


def _without_name(
    names: AgentStore, nodes: int, *, options: RendezvousOptions
) -> IncarnationRecord:
    if options.inner == "static":
        # The next attempt is at the same round: that is never given up.
        message = f"not all {nodes} nodes have come within {options.join_s:g} s"
        raise StoreUnavailableError(message)
    return names.run(give_up(nodes=nodes))
