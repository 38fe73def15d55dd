# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ended a start of the job: the first cause, as one record that all ranks share.

When one rank fails, the others fail with it: a collective breaks, a launcher sends SIGTERM. What a
person needs is the cause and not its echoes, and in time order the echoes are sometimes first. So
each rank that leaves training with an exception of its own offers it as the incident, and what
stands is:

1. the first ``error``: an exception that is neither an echo nor a request to stop;
2. as long as there is none, the first ``killed``: a process that was ended without a word, as its
   agent has seen;
3. as long as there is none of these, the first ``signal`` that an agent has seen: somebody else has
   told that process to stop, since an agent that stops its own workers does not look at them;
4. as long as there is none of these, whatever came first: a ``signal`` that a rank tells (maybe
   its agent has stopped it, because another one has failed), an ``echo`` (a transport broke:
   another rank has gone without a word), or an ``exit`` (its agent has seen it end with a status,
   and nobody has said why).

An exception with which all ranks leave together wakes nobody, since nobody waits for anybody. One
rank tells of it all the same, for the agents, who decide about a restart.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Final

import msgspec
import xxhash

from lightning_resilience.core.evidence import one_line, type_names
from lightning_resilience.core.failures import FailureClass
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import VERSION
from lightning_resilience.errors import PeerFailedError


__all__ = [
    "TRANSPORT_SOURCE",
    "IncidentKind",
    "IncidentRecord",
    "PeerInterruption",
    "error_of",
    "fingerprint_of",
    "incident_of",
    "is_echo",
    "is_notable",
    "is_shared",
    "is_stop",
    "note_of",
    "outranks",
    "why_not_saved",
]


class IncidentKind(str, enum.Enum):
    """What sort of cause it is."""

    ERROR = "error"
    KILLED = "killed"
    SIGNAL = "signal"
    ECHO = "echo"
    EXIT = "exit"


class IncidentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What ended this start of the job, as far as the ranks know.

    Args:
        v: Version of the format.
        rank: The rank that has left with it.
        kind: Name of an ``IncidentKind``.
        error: One line: type and text of its exception.
        step: Training step that the rank had completed; -1 where nobody has said.
        failure: Name of the ``FailureClass`` of its exception; empty where that is not known.
        fingerprint: Stands for the error, the same for each that differs in numbers only; empty
            where there is none.
        by_agent: Whether an agent tells it, which has seen how the process has ended.
        writer: Nonce of this write.
    """

    v: int = VERSION
    rank: Annotated[int, msgspec.Meta(ge=0)]
    kind: Annotated[str, msgspec.Meta(pattern=r"\A(error|killed|signal|echo|exit)\Z")]
    error: str
    step: Annotated[int, msgspec.Meta(ge=-1)]
    failure: str = ""
    fingerprint: str = ""
    by_agent: bool = False
    writer: str


class PeerInterruption(BaseException):
    """Ends this rank's waits because another rank has failed. Never leaves the package.

    No ``Exception``, so that nobody takes it for a failure of what was waited for.

    Args:
        error: What this rank leaves with.
    """

    def __init__(self, error: PeerFailedError) -> None:
        super().__init__(str(error))
        self.error = error


# The last is of torch's launcher, whose handler a forked worker may have.
_SIGNALS: Final = frozenset({"KeyboardInterrupt", "SIGTERMException", "SignalException"})
_TRANSPORT_ERRORS: Final = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_TOGETHER: Final = "JointError"
_ALONE: Final = "JointUnavailableError"
TRANSPORT_SOURCE: Final = "/gloo/"
"""gloo raises plain RuntimeErrors, and names the line of its source."""
_STANDING: Final = {IncidentKind.ERROR.value: 3, IncidentKind.KILLED.value: 2}
_NUMBERS: Final = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")


def is_stop(error: BaseException) -> bool:
    """Tell whether this exception stands for a request to stop."""
    return not _SIGNALS.isdisjoint(type_names(error))


def is_shared(error: BaseException) -> bool:
    """Tell whether every rank leaves with this exception, at the same point of the program."""
    names = type_names(error)
    return _TOGETHER in names and _ALONE not in names


def is_echo(error: BaseException, *, was_woken: bool = False) -> bool:
    """Tell whether this exception says no more than that something has happened to another rank.

    Args:
        error: The exception.
        was_woken: Whether this rank's collectives were ended before, for another rank's sake. Then
            whatever it fails with follows from that.
    """
    names = type_names(error)
    if was_woken and _SIGNALS.isdisjoint(names):
        return True
    if not _TRANSPORT_ERRORS.isdisjoint(names) or isinstance(error, PeerFailedError):
        return True
    if _TOGETHER in names and classify(error).failure is FailureClass.LOST:
        return True
    return _ALONE in names or ("RuntimeError" in names and TRANSPORT_SOURCE in one_line(error))


def incident_of(
    error: BaseException, *, is_an_echo: bool, rank: int, step: int, writer: str
) -> IncidentRecord:
    """Make the record that a rank offers for the exception with which it leaves.

    Args:
        error: The exception.
        is_an_echo: What ``is_echo`` says of it.
        rank: This rank.
        step: Training step that it has completed.
        writer: A fresh nonce.
    """
    failure = classify(error).failure
    was_told = is_shared(error) and failure is FailureClass.CANCELLED
    if is_an_echo:
        kind = IncidentKind.ECHO
    elif was_told or is_stop(error):
        kind = IncidentKind.SIGNAL
    else:
        kind = IncidentKind.ERROR
    line = one_line(error)
    return IncidentRecord(
        rank=rank,
        kind=kind.value,
        error=line,
        step=step,
        failure="" if failure is None else failure.value,
        fingerprint=fingerprint_of(line) if kind is IncidentKind.ERROR else "",
        writer=writer,
    )


def fingerprint_of(error: str) -> str:
    """Return what stands for an error: the same for each that differs in numbers only.

    Args:
        error: Its type and text.
    """
    return xxhash.xxh3_64_hexdigest(_NUMBERS.sub("#", error).encode())


def outranks(new: IncidentRecord, found: IncidentRecord) -> bool:
    """Tell whether ``new`` takes the place of what was found: only what is nearer to the cause."""
    return _standing(new) > _standing(found)


def _standing(record: IncidentRecord) -> int:
    is_outsiders = record.by_agent and record.kind == IncidentKind.SIGNAL.value
    return _STANDING.get(record.kind, int(is_outsiders))


def is_notable(mine: IncidentRecord, standing: IncidentRecord) -> bool:
    """Tell whether what stands is worth a note on this rank's own exception.

    Args:
        mine: What this rank has offered.
        standing: What stands.
    """
    signal, echo = IncidentKind.SIGNAL.value, IncidentKind.ECHO.value
    if standing == mine:
        return mine.kind == echo
    # A scheduler tells every rank to stop: who was first says nothing.
    return (mine.kind, standing.kind) != (signal, signal)


_TEXTS: Final = {
    IncidentKind.ERROR: (
        "Rank {rank} failed first, after step {step}, with {error}. Mend that; its traceback is in "
        "that rank's log."
    ),
    IncidentKind.SIGNAL: (
        "Rank {rank} was told to stop first, after step {step}, and left with {error}. Nothing is "
        "known to be wrong with the training itself."
    ),
    IncidentKind.KILLED: (
        "Rank {rank} was killed, after step {step}: {error}. If nobody did that, it has probably "
        "run out of memory: look at the kernel's log of its host."
    ),
    IncidentKind.EXIT: (
        "Rank {rank} has ended, after step {step}, with {error}, and has not said why: look at its "
        "log."
    ),
    IncidentKind.ECHO: (
        "Rank {rank} was the first to notice, after step {step}, that another rank had gone: "
        "{error}. A rank that was killed says nothing: look for the one whose log just stops, and "
        "at the kernel's log of its host."
    ),
}


def note_of(incident: IncidentRecord) -> str:
    """Return the incident in words."""
    text = _TEXTS[IncidentKind(incident.kind)]
    if incident.step < 0:
        text = text.replace(", after step {step}", "")
    return text.format(rank=incident.rank, step=incident.step, error=incident.error.rstrip("."))


def error_of(incident: IncidentRecord | None, *, rank: int) -> PeerFailedError:
    """Return the error with which another rank leaves because of an incident.

    Args:
        incident: What happened; None where it is known only that something has.
        rank: The rank that leaves.
    """
    if incident is None:
        message = (
            f"Rank {rank} stops because another rank has failed. Which one is not known, because "
            "the shared store does not answer any more: look at the logs of the other ranks."
        )
        return PeerFailedError(message)
    message = f"Rank {rank} stops because another rank has left. {note_of(incident)}"
    return PeerFailedError(message, rank=incident.rank, kind=incident.kind, error=incident.error)


def why_not_saved(*, on_cpu: bool, is_replicated: bool, is_group_ended: bool) -> str:
    """Return why no checkpoint is saved on an exception that not all ranks share, or nothing.

    Rank 0 saves it alone, without any collective, and only what is known to be whole.

    Args:
        on_cpu: Whether the model is on the CPU. An accelerator may have been given an optimizer
            step with the gradients of a collective that was broken off.
        is_replicated: Whether rank 0 has the whole state.
        is_group_ended: Whether a collective that somebody calls meanwhile would fail at once,
            instead of hanging.
    """
    if not is_replicated:
        return "the state is spread over the ranks, which are not there any more"
    if not on_cpu:
        return (
            "the model is on an accelerator, whose last optimizer step may have used gradients of "
            "a collective that was broken off"
        )
    if not is_group_ended:
        return "a collective on the way to the checkpoint could hang, because ranks have left"
    return ""
