# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What rank 0 knows of checkpoints that are written in the background, and what follows from it.

A save that was handed over is *pending* until its thread is through with it. Nobody waits for it,
so three things follow from what is known of it:

* **the bound**: each one that is pending is a copy of the checkpoint in memory, so a new save waits
  once there are ``max_pending_saves``;
* **the report**: the first failure ends training on all ranks, at the next step boundary, and is
  told once. What else has failed by then is told with it, in notes;
* **the answer to a load**: it waits for a pending save of its path. Where that one has failed, its
  failure is the answer, until the path was written after all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_resilience.core.agenda import AgendaItem, AgendaKind
from lightning_resilience.core.joint import advice_for
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.errors import JointError


if TYPE_CHECKING:
    from lightning_resilience.core.agenda import AgendaRecord
    from lightning_resilience.core.records import OutcomeRecord


__all__ = ["Backlog", "FailedSave", "error_of", "item_of", "note_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSave:
    """A save that was handed over, and is not in storage.

    Args:
        path: The checkpoint, as this process compares paths.
        subject: The checkpoint, as it may be shown: without credentials.
        report: How the save ended.
    """

    path: str
    subject: str
    report: OutcomeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What was handed over, and what has become of it. Each change makes a new one.

    Args:
        pending: Paths that were handed over and are not done with, the earliest first; one that was
            handed over twice is there twice.
        unreported: Failures that nobody was told of yet, the first of them first.
        unwritten: The last failure of each path that was not written since.
    """

    pending: tuple[str, ...] = ()
    unreported: tuple[FailedSave, ...] = ()
    unwritten: tuple[FailedSave, ...] = ()

    def has_room(self, limit: int) -> bool:
        """Tell whether another save may be handed over.

        Args:
            limit: How many may be pending, ≥ 1.
        """
        return len(self.pending) < limit

    def awaits(self, path: str) -> bool:
        """Tell whether a save of ``path`` is pending."""
        return path in self.pending

    def failure_of(self, path: str) -> FailedSave | None:
        """Return how the last save of ``path`` has failed; None where it has not."""
        return next((failed for failed in self.unwritten if failed.path == path), None)

    def handed_over(self, path: str) -> Backlog:
        """Return what is known once a save was handed over."""
        return replace(self, pending=(*self.pending, path))

    def withdrawn(self, path: str) -> Backlog:
        """Return what is known once a save was not handed over after all."""
        return replace(self, pending=self._without(path))

    def written(self, path: str) -> Backlog:
        """Return what is known once a save is in storage."""
        return replace(self, pending=self._without(path), unwritten=self._unwritten_but(path))

    def not_written(self, failed: FailedSave) -> Backlog:
        """Return what is known once a save has failed."""
        return Backlog(
            pending=self._without(failed.path),
            unreported=(*self.unreported, failed),
            unwritten=(*self._unwritten_but(failed.path), failed),
        )

    def reported(self) -> Backlog:
        """Return what is known once all ranks were told of the failures."""
        return replace(self, unreported=())

    def _unwritten_but(self, path: str) -> tuple[FailedSave, ...]:
        return tuple(failed for failed in self.unwritten if failed.path != path)

    def _without(self, path: str) -> tuple[str, ...]:
        # One whose path is not known was handed over under another name: saves are carried out in
        # their order, so it is the earliest. Else its place would be taken for ever.
        at = self.pending.index(path) if path in self.pending else 0
        return self.pending[:at] + self.pending[at + 1 :]


def item_of(failed: FailedSave) -> AgendaItem:
    """Return what is put on the agenda, so that all ranks are told."""
    return AgendaItem(kind=AgendaKind.FAIL, reason=_told(failed), detail=failed.report.failure)


def error_of(record: AgendaRecord) -> JointError:
    """Return the error that every rank raises for saves that have failed in the background.

    The text depends on the record only, so it is the same on every rank.

    Args:
        record: What all ranks were told, made from ``item_of``.
    """
    failure = FailureClass(record.detail)
    message = (
        f"{record.reason}. It was written by rank {record.rank} while training went on, and all "
        f"ranks raise this now. {advice_for(failure)}"
    )
    return JointError(message, op="save", outcome=failure.value, first_rank=record.rank)


def note_of(failed: FailedSave) -> str:
    """Return what is said of a failure beside the exception that has ended training already."""
    given_up = ""
    if failed.report.failure == FailureClass.CANCELLED.value:
        given_up = "; it was given up because training was ending"
    return f"A checkpoint was not written in the background: {_told(failed)}{given_up}."


def _told(failed: FailedSave) -> str:
    report = failed.report
    attempts = f" after {report.attempts} attempts" if report.attempts > 1 else ""
    return (
        f"save of {failed.subject} failed in the background{attempts}, "
        f"{report.failure}: {report.error.rstrip('.')}"
    )
