# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the agents of its job, who decide about restarts: by the store they share.

======================  ============  ==============================================================
when                    who           what
======================  ============  ==============================================================
a fit is set up         rank 0        what it loads and saves, and under which run its circuits
                                      are: a restart waits for that
it goes on from a       rank 0        that step: how far the job has come
checkpoint
a checkpoint is in      rank 0        its step; from a thread, so that training waits for nobody
storage, verified
training is left with   see           why, under the agents' name of this start of the workers; and
an exception            ``accounts``  rank 0, the step it has come to
======================  ============  ==============================================================

Nothing of this is done without agents that have named this start in the environment, and none of
it may fail training: what a lost store is not told, agents find out by exit statuses and files.

Joint operations have another name for their keys, since one start of the workers may have several
fits; and maybe another store, where the user has named one.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces import (
    checkpoint_callbacks,
    is_fitting,
    stage_runner,
)
from lightning_resilience.adapters.store_discovery import open_store
from lightning_resilience.adapters.telemetry import LoggingSink
from lightning_resilience.config import read_environment
from lightning_resilience.core.accounts import account_of, status_of
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.keys import Keys
from lightning_resilience.errors import ConfigError, ResilienceError
from lightning_resilience.protocols.incarnation import tell_progress
from lightning_resilience.protocols.incident import tell_incident
from lightning_resilience.protocols.reports import tell_start
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice
from lightning_resilience.topology import read_topology


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_resilience.adapters.lightning.failing import Failing
    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.config import Environment
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Reporting", "hook_reporting", "report_exception"]

_log = logging.getLogger(__name__)

_CLOSING_S = 1.0
"""As long as two answers of a store that is on its last legs."""


class Reporting:
    """One rank's reports. The thread that trains, and whichever publishes checkpoints.

    Args:
        driver: Runs protocols at the agents' store; closed with this.
        keys: Names of the keys that the agents read.
        rank: This rank.
        step: Tells the training step that it has completed.

    Attributes:
        failing: What it tells the other ranks; None where it is the only one.
    """

    def __init__(self, driver: Driver, keys: Keys, *, rank: int, step: Callable[[], int]) -> None:
        self._driver = driver
        self._keys = keys
        self._rank = rank
        self._step = step
        self.failing: Failing | None = None
        self._has_left = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._told = self._verified = -1

    @classmethod
    def open(
        cls, environment: Environment, *, rank: int, step: Callable[[], int]
    ) -> Reporting | None:
        """Return what reports to the agents; None where there are none. Nothing is sent yet."""
        incarnation, run_id = environment.incarnation, environment.agents_run_id
        if incarnation is None or run_id is None or environment.store is None:
            return None
        if not environment.enabled:
            return None
        driver = Driver(
            # A connection of its own: it waits for nobody, and is interrupted by no signal.
            store=open_store(environment.store, world_size=1),
            clock=SystemClock(),
            dice=SystemDice(rank=rank),
            sink=LoggingSink(rank=rank),
        )
        return cls(driver, Keys(run_id=run_id, incarnation=incarnation), rank=rank, step=step)

    # How far the job has come ---------------------------------------------------------------------

    def start(self, urls: Iterable[str], *, run_id: str) -> None:
        """Tell what is loaded and saved, on rank 0 of a fit.

        Args:
            urls: Directories of checkpoints.
            run_id: Under which run this rank keeps its circuits, maybe a name of the user's.
        """
        if self._rank == 0:
            told = [redacted(url) for url in urls]
            self._try(tell_start(self._keys, told, run_id=run_id))

    def went_on(self, step: int) -> None:
        """Have it told, by rank 0, that a fit starts from a checkpoint; step 0 is none."""
        if step and self._rank == 0:
            self.saved(step)

    def saved(self, step: int) -> None:
        """Have it told that a checkpoint is verified; any thread of rank 0.

        Args:
            step: Training step of the checkpoint.
        """
        with self._lock:
            self._verified = max(self._verified, step)
            if self._thread is None and self._verified > self._told:
                self._thread = threading.Thread(
                    target=self._tell_verified, name="lightning-resilience-reports", daemon=True
                )
                self._thread.start()

    def _tell_verified(self) -> None:
        while (step := self._next()) is not None:
            self._try(tell_progress(self._keys, step=step, checkpoint_step=step))

    def _next(self) -> int | None:
        with self._lock:
            if self._told == self._verified:
                # Order: under the lock, so that whoever adds one finds that there is no thread.
                self._thread = None
                return None
            self._told = self._verified
            return self._told

    # The end --------------------------------------------------------------------------------------

    def leave(self, error: BaseException) -> None:
        """Tell why this rank leaves, once; it never blocks for long.

        Args:
            error: The exception that it leaves with; the other ranks have been told.
        """
        if self._has_left:
            return
        self._has_left = True
        status = status_of(error)
        if status is not None:
            error.code = status  # type: ignore[attr-defined] # it is a SystemExit then
        step, failing = self._step(), self.failing
        account = account_of(
            error,
            None if failing is None else failing.told,
            rank=self._rank,
            step=step,
            is_together=failing is not None and not failing.leaves_alone,
            writer=self._driver.dice.nonce(),
        )
        if account is None or not self._try(tell_incident(self._keys, account), hurry=True):
            return
        if self._rank == 0:
            reached = tell_progress(self._keys, step=step, checkpoint_step=self._verified)
            self._try(reached, hurry=True)

    def close(self) -> None:
        """Wait shortly for what is being told, and let the connection go. Idempotent."""
        thread = self._thread
        if thread is not None:
            thread.join(_CLOSING_S)
        self._driver.close()
        self._driver.store.close()

    def _try(self, protocol: Protocol[Any], *, hurry: bool = False) -> bool:
        try:
            self._driver.run(protocol, hurry=hurry)
        except ResilienceError as error:
            _log.info("the agents of this job could not be told: %s", error)
            return False
        return True


def hook_reporting(
    trainer: Any, session: Session, environment: Environment, *, patches: Patches
) -> Reporting | None:
    """Report to the agents of this job, if it has any that listen.

    Args:
        trainer: The Trainer, which has not begun its stage; its strategy is hooked already.
        session: This rank's session.
        environment: What the environment variables say.
        patches: Remembers what was replaced.

    Returns:
        What reports; None where nobody listens.

    Note:
        On every rank alike; not collective.
    """
    rank = session.member.rank
    reporting = Reporting.open(environment, rank=rank, step=lambda: trainer.global_step)
    if reporting is None:
        return None
    reporting.failing = session.failing
    if is_fitting(trainer):
        reporting.start(_directories(trainer), run_id=session.member.keys.run_id)
    if rank == 0:
        session.alone.on_saved = reporting.saved
    owner, name = stage_runner(trainer)
    patches.replace(owner, name, partial(_run_stage, getattr(owner, name), trainer, reporting))
    return reporting


def _directories(trainer: Any) -> list[str]:
    # Some are set up later only, and their directories are in the Trainer's as a rule.
    found = (getattr(callback, "dirpath", None) for callback in checkpoint_callbacks(trainer))
    return [str(directory or trainer.default_root_dir) for directory in found]


def _run_stage(inner: Callable[[], Any], trainer: Any, reporting: Reporting) -> Any:
    if is_fitting(trainer) and trainer.ckpt_path:
        # It was read, and checked.
        reporting.went_on(trainer.global_step)
    try:
        return inner()
    except BaseException as error:
        reporting.leave(error)
        raise


def report_exception(trainer: Any, reporting: Reporting | None, error: BaseException) -> None:
    """Tell the agents of an exception that has come to a callback, also outside of a session.

    Args:
        trainer: The Trainer.
        reporting: What reports in this session; None where there is none, not yet or no more, and
            where nobody listens.
        error: The exception.
    """
    if reporting is not None:
        reporting.leave(error)
        return
    try:
        environment, rank = read_environment(), read_topology().rank
    except ConfigError:
        # It is about the same variables, and the user is told already.
        return
    early = Reporting.open(environment, rank=rank, step=lambda: trainer.global_step)
    if early is not None:
        early.leave(error)
        early.close()
