# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""With which status an agent leaves, where the store cannot say how the job has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.restart_record import Memory
from tests.handlers import server, status_of


if TYPE_CHECKING:
    from lightning_resilience.adapters.rendezvous import ResilientHandler
    from tests.handlers import Handlers


def shut_down_after(error: Exception, handler: ResilientHandler) -> bool:
    """Do what torch's launcher does when its agent has raised."""
    try:
        raise error
    except type(error):
        return handler.shutdown()


def test_an_agent_that_has_failed_and_cannot_ask_may_be_started_again(handlers: Handlers) -> None:
    """The store has gone, and its workers have failed: nobody knows whether that would help."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    del store

    assert status_of(lambda: shut_down_after(ValueError("bad"), handler)) == 160


def test_an_agent_that_has_failed_alone_says_so_itself(handlers: Handlers) -> None:
    """Where the store can be asked, and the job has not ended, the launcher's own status stands."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)

    assert shut_down_after(ValueError("bad"), handler)
    assert store.port


def test_a_connection_that_was_dropped_is_no_loss_of_nodes(handlers: Handlers) -> None:
    """The handler that is made anew has not looked yet, and takes nobody for gone."""
    store = server()
    first, second = handlers.make(store.port, nodes=(2, 2)), handlers.make(store.port, nodes=(2, 2))
    handlers.join(first, second)
    first._is_called = True
    first._connection.drop()

    first._pass_gate()

    client = AgentStore.at("127.0.0.1", store.port, run_id="job")
    record = client.run(restart_record.read(Memory(client.keys(""))))
    client.close()
    assert (record.restarts, record.charges) == (0, ())
