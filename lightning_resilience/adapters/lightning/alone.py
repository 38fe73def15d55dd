# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Guarded calls that one rank makes by itself, from any thread.

What is joint is in ``session``. These calls may be decided without the shared store, once that is
lost (``protocols.detour``). Here is the rest: what rank 0 asks storage alone, what a background
thread writes, and all that a ``ResilientCheckpointIO`` does without the callback. All
threads share the breakers of their rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.lightning.breakers import Breakers
from lightning_resilience.adapters.lightning.retaining import Retaining
from lightning_resilience.adapters.lightning.work import Asked, Operation, carry_out, detail_of
from lightning_resilience.adapters.object_store import protocols
from lightning_resilience.adapters.standalone import STORE_PATIENCE_S
from lightning_resilience.core.events import CheckpointPublished
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.outcome import operation_class
from lightning_resilience.core.retention import Stage
from lightning_resilience.core.retry import failure_to_raise
from lightning_resilience.core.spool import is_spooled
from lightning_resilience.core.spooled import may_be_spooled
from lightning_resilience.errors import RetriesExhaustedError, StoreUnavailableError
from lightning_resilience.protocols.circuit_memory import Link
from lightning_resilience.protocols.guard import Guarded, GuardedCall
from lightning_resilience.protocols.joint_fence import enlist


if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.lightning.breakers import BreakerReport, Policy
    from lightning_resilience.adapters.lightning.removals import Removals
    from lightning_resilience.adapters.lightning.spooling import Spooling
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.joint import Member
    from lightning_resilience.runtime.driver import Driver


__all__ = ["Alone", "adopt_device", "enlisted"]

T = TypeVar("T")


def adopt_device() -> Callable[[], None]:
    """Return what another thread has to run to work on this thread's CUDA device."""
    # Asking for the device of a process that does not use CUDA would make it use CUDA.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch has no types here
        return partial(torch.cuda.set_device, torch.cuda.current_device())
    return lambda: None


class Alone:
    """One rank's guarded calls.

    Args:
        member: Who this rank is.
        policy: How to retry, break and classify.
        driver: Runs protocols.
        storage: Clients of storage.
        hosts: Hosts on which ranks load checkpoints.

    Attributes:
        retaining: What this rank knows of its checkpoints, for removals.
        removals: What is still to be removed.
        spooling: What waits on this node until storage is well; None where nothing does.
        on_saved: Called with the training step of each checkpoint that is verified, in any thread.
    """

    def __init__(
        self, member: Member, *, policy: Policy, driver: Driver, storage: Storage, hosts: int = 1
    ) -> None:
        self.driver = driver
        self.storage = storage
        self._policy = policy
        self.retaining = Retaining()
        self.removals: Removals
        self.spooling: Spooling | None = None
        self.on_saved: Callable[[int], None] | None = None
        self.breakers = Breakers(member, policy=policy, driver=driver, link=Link(), hosts=hosts)

    def call(self, op: str, work: Work, *, kind: str, collective: bool = False) -> GuardedCall:
        """Describe the attempts of ``work`` to a guard."""
        retry = work.retry or self._policy.retry
        return GuardedCall(
            work=work.attempt,
            operation=op,
            target=redacted(work.url),
            policy=retry,
            patience=self.breakers.patience(work.url, kind, work.storage),
            timeout_s=None if work.marks_progress else retry.deadline_s,
            rebuild=work.rebuild,
            drop_caches=work.drop_caches,
            collective=collective,
        )

    def run(self, op: str, work: Work, *, kind: str) -> Guarded:
        """Do ``work`` under the breaker and the retry policy.

        Raises:
            RetriesExhaustedError: A series of attempts was given up; its cause is the last failure.
            CircuitOpenError: The storage was ill for longer than ``deadline_s``.
            StoreUnavailableError: The shared store does not answer, under ``strict``.
            BaseException: The storage's own, where repeating is no option: a missing file, a
                denial, a full disk.
        """
        call = replace(
            self.call(op, work, kind=kind),
            may_go_alone=not self._policy.strict,
            store_patience_s=STORE_PATIENCE_S,
        )
        try:
            circuit = self.breakers.circuit(work.url, kind)
            done: Guarded = self.driver.run(carry_out(circuit, call, work))
        except RetriesExhaustedError as error:
            failure = failure_to_raise(error)
        else:
            return done
        finally:
            work.close()
            # A background thread may be gone before anybody could let its helper go.
            self.driver.close()
        # Outside the handler, which would make its own error this one's context.
        raise failure

    def save(self, work: Work) -> None:
        """Save a checkpoint, or spool it; it raises what ``run`` raises."""
        spooling = self.spooling
        if spooling is None or not may_be_spooled(work.url):
            with self.retaining.writing(work.url):
                done = self.run("save", work, kind="write")
            self.tell(work.url, done, step=work.step)
            return
        spooling.divert(work)
        with spooling.saving(work.url):
            with self.retaining.writing(work.url) as ending:
                done = self.run("save", work, kind="write")
                if is_spooled(detail_of("save", done)):
                    ending.stage = Stage.SPOOLED
            # Order: while an older one of that path is still held back.
            if ending.stage is Stage.VERIFIED:
                self.saved(work.url, done, step=work.step)
        spooling.reconsider()

    def saved(self, url: str, done: Guarded, *, step: int | None = None) -> None:
        """Report a checkpoint that is in storage, and let go an older one that waits for it."""
        if self.spooling is not None:
            self.spooling.saved(url)
        self.tell(url, done, step=step)

    def question(self, url: str) -> Work:
        """Return the question whether a checkpoint exists, in storage or on this node."""
        spooling, storage = self.spooling, self.storage
        if spooling is None:
            return Asked(storage, url, partial(storage.exists, url))

        def ask(token: CancelToken) -> bool:
            return spooling.holds(url) or storage.exists(url, token)

        return Asked(storage, url, ask, instead=partial(spooling.is_known, url))

    def tell(self, url: str, done: Guarded, *, step: int | None = None) -> None:
        """Report a checkpoint that was saved: its step and its size, where those are known."""
        if self.on_saved is not None and step is not None:
            self.on_saved(step)
        if done.value is not None:
            self.driver.sink.emit(
                CheckpointPublished(
                    path=redacted(url),
                    size_bytes=done.value.size_bytes,
                    digest=done.value.digest,
                    attempts=done.attempts,
                    elapsed_s=done.elapsed_s,
                )
            )

    def guarded_filesystem(self, url: str) -> AbstractFileSystem:
        """Return a filesystem whose every operation is guarded."""
        return guarded(self.storage.place(url).fs, run=self._run_operation)

    def _run_operation(  # noqa: PLR0917 - called as a Runner
        self, fs: AbstractFileSystem, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        url = path if "file" in protocols(fs) else str(fs.unstrip_protocol(path))
        asked = Operation(self.storage, url, work, fs=fs)
        value: T = self.run(operation, asked, kind=operation_class(operation)).value
        return value

    def reports(self, *, hurry: bool = False) -> dict[str, BreakerReport]:
        """Return what this rank knows of every breaker; see ``Breakers.reports``."""
        return self.breakers.reports(hurry=hurry)


def enlisted(member: Member, driver: Driver) -> Member:
    """Have a rank's name entered in the shared store; its first joint operation asks for that.

    Where the store is away now, that operation finds out what is to be done about it.
    """
    try:
        entered: Member = driver.run(enlist(member), hurry=True)
    except StoreUnavailableError:
        return member
    return entered
