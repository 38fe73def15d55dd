# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Saves of ``ModelCheckpoint`` that may fail without ending training, as often as the user says.

What is caught is the error that all ranks raise at the same point, so all of them go on, with the
same count (``core.save_failures``). The bookkeeping is put back before it comes here. Saves that
the user's own code makes are not caught: whoever calls ``trainer.save_checkpoint`` is told; nor is
anything once training is being left, because no later save could make up for it.

The end of training is the last chance to tell: a failure that no later save has made up for is
raised there, on all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces import stage_runner
from lightning_resilience.core.events import SaveSkipped
from lightning_resilience.core.save_failures import (
    SaveFailures,
    error_at_end,
    error_at_limit,
    event_of,
    failure_of,
    is_skipped,
)
from lightning_resilience.errors import JointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session


__all__ = ["Tolerance"]


class Tolerance:
    """One rank's count of failed saves in a row.

    Args:
        trainer: The Trainer; the stage that it runs is hooked.
        session: This rank's session.
        patches: Remembers what was replaced.

    Note:
        Made and used by the thread that trains.
    """

    def __init__(self, trainer: Any, session: Session, patches: Patches) -> None:
        limit = session.checkpoints.max_consecutive_save_failures
        self._trainer = trainer
        self._session = session
        self._failures = SaveFailures(limit=limit, rows={})
        owner, name = stage_runner(trainer)
        patches.replace(owner, name, partial(self._run_stage, getattr(owner, name)))

    def attempt(self, kind: str, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save, and go on where that fails and may fail.

        Args:
            kind: Which row it counts in.
            save: Saves, clears up, and puts the bookkeeping back where it fails.
            *args: Its arguments.
            **kwargs: More of them.

        Raises:
            JointError: The same on every rank: the save has failed, and training ends.
        """
        operations = self._session.operations
        try:
            save(*args, **kwargs)
        except JointError as error:
            if not self._session.is_leaving and is_skipped(
                error, on_outage=self._session.member.on_outage
            ):
                self._skip(error)
                return
            if self._session.is_leaving or not self._failures.counts(error):
                raise
            self._fail(kind, error)
        else:
            # A save point at which nothing was to be saved says nothing about storage.
            if self._session.operations > operations:
                self._failures = self._failures.succeeded(kind)

    def _skip(self, error: JointError) -> None:
        skipped = failure_of(error, step=self._trainer.global_step)
        self._session.driver.sink.emit(
            SaveSkipped(step=skipped.step, outcome=skipped.outcome, error=skipped.text)
        )

    def _fail(self, kind: str, error: JointError) -> None:
        failure = failure_of(error, step=self._trainer.global_step)
        self._failures = self._failures.failed(kind, failure)
        if self._failures.ends_run(kind):
            raise error_at_limit(self._failures, kind) from error.__cause__
        self._session.driver.sink.emit(event_of(self._failures, kind))

    def _run_stage(self, inner: Callable[[], Any]) -> Any:
        value = inner()
        error = error_at_end(self._failures)
        if error is not None:
            raise error
        return value
