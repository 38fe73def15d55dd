# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Everything that one rank needs for one ``fit``: store, driver, breakers, and joint operations.

Made in ``setup``, when the process group is up, and closed at the strategy's ``teardown``. Every
method that is a joint operation must be called on all ranks in the same order, as Lightning calls
``save_checkpoint`` and the like; the session counts them, and lock-step gives every rank the same
numbers.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.storage import redacted
from lightning_resilience.core.events import CheckpointPublished, CheckpointRemoved
from lightning_resilience.core.joint import error_of, report_of, unavailable_error
from lightning_resilience.core.outcome import operation_class
from lightning_resilience.core.waiting import chunk_s
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.circuit import Circuit, begin, refresh
from lightning_resilience.protocols.guard import Guarded, GuardedCall, guard
from lightning_resilience.protocols.joint import Joint, JointResult, Member, Part, perform
from lightning_resilience.protocols.persistent import Persistence, with_persistence
from lightning_resilience.protocols.probe import Patience


if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.lightning.checkpoint_io import ForeignSave, StagedSave
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.core.breaker import BreakerConfig
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.runtime.driver import Driver


__all__ = ["BreakerReport", "Policy", "Session", "adopt_device"]

T = TypeVar("T")

# Rank 0 speaks at least this often while it waits; the promise is 30 s.
_VOICE_S = 28.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerReport:
    """What one rank knows of one breaker.

    Args:
        state: State of the shared record.
        epoch: Epoch of the shared record.
        history: Its last transitions as (epoch, state, reason), the same on every rank.
        seen: The (epoch, state) that this rank saw on the way; a part of the history.
    """

    state: str
    epoch: int
    history: tuple[tuple[int, str, str], ...]
    seen: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How this job retries, breaks and classifies.

    Args:
        retry: The retry policy.
        breaker: The breakers' configuration.
        classify: Makes an outcome of an exception.
    """

    retry: RetryPolicy
    breaker: BreakerConfig
    classify: Callable[..., Outcome]


def adopt_device() -> Callable[[], None]:
    """Return what another thread has to run to work on this thread's CUDA device."""
    # Asking for the device of a process that does not use CUDA would make it use CUDA.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch has no types here
        return partial(torch.cuda.set_device, torch.cuda.current_device())
    return lambda: None


def _parent(url: str) -> str:
    if url.endswith("/"):
        # A folder itself. What is above it may be no place at all: a bucket has no parent.
        return url[:-1]
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{PurePosixPath(rest).parent}"


class Session:
    """One rank's part in one ``fit``.

    Args:
        member: Who this rank is.
        policy: How to retry, break and classify.
        driver: Runs protocols; the session closes it.
        storage: Clients of storage.
    """

    def __init__(self, *, member: Member, policy: Policy, driver: Driver, storage: Storage) -> None:
        self.member = member
        self.driver = driver
        self.storage = storage
        self._policy = policy
        self._circuits: dict[str, Circuit] = {}
        self._seq = 0

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
                timeout_s = None if save.marks_progress else self._policy.retry.deadline_s
                result = self._joint("save", url, save.attempt, timeout_s=timeout_s)
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
        """Remove a checkpoint; absent is success.

        Raises:
            JointError: The same on every rank.
        """
        result = self._joint("remove", url, remove)
        if result.value is not None:
            attempts = result.value.attempts
            self.driver.sink.emit(CheckpointRemoved(path=redacted(url), attempts=attempts))

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
    ) -> JointResult:
        self._seq += 1
        circuit = self._circuit(url, kind)
        joint = Joint(
            op=op,
            seq=self._seq,
            # Paths may hold a metric that is not the same on every rank, and only rank 0's counts.
            digest="",
            subject=redacted(url),
            workers=(0,),
            circuit=circuit,
            patience=self._patience(url, kind),
            deadline_s=self._policy.retry.deadline_s,
        )
        part = None
        if self.member.rank == 0 and work is not None:
            part = self._part(circuit, self._call(op, url, work, kind=kind, timeout_s=timeout_s))
        result = self.driver.run(perform(self.member, joint, part))
        self._raise(result)
        return result

    def _call(
        self,
        op: str,
        url: str,
        work: Callable[[CancelToken], Any],
        *,
        kind: str,
        timeout_s: float | None = None,
    ) -> GuardedCall:
        return GuardedCall(
            work=work,
            operation=op,
            target=redacted(url),
            policy=self._policy.retry,
            patience=self._patience(url, kind),
            timeout_s=timeout_s,
            rebuild=partial(self.storage.rebuild, url),
            drop_caches=partial(self.storage.drop_caches, url),
        )

    # Guarded, by this rank alone ------------------------------------------------------------------

    def guarded_filesystem(self, url: str) -> AbstractFileSystem:
        """Return a filesystem whose every operation is guarded, for callers that are not joint."""
        fs = self.storage.place(url).fs
        return guarded(fs, run=partial(self._run_operation, fs))

    def _run_operation(  # noqa: PLR0917 - a partial of ours, called as a Runner
        self, fs: AbstractFileSystem, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        url = path if "file" in fs.protocol else str(fs.unstrip_protocol(path))
        kind = operation_class(operation)
        call = self._call(operation, url, work, kind=kind)
        done: Guarded = self.driver.run(guard(self._circuit(url, kind), call))
        value: T = done.value
        return value

    def _part(self, circuit: Circuit, call: GuardedCall) -> Part:
        def report(error: BaseException) -> Any:
            outcome = call.patience.classify(error)
            return report_of(error, rank=self.member.rank, outcome=outcome)

        def detail(done: Guarded) -> str:
            value = done.value
            return "" if value is None else str(getattr(value, "digest", value))

        return Part(run=partial(guard, circuit, call), detail=detail, outcome=report)

    def _raise(self, result: JointResult) -> None:
        error = result.error
        if error is not None and not isinstance(error, Exception):
            # An interruption: the others have been told, and this rank goes on being interrupted.
            raise error
        joint_error = error_of(result.final, seq=self._seq)
        if joint_error is None:
            return
        root = error.__cause__ if isinstance(error, ResilienceError) and error.__cause__ else error
        raise joint_error from root

    # Breakers -------------------------------------------------------------------------------------

    def _circuit(self, url: str, kind: str) -> Circuit:
        name = f"{self.storage.place(url).dependency}:{kind}"
        circuit = self._circuits.get(name)
        if circuit is None:
            circuit = Circuit(
                name,
                config=self._policy.breaker,
                keys=self.member.keys,
                host=platform.node(),
                hosts=1,  # only rank 0 touches the storage
            )
            self._run(begin(circuit, new_incarnation=self.member.rank == 0))
            self._circuits[name] = circuit
        return circuit

    def _run(self, protocol: Protocol[Any]) -> Any:
        member = self.member

        def unavailable(lost_for_s: float, error: Exception) -> Exception:
            return unavailable_error(
                "begin", seq=self._seq, rank=member.rank, lost_for_s=lost_for_s, cause=str(error)
            )

        persistence = Persistence(op="begin", patience_s=member.store_patience_s, error=unavailable)
        return self.driver.run(with_persistence(protocol, persistence))

    def _patience(self, url: str, kind: str) -> Patience:
        directory = _parent(url)
        chunk = chunk_s(joint_timeout_s=self.member.timeout_s)
        return Patience(
            probe=self._probe(directory, kind),
            classify=partial(self._policy.classify, reading=kind == "read"),
            when_open="raise" if self.member.on_outage == "fail" else "wait",
            chunk_s=chunk,
            voice_s=_VOICE_S if self.member.rank == 0 else chunk,
            # Rank 0 alone touches the storage: there is nobody to come back at the same time as.
            spread_s=0.0,
        )

    def _probe(self, directory: str, kind: str) -> Callable[[CancelToken], None]:
        if kind == "read":
            return partial(self.storage.probe_read, directory)

        def probe(token: CancelToken) -> None:
            self.storage.probe_write(directory, self.driver.dice.nonce(), token)

        return probe

    def reports(self) -> dict[str, BreakerReport]:
        """Read every breaker's record once more, and return what this rank knows of it.

        Raises:
            StoreError: The shared store does not answer.
        """
        return {name: self._report(circuit) for name, circuit in self._circuits.items()}

    def _report(self, circuit: Circuit) -> BreakerReport:
        record = self.driver.run(refresh(circuit)).record
        return BreakerReport(
            state=record.state,
            epoch=record.epoch,
            history=tuple((entry.epoch, entry.state, entry.reason) for entry in record.history),
            seen=circuit.seen,
        )

    def close(self) -> None:
        """Let the helper thread and the connection go. Idempotent."""
        self.driver.close()
        self.driver.store.close()
