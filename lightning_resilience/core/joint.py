# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What all ranks decide together: the gate's verdict before, and the final verdict after.

A joint operation is one save, removal or load that every rank enters with the same sequence number,
because training is lock-step. Two decisions are taken for all ranks:

1. **the gate**: the first to arrive decides from the breaker, and everybody reads the same;
2. **the verdict**: from the outcomes of the ranks that had work. The most severe class wins, ties
   go to the lowest rank, and a rank that was silent for too long is ``lost``. It is written once;
   later reports change nothing.

Both are written by one compare-and-set, so this module never needs to know who else is deciding.

Silence counts, not duration: a rank is lost when its ``arrived`` or ``beat`` key has not *changed*
for ``joint_timeout_s`` on the observer's clock, so that a long save in progress never is. So is one
that has not come by then (``core.muster``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from lightning_resilience.core.breaker_record import BreakerState, passes
from lightning_resilience.core.muster import lost_error, named
from lightning_resilience.core.outcome import SEVERITY, FailureClass
from lightning_resilience.core.pausing import AT_SAVE_POINTS
from lightning_resilience.core.records import FinalRecord, OutcomeRecord
from lightning_resilience.core.validation import (
    check_choice,
    check_less,
    check_seconds,
    check_whole,
    option,
)
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CircuitOpenError,
    JointError,
    JointUnavailableError,
    RetriesExhaustedError,
)


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.core.records import BreakerRecord, GateRecord


__all__ = [
    "GateDecision",
    "GateVerdict",
    "JointConfig",
    "advice_for",
    "conflict_error",
    "decide_final",
    "decide_gate",
    "error_of",
    "gate_wait_s",
    "report_of",
    "unavailable_error",
]

_PROCESS_GROUP_SHARE = 0.8
_BEATS_PER_TIMEOUT = 4
_LONGEST_BEAT_S = 5.0
_OUT_OF_STEP = "The ranks are not in lock-step"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointConfig:
    """How ranks wait for each other.

    Args:
        joint_timeout_s: Silence after which a rank is taken for lost, in seconds, > 0. None takes
            0.8 × the process group's timeout: long enough for a slow rank, and short enough to
            leave before the process group's watchdog does.
        joint_beat_s: How often a working rank shows that it lives, in seconds, > 0. None takes
            min(5, ``joint_timeout_s`` / 4).
        on_outage: What a save does while storage is ill: ``spool`` it on the node, ``wait`` for
            storage, ``skip`` the save point, or ``fail`` on all ranks.
        on_store_loss: What a rank does that cannot reach the shared store: ``wait`` until
            ``joint_timeout_s`` and then raise, or ``raise`` at once.
        termination_grace_s: How long a process may still run after SIGTERM or SIGUSR1, in seconds,
            > 0. None takes 30, or after SIGUSR1 as long as SLURM's job still has.
        max_pending_saves: How many saves that were handed over to ``AsyncCheckpointIO`` may be
            unfinished, ≥ 1; another one waits.
        pause_training: When all ranks wait for an ill storage: ``at_save_points``, where they need
            it, or between two steps, looking after every so many, ≥ 1.

    Raises:
        ConfigError: An option is out of range or contradicts another.
    """

    joint_timeout_s: float | None = option(
        None, why="0.8 × the process group's timeout: leaves before its watchdog"
    )
    joint_beat_s: float | None = option(None, why="min(5, a quarter of `joint_timeout_s`)")
    on_outage: str = option(
        "spool", why="training goes on, and the node keeps the checkpoint until storage is well"
    )
    on_store_loss: str = option("wait", why="until `joint_timeout_s`; `raise` at once")
    termination_grace_s: float | None = option(
        None, why="until SLURM's end of the job, or 30 s, which it and torchrun leave by default"
    )
    max_pending_saves: int = option(
        2, why="one is written while the next one waits; each is a copy of the checkpoint in memory"
    )
    pause_training: str | int = option(
        AT_SAVE_POINTS, why="storage is needed there; k looks after every k steps as well"
    )

    def __post_init__(self) -> None:
        for name in ("joint_timeout_s", "joint_beat_s", "termination_grace_s"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))
        check_whole("max_pending_saves", self.max_pending_saves, minimum=1)
        check_choice("on_outage", self.on_outage, choices=("spool", "wait", "skip", "fail"))
        check_choice("on_store_loss", self.on_store_loss, choices=("wait", "raise"))
        if isinstance(self.pause_training, str):
            check_choice("pause_training", self.pause_training, choices=(AT_SAVE_POINTS,))
        else:
            check_whole("pause_training", self.pause_training, minimum=1)
        if self.joint_timeout_s is not None and self.joint_beat_s is not None:
            check_less(
                ("joint_beat_s", self.joint_beat_s),
                ("joint_timeout_s", self.joint_timeout_s),
                why="a rank that works would be taken for lost between two beats",
            )

    def timeout_s(self, *, process_group_timeout_s: float) -> float:
        """Return ``joint_timeout_s``, or what it is by default for this process group."""
        if self.joint_timeout_s is not None:
            return self.joint_timeout_s
        return _PROCESS_GROUP_SHARE * process_group_timeout_s

    def beat_s(self, *, process_group_timeout_s: float) -> float:
        """Return ``joint_beat_s``, or what it is by default for this process group."""
        if self.joint_beat_s is not None:
            return self.joint_beat_s
        timeout_s = self.timeout_s(process_group_timeout_s=process_group_timeout_s)
        return min(_LONGEST_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)


class GateVerdict(str, enum.Enum):
    """What all ranks do next."""

    PROCEED = "proceed"
    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    """A verdict and why."""

    verdict: GateVerdict
    reason: str


def decide_gate(
    record: BreakerRecord | None, *, on_outage: str, expired: str = "", probe_owed: bool = False
) -> GateDecision:
    """Decide a round of the gate.

    PROCEED may rest on an old view, because the work is guarded all the same; ``FAIL`` needs a
    record that was read after arrival, and the caller sees to that.

    Args:
        record: The breaker's record, or None where the operation has no shared dependency.
        on_outage: ``wait``, ``fail``, or ``proceed`` where the operation has another way.
        expired: Why the caller will not wait any longer, empty while it will.
        probe_owed: Whether a probe is due, or the circuit was open already when this process first
            looked: it was tripped by an earlier start of the job. Either way the storage may be
            well by now, and ``fail`` waits for one probe, or it would refuse for ever.

    Returns:
        The verdict for all ranks.
    """
    if record is None or passes(record):
        return GateDecision(verdict=GateVerdict.PROCEED, reason="the circuit lets calls through")
    why = f"the circuit is {record.state} since epoch {record.epoch}: {record.reason}"
    if on_outage == "proceed":
        return GateDecision(verdict=GateVerdict.PROCEED, reason=f"{why}; there is another way")
    if expired:
        return GateDecision(verdict=GateVerdict.FAIL, reason=expired)
    forced = record.state == BreakerState.FORCED_OPEN.value
    if on_outage == "fail" and (forced or not probe_owed):
        return GateDecision(verdict=GateVerdict.FAIL, reason=why)
    if forced:
        why = f"{why}; an operator has to release it"
    return GateDecision(verdict=GateVerdict.WAIT, reason=why)


def gate_wait_s(
    record: BreakerRecord, config: BreakerConfig, *, on_outage: str, deadline_s: float
) -> float:
    """Return how long all ranks may wait at a gate, in seconds.

    Args:
        record: The breaker's record.
        config: The breaker's configuration.
        on_outage: ``wait`` waits for ``deadline_s``, ``fail`` for one probe.
        deadline_s: The operation's deadline, in seconds.
    """
    if on_outage == "fail":
        return min(deadline_s, record.open_s + config.probe_lease_s)
    return deadline_s


def report_of(error: BaseException, *, rank: int, outcome: Outcome) -> OutcomeRecord:
    """Make the report of a part that ended with ``error``.

    What a guarded call raises says how its last attempt ended; that, and not the giving up, is the
    first cause.

    Args:
        error: What the part raised.
        rank: The rank whose part it was.
        outcome: ``error`` itself, classified.
    """
    failure = (outcome.failure or FailureClass.UNKNOWN).value
    if isinstance(error, RetriesExhaustedError):
        return OutcomeRecord(
            rank=rank,
            failure=error.failure or failure,
            error=error.last_error or outcome.error,
            attempts=error.attempts,
        )
    if isinstance(error, (CircuitOpenError, BudgetExhaustedError)):
        text = f"{error.last_error}; then: {error}" if error.last_error else str(error)
        failure = FailureClass.TRANSIENT.value
        return OutcomeRecord(rank=rank, failure=failure, error=text, attempts=error.attempts)
    return OutcomeRecord(rank=rank, failure=failure, error=outcome.error, attempts=1)


def decide_final(
    terms: FinalRecord,
    outcomes: Sequence[OutcomeRecord],
    *,
    lost_ranks: Sequence[int] = (),
    absent_ranks: Sequence[int] = (),
    silent_s: float = 0.0,
) -> FinalRecord:
    """Merge the outcomes of all ranks that had work into one verdict.

    Args:
        terms: The record to complete: it says what the operation is, who works, and who writes.
        outcomes: What the workers reported.
        lost_ranks: Ranks that were silent for too long: workers that have reported nothing, and
            ranks that have not come.
        absent_ranks: Those of them that have not come.
        silent_s: For how long, in seconds.

    Returns:
        The verdict: the most severe failure, ties to the lowest rank; or success with the lowest
        worker's detail.
    """
    reports = list(outcomes)
    for rank in lost_ranks:
        error = lost_error(rank, is_absent=rank in absent_ranks, silent_s=silent_s)
        reports.append(OutcomeRecord(rank=rank, failure=FailureClass.LOST.value, error=error))
    if not reports:
        return terms
    first = min(reports, key=lambda report: (_severity(report.failure), report.rank))
    return msgspec.structs.replace(
        terms,
        failure=first.failure,
        first_rank=first.rank if first.failure else -1,
        error=first.error,
        detail=first.detail,
        lost_ranks=tuple(sorted(lost_ranks)),
        attempts=first.attempts,
    )


def _severity(failure: str) -> int:
    if not failure:
        return len(SEVERITY)
    return SEVERITY.index(FailureClass(failure))


_ADVICE = {
    FailureClass.CANCELLED: "It was interrupted; nothing is wrong with the storage.",
    FailureClass.PERMANENT: "Mend the cause (rights, bucket, path), then start again.",
    FailureClass.CAPACITY: "Free space or raise the quota, then start again.",
    FailureClass.AUTH: "Renew the credentials, then start again.",
    FailureClass.UNKNOWN: "If this failure is known to pass, say so with a classifier (classify=).",
    FailureClass.LOST: "Look at that rank's log first: it hung, died, or never came.",
}
_ADVICE_OTHERWISE = (
    "The storage is ill, and the policy does not wait (any longer): see on_outage and deadline_s."
)


def advice_for(failure: FailureClass) -> str:
    """Return what a user is to do about a failure of storage, in a sentence."""
    return _ADVICE.get(failure, _ADVICE_OTHERWISE)


def error_of(final: FinalRecord, *, seq: int) -> JointError | None:
    """Return the error that every rank raises for a verdict, or None where all went well.

    The text depends on the shared record only, so it is the same on every rank.

    Args:
        final: The verdict.
        seq: Sequence number of the operation.
    """
    if not final.failure:
        return None
    failure = FailureClass(final.failure)
    others = f" Lost ranks: {named(final.lost_ranks)}." if len(final.lost_ranks) > 1 else ""
    attempts = (
        f" after {final.attempts} attempt{'s' if final.attempts > 1 else ''}"
        if final.attempts
        else ""
    )
    message = (
        f"{final.op} of {final.subject} failed on all ranks (joint operation {seq}). "
        f"First cause, {failure.value}, on rank {final.first_rank}{attempts}: "
        f"{final.error.rstrip('.')}.{others} {advice_for(failure)}"
    )
    error = JointError(
        message, op=final.op, seq=seq, outcome=failure.value, first_rank=final.first_rank
    )
    error.cause = final.error.partition(":")[0]
    # The rank that has noticed it raises an error of its own.
    error.in_step = _OUT_OF_STEP not in final.error
    return error


def conflict_error(
    found: GateRecord | FinalRecord, *, op: str, digest: str, seq: int, rank: int
) -> JointError | None:
    """Return the error for two different operations at the same number, or None where they are one.

    Args:
        found: The gate's record, or where that was lost the verdict, whose writer has no name.
        op: What this rank is about to do.
        digest: Where in training, in words.
        seq: Sequence number.
        rank: This rank.
    """
    if (found.op, found.digest) == (op, digest):
        return None
    other = getattr(found, "rank", None)
    who = "another rank" if other is None else f"rank {other}"
    if found.op != op:
        difference = f"{who} does {found.op!r}, rank {rank} does {op!r}"
    else:
        difference = f"{who} does {op!r} at {found.digest}, rank {rank} at {digest}"
    message = (
        f"{_OUT_OF_STEP} at joint operation {seq}: {difference}. "
        "Every rank has to call save_checkpoint and the like, in the same order; a call "
        "under `if trainer.is_global_zero` is the usual reason."
    )
    return JointError(
        message,
        op=op,
        seq=seq,
        outcome=FailureClass.PERMANENT.value,
        first_rank=rank if other is None else min(other, rank),
    )


def unavailable_error(
    op: str, *, seq: int, rank: int, lost_for_s: float, cause: str
) -> JointUnavailableError:
    """Return the error of a rank that cannot learn the verdict.

    Args:
        op: Name of the operation.
        seq: Sequence number.
        rank: This rank.
        lost_for_s: For how long the store has not answered, in seconds.
        cause: The store's last error.
    """
    message = (
        f"Rank {rank} could not learn how {op} (joint operation {seq}) ended: the shared store has "
        f"not answered for {lost_for_s:.1f} s ({cause}). Where others wait for this rank, "
        "they name it as lost. "
        "Look at the host of the rendezvous store, and at the network between it and this host."
    )
    return JointUnavailableError(message, op=op, seq=seq, first_rank=rank, lost_ranks=(rank,))
