# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Failed saves in a row: which of them training may go on after, how many, and what is said.

Each *kind* of save has a row of its own: the checkpoints of one ``ModelCheckpoint`` by name are one
kind, its "last" is another. So an outage of one save point is one failure in each row, and a "last"
that succeeds does not hide that no other checkpoint does.

A row begins anew with a success of its kind. What is in it is a verdict that all ranks share, taken
at the same step, so the rows of all ranks are equal without a word between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.events import SaveTolerated
from lightning_resilience.core.joint import advice_for
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.errors import JointError


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


__all__ = [
    "SaveFailure",
    "SaveFailures",
    "error_at_end",
    "error_at_limit",
    "event_of",
    "failure_of",
    "is_outage",
    "is_skipped",
]

_OUTAGES: Final = frozenset({FailureClass.TRANSIENT.value, FailureClass.THROTTLE.value})
_ALWAYS_FATAL: Final = frozenset({FailureClass.CANCELLED, FailureClass.LOST})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure:
    """One failed save, without what an exception keeps alive.

    Args:
        step: Training step at which it was made.
        op: Name of the joint operation that has failed, for example ``save``.
        seq: Its sequence number.
        outcome: Failure class on which all ranks have agreed.
        first_rank: Lowest rank that has reported it, if known.
        text: What happened, without what to do next.
    """

    step: int
    op: str
    seq: int
    outcome: str
    first_rank: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailures:
    """The rows of one run. Each change makes a new one.

    Args:
        limit: The how manieth failure in a row ends the run, ≥ 1.
        rows: Failures since the last success, the earliest first, by kind; no row is empty.
    """

    limit: int
    rows: Mapping[str, tuple[SaveFailure, ...]]

    def counts(self, error: JointError) -> bool:
        """Tell whether training may go on after this failure of a save, if it is not one too many.

        It may where every rank raises it at this point and is well itself. Where a rank is lost,
        out of step, or does not know what the others do, there is nobody to go on with; and an
        interruption is a request to stop. With a limit of 1, each failure is what it was.
        """
        if self.limit == 1 or not error.in_step:
            return False
        return FailureClass(error.outcome) not in _ALWAYS_FATAL

    def failed(self, kind: str, failure: SaveFailure) -> SaveFailures:
        """Return the rows once a save of this kind has failed."""
        row = (*self.rows.get(kind, ()), failure)
        return replace(self, rows={**self.rows, kind: row})

    def succeeded(self, kind: str) -> SaveFailures:
        """Return the rows once a save of this kind has succeeded."""
        return replace(self, rows={name: row for name, row in self.rows.items() if name != kind})

    def ends_run(self, kind: str) -> bool:
        """Tell whether the latest failure of this kind is the last that there may be."""
        return len(self.rows[kind]) >= self.limit


def is_skipped(error: JointError, *, on_outage: str) -> bool:
    """Tell whether a save point is left out for this failure, because storage is ill.

    Args:
        error: What every rank has raised at it.
        on_outage: What a save does while storage is ill.
    """
    return on_outage == "skip" and is_outage(error)


def is_outage(error: JointError) -> bool:
    """Tell whether an operation has failed only because storage is ill, on ranks that go on."""
    return error.in_step and error.outcome in _OUTAGES


def failure_of(error: JointError, *, step: int) -> SaveFailure:
    """Return what is remembered of a failure.

    Args:
        error: What all ranks have raised; one that counts.
        step: Training step at which it was raised.
    """
    advice = advice_for(FailureClass(error.outcome))
    return SaveFailure(
        step=step,
        op=error.op,
        seq=error.seq,
        outcome=error.outcome,
        first_rank=error.first_rank,
        text=str(error).removesuffix(advice).rstrip(),
    )


def event_of(failures: SaveFailures, kind: str) -> SaveTolerated:
    """Return what is reported once training goes on after the latest failure of a kind."""
    row = failures.rows[kind]
    latest = row[-1]
    return SaveTolerated(
        step=latest.step,
        number=len(row),
        limit=failures.limit,
        outcome=latest.outcome,
        first_rank=latest.first_rank,
        error=latest.text,
    )


def error_at_limit(failures: SaveFailures, kind: str) -> JointError:
    """Return the error that every rank raises for the failure that ends the run.

    Args:
        failures: The rows, the last failure among them.
        kind: Its kind.
    """
    row = failures.rows[kind]
    latest = row[-1]
    message = (
        f"{latest.text} It is number {len(row)} in a row of failed saves, and "
        f"max_consecutive_save_failures={failures.limit}. Before it: {_listed(row[:-1])} "
        f"{advice_for(FailureClass(latest.outcome))}"
    )
    return _error(latest, message)


def error_at_end(failures: SaveFailures) -> JointError | None:
    """Return the error with which a training ends that was otherwise well, or None.

    A failure was tolerated because a later save would make up for it. Where none has, the caller of
    ``fit`` must not believe that all is saved.

    Args:
        failures: The rows at the end.
    """
    standing = sorted(
        (failure for row in failures.rows.values() for failure in row),
        key=lambda failure: failure.seq,
    )
    if not standing:
        return None
    latest = standing[-1]
    message = (
        "Training has ended well, but no save has made up for what has failed before, and was "
        f"tolerated because max_consecutive_save_failures={failures.limit}: {_listed(standing)} "
        "ModelCheckpoint.best_model_path and last_model_path name the checkpoints that are there. "
        f"{advice_for(FailureClass(latest.outcome))}"
    )
    return _error(latest, message)


def _listed(failures: Iterable[SaveFailure]) -> str:
    return " ".join(f"At step {failure.step}, {failure.text}" for failure in failures)


def _error(latest: SaveFailure, message: str) -> JointError:
    error = JointError(
        message,
        op=latest.op,
        seq=latest.seq,
        outcome=latest.outcome,
        first_rank=latest.first_rank,
    )
    error.in_step = True
    return error
