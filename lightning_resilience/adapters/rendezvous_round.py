# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A round of the rendezvous that is complete: its nodes find each other there, and learn its name.

What torch's agents do next, to give the workers their ranks, waits for all nodes of the round, and
ends the agent where one of them has gone meanwhile. So node 0 names a round only when all others
have been seen in it; where one is not, the round is made anew, as where node 0 itself has gone.

Torch's own wait is used here, which ends at once when what is waited for is there.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Final

from torch.distributed import DistStoreError

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.incarnation import ROUND_KEY, announce, name_round, read_name


if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.restart import IncarnationRecord


__all__ = ["name_of_round"]

_HERE: Final = "lr/here/"
_SLICE_S: Final = 1.0
"""Python hears a signal between two waits of torch's only."""


def name_of_round(
    info: RendezvousInfo, store: AgentStore, options: RendezvousOptions, *, before: str
) -> IncarnationRecord:
    """Return the name of the start of the workers that begins, once all its nodes are there.

    Args:
        info: The round, as torch's handler has found it.
        store: The job's.
        options: Checked options.
        before: The incarnation before, as this agent knows it; empty for the first.

    Raises:
        StoreUnavailableError: A node has gone, or a store does not answer: the round has to be
            made anew.
        RuntimeError: As torch says that the store has gone.
    """
    info.store.set(f"{_HERE}{info.rank}", "1")
    names = AgentStore.of(info.store, run_id=store.run_id)
    try:
        if info.rank == 0:
            others = [f"{_HERE}{rank}" for rank in range(1, info.world_size)]
            _await(info, others, names, within_s=options.naming_s)
            found = names.run(name_round(nodes=info.world_size, before=before))
            store.run(announce(store.keys(""), found))
            return found
        _await(info, [ROUND_KEY], names, within_s=options.named_s)
        return names.run(read_name(deadline_at_s=names.now_s()))
    finally:
        names.close()


def _await(info: RendezvousInfo, keys: list[str], clock: AgentStore, *, within_s: float) -> None:
    ends_at_s = clock.now_s() + within_s
    rest_s = within_s
    while keys:
        try:
            info.store.wait(keys, dt.timedelta(seconds=min(rest_s, _SLICE_S)))
        except DistStoreError as error:
            rest_s = ends_at_s - clock.now_s()
            if rest_s > 0:
                continue
            message = (
                f"not all {info.world_size} nodes of this round of the rendezvous were there "
                f"within {within_s:g} s of its completion; one has probably gone, so the round has "
                "to be made anew"
            )
            raise StoreUnavailableError(message) from error
        return
