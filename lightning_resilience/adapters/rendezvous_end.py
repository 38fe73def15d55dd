# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How an agent leaves a job that has ended: it says why, lets the others read it, and goes.

``SystemExit`` passes through torch's agent, which ends its workers, and through its launcher, whose
exit status it becomes. The agent with the store in its process goes last, or when it has waited for
long enough: an agent that finds no store any more leaves with a status of its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from lightning_resilience.adapters.reason_file import write_reason
from lightning_resilience.adapters.rendezvous_connection import RETRYABLE
from lightning_resilience.protocols.incarnation import acknowledge, await_acknowledged


if TYPE_CHECKING:
    from lightning_resilience.adapters.rendezvous_connection import Connection
    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.quota import Ending


__all__ = ["leave", "leave_alone"]

_log = logging.getLogger(__name__)


def leave(
    connection: Connection, ending: Ending, *, options: RendezvousOptions, node: int, nodes: int
) -> NoReturn:
    """Leave with a status, and say why.

    Args:
        connection: To the job's store.
        ending: How the job has ended.
        options: Of this agent.
        node: Number of this node in the round.
        nodes: How many nodes have part in it.

    Raises:
        SystemExit: Always, with the ending's status.
    """
    _say(ending, options, run_id=connection.run_id)
    try:
        store = connection.store()
        keys = store.keys(ending.incarnation)
        store.run(acknowledge(keys, node))
        if connection.hosts_store:
            linger_s = options.restart.linger_s
            store.run(await_acknowledged(keys, nodes, linger_s=linger_s))
    except RETRYABLE as error:
        _log.debug("the store has gone already: %s", error)
    raise SystemExit(int(ending.code))


def leave_alone(ending: Ending, *, options: RendezvousOptions, run_id: str) -> NoReturn:
    """Leave with a status where there is no store, and nobody who waits for this agent.

    Args:
        ending: How the job has ended.
        options: Of this agent.
        run_id: Name of the run.

    Raises:
        SystemExit: Always, with the ending's status.
    """
    _say(ending, options, run_id=run_id)
    raise SystemExit(int(ending.code))


def _say(ending: Ending, options: RendezvousOptions, *, run_id: str) -> None:
    _log.error("the job has ended with status %d: %s", ending.code, ending.reason)
    write_reason(options.termination_log, ending, run_id=run_id)
