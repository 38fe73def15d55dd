# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How an agent leaves a job that has ended: it says why, lets the others read it, and goes.

``SystemExit`` passes through torch's agent, which ends its workers, and through its launcher, whose
exit status it becomes. The agent with the store in its process goes last, or when it has waited for
long enough: an agent that finds no store any more leaves with a status of its own.

An agent that a signal has told to stop leaves alone. Torch ends the workers, and asks our handler
only for the run's id, to record what has happened: that is where the status is given.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from lightning_resilience.adapters.reason_file import write_reason
from lightning_resilience.adapters.rendezvous_connection import RETRYABLE
from lightning_resilience.adapters.rendezvous_reports import report_stop
from lightning_resilience.core.exit_codes import may_start_again
from lightning_resilience.core.leaving import Apart, told_to_stop
from lightning_resilience.protocols.incarnation import take_leave


if TYPE_CHECKING:
    import signal

    from lightning_resilience.adapters.rendezvous_connection import Connection
    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.core.quota import Ending
    from lightning_resilience.protocols.incarnation import Part


__all__ = ["leave", "leave_alone", "leave_told"]

_log = logging.getLogger(__name__)


def leave(
    connection: Connection, how: Ending | Apart, *, options: RendezvousOptions, part: Part | None
) -> NoReturn:
    """Leave with a status, and say why.

    Args:
        connection: To the job's store.
        how: How the job has ended, or with what this agent leaves one that goes on.
        options: Of this agent.
        part: What part this agent had in a start of the workers last; None where it never had.

    Raises:
        SystemExit: Always, with the ending's status.
    """
    if isinstance(how, Apart):
        _leave_apart(how.ending, options, run_id=connection.run_id)
    _say(how, options, run_id=connection.run_id)
    if not may_start_again(how.code):
        connection.set_closed()
    try:
        store = connection.store()
        hosts_store, linger_s = connection.hosts_store, options.restart.linger_s
        keys = store.keys("")
        store.run(take_leave(keys, part, hosts_store=hosts_store, linger_s=linger_s))
    except RETRYABLE as error:
        _log.debug("the store has gone already: %s", error)
    raise SystemExit(int(how.code))


def leave_told(
    connection: Connection, sign: signal.Signals, *, options: RendezvousOptions, keys: Keys | None
) -> NoReturn:
    """Leave because a signal says so: the others learn why the workers of this agent have ended.

    Args:
        connection: To the job's store.
        sign: The signal.
        options: Of this agent.
        keys: Names of the keys of the start of the workers that it ends; None where none works.

    Raises:
        SystemExit: Always.
    """
    ending = told_to_stop(sign.name)
    _log.warning("leaving with status %d: %s", ending.code, ending.reason)
    write_reason(options.termination_log, ending, run_id=connection.run_id)
    if keys is not None:
        report_stop(connection, keys, number=int(sign))
    connection.close()
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


def _leave_apart(ending: Ending, options: RendezvousOptions, *, run_id: str) -> NoReturn:
    """Leave without a word to those who train, and with the rendezvous as open as it was."""
    _log.error("leaving alone, with status %d: %s", ending.code, ending.reason)
    write_reason(options.termination_log, ending, run_id=run_id)
    raise SystemExit(int(ending.code))
