# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An agent learns the name of a round that is complete: by a connection to the round's own store.

What is done there is in ``protocols.rendezvous_round``. The connection is for nothing else, so that
it may wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_resilience.protocols.effects import Call, WaitFor
from lightning_resilience.protocols.incarnation import announce
from lightning_resilience.protocols.rendezvous_round import Round, name_of_round
from lightning_resilience.protocols.transform import transform


if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from lightning_resilience.adapters.agent_store import AgentStore
    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.restart import IncarnationRecord
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["learn_name"]


def learn_name(
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
    of = Round(
        rank=info.rank,
        nodes=info.world_size,
        before=before,
        naming_s=options.naming_s,
        named_s=options.named_s,
        is_repeated=options.inner == "static",
    )

    def announcing(record: IncarnationRecord) -> Protocol[None]:
        yield Call(lambda _: store.run(announce(store.keys(""), record)))

    def here(effect: Effect) -> Protocol[Any]:
        if isinstance(effect, WaitFor):
            # Not by a helper, which would open one more connection.
            wait_for = names.driver.store.wait_for
            return (yield Call(lambda _: wait_for(effect.key, effect.timeout_s)))
        return (yield effect)

    try:
        return names.run(transform(name_of_round(of, announcing), here))
    finally:
        names.close()
