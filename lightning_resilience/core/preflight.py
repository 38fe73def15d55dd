# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is tried before the first step, and what follows from what the storage has refused.

One rank tries each checkpoint directory once, with a small object of its own, and shares what was
refused: an answer of the storage that repeating cannot change. Every rank decides on that record:

=======  ================================================  =========================================
step     what is tried                                     where that is refused
=======  ================================================  =========================================
ask      whether a name is taken that is not               an error where ``ModelCheckpoint`` asks
write    a small object                                    an error
confirm  the size of what was written                      an error: every save is verified by it
read     its content                                       an error where this run looks for
                                                           ``"last"`` here, else a warning
list     its directory                                     an error where this run looks for
                                                           ``"last"`` here, else nothing
remove   the object                                        a warning where ``ModelCheckpoint``
                                                           removes, else nothing
=======  ================================================  =========================================

A prefix of an object store under which there is nothing yet is no refusal.

A storage that is ill has refused nothing. It is waited for as for a save, but only for a tenth of
``deadline_s``: nothing has been computed yet that waiting would rescue, and the first save waits
for all of it. Where a save would wait, the run then begins with a warning, because a trial must not
end a job that the saves would have survived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.records import VERSION
from lightning_resilience.core.resolution import Search
from lightning_resilience.core.sweeping import is_orphaned


if TYPE_CHECKING:
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.core.retry import RetryPolicy


__all__ = [
    "Needs",
    "Refusal",
    "Step",
    "Trial",
    "bounded",
    "is_leftover",
    "is_refusal",
    "is_survived",
    "moves",
    "needs_of",
    "refusal_text",
    "warnings_of",
]

_SHARE: Final = 0.1
"""With the defaults 180 s: the three failures by which a circuit opens fit in, also where each is
an attempt that hangs for ``stall_timeout_s``."""
_LEFTOVER_S: Final = 3600.0
"""Far longer than any trial takes by default: what is older, nobody comes back for."""

_ILL: Final = frozenset({
    FailureClass.TRANSIENT.value,
    FailureClass.THROTTLE.value,
    FailureClass.STALE.value,
})  # fmt: skip


class Step(str, Enum):
    """What is tried, in this order."""

    ASK = "ask"
    WRITE = "write"
    CONFIRM = "confirm"
    READ = "read"
    LIST = "list"
    REMOVE = "remove"


_TRIED: Final = {
    Step.ASK: "asking whether a name is taken",
    Step.WRITE: "writing",
    Step.CONFIRM: "asking for the size of what was written",
    Step.READ: "reading back what was written",
    Step.LIST: "listing",
    Step.REMOVE: "removing",
}
_ADVICE: Final = {
    Step.ASK: (
        "Object storage says that there is no such name only to those who may list: give this job "
        "the right to list there, or set ModelCheckpoint(enable_version_counter=False)."
    ),
    Step.WRITE: (
        "Give this job the right to write there, or mend the name of the bucket or the directory; "
        "a bucket that does not exist is never made."
    ),
    Step.CONFIRM: "Every save is verified by it: give this job the right to read there.",
    Step.READ: "Give this job the right to read there, or do not start from ckpt_path='last'.",
    Step.LIST: (
        "Give this job the right to list there, or name the checkpoint to start from as ckpt_path."
    ),
}
_CONSEQUENCE: Final = {
    Step.READ: (
        "checkpoints can be saved, but with these rights no run can start from one. Give this job, "
        "or the one that is to resume, the right to read there"
    ),
    Step.REMOVE: (
        "retention cannot work: older checkpoints that ModelCheckpoint removes (save_top_k, "
        "save_last) cannot be removed. Give this job the right to remove there, or keep all with "
        "save_top_k=-1"
    ),
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the storage has refused.

    Args:
        step: What was tried, the value of a ``Step``.
        error: The answer in one line, with its code.
    """

    step: str
    error: str


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What was refused in one checkpoint directory; a detail of a ``FinalRecord``.

    Args:
        v: Version of the format.
        refused: In the order in which it was tried; empty where all went well.
    """

    v: int = VERSION
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run does in one directory, besides writing there.

    Args:
        saves: Whether checkpoints are saved there at all.
        asks: Whether it is asked for which names are taken.
        removes: Whether older checkpoints are removed.
        searches: Whether this run looks there for the checkpoint to start from.
    """

    saves: bool
    asks: bool
    removes: bool
    searches: bool


def needs_of(
    *,
    save_top_k: int,
    save_last: object,
    last_name: str,
    counts_versions: bool,
    asked: object,
) -> Needs:
    """Return what a ``ModelCheckpoint`` with these options does in its directory.

    Args:
        save_top_k: How many checkpoints it keeps; -1 for all.
        save_last: Whether it keeps the last one besides.
        last_name: Name of that, which may have fields in braces.
        counts_versions: Whether it looks for a name that is free.
        asked: What the run was asked to start from.
    """
    return Needs(
        saves=save_top_k != 0 or bool(save_last),
        asks=counts_versions,
        # A last one whose name does not change is written over.
        removes=save_top_k > 0 or (bool(save_last) and "{" in last_name),
        searches=asked == Search.LAST.value,
    )


def bounded(policy: RetryPolicy) -> RetryPolicy:
    """Return how long, and how often, the storage is tried before the first step.

    Args:
        policy: How the job's saves are repeated.
    """
    within_s = _SHARE * policy.deadline_s
    return replace(
        policy,
        deadline_s=within_s,
        # One attempt that hangs must not take longer than all of them may.
        stall_timeout_s=min(policy.stall_timeout_s, within_s),
    )


def is_refusal(outcome: Outcome) -> bool:
    """Tell whether an answer is final, so that it is noted and the next thing is tried."""
    return outcome.failure is FailureClass.PERMANENT


def is_survived(failure: str, *, on_outage: str) -> bool:
    """Tell whether a run begins although its storage could not be tried.

    Args:
        failure: How the trial ended, the value of a failure class.
        on_outage: What a save does while storage is ill.
    """
    return failure in _ILL and on_outage != "fail"


def is_leftover(older_by_s: float, *, policy: RetryPolicy) -> bool:
    """Tell whether nobody comes back for an object of an earlier trial.

    Args:
        older_by_s: How much older it is than one of now, by the storage's own clock, in seconds.
        policy: How this trial is bounded; another job's is taken to be alike.
    """
    trial_s = policy.deadline_s + policy.stall_timeout_s
    return is_orphaned(older_by_s, after_s=max(_LEFTOVER_S, trial_s))


def refusal_text(trial: Trial, needs: Needs, *, directory: str) -> str:
    """Return why a run must not begin; empty where it may.

    Args:
        trial: What was refused.
        needs: What the run does in that directory.
        directory: Its name, for people.
    """
    fatal = {
        Step.ASK: needs.asks,
        Step.WRITE: True,
        Step.CONFIRM: True,
        Step.READ: needs.searches,
        Step.LIST: needs.searches,
        Step.REMOVE: False,
    }
    found = [refusal for refusal in trial.refused if fatal[Step(refusal.step)]]
    # Of a bucket that is not there everything is refused, and to write there is what counts.
    found.sort(key=lambda refusal: refusal.step != Step.WRITE.value)
    if not found:
        return ""
    first = found[0]
    others = [_TRIED[Step(refusal.step)] for refusal in found[1:]]
    also = f" So was {', and '.join(others)}." if others else ""
    return (
        f"preflight of {directory} failed on all ranks, before the first step: "
        f"{_TRIED[Step(first.step)]} there was refused to rank 0: {first.error.rstrip('.')}."
        f"{also} {_ADVICE[Step(first.step)]}"
    )


def warnings_of(trial: Trial, needs: Needs, *, directory: str) -> list[str]:
    """Return what will not work in a run that may begin.

    Args:
        trial: What was refused.
        needs: What the run does in that directory.
        directory: Its name, for people.
    """
    told = {Step.READ: True, Step.REMOVE: needs.removes}
    return [
        f"{_TRIED[Step(refusal.step)]} in {directory} was refused, so "
        f"{_CONSEQUENCE[Step(refusal.step)]}: {refusal.error}"
        for refusal in trial.refused
        if told.get(Step(refusal.step), False)
    ]


def moves(*, dirpath: object, version: object, asked: object) -> bool:
    """Tell whether a run looks for ``"last"`` in a directory that each start has anew.

    Args:
        dirpath: The user's choice of the directory; None leaves it to the logger.
        version: The logger's version: a number is counted up by most loggers at every start, a name
            stays. None where there is no logger.
        asked: What the run was asked to start from.
    """
    return dirpath is None and isinstance(version, int) and asked == Search.LAST.value
