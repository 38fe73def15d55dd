# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent tells the others of how its own workers have ended: by themselves, or by a signal.

A worker with the callback has told its own story before; ``core.incident`` says which one stands.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_resilience.adapters.agent_view import first_rank, worker_exits
from lightning_resilience.adapters.rendezvous_connection import RETRYABLE
from lightning_resilience.core.worker_exits import incident_of_exit
from lightning_resilience.protocols.incident import publish_incident


if TYPE_CHECKING:
    from lightning_resilience.adapters.agent_store import AgentStore
    from lightning_resilience.adapters.rendezvous_connection import Connection
    from lightning_resilience.core.keys import Keys


__all__ = ["report_exits", "report_stop"]

_log = logging.getLogger(__name__)


def report_exits(store: AgentStore, keys: Keys) -> None:
    """Tell how the workers of this agent have ended.

    Args:
        store: The job's.
        keys: Names of the keys of the start of the workers that is over.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    for each in worker_exits():
        offered = incident_of_exit(
            rank=each.rank,
            status=each.status,
            message=each.message,
            writer=store.driver.dice.nonce(),
        )
        store.run(publish_incident(keys, offered))


def report_stop(connection: Connection, keys: Keys, *, number: int) -> None:
    """Tell that this agent was told to stop, and has ended its workers; it never blocks for long.

    Args:
        connection: To the job's store.
        keys: Names of the keys of the start of the workers that it has ended.
        number: The signal's number.
    """
    rank = first_rank()
    if rank is None:
        return
    try:
        store = connection.store()
        writer = store.driver.dice.nonce()
        mine = incident_of_exit(rank=rank, status=-number, message="", writer=writer)
        store.run(publish_incident(keys, mine), hurry=True)
    except RETRYABLE as error:
        _log.info("the other agents could not be told that this one stops: %s", error)
