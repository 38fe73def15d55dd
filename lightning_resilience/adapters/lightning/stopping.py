# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What all ranks do when one of them was told to stop: save, requeue the job, and leave.

All of it happens between two steps, on every rank, so it is as harmless as any other save: the
handlers have long returned. The checkpoint is the "last" of the first ``ModelCheckpoint``, so that
``ckpt_path="last"`` finds it, and where it is written in the background, all ranks wait until it is
in storage, as long as there is time. Where a callback saves on every exception anyway, it is left
to that one; where SLURM's job is to be requeued, it is the one that a requeued job starts from, and
rank 0 requeues before any rank leaves.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.lightning.namespaces import (
    checkpoint_callbacks,
    sigterm_exception,
)
from lightning_resilience.adapters.lightning.namespaces_loops import (
    free_requeue_path,
    last_checkpoint_saver,
    requeue_signal,
    saves_on_exception,
)
from lightning_resilience.adapters.lightning.requeueing import clear_up
from lightning_resilience.adapters.lightning.signals import quiet_children
from lightning_resilience.adapters.lightning.work import HandedOver
from lightning_resilience.errors import JointError
from lightning_resilience.topology import job_to_requeue


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.lightning.signals import Termination
    from lightning_resilience.core.agenda import AgendaRecord


__all__ = ["Stopping"]

_log = logging.getLogger(__name__)

_REQUEUE_S: Final = 10.0


class Stopping:
    """The action for the agenda's kind ``stop``.

    Args:
        trainer: The Trainer.
        session: This rank's session.
        termination: This process's signals.
        patches: Remembers what was replaced.
    """

    def __init__(
        self, trainer: Any, session: Session, *, termination: Termination, patches: Patches
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._termination = termination
        self._patches = patches
        if session.flushing is not None:
            session.flushing.left_s = lambda: termination.remaining_s

    def __call__(self, record: AgendaRecord) -> None:
        """Save if there is time, and leave ``fit``.

        Args:
            record: What all ranks have agreed.

        Raises:
            SIGTERMException: Always, on all ranks; Lightning's, of the distribution at hand.
            JointError: Instead of it, on all ranks: the checkpoint could not be saved.
        """
        self._termination.is_agreed = True
        self._session.is_leaving = True
        self._termination.stop(record.left_s)
        _log.info(
            "all ranks stop at step %d: %s on rank %d",
            self._trainer.global_step,
            record.reason,
            record.rank,
        )
        self._termination.waits_for_writes = True
        try:
            with quiet_children():
                self._save_or_leave(record)
        finally:
            self._termination.waits_for_writes = False
        if self._session.failing is not None:
            # No incident: the others do the same.
            self._session.failing.agree()
        raise sigterm_exception(self._trainer)

    def _save_or_leave(self, record: AgendaRecord) -> None:
        if self._trainer.sanity_checking:
            _log.info("no checkpoint is saved: this fit has not made a step.")
            if self._is_requeued(record):
                self._requeue()
        elif self._is_requeued(record):
            self._save_and_requeue(record)
        elif record.saves:
            self._save()
            self._settle()
        else:
            self._leave_as_it_is(record)

    def _settle(self) -> None:
        # What is saved in the background is in storage only once its thread is through with it.
        background = self._session.background
        if background is not None:
            background.settle()
        if self._session.flushing is not None:
            self._session.flushing.flush(self._termination.remaining_s)

    def _is_requeued(self, record: AgendaRecord) -> bool:
        number = requeue_signal(self._trainer)
        return bool(number) and record.detail == signal.Signals(number).name

    def _save(self) -> None:
        if saves_on_exception(self._trainer):
            return
        save = last_checkpoint_saver(self._trainer)
        if save is None:
            _log.warning("no checkpoint is saved: the Trainer has no ModelCheckpoint.")
        else:
            save()

    def _leave_as_it_is(self, record: AgendaRecord) -> None:
        _log.warning(
            "no checkpoint is saved: %.1f s are left, and the last save took longer. Raise "
            "termination_grace_s if the scheduler leaves more time than that.",
            record.left_s or 0.0,
        )
        # Nor on the exception that ends it.
        for callback in checkpoint_callbacks(self._trainer):
            self._patches.replace(callback, "on_exception", _leave_out)

    def _save_and_requeue(self, record: AgendaRecord) -> None:
        try:
            saved = self._save_for_requeueing(record)
        except JointError:
            # The same on all ranks. An older checkpoint may be there, for the job to go on from.
            self._requeue()
            raise
        self._requeue(saved)

    def _save_for_requeueing(self, record: AgendaRecord) -> str:
        if not record.saves:
            self._leave_as_it_is(record)
            return ""
        trainer = self._trainer
        # One rank lists: the others might see the directory otherwise.
        found = self._session.on_rank_zero(
            "list",
            f"{os.fspath(trainer.default_root_dir).rstrip('/')}/",
            lambda _token: free_requeue_path(trainer),
            kind="read",
        )
        trainer.save_checkpoint(found.detail)
        self._settle()
        try:
            for logger in trainer.loggers:
                logger.finalize("finished")
        except Exception as error:  # noqa: BLE001 - rank 0's logger is not to split the ranks
            _log.warning("a logger could not be finalized: %r", error)
        return found.detail

    def _requeue(self, saved: str = "") -> None:
        # Joint, so that no rank leaves before: SLURM may end the job when the first one does.
        url = os.fspath(self._trainer.default_root_dir)
        work = HandedOver(self._session.storage, url, partial(self._requeue_on_rank_zero, saved))
        self._session.hand_over("requeue", url, work if self._session.member.rank == 0 else None)

    def _requeue_on_rank_zero(self, saved: str) -> None:
        if saved:
            # Before: the next start of the job may look at the same files.
            clear_up(self._trainer, self._session, saved, left_s=self._termination.remaining_s)
        _requeue_job()


def _leave_out(*_: Any) -> None:
    return None


def _requeue_job() -> None:
    job = job_to_requeue()
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, timeout=_REQUEUE_S, check=False)  # noqa: S603 - SLURM's own
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("job %s is not requeued, requeue it by hand: %r", job, error)
        return
    if done.returncode:
        _log.warning(
            "job %s is not requeued, requeue it by hand: scontrol ended with %d",
            job,
            done.returncode,
        )
    else:
        _log.info("job %s is requeued", job)
