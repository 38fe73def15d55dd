# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C44: a node that waits for something gives no sign of life meanwhile, and counts as dead.

Here: while an agent waits at the gate its heartbeat goes on, on a connection of its own. Reported
for pytorch as #69520 and #64990.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters import rendezvous_inner as within
from tests.handlers import WITHIN_S, server


if TYPE_CHECKING:
    from tests.handlers import Handlers


def test_the_heartbeat_goes_on(handlers: Handlers) -> None:
    """While one agent waits for reports of workers, the other sees several signs of life of it."""
    store = server()
    one, other = (handlers.make(store.port, nodes=(2, 2), settle_s=each) for each in (4, 0))
    handlers.join(one, other)
    node = _inner(one)._this_node
    signs: set[Any] = set()

    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(one.next_rendezvous)
        while one._passed is None and not joined.done():
            other.num_nodes_waiting()
            state = _inner(other)._state_holder.state
            signs.add(state.last_heartbeats.get(node))
            time.sleep(0.05)
        there = within.participants(_inner(other))
        other.next_rendezvous()
        assert joined.result(WITHIN_S).world_size == 2

    assert len(signs) >= 3
    assert there == 2


def _inner(handler: Any) -> Any:
    return handler._connection.handler()
