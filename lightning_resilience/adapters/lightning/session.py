# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Everything that one rank needs for one run: store, driver, breakers, and joint operations.

Made in ``setup``, when the process group is up, and closed at the strategy's ``teardown``. Every
method that is a joint operation must be called on all ranks in the same order, as Lightning calls
``save_checkpoint`` and the like; the session counts them, and lock-step gives every rank the same
numbers.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.alone import Alone, enlisted
from lightning_resilience.adapters.lightning.parts import part_of
from lightning_resilience.adapters.lightning.removals import Removals
from lightning_resilience.adapters.lightning.work import Asked, Passage, detail_of, hand_over
from lightning_resilience.core.checkpoints import CheckpointConfig
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.incident import PeerInterruption
from lightning_resilience.core.joint import error_of
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.records import FinalRecord
from lightning_resilience.core.retention import Stage
from lightning_resilience.core.spool import SpoolConfig, outage_policy
from lightning_resilience.core.store_loss import is_deferred
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.joint import Joint, JointResult, Member, perform
from lightning_resilience.protocols.joint_told import read_reports
from lightning_resilience.protocols.joint_verdict import someone_left


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.background import Background
    from lightning_resilience.adapters.lightning.breakers import BreakerReport, Policy
    from lightning_resilience.adapters.lightning.failing import Failing
    from lightning_resilience.adapters.lightning.flushing import Flushing
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.runtime.driver import Driver


__all__ = ["Session"]

_log = logging.getLogger(__name__)


class Session:
    """One rank's part in one run: a fit, or a validation, test or prediction.

    Args:
        member: Who this rank is.
        policy: How to retry, break and classify.
        driver: Runs protocols; the session closes it.
        storage: Clients of storage.
        hosts: Hosts on which ranks load checkpoints.
        is_stopping: Whether this process was told to stop, and nobody has acted on it.
        asked: What rank 0 was asked to start from.

    Attributes:
        failing: What this rank tells and knows of ranks that leave; None where it is the only one.
        place: Tells where in training the next joint operation is.
        background: What is written in the background; None where nothing is.
        checkpoints: What checkpoints the run insists on.
        is_leaving: Whether training is being left, so that no later save makes up for a failed one.
        is_saving: Whether ``ModelCheckpoint`` saves now, and clears up after it.
        spool: How much may wait on rank 0's node while storage is ill.
        flushing: The end of what waits there; None where nothing does.
    """

    def __init__(
        self,
        *,
        member: Member,
        policy: Policy,
        driver: Driver,
        storage: Storage,
        hosts: int = 1,
        is_stopping: Callable[[], bool] = lambda: False,
        asked: Any = None,
    ) -> None:
        self.member = enlisted(member, driver)
        self.driver = driver
        self.storage = storage
        self.alone = Alone(member, policy=policy, driver=driver, storage=storage, hosts=hosts)
        self.failing: Failing | None = None
        self.place: Callable[[], str] = str
        self.background: Background | None = None
        self.checkpoints = CheckpointConfig()
        self.is_leaving = False
        self.is_saving = False
        self.spool = SpoolConfig()
        self.flushing: Flushing | None = None
        self._all = tuple(range(member.world_size))
        self._policy = policy
        self._is_stopping = is_stopping
        self._seq = 0
        self.asked = asked
        self.chosen: Inspection | None = None
        """What rank 0 has seen of the checkpoint that is being loaded, while it is."""
        self._removals = self.alone.removals = Removals(self.alone)

    # Joint operations: all ranks, in the same order -----------------------------------------------

    def save(self, url: str, work: Work | None) -> None:
        """Save a checkpoint; ``work`` is what rank 0 does.

        Raises:
            JointError: The same on every rank: the checkpoint is not there.
        """
        with self.alone.retaining.saving(url) as ending:
            result = self._joint("save", url, work)
            if self.flushing is not None:
                ending.stage = self.flushing.storeless.saved(url, result)
        if ending.stage is Stage.VERIFIED and result.value is not None:
            self.alone.saved(url, result.value, step=None if work is None else work.step)

    def load(self, url: str, work: Work) -> Any:
        """Load a checkpoint; every rank has ``work``.

        Returns:
            What this rank has loaded.

        Raises:
            JointError: The same on every rank: no rank has loaded it.
        """
        return self._joint("load", url, work, kind="read", workers=self._all).value.value

    def hand_over(self, op: str, url: str, work: Work | None, *, by_all: bool = False) -> Any:
        """Leave a save or a load to what guards it by itself, maybe later.

        Returns:
            What this rank's ``work`` has returned.

        Raises:
            JointError: The same on every rank.
        """
        workers = self._all if by_all else (0,)
        result = self._joint(op, url, work, workers=workers, is_guarded=False)
        return None if result.value is None else result.value.value

    def pause(self, name: str, *, worker: int) -> None:
        """Wait until a breaker lets calls through.

        Args:
            name: The breaker's name.
            worker: The rank that waits behind it; the others wait for that one.

        Raises:
            JointError: The same on every rank: it was open for longer than ``deadline_s``.
        """
        url, kind = self.alone.breakers.place_of(name)
        work = Passage(self.storage, url)
        self._joint("pause", url, work, kind=kind, workers=(worker,))

    def by_all(
        self, op: str, url: str, work: Work, *, kind: str = "write", is_guarded: bool = True
    ) -> Any:
        """Do a part of the same operation on every rank.

        Args:
            op: Name of the operation.
            url: What it is about.
            work: This rank's part; its result is told as text, see ``told``.
            kind: ``read`` or ``write``.
            is_guarded: Whether it asks storage.

        Returns:
            What this rank's ``work`` has returned.

        Raises:
            JointError: The same on every rank.
        """
        result = self._joint(op, url, work, kind=kind, workers=self._all, is_guarded=is_guarded)
        return result.value.value

    def told(self, op: str) -> tuple[str, ...]:
        """Return what every rank has told in ``op``, the last operation; one rank calls this.

        Raises:
            JointUnavailableError: This rank could not reach the shared store for too long.
        """
        reports = self.driver.run(read_reports(self.member, op, seq=self._seq))
        return tuple(report.detail for report in reports)

    def remove_later(self, work: Work) -> None:
        """Remove what is no checkpoint with the next joint operation; rank 0's request counts."""
        if self.member.rank == 0:
            self._removals.add(work)

    def keep(self, url: str) -> None:
        """Do not remove ``url`` any more: it is about to be written again."""
        self._removals.keep(url)

    def remove(self, work: Work) -> None:
        """Remove a checkpoint: at once where there is one rank, else with the next joint operation.

        Not joint: each rank decides for itself, from metrics that may differ; rank 0's counts. What
        a save point removes is cleared up at its end, so as not to look like a failure of the save.
        """
        if self.member.rank == 0:
            self._removals.ask(work)
        if self.member.world_size == 1 and not self.is_saving:
            self.clear_up(work.url)

    def clear_up(self, url: str) -> None:
        """Carry out the removals that rank 0 has been asked for and that may be; absent is success.

        Args:
            url: The directory, or something in it: the same storage on every rank.

        Raises:
            JointError: The same on every rank.
        """
        self._joint("remove", url, self._removals.work(url))

    @property
    def operations(self) -> int:
        """Number of joint operations so far, the same on every rank."""
        return self._seq

    def exists(self, url: str) -> bool:
        """Tell whether a checkpoint exists: rank 0's answer, on every rank.

        Raises:
            JointError: The same on every rank: it cannot be told.
        """
        work = self.alone.question(url)
        final = self._joint("exists", url, work, kind="read").final
        told = final.detail if self.flushing is None else self.flushing.storeless.answer(url, final)
        return told == str(True)

    def on_rank_zero(
        self,
        op: str,
        url: str,
        work: Callable[[CancelToken], Any],
        *,
        retry: RetryPolicy | None = None,
        instead: Callable[[str, CancelToken], Any] | None = None,
        **how: Any,
    ) -> FinalRecord:
        """Do ``work`` on rank 0 while the others wait on the shared store.

        Args:
            op: Name of the operation.
            url: What it is about.
            work: What rank 0 does.
            retry: How it is repeated, the same on every rank; None for as all others are.
            instead: What rank 0 does while storage is ill; see ``Work``.
            how: See ``by_all``.

        Raises:
            JointError: The same on every rank.
        """
        asked = Asked(self.storage, url, work, retry=retry, instead=instead)
        return self._joint(op, url, asked, **how).final

    def _joint(self, op: str, url: str, work: Work | None, **how: Any) -> JointResult:
        self._seq += 1
        if self.failing is None:
            return self._together(op, url, work, **how)
        if self.failing.leaves_alone:
            return self._by_itself(op, work, **how)
        try:
            self.failing.check()
            return self._together(op, url, work, **how)
        except PeerInterruption as interruption:
            raise interruption.error from None

    def _by_itself(
        self,
        op: str,
        work: Work | None,
        *,
        kind: str = "write",
        workers: tuple[int, ...] = (),
        is_guarded: bool = True,
    ) -> JointResult:
        # On an exception, with nobody there to agree with, and nobody else who works.
        del workers
        if work is None:
            return JointResult(final=FinalRecord(op=op, writer=""))
        if is_guarded:
            done = self.alone.run(op, work, kind=kind)
        else:
            done = self.driver.run(hand_over(work, self.driver.clock.now_s()))
        final = FinalRecord(op=op, detail=detail_of(op, done), writer="")
        return JointResult(final=final, value=done)

    def _together(
        self,
        op: str,
        url: str,
        work: Work | None,
        *,
        kind: str = "write",
        workers: tuple[int, ...] = (0,),
        is_guarded: bool = True,
    ) -> JointResult:
        breakers = self.alone.breakers
        storage = self.storage if work is None else work.storage
        retry = (work and work.retry) or self._policy.retry
        policy = outage_policy(self.member.on_outage, op=op, is_saving=self.is_saving)
        if work is not None and policy != "proceed":
            work.instead = None
        storeless = None if self.flushing is None else self.flushing.storeless
        may_be_deferred = storeless is not None and storeless.begins(op, url, workers=workers)
        joint = Joint(
            op=op,
            seq=self._seq,
            digest=self.place(),
            subject=redacted(url),
            workers=workers,
            circuit=breakers.joint_circuit(url, kind, may_be_deferred) if is_guarded else None,
            patience=breakers.patience(url, kind, storage, on_outage=policy),
            deadline_s=retry.deadline_s,
            on_outage=policy,
            may_be_deferred=may_be_deferred,
        )
        works = work is not None and self.member.rank in joint.workers
        try:
            part = None
            if work is not None and works:
                first = None if op == "remove" else self._removals.first()
                rank, alone = self.member.rank, self.alone
                part = part_of(joint, work, rank=rank, kind=kind, alone=alone, first=first)
                if storeless is not None and may_be_deferred:
                    part = replace(part, instead=storeless.instead(op, work))
            result: JointResult = self.driver.run(perform(self.member, joint, part))
        finally:
            if work is not None:
                work.close()
        self._raise(result, joint.seq)
        if not is_deferred(result.final):
            self._stop_alone(op)
        return result

    def _stop_alone(self, op: str) -> None:
        # The operation went well, and the signal may wait for the end of the step. Not so where
        # another rank has left already: the collective that follows would fail for its absence.
        if self._is_stopping() and self.alone.breakers.run(op, someone_left(self.member)):
            self.driver.interrupt()

    def _raise(self, result: JointResult, seq: int) -> None:
        error = result.error
        if error is not None and not isinstance(error, Exception):
            # An interruption: the others have been told, and this rank goes on being interrupted.
            raise error
        joint_error = error_of(result.final, seq=seq)
        if joint_error is None:
            return
        if joint_error.outcome == FailureClass.CANCELLED.value:
            # Where this rank was interrupted as well, that is what it leaves with.
            self.driver.interrupt()
        root = error.__cause__ if isinstance(error, ResilienceError) and error.__cause__ else error
        raise joint_error from root

    def reports(self, *, hurry: bool = False) -> dict[str, BreakerReport]:
        """Return what this rank knows of every breaker, read anew where the store answers."""
        return self.alone.reports(hurry=hurry)

    def close(self) -> None:
        """Do what is left to do, and let the helper thread and the connection go. Idempotent."""
        try:
            self._removals.finish()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.driver.close()
        self.driver.store.close()
