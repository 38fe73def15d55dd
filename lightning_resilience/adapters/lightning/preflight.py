# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Before the first step: rank 0 tries each checkpoint directory, and all ranks have its verdict.

It comes after ``ModelCheckpoint.setup``, which decides where checkpoints go, and is one joint
operation for each directory: the other ranks wait on the shared store. What follows from what was
refused is decided by each rank for itself, from the shared record, for each callback that saves
there (``core.preflight``).

Where all went well, what killed processes have left there is removed as well (``sweeping``).

Nothing is tried in a ``fast_dev_run``, which saves nothing, and for a ``CheckpointIO`` that is
called as a whole: where and how it writes is its own business.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces import (
    counts_versions,
    innermost_wrapper,
)
from lightning_resilience.adapters.lightning.resilient_io import format_of
from lightning_resilience.adapters.preflight import DirectoryTrial
from lightning_resilience.adapters.sweeping import sweep_directory
from lightning_resilience.core.events import DirectoryTried
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.preflight import (
    Needs,
    Trial,
    bounded,
    is_survived,
    moves,
    needs_of,
    refusal_text,
    warnings_of,
)
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import CallTimeoutError, JointError


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken


__all__ = ["Preflight"]

_log = logging.getLogger(__name__)


class Preflight:
    """The trials of one ``setup``. Every rank, joint.

    Args:
        trainer: The Trainer.
        session: This rank's session.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        wrapper = innermost_wrapper(trainer.strategy.checkpoint_io)
        inner = trainer.strategy.checkpoint_io if wrapper is None else wrapper.checkpoint_io
        self._is_on = (
            session.checkpoints.preflight
            and not trainer.fast_dev_run
            and format_of(inner).can_be_asked
        )
        self._trainer = trainer
        self._session = session
        self._trials: dict[str, tuple[BaseException | None, Trial]] = {}

    @property
    def policy(self) -> RetryPolicy | None:
        """How questions to storage are bounded in this setup; None for as all others are."""
        return bounded(self._session.alone.breakers.policy.retry) if self._is_on else None

    def survives(self, error: JointError, directory: str) -> bool:
        """Tell whether training begins all the same, and say so.

        Args:
            error: How a question to storage has ended, on all ranks.
            directory: What it was about.
        """
        survived = self._is_on and is_survived(
            error.outcome, on_outage=self._session.member.on_outage
        )
        if survived and self._speaks:
            _log.warning(
                "training begins without knowing whether checkpoints can be saved in %s, because "
                "the storage is ill; the first save waits for it: %s",
                redacted(directory),
                error,
            )
        return survived

    def check(self, callback: Any) -> None:
        """Try the directory of a ``ModelCheckpoint`` that has been set up.

        Raises:
            JointError: The same on every rank: what this run needs was refused.
        """
        needs = _needs(callback, self._session.asked)
        if not (self._is_on and needs.saves):
            return
        directory = os.fspath(callback.dirpath)
        is_new = directory not in self._trials
        if is_new:
            self._trials[directory] = self._tried(directory)
        cause, trial = self._trials[directory]
        shown = redacted(directory)
        refused = refusal_text(trial, needs, directory=shown)
        warnings = warnings_of(trial, needs, directory=shown)
        if is_new:
            self._emit(shown, trial, needed=bool(refused))
        if refused:
            raise JointError(
                refused,
                op="preflight",
                seq=self._session.operations,
                outcome=FailureClass.PERMANENT.value,
                first_rank=0,
            ) from cause
        for warning in warnings if self._speaks else ():
            _log.warning("%s", warning)

    def warn_where_it_moves(self, chosen: object, directory: str | os.PathLike[str]) -> None:
        """Say on rank 0 that ``"last"`` is looked for in a directory that each start has anew.

        Args:
            chosen: The directory that the user has given; None where the logger names it.
            directory: The directory that is used.
        """
        loggers = self._trainer.loggers
        version = loggers[0].version if loggers else None
        if moves(dirpath=chosen, version=version, asked=self._session.asked) and self._speaks:
            _log.warning(
                "ckpt_path='last' is looked for in %s, which is named by the logger: one that "
                "counts its versions gives every start a directory of its own, in which there is "
                "nothing to find. Give ModelCheckpoint a dirpath that stays the same, or the "
                "logger a version that is a name.",
                redacted(os.fspath(directory)),
            )

    @property
    def _speaks(self) -> bool:
        return self._session.member.rank == 0

    def _tried(self, directory: str) -> tuple[BaseException | None, Trial]:
        session = self._session
        policy = bounded(session.alone.breakers.policy.retry)
        trial = DirectoryTrial(
            session.storage,
            directory,
            nonce=session.driver.dice.nonce,
            classify=session.alone.breakers.policy.classify,
            policy=policy,
        )

        def encoded(token: CancelToken) -> str:
            found = trial.attempt(token)
            if not found.refused:
                _sweep(session, directory, token)
            return encode(found).decode()

        url = f"{directory.rstrip('/')}/"
        try:
            final = session.on_rank_zero("preflight", url, encoded, retry=policy)
        except JointError as error:
            if not self.survives(error, directory):
                raise
            return None, Trial()
        key = f"what rank 0 was refused in {redacted(directory)}"
        return trial.cause, decode(Trial, final.detail.encode(), key=key)

    def _emit(self, directory: str, trial: Trial, *, needed: bool) -> None:
        refused = tuple(refusal.step for refusal in trial.refused)
        outcome = FailureClass.PERMANENT.value if needed else "ok"
        event = DirectoryTried(directory=directory, outcome=outcome, refused=refused)
        self._session.driver.sink.emit(event)


def _sweep(session: Session, directory: str, token: CancelToken) -> None:
    nonce = session.driver.dice.nonce
    try:
        removed = sweep_directory(session.storage, directory, token, nonce=nonce)
    except CallTimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - what is in the way of cleaning up is in no run's way
        _log.warning(
            "what killed processes have left in %s was not removed: %s", redacted(directory), error
        )
    else:
        if removed:
            names = ", ".join(map(redacted, removed))
            _log.info("removed what killed processes have left: %s", names)


def _needs(callback: Any, asked: object) -> Needs:
    return needs_of(
        save_top_k=callback.save_top_k,
        save_last=callback.save_last,
        last_name=callback.CHECKPOINT_NAME_LAST,
        counts_versions=counts_versions(callback),
        asked=asked,
    )
