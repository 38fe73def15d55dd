# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The callback that a user adds to a ``Trainer``.

It checks its options when it is made, sets everything up in ``setup`` (the process group is up by
then, and checkpoint callbacks are set up after it), and everything is put back at the strategy's
``teardown``, also after an exception.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, NoReturn, cast

from lightning_resilience.adapters.lightning import namespaces
from lightning_resilience.adapters.lightning.background import hook_background
from lightning_resilience.adapters.lightning.boundary import Boundary
from lightning_resilience.adapters.lightning.deferral import defer
from lightning_resilience.adapters.lightning.failing import Failing, hook_stage, tell_of_ended_group
from lightning_resilience.adapters.lightning.model_checkpoint import hook_checkpoint_callbacks
from lightning_resilience.adapters.lightning.namespaces_loops import idle_hooks
from lightning_resilience.adapters.lightning.opening import check_times, open_session
from lightning_resilience.adapters.lightning.options import check_options
from lightning_resilience.adapters.lightning.patches import Patches
from lightning_resilience.adapters.lightning.pausing import Pausing
from lightning_resilience.adapters.lightning.progress import BarSink
from lightning_resilience.adapters.lightning.reporting import hook_reporting, report_exception
from lightning_resilience.adapters.lightning.resilient_io import adopt_options
from lightning_resilience.adapters.lightning.sharded import complete_teardown, hook_sharded
from lightning_resilience.adapters.lightning.signals import Termination
from lightning_resilience.adapters.lightning.stopping import Stopping
from lightning_resilience.adapters.lightning.strategy import hook_loads, hook_strategy
from lightning_resilience.adapters.lightning.words import with_words
from lightning_resilience.adapters.telemetry import LoggingSink, audible
from lightning_resilience.config import (
    build,
    check_relations,
    read_environment,
    refuse_unknown_arguments,
)
from lightning_resilience.core.agenda import AgendaKind
from lightning_resilience.core.checkpoints import CheckpointConfig
from lightning_resilience.core.pausing import steps
from lightning_resilience.core.shards import Saving
from lightning_resilience.core.spool import SpoolConfig
from lightning_resilience.errors import ConfigError
from lightning_resilience.topology import read_topology


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

    from lightning_resilience.adapters.lightning.breakers import BreakerReport
    from lightning_resilience.adapters.lightning.options import Options
    from lightning_resilience.adapters.lightning.reporting import Reporting
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.config import Environment
    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker import BreakerConfig
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.outcome import Classifier
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import SharedStore


__all__ = ["ResilienceCallback"]

_log = logging.getLogger(__name__)

_Callback: Any = type("_Callback", namespaces.callback_bases(), {})


class ResilienceCallback(_Callback):  # type: ignore[misc] # the base depends on what is installed
    """Keeps training alive while its checkpoint storage is ill, without making that worse.

    Saves, loads, removals and ``ModelCheckpoint``'s questions to storage become joint operations:
    all ranks take the same decision at the same point. While storage is ill, the ranks that need it
    (rank 0; all of them at a load) wait behind a circuit breaker, and the others wait on the shared
    store instead of in a collective, so an outage may last longer than the process group's timeout.
    A checkpoint is believed only once storage reports its size.

    The checkpoint to start from (``ckpt_path``, also of ``validate``, ``test`` and ``predict``) is
    searched for by rank 0 and shared.

    Covers strategies in which rank 0 writes the checkpoint (single device, DDP), and those whose
    ranks all write: FSDP and ``ModelParallelStrategy``, in full and in shards, and DeepSpeed. With
    another strategy it says so and changes nothing.

    Args:
        retry: A ``RetryPolicy``, or a mapping of its options.
        breaker: A ``BreakerConfig``, or a mapping of its options.
        budget: A ``BudgetConfig``, or a mapping of its options.
        admission: An ``AdmissionConfig``, or a mapping of its options.
        joint: A mapping of ``joint_timeout_s``, ``joint_beat_s`` and ``defer_after_s``.
        checkpoints: A mapping of ``preflight``, ``max_consecutive_save_failures`` and
            ``allow_fresh_start``.
        spool: A mapping of ``spool_max_items``, ``spool_max_bytes``, ``max_unpublished_s``,
            ``flush_timeout_s`` and ``same_path_interval_s``.
        on_outage: What a save does while storage is ill. ``spool`` (default) keeps it on the node
            and publishes it afterwards, but for shards and ``staging=False``, which wait; ``wait``
            waits up to ``deadline_s``, as a load always does; ``skip`` leaves the save point out;
            ``fail`` raises the same error on all ranks.
        on_store_loss: What a rank does that cannot reach the shared store. ``wait`` tries until
            ``joint_timeout_s`` and then raises; ``raise`` does so at once. ``defer`` waits as well,
            but where nobody has listened at the store's address for ``defer_after_s``, saves are
            spooled, and training goes on. None: ``defer`` where saves are spooled, else ``wait``.
        termination_grace_s: How long a process may still run after SIGTERM or SIGUSR1, in seconds:
            what no longer fits is not begun. None (default) takes what SLURM or torch says, or 30.
        max_pending_saves: How many saves that were handed over to ``AsyncCheckpointIO`` may be
            unfinished, ≥ 1; another one waits, on all ranks. None (default) takes 2.
        pause_training: When all ranks wait for an ill storage. ``at_save_points`` (default): where
            they need it. A whole number k: also between two steps, where after every k-th one a
            rank finds a breaker open that it has used, so that no work is done that is kept
            nowhere.
        store: The store that all ranks share: a URL ``tcp://host:port``, a
            ``torch.distributed.Store``, or None for the server behind the default process group.
        run_id: Name of this run. None takes ``LIGHTNING_RESILIENCE_RUN_ID``, the launcher's, or a
            fresh one.
        storage_options: Options of the fsspec filesystem; merged with ours, not replaced.
        classify: Names the failure class of an exception (``transient``, ``permanent``, …), or
            returns None for the default.
        spool_dir: Parent of the node's directory for staged files. None takes
            ``LIGHTNING_RESILIENCE_SPOOL_DIR``, ``TMPDIR`` or ``/var/tmp``.
        strict: Whether what a rank asks of storage outside joint operations fails where the shared
            store is away. By default it goes on alone, on its share of every limit; inside joint
            operations ``on_store_loss`` decides.

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another; also in ``setup``,
            before training starts, where that needs the Trainer.

    Example::

        trainer = Trainer(callbacks=[ResilienceCallback()])
    """

    def __init__(  # noqa: PLR0913 - the arguments that the reference lists
        self,
        *,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        breaker: BreakerConfig | Mapping[str, Any] | None = None,
        budget: BudgetConfig | Mapping[str, Any] | None = None,
        admission: AdmissionConfig | Mapping[str, Any] | None = None,
        joint: Mapping[str, Any] | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        spool: Mapping[str, Any] | None = None,
        on_outage: str | None = None,
        on_store_loss: str | None = None,
        termination_grace_s: float | None = None,
        max_pending_saves: int | None = None,
        pause_training: str | int | None = None,
        store: SharedStore | Store | str | None = None,
        run_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        classify: Classifier | None = None,
        spool_dir: str | None = None,
        strict: bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        refuse_unknown_arguments(ResilienceCallback, unknown)
        self._options = check_options(
            retry=retry,
            breaker=breaker,
            budget=budget,
            admission=admission,
            store=store,
            run_id=run_id,
            storage_options=storage_options,
            classify=classify,
            spool_dir=spool_dir,
            strict=strict,
        )
        self._joint = with_words(
            *(joint, on_outage, on_store_loss),
            termination_grace_s=termination_grace_s,
            max_pending_saves=max_pending_saves,
            pause_training=pause_training,
        )
        self._checkpoints = build(CheckpointConfig, checkpoints)
        self._spool = build(SpoolConfig, spool)
        own = self._options
        check_relations(own.retry, own.breaker, self._joint, budget=own.budget)
        self._forget()
        defer(_callback_of)

    def _forget(self) -> None:
        self._session: Session | None = None
        self._asked: Any = None
        self._patches = Patches()
        self._termination: Termination | None = None
        self._boundary: Boundary | None = None
        self._reporting: Reporting | None = None
        self._is_failing = False
        self._audible = contextlib.ExitStack()
        self._reports: dict[str, BreakerReport] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one running fit of one process."""
        running = (
            "_session",
            "_asked",
            "_patches",
            "_termination",
            "_boundary",
            "_reporting",
            "_audible",
        )
        return {name: value for name, value in vars(self).items() if name not in running}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the options, with nothing running."""
        self._forget()
        self.__dict__.update(state)
        defer(_callback_of)

    # Lightning's hooks ----------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check what needs the Trainer, open the shared store, and hook its checkpoints."""
        del pl_module
        environment = read_environment()
        if not environment.enabled:
            return
        # What is not allowed is told now, not in a joint operation in which other ranks wait.
        read_topology()
        if len(_ours(trainer)) > 1:
            message = "This Trainer has two ResilienceCallbacks; keep one, and give it all options."
            raise ConfigError(message)
        saving = namespaces.saving_of(trainer)
        if saving is Saving.UNKNOWN:
            _log.warning(
                "ResilienceCallback does not cover %s, which saves or loads in a way of its own: "
                "it changes nothing in this run. It covers single device, DDP, FSDP, ModelParallel "
                "and DeepSpeed.",
                type(trainer.strategy).__name__,
            )
            return
        if trainer.is_global_zero:
            self._audible.enter_context(audible())
        try:
            options = adopt_options(self._options, trainer.strategy.checkpoint_io)
            self._session = self._open_session(trainer, environment, options)
            self._hook(trainer, self._session, saving)
            self._reporting = hook_reporting(
                trainer, self._session, environment, patches=self._patches
            )
            self._session.background = hook_background(
                trainer, self._session, self._patches, limit=self._joint.max_pending_saves
            )
            if stage == "fit":
                hook_checkpoint_callbacks(trainer, self._session, self._patches)
                self._hook_boundary(trainer, self._session)
        except BaseException:
            # Order: strategy.teardown puts back what has been done, but only once it is hooked.
            self._close()
            raise

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tell the other ranks, and let checkpoints that are saved on it have their waits."""
        del pl_module
        self._is_failing = True
        failing = None if self._session is None else self._session.failing
        if failing is None:
            tell_of_ended_group(exception)
        else:
            failing.leave(exception)
        report_exception(trainer, self._reporting, exception)
        if self._termination is not None:
            self._termination.acknowledge()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Leave in time, where this process was told to stop or another rank has left.

        Ranks that validate, test or predict need not meet in a collective for hours.
        """
        if self._boundary is not None:
            self._boundary.between_batches()
        if self._session is not None and self._session.failing is not None:
            self._session.failing.check()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def breaker_report(self) -> dict[str, BreakerReport]:
        """Return what this rank knows of every breaker.

        While ``fit`` runs, the shared records are read anew; afterwards, this is what they were at
        its end.

        Returns:
            Reports by dependency and operation class, for example ``s3://bucket:write``.

        Note:
            Any rank, not collective.
        """
        if self._session is not None:
            self._reports = self._session.reports()
        return dict(self._reports)

    # Inside ---------------------------------------------------------------------------------------

    def _open_session(self, trainer: Any, environment: Environment, options: Options) -> Session:
        check_times(trainer, options, self._joint)
        self._is_failing = False
        grace_s = self._joint.termination_grace_s
        self._termination = Termination(trainer, self._patches, grace_s=grace_s)
        sink = BarSink(trainer, LoggingSink(rank=trainer.global_rank))
        self._audible.callback(sink.put_back)
        session = open_session(
            trainer,
            environment,
            options,
            joint=self._joint,
            termination=self._termination,
            sink=sink,
            asked=self._asked,
        )
        session.checkpoints, session.spool = self._checkpoints, self._spool
        if session.member.world_size > 1:
            session.failing = Failing(
                session.member, driver=session.driver, step=lambda: trainer.global_step
            )
        return session

    def _hook(self, trainer: Any, session: Session, saving: Saving) -> None:
        strategy, patches = trainer.strategy, self._patches
        if saving is Saving.GATHERED:
            complete_teardown(strategy, patches)
        hook_strategy(
            strategy,
            session,
            patches,
            at_end=self._close,
            is_failing=lambda: self._is_failing,
        )
        if saving is not Saving.RANK_ZERO:
            hook_sharded(strategy, session, patches, saving=saving)
        elif namespaces.loads_through_io(trainer):
            hook_loads(trainer, session, patches)
        if session.failing is not None:
            hook_stage(trainer, session.failing, patches)

    def _hook_boundary(self, trainer: Any, session: Session) -> None:
        termination = cast("Termination", self._termination)
        patches = self._patches
        self._boundary = Boundary(trainer, session, termination=termination, patches=patches)
        stopping = Stopping(trainer, session, termination=termination, patches=patches)
        self._boundary.on(AgendaKind.STOP, stopping)
        if session.background is not None:
            session.background.report_at(self._boundary)
        every = steps(self._joint.pause_training)
        pausing = Pausing(trainer, session, ask=self._boundary.ask, every=every)
        self._boundary.on(AgendaKind.PAUSE, pausing)
        if every:
            self._boundary.look = pausing.before_step
        for name in idle_hooks(self):
            patches.replace(self, name, None)

    def _close(self) -> None:
        session, self._session = self._session, None
        boundary, self._boundary = self._boundary, None
        reporting, self._reporting = self._reporting, None
        termination, self._termination = self._termination, None
        self._patches.undo()
        if boundary is not None:
            boundary.close()
        if termination is not None:
            termination.close()
        try:
            if session is not None:
                self._end(session)
        finally:
            if reporting is not None:
                reporting.close()
            self._audible.close()

    def _end(self, session: Session) -> None:
        try:
            if session.failing is not None:
                session.failing.close()
            self._reports = session.reports(hurry=True)
        finally:
            session.close()


def _ours(trainer: Any) -> list[ResilienceCallback]:
    return [each for each in trainer.callbacks if isinstance(each, ResilienceCallback)]


def _callback_of(trainer: Any) -> ResilienceCallback | None:
    ours = _ours(trainer)
    return ours[0] if ours and read_environment().enabled else None
