# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Everything that one rank needs for one ``fit``: store, driver, breakers, and joint operations.

Made in ``setup``, when the process group is up, and closed at the strategy's ``teardown``. Every
method that is a joint operation must be called on all ranks in the same order, as Lightning calls
``save_checkpoint`` and the like; the session counts them, and lock-step gives every rank the same
numbers.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_resilience.adapters.filesystem import guarded, renew_client
from lightning_resilience.adapters.lightning.breakers import Breakers
from lightning_resilience.adapters.storage import redacted
from lightning_resilience.core.events import CheckpointPublished, CheckpointRemoved
from lightning_resilience.core.joint import error_of, report_of
from lightning_resilience.core.outcome import FailureClass, operation_class
from lightning_resilience.core.retry import failure_to_raise
from lightning_resilience.errors import ResilienceError, RetriesExhaustedError
from lightning_resilience.protocols.guard import Guarded, GuardedCall, guard
from lightning_resilience.protocols.joint import Joint, JointResult, Member, Part, perform
from lightning_resilience.protocols.joint_verdict import someone_left


if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.lightning.breakers import BreakerReport, Policy
    from lightning_resilience.adapters.lightning.checkpoint_io import ForeignSave, StagedSave
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.runtime.driver import Driver


__all__ = ["Session", "adopt_device"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


def adopt_device() -> Callable[[], None]:
    """Return what another thread has to run to work on this thread's CUDA device."""
    # Asking for the device of a process that does not use CUDA would make it use CUDA.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch has no types here
        return partial(torch.cuda.set_device, torch.cuda.current_device())
    return lambda: None


def _renew(fs: AbstractFileSystem) -> None:
    renew_client(fs)


class Session:
    """One rank's part in one ``fit``.

    Args:
        member: Who this rank is.
        policy: How to retry, break and classify.
        driver: Runs protocols; the session closes it.
        storage: Clients of storage.
        is_stopping: Whether this process was told to stop, and nobody has acted on it.
    """

    def __init__(
        self,
        *,
        member: Member,
        policy: Policy,
        driver: Driver,
        storage: Storage,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.member = member
        self.driver = driver
        self.storage = storage
        self._policy = policy
        self._is_stopping = is_stopping
        self._breakers = Breakers(member, policy=policy, driver=driver)
        self._seq = 0
        self._removals: list[tuple[str, Callable[[CancelToken], Any]]] = []
        self._removals_failed = False

    # Joint operations: all ranks, in the same order -----------------------------------------------

    def save(self, url: str, save: StagedSave | ForeignSave | None) -> None:
        """Save a checkpoint; ``save`` is the work of rank 0.

        Raises:
            JointError: The same on every rank: the checkpoint is not there.
        """
        try:
            if save is None:
                result = self._joint("save", url, None)
            else:
                result = self._joint(
                    "save",
                    url,
                    save.attempt,
                    timeout_s=None if save.marks_progress else self._policy.retry.deadline_s,
                    storage=save.storage,
                )
        finally:
            if save is not None:
                save.close()
        if result.value is not None and result.value.value is not None:
            done: Guarded = result.value
            self.driver.sink.emit(
                CheckpointPublished(
                    path=redacted(url),
                    size_bytes=done.value.size_bytes,
                    digest=done.value.digest,
                    attempts=done.attempts,
                    elapsed_s=done.elapsed_s,
                )
            )

    def remove(self, url: str, remove: Callable[[CancelToken], Any]) -> None:
        """Remove a checkpoint: at once where there is one rank, else with the next joint operation.

        Not joint: whether there is something to remove is decided by each rank for itself, from
        metrics that may differ, and only rank 0's decision counts.
        """
        if self.member.rank == 0:
            self._removals.append((url, remove))
        if self.member.world_size == 1:
            self.clear_up(url)

    def clear_up(self, url: str) -> None:
        """Carry out the removals that rank 0 has been asked for; absent is success.

        Args:
            url: The directory, or something in it: the same storage on every rank.

        Raises:
            JointError: The same on every rank.
        """
        self._joint("remove", url, self._remove_all)

    @property
    def operations(self) -> int:
        """Number of joint operations so far, the same on every rank."""
        return self._seq

    def _remove_all(self, token: CancelToken) -> None:
        # What is removed is taken off the list, so that an attempt goes on where the last ended.
        self._removals_failed = True
        while self._removals:
            removal = self._removals[0]
            removal[1](token)
            # One that was abandoned leaves the list to its successor, which has another first.
            token.raise_if_cancelled()
            token.progress()
            self.driver.sink.emit(CheckpointRemoved(path=redacted(removal[0])))
            if removal in self._removals:
                self._removals.remove(removal)
        self._removals_failed = False

    def exists(self, url: str) -> bool:
        """Tell whether a checkpoint exists: rank 0's answer, on every rank.

        Raises:
            JointError: The same on every rank: it cannot be told.
        """
        result = self._joint("exists", url, partial(self.storage.exists, url), kind="read")
        return result.final.detail == str(True)

    def on_rank_zero(
        self, op: str, url: str, work: Callable[[CancelToken], Any], *, kind: str
    ) -> FinalRecord:
        """Do ``work`` on rank 0 while the others wait on the shared store.

        Raises:
            JointError: The same on every rank.
        """
        return self._joint(op, url, work, kind=kind).final

    def _joint(
        self,
        op: str,
        url: str,
        work: Callable[[CancelToken], Any] | None,
        *,
        kind: str = "write",
        timeout_s: float | None = None,
        storage: Storage | None = None,
    ) -> JointResult:
        self._seq += 1
        circuit = self._breakers.circuit(url, kind)
        joint = Joint(
            op=op,
            seq=self._seq,
            # Paths may hold a metric that is not the same on every rank, and only rank 0's counts.
            digest="",
            subject=redacted(url),
            workers=(0,),
            circuit=circuit,
            patience=self._breakers.patience(url, kind, storage or self.storage),
            deadline_s=self._policy.retry.deadline_s,
        )
        part = None
        if self.member.rank == 0 and work is not None:
            call = self._call(op, url, work, kind=kind, timeout_s=timeout_s, storage=storage)
            part = self._part(circuit, call)
        result = self.driver.run(perform(self.member, joint, part))
        self._raise(result, joint.seq)
        self._stop_alone(op)
        return result

    def _stop_alone(self, op: str) -> None:
        # The operation went well, and the signal may wait for the end of the step. Not so where
        # another rank has left already: the collective that follows would fail for its absence.
        if self._is_stopping() and self._breakers.run(op, someone_left(self.member)):
            self.driver.interrupt()

    def _call(
        self,
        op: str,
        url: str,
        work: Callable[[CancelToken], Any],
        *,
        kind: str,
        timeout_s: float | None = None,
        storage: Storage | None = None,
    ) -> GuardedCall:
        storage = storage or self.storage
        return GuardedCall(
            work=work,
            operation=op,
            target=redacted(url),
            policy=self._policy.retry,
            patience=self._breakers.patience(url, kind, storage),
            timeout_s=timeout_s,
            rebuild=partial(storage.rebuild, url),
            drop_caches=partial(storage.drop_caches, url),
        )

    # Guarded, by this rank alone ------------------------------------------------------------------

    def guarded_filesystem(self, url: str) -> AbstractFileSystem:
        """Return a filesystem whose every operation is guarded, for callers that are not joint."""
        return guarded(self.storage.place(url).fs, run=self._run_operation)

    def _run_operation(  # noqa: PLR0917 - called as a Runner
        self, fs: AbstractFileSystem, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        url = path if "file" in fs.protocol else str(fs.unstrip_protocol(path))
        kind = operation_class(operation)
        call = replace(
            self._call(operation, url, work, kind=kind),
            # It has a client and caches of its own, which the storage knows nothing of.
            rebuild=lambda: _renew(fs),
            drop_caches=fs.invalidate_cache,
        )
        try:
            done: Guarded = self._breakers.run(
                operation, guard(self._breakers.circuit(url, kind), call)
            )
            value: T = done.value
        except RetriesExhaustedError as error:
            failure = failure_to_raise(error)
        else:
            return value
        # Outside the handler, which would make its own error this one's context.
        raise failure

    def _part(self, circuit: Circuit, call: GuardedCall) -> Part:
        def report(error: BaseException) -> Any:
            outcome = call.patience.classify(error)
            return report_of(error, rank=self.member.rank, outcome=outcome)

        def detail(done: Guarded) -> str:
            value = done.value
            return "" if value is None else str(getattr(value, "digest", value))

        first = None if call.operation == "remove" else self._removal_first()

        def run(started_at_s: float) -> Protocol[Guarded]:
            if first is not None:
                with contextlib.suppress(ResilienceError):
                    yield from first
            return (yield from guard(circuit, call, started_at_s))

        return Part(run=run, detail=detail, outcome=report)

    def _removal_first(self) -> Protocol[Guarded] | None:
        # Asked for outside a ModelCheckpoint's save point, for example by a callback of the user's.
        # It must not fail the operation that it comes before, so it may stay for later.
        if not self._removals:
            return None
        url = self._removals[0][0]
        call = self._call("remove", url, self._remove_all, kind="write")
        hasty = replace(call, patience=replace(call.patience, when_open="raise"))
        return guard(self._breakers.circuit(url, "write"), hasty)

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
        return self._breakers.reports(hurry=hurry)

    def close(self) -> None:
        """Do what is left to do, and let the helper thread and the connection go. Idempotent."""
        try:
            self._remove_the_rest()
        finally:
            self._removals.clear()
            self._let_go()

    def _remove_the_rest(self) -> None:
        # Nobody waits here: a run that has ended, maybe by an exception, must end. So each removal
        # has one attempt, as long as a probe's, and none where it has just failed or been
        # interrupted.
        if not self._removals:
            return
        if self._removals_failed:
            self._tell_what_is_left("the last removal failed")
            return
        url = self._removals[0][0]
        timeout_s = self._policy.breaker.probe_timeout_s
        call = self._call("remove", url, self._remove_all, kind="write", timeout_s=timeout_s)
        hasty = replace(
            call,
            policy=replace(call.policy, max_attempts=1, unknown_max_attempts=1),
            patience=replace(call.patience, when_open="raise"),
        )
        try:
            self._breakers.run("remove", guard(self._breakers.circuit(url, "write"), hasty))
        except ResilienceError as error:
            self._tell_what_is_left(str(error))

    def _tell_what_is_left(self, why: str) -> None:
        left = ", ".join(redacted(url) for url, _ in self._removals)
        _log.warning("not removed at the end of the run, remove by hand: %s (%s)", left, why)

    def _let_go(self) -> None:
        self.driver.close()
        self.driver.store.close()
