# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How many restarts a job may make before a person has to look at it: one record for all agents.

Torch's agents count restarts each for itself, and membership changes not at all, so a job may make
many times of what ``--max-restarts`` says. Here each end of a start of the workers, an *incident*,
is charged once: the record holds the incarnation that has ended, so whoever comes second finds it
charged. What it costs depends on what has happened:

===========================================  =======================================================
what has happened                            what it costs
===========================================  =======================================================
somebody asked the job to stop               nothing
nodes have come, none has left               nothing
nodes have left                              one of ``membership_quota``
an error that every attempt would repeat     the job: it stops, and nothing is restarted
the same error at the same step, as often    the job: it is dead-lettered
in a row as ``same_failure_limit``
a worker was killed by SIGKILL               one of ``killed_quota``, and as any other failure
any other failure                            one of ``restart_quota``
===========================================  =======================================================

A quota counts within ``restart_window_s``, and **progress** refills it: a newer verified checkpoint
than at the last charge. Where no checkpoint is ever told of, nothing is known of progress; then the
window alone decides.

A charge has an age, in seconds by local sight: to what was written comes the time for which this
observer has seen the record unchanged. That is never more than its true age, so it errs towards
denying, and what has happened while nobody looked, such as between two starts of the launcher, does
not count. No instant of one host is compared with another's.

Once the record says how the job has ended, nothing but a person changes that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from lightning_resilience.core.causes import FREE, Cause, cause_of
from lightning_resilience.core.exit_codes import ExitCode, may_start_again
from lightning_resilience.core.incident import note_of
from lightning_resilience.core.records import VERSION
from lightning_resilience.core.restart_config import MOST_CHARGES


if TYPE_CHECKING:
    from lightning_resilience.core.incident import IncidentRecord
    from lightning_resilience.core.restart_config import RestartConfig


__all__ = [
    "FREE",
    "Cause",
    "Charge",
    "Closed",
    "Ending",
    "RestartRecord",
    "Ruling",
    "carried_over",
    "cause_of",
    "charge",
    "charged",
    "created",
    "ended",
    "failures",
    "outranks",
    "rebuilt",
    "released",
    "started_again",
]

_UNKNOWN_STEP: Final = -1
_FAILURES: Final = frozenset({Cause.KILLED, Cause.FAILED})

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Step = Annotated[int, msgspec.Meta(ge=_UNKNOWN_STEP, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """One incident that was counted.

    Args:
        incarnation: The start of the workers that has ended.
        cause: Value of a ``Cause``.
        fingerprint: Stands for the error; empty where none is known.
        step: Training step at which it was; -1 where nobody has said.
        age_s: How old it was at least when the record was written, in seconds.
    """

    incarnation: str
    cause: Annotated[str, msgspec.Meta(pattern=r"\A(left|killed|failed)\Z")]
    fingerprint: str = ""
    step: _Step = _UNKNOWN_STEP
    age_s: _Seconds = 0.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a job has ended: every agent leaves with it.

    Args:
        code: Exit status; see ``core.exit_codes``.
        reason: What has happened, with the numbers, for a person.
        incarnation: The start of the workers that has ended; empty before the first.
    """

    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    reason: str
    incarnation: str = ""


class RestartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The restarts of one job.

    Args:
        v: Version of the format.
        epoch: Grows with every change.
        charges: Incidents of the window, the oldest first.
        checkpoint_step: Step of the newest verified checkpoint at the last charge; -1 where no
            checkpoint was told of.
        restarts: Incidents that were charged since the job began.
        ending: How the job has ended; None while it has not.
        stops: How often in a row workers were told to stop, by somebody who left their agents
            alone, with no progress in between. They are free, but not restarted at once each time.
        stopped: The last start of the workers among those; empty where there is none.
        writer: Nonce of this write.
    """

    v: int = VERSION
    epoch: _Count = 0
    charges: Annotated[tuple[Charge, ...], msgspec.Meta(max_length=MOST_CHARGES)] = ()
    checkpoint_step: _Step = _UNKNOWN_STEP
    restarts: _Count = 0
    ending: Ending | None = None
    stops: _Count = 0
    stopped: str = ""
    writer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A start of the workers that is over.

    Args:
        incarnation: Which one.
        cause: What has ended it: ``cause_of``.
        incident: What workers and agents have told of it; None where nobody has told anything.
        checkpoint_step: Step of the newest verified checkpoint; -1 where none was told of.
    """

    incarnation: str
    cause: Cause
    incident: IncidentRecord | None = None
    checkpoint_step: int = _UNKNOWN_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What follows from one incident.

    Args:
        record: What to write; the very record that was given where nothing changes.
        number: Failures without progress, this one included.
        delays: With what the restart delay grows: that, or how often workers were told to stop
            before without progress; 0 where nothing has to be waited for.
    """

    record: RestartRecord
    number: int
    delays: int = 0

    @property
    def ending(self) -> Ending | None:
        """How the job has ended; None where it is restarted."""
        return self.record.ending


def created(*, writer: str) -> RestartRecord:
    """Return the record of a job that has not been restarted."""
    return RestartRecord(writer=writer)


def charged(record: RestartRecord, incarnation: str) -> bool:
    """Tell whether the incident that ended ``incarnation`` was counted."""
    return any(each.incarnation == incarnation for each in record.charges)


def failures(record: RestartRecord) -> int:
    """Return how many failures without progress count."""
    return sum(each.cause in _FAILURES for each in record.charges)


def charge(
    config: RestartConfig,
    record: RestartRecord,
    closed: Closed,
    *,
    unchanged_s: float,
    writer: str,
) -> Ruling:
    """Count one incident, once, and decide whether the job goes on.

    Args:
        config: The quotas.
        record: The record as it was read.
        closed: The start of the workers that is over.
        unchanged_s: For how long this observer has seen exactly this record, in seconds.
        writer: A fresh nonce for the record that is written.
    """
    if record.ending is not None or charged(record, closed.incarnation):
        return _ruling(record, closed)
    aged = _aged(config, record, unchanged_s, checkpoint_step=closed.checkpoint_step)
    if closed.cause is Cause.PREEMPTED:
        return _ruling(_stopped(record, aged, closed, writer=writer), closed)
    if closed.cause in FREE:
        return Ruling(record=record, number=failures(aged))
    if closed.cause is Cause.PERMANENT:
        final = _ending(
            closed, ExitCode.PERMANENT, "Every attempt would end like that, so none is made."
        )
        return _ruling(_written(aged, writer, ending=final), closed)
    counted = _counted(aged, closed)
    why = _exhausted(config, counted)
    ending = _ending(closed, ExitCode.DEAD_LETTERED, why) if why else None
    return _ruling(_written(counted, writer, ending=ending), closed)


def outranks(seen: RestartRecord, found: RestartRecord) -> bool:
    """Tell whether what an observer has seen counts for more than what it finds now.

    A store that came back empty is filled again by whoever asks first, who may know less, and whose
    first write has the epoch of a change that it has not read. How a job has ended counts for more
    than anything; then the record of more restarts.
    """
    if (seen.ending is None) is not (found.ending is None):
        # A person's release is a later epoch of the same record, and not less knowledge.
        return seen.ending is not None and seen.epoch >= found.epoch
    if seen.restarts != found.restarts:
        return seen.restarts > found.restarts
    return seen.epoch > found.epoch


def rebuilt(
    seen: RestartRecord, *, writer: str, over: RestartRecord | None = None
) -> RestartRecord:
    """Return what an observer has seen, for a store that knows less.

    Args:
        seen: What it has seen.
        writer: A fresh nonce for the record that is written.
        over: What is there; None where nothing is.
    """
    epoch = seen.epoch if over is None else max(seen.epoch, over.epoch)
    return _written(msgspec.structs.replace(seen, epoch=epoch), writer, ending=seen.ending)


def carried_over(kept: RestartRecord) -> RestartRecord:
    """Return what a new start of the launcher has to know of what was kept on shared storage.

    Only what a person has to release still holds then: whatever else had ended the job, somebody
    has started it again since.
    """
    is_held = kept.ending is not None and kept.ending.code == ExitCode.DEAD_LETTERED
    return kept if is_held else msgspec.structs.replace(kept, ending=None)


def ended(record: RestartRecord, ending: Ending, *, writer: str) -> RestartRecord:
    """Return the record of a job that has ended so; the same where it has ended before."""
    return record if record.ending is not None else _written(record, writer, ending=ending)


def started_again(record: RestartRecord, *, writer: str) -> RestartRecord:
    """Return the record for an agent that begins; the same where that may not start again.

    In a store that outlives the job, an ending would stand for ever. One that lets a scheduler
    start the job again has been heeded when somebody does.
    """
    if record.ending is None or not may_start_again(record.ending.code):
        return record
    return _written(record, writer, ending=None)


def released(record: RestartRecord, *, writer: str) -> RestartRecord:
    """Return the record of a job that a person lets start again, with all quotas refilled."""
    refilled = msgspec.structs.replace(record, charges=(), ending=None, stops=0)
    return _written(refilled, writer, ending=None)


def _ruling(record: RestartRecord, closed: Closed) -> Ruling:
    number = failures(record)
    delays = {Cause.GROWN: 0, Cause.PREEMPTED: record.stops - 1}.get(closed.cause, number)
    return Ruling(record=record, number=number, delays=max(0, delays))


def _stopped(
    record: RestartRecord, aged: RestartRecord, closed: Closed, *, writer: str
) -> RestartRecord:
    """Return the record once workers were told to stop; the very record where that is noted."""
    if record.stopped == closed.incarnation:
        return record
    noted = msgspec.structs.replace(aged, stops=aged.stops + 1, stopped=closed.incarnation)
    return _written(noted, writer, ending=record.ending)


def _counted(record: RestartRecord, closed: Closed) -> RestartRecord:
    incident = closed.incident
    new = Charge(
        incarnation=closed.incarnation,
        cause=closed.cause.value,
        fingerprint="" if incident is None else incident.fingerprint,
        step=_UNKNOWN_STEP if incident is None else incident.step,
    )
    charges = (*record.charges, new)[-MOST_CHARGES:]
    return msgspec.structs.replace(record, charges=charges, restarts=record.restarts + 1)


def _ending(closed: Closed, code: ExitCode, why: str) -> Ending:
    incident = closed.incident
    told = "" if incident is None else f"{note_of(incident)} "
    return Ending(code=code, reason=f"{told}{why}", incarnation=closed.incarnation)


def _written(record: RestartRecord, writer: str, *, ending: Ending | None) -> RestartRecord:
    return msgspec.structs.replace(record, epoch=record.epoch + 1, ending=ending, writer=writer)


def _aged(
    config: RestartConfig, record: RestartRecord, unchanged_s: float, *, checkpoint_step: int
) -> RestartRecord:
    has_progress = checkpoint_step > record.checkpoint_step
    older = (
        msgspec.structs.replace(each, age_s=each.age_s + unchanged_s) for each in record.charges
    )
    kept = tuple(
        each
        for each in older
        if each.age_s < config.restart_window_s and not (has_progress and each.cause in _FAILURES)
    )
    step = max(checkpoint_step, record.checkpoint_step)
    is_new = has_progress or unchanged_s >= config.restart_window_s
    return msgspec.structs.replace(
        record, charges=kept, checkpoint_step=step, stops=0 if is_new else record.stops
    )


def _exhausted(config: RestartConfig, record: RestartRecord) -> str:
    """Return which quota is exhausted, in a sentence; empty where none is."""
    window = f"within {config.restart_window_s:g} s"
    in_a_row = _same_in_a_row(record)
    if in_a_row >= config.same_failure_limit:
        step = record.charges[-1].step
        return (
            f"It is the same error at step {step}, {in_a_row} times in a row "
            f"(same_failure_limit={config.same_failure_limit}): no accident."
        )
    counts = {
        "killed_quota": (
            _count(record, Cause.KILLED),
            config.killed_quota,
            "kills without progress",
        ),
        "restart_quota": (failures(record), config.restart_quota, "failures without progress"),
        "membership_quota": (
            _count(record, Cause.LEFT),
            config.membership_quota,
            "losses of nodes",
        ),
    }
    for name, (count, quota, what) in counts.items():
        if count > quota:
            return (
                f"These were {count} {what} {window}, and {name}={quota} of them may be "
                "followed by a restart."
            )
    return ""


def _count(record: RestartRecord, cause: Cause) -> int:
    return sum(each.cause == cause.value for each in record.charges)


def _same_in_a_row(record: RestartRecord) -> int:
    last = record.charges[-1]
    if not last.fingerprint or last.step == _UNKNOWN_STEP:
        return 0
    pair = (last.fingerprint, last.step)
    same = takewhile(lambda each: (each.fingerprint, each.step) == pair, reversed(record.charges))
    return len(list(same))
