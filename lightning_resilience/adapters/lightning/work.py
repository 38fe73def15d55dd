# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is done for one checkpoint: attempts under a guard, with steps on the node around them.

One object is one save, load or question. The guard repeats its ``attempt``; what needs no storage,
such as writing a staged file in a format of the user's, comes before or after, once, and says
nothing about the health of the storage. An attempt that was abandoned may still be running: it
works on names of its own, and its token keeps it from publishing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.filesystem import renew_client
from lightning_resilience.core.carrying import carried_out
from lightning_resilience.core.fetching import Fetch, loading
from lightning_resilience.errors import CheckpointError
from lightning_resilience.protocols.diverted import OtherWay, guard_or_divert
from lightning_resilience.protocols.effects import Call, Now
from lightning_resilience.protocols.guard import Guarded, guard


if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.guard import GuardedCall


__all__ = [
    "Asked",
    "HandedOver",
    "Operation",
    "Passage",
    "Work",
    "carry_out",
    "detail_of",
    "hand_over",
]


class Work(ABC):
    """What is done for one checkpoint.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
    """

    marks_progress = True
    """Whether an attempt marks its progress; one that does not has ``deadline_s`` as a whole."""
    has_steps = False
    """Whether there is something to do on the node before or after the attempts."""
    is_guarded = True
    """Whether attempts are guarded; one that is not says nothing about the health of storage."""
    retry: RetryPolicy | None = None
    """How attempts are repeated, the same on every rank; None for as the job's others are."""
    instead: Callable[[str, CancelToken], Any] | None = None
    """What is done while storage is ill, given why; None to wait for it."""
    at_once = ""
    """Why ``instead`` is tried first; empty where it is not."""
    not_spooled = ""
    """Why it is never spooled; empty where it can be."""
    waits_because = ""
    """Why it has no other way, to be said where it meets an outage; empty where nothing is said."""
    step: int | None = None
    """Training step of the checkpoint that is saved; None where that is not known."""

    def __init__(self, storage: Storage, url: str) -> None:
        self.storage = storage
        self.url = url

    @property
    def needs_storage(self) -> bool:
        """Whether the storage has to be asked, once this is prepared."""
        return True

    def prepare(self, token: CancelToken) -> None:  # noqa: B027 - most have nothing to do
        """Do what comes before the attempts, once."""

    def give_up(self) -> None:  # noqa: B027 - most keep nobody waiting
        """Let others on this node try: no further attempt is made."""

    @abstractmethod
    def attempt(self, token: CancelToken) -> Any:
        """Do it, in one attempt of several."""

    def finish(self, value: Any, token: CancelToken) -> Any:
        """Make the result of what an attempt returned, once."""
        del token
        return value

    def confirm(self) -> None:  # noqa: B027 - most read what nobody changes
        """Raise where what was checked is not what ``finish`` has read."""

    def rebuild(self) -> None:
        """Make a fresh client, after credentials were refused."""
        self.storage.rebuild(self.url)

    def drop_caches(self) -> None:
        """Drop what is cached of the storage."""
        self.storage.drop_caches(self.url)

    def close(self) -> None:  # noqa: B027 - most leave nothing behind
        """Remove what is left behind on this node."""


class Asked(Work):
    """A question or a request to storage that is one function.

    Args:
        storage: Clients of storage.
        url: What it is about.
        ask: The function.
        retry: How it is repeated; None for as the job's others are.
        instead: What is done while storage is ill, given why; None to wait for it.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        ask: Callable[[CancelToken], Any],
        *,
        retry: RetryPolicy | None = None,
        instead: Callable[[str, CancelToken], Any] | None = None,
    ) -> None:
        super().__init__(storage, url)
        self.retry = retry
        self.instead = instead
        self._ask = ask

    def attempt(self, token: CancelToken) -> Any:
        """Ask."""
        return self._ask(token)


class Operation(Asked):
    """One operation of a filesystem that has a client of its own, which ``Storage`` knows not of.

    Args:
        storage: Clients of storage.
        url: What it is about.
        ask: The operation.
        fs: The filesystem.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        ask: Callable[[CancelToken], Any],
        *,
        fs: AbstractFileSystem,
    ) -> None:
        super().__init__(storage, url, ask)
        self._fs = fs

    def rebuild(self) -> None:
        """Let that client read its credentials anew."""
        renew_client(self._fs)

    def drop_caches(self) -> None:
        """Drop the caches of that filesystem."""
        self._fs.invalidate_cache()


class HandedOver(Work):
    """What is left to a ``CheckpointIO`` that passes it on, maybe later, to a guarded one.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
        pass_on: Calls that ``CheckpointIO``.
    """

    def __init__(self, storage: Storage, url: str, pass_on: Callable[[], Any]) -> None:
        super().__init__(storage, url)
        self._pass_on = pass_on

    def attempt(self, token: CancelToken) -> Any:
        """Pass it on."""
        token.raise_if_cancelled()
        return self._pass_on()


class Passage(Work):
    """Nothing at all, once the storage lets calls through: what is waited for is the gate."""

    is_guarded = False

    def attempt(self, token: CancelToken) -> None:
        """Be there."""
        del token


def carry_out(
    circuit: Circuit, call: GuardedCall, work: Work, *, started_at_s: float | None = None
) -> Protocol[Guarded]:
    """Do all of it: the steps on the node, and the attempts under the guard.

    Args:
        circuit: The breaker of the storage.
        call: The attempts.
        work: What they are attempts of.
        started_at_s: When the operation began, on this process's clock; None for now.
    """
    if not work.has_steps:
        return (yield from _attempts(circuit, call, work, started_at_s=started_at_s))
    done: Guarded = yield from carried_out(
        loading(),
        _hands(work, call, partial(_attempts, circuit, call, work, started_at_s=started_at_s)),
    )
    return done


def _hands(
    work: Work, call: GuardedCall, attempts: Callable[[], Protocol[Guarded]]
) -> dict[Fetch, Callable[[Any], Protocol[Any]]]:
    # What comes before and after cannot mark its progress: it is somebody else's code.
    timeout_s = call.policy.deadline_s

    def prepare(_: object) -> Protocol[bool]:
        yield Call(work.prepare, timeout_s=timeout_s)
        return work.needs_storage

    def give_up(_: object) -> Protocol[None]:
        work.give_up()
        yield from ()

    def confirm(_: object) -> Protocol[None]:
        work.confirm()
        yield from ()

    def finish(done: Guarded | None) -> Protocol[Guarded]:
        before = done or Guarded(value=None, attempts=0, elapsed_s=0.0)
        value = yield Call(partial(work.finish, before.value), timeout_s=timeout_s)
        return replace(before, value=value)

    return {
        Fetch.PREPARE: prepare,
        Fetch.ATTEMPTS: lambda _: attempts(),
        Fetch.GIVE_UP: give_up,
        Fetch.FINISH: finish,
        Fetch.CONFIRM: confirm,
    }


def _attempts(
    circuit: Circuit, call: GuardedCall, work: Work, *, started_at_s: float | None
) -> Protocol[Guarded]:
    instead = partial(_refuse, work.waits_because) if work.waits_because else work.instead
    if instead is None:
        return (yield from guard(circuit, call, started_at_s))
    policy = call.policy
    other = OtherWay(
        work=instead,
        # Somebody else's code marks no progress there either.
        timeout_s=policy.stall_timeout_s if work.marks_progress else policy.deadline_s,
        at_once=work.at_once,
    )
    return (yield from guard_or_divert(circuit, call, other, started_at_s=started_at_s))


def _refuse(why_it_waits: str, why: str, token: CancelToken) -> None:
    del why
    token.raise_if_cancelled()
    raise CheckpointError(why_it_waits)


def hand_over(work: Work, started_at_s: float) -> Protocol[Guarded]:
    """Do it without a guard and without a timeout: what is inside has both.

    Args:
        work: What is handed over.
        started_at_s: When the operation began, on this process's clock.
    """
    # In a thread all the same, so that this rank shows that it lives, and can be interrupted.
    value = yield Call(work.attempt, timeout_s=math.inf)
    now_s: float = yield Now()
    return Guarded(value=value, attempts=1, elapsed_s=now_s - started_at_s)


def detail_of(op: str, done: Guarded) -> str:
    """Return what the other ranks are told of the work of one: nothing of what it has loaded.

    Args:
        op: Name of the operation.
        done: How its work has ended.
    """
    value = None if op == "load" else done.value
    return "" if value is None else str(getattr(value, "digest", value))
