# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""With which status an agent leaves, where the store cannot say how the job has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
