# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent makes of a worker that has ended: it sees a status, and maybe a file with an error.

==============================  ==============  ====================================================
the worker                      is              because
==============================  ==============  ====================================================
has left a file with an error   ``error``       it is the worker's own word
SIGTERM, SIGINT, SIGHUP         ``signal``      somebody asked it to stop
status 143                      ``signal``      so the callback has it end then
SIGKILL                         ``killed``      nobody heeds that: a person, or the kernel, which
                                                was out of memory
SIGABRT                         ``echo``        a watchdog that waited for another rank in vain ends
                                                its process so; so does a bug, which is then found
                                                only where nobody else has said anything
any other signal                ``error``       the process has crashed by itself
a status                        ``exit``        it has ended, and has not said why
==============================  ==============  ====================================================

A worker with the callback has told its own story before; ``core.incident`` says which one stands.
The file of an exception that all ranks have, or that is an echo, says so by the exception's name.
"""

from __future__ import annotations

from typing import Final

from lightning_resilience.core.evidence import without_credentials
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.failures import NAMES
from lightning_resilience.core.incident import (
    TRANSPORT_SOURCE,
    IncidentKind,
    IncidentRecord,
    fingerprint_of,
)


__all__ = ["incident_of_exit"]

_MAX_ERROR_CHARS: Final = 500
_UNKNOWN_STEP: Final = -1
# POSIX has fixed these numbers.
_SIGNALS: Final = {
    1: ("SIGHUP", IncidentKind.SIGNAL),
    2: ("SIGINT", IncidentKind.SIGNAL),
    6: ("SIGABRT", IncidentKind.ECHO),
    9: ("SIGKILL", IncidentKind.KILLED),
    15: ("SIGTERM", IncidentKind.SIGNAL),
}
# By the name only: the process that had the exception is gone.
_STOPS: Final = frozenset({"KeyboardInterrupt", "SIGTERMException", "SignalException"})
_ECHOES: Final = frozenset(
    {
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "JointUnavailableError",
        "PeerFailedError",
    }
)


def incident_of_exit(*, rank: int, status: int, message: str, writer: str) -> IncidentRecord:
    """Make the record that an agent offers for a worker that has ended.

    Args:
        rank: The worker's global rank.
        status: Its exit status; the negative number of a signal.
        message: What its file says, ``TypeName: text``; empty without one.
        writer: A fresh nonce.
    """
    kind = _kind_of(status, message)
    error = without_credentials(" ".join(message.split()))[:_MAX_ERROR_CHARS] or _words(status)
    failure = NAMES.get(_type_in(message))
    return IncidentRecord(
        rank=rank,
        kind=kind.value,
        error=error,
        step=_UNKNOWN_STEP,
        failure="" if failure is None else failure.value,
        fingerprint=fingerprint_of(error) if kind is IncidentKind.ERROR else "",
        by_agent=True,
        writer=writer,
    )


def _kind_of(status: int, message: str) -> IncidentKind:
    if message:
        name = _type_in(message)
        if name in _STOPS:
            return IncidentKind.SIGNAL
        is_echo = name in _ECHOES or (name == "RuntimeError" and TRANSPORT_SOURCE in message)
        return IncidentKind.ECHO if is_echo else IncidentKind.ERROR
    if status == ExitCode.PREEMPTED:
        return IncidentKind.SIGNAL
    if status >= 0:
        return IncidentKind.EXIT
    return _SIGNALS.get(-status, ("", IncidentKind.ERROR))[1]


def _type_in(message: str) -> str:
    return message.partition(":")[0].strip().rpartition(".")[2]


def _words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    name, _ = _SIGNALS.get(-status, ("", None))
    return f"signal {name or -status}"
