# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One attempt in a simulated storage: stopped before each thing it does, so that any may go wrong.

An attempt that was abandoned keeps what it has not done yet, and may do it at any later instant,
beside its successor: that is what a call does that hangs in a thread. What keeps the two apart is
shipped: where ``core.pipeline`` asks, and what ``core.landings`` lets wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_resilience.core.carrying import carried_out
from lightning_resilience.core.landings import BEFORE_SENDING, Act, Request, blocks
from lightning_resilience.errors import CallTimeoutError, CheckpointError


if TYPE_CHECKING:
    from lightning_resilience.core.pipeline import Step, Steps


__all__ = [
    "FAILURES",
    "Attempt",
    "Hand",
    "Kind",
    "Op",
    "Pending",
    "question",
    "sending",
    "troubles",
]

FAILURES: Final = (OSError, CheckpointError, CallTimeoutError)
"""What an attempt may raise, and is begun again for."""


class Kind(str, Enum):
    """What an operation is to the storage."""

    ASK = "ask"
    """Nothing: the attempt looks whether it was abandoned."""
    SAY = "say"
    """Nothing: the attempt says that it is about to send."""
    WAIT = "wait"
    """Nothing: the attempt waits for others that are about the same name."""
    NODE = "node"
    """Something on the node."""
    QUESTION = "question"
    """A question: it changes nothing."""
    EFFECT = "effect"
    """A change: it may be carried out although its answer is lost."""


@dataclass(slots=True, kw_only=True)
class Op:
    """One thing that an attempt is about to do.

    Args:
        kind: What it is to the storage.
        what: It in words.
        run: Does it.
        may_be_dropped: Whether the storage may answer that it was done, and drop it.
        blocked: Tells whether it must wait.
    """

    kind: Kind
    what: str
    run: Callable[[], Any]
    may_be_dropped: bool = False
    blocked: Callable[[], bool] = bool


Ops: TypeAlias = Generator[Op, Any, Any]
Hand: TypeAlias = Callable[[Any], Ops]


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """A request that has not ended.

    Args:
        key: The name that it is about.
        attempt: Whose it is.
        is_removal: Whether it removes.
        is_sent: Whether it may have been sent.
    """

    key: str
    attempt: Attempt
    is_removal: bool
    is_sent: bool

    @property
    def request(self) -> Request:
        """What it is now."""
        return Request(
            key=self.key,
            is_removal=self.is_removal,
            is_sent=self.is_sent,
            is_abandoned=self.attempt.is_abandoned,
        )


class Attempt:
    """An order of steps on its way.

    Attributes:
        op: What it is about to do; None once it has ended.
        is_abandoned: Whether its caller has given up.
        value: What it has ended with.
        error: What it has raised.

    Args:
        name: Whose attempt it is, for the story.
        pending: Requests of this process that have not ended.
    """

    def __init__(self, name: str, pending: list[Pending]) -> None:
        self.name = name
        self.pending = pending
        self.is_abandoned = False
        self.op: Op | None = None
        self.value: Any = None
        self.error: Exception | None = None
        self._ops: Ops = _nothing()

    def begin(self, steps: Steps[Any], hands: Mapping[Step, Hand]) -> Attempt:
        """Come to the first thing to do."""
        return self.set_out(carried_out(steps, hands))

    def set_out(self, ops: Ops) -> Attempt:
        """Come to the first of some operations."""
        self._ops = ops
        self._resume(lambda: next(self._ops))
        return self

    def perform(self, how: str = "go") -> None:
        """Do what it is about to do, and come to the next.

        Args:
            how: ``go``; ``fail``, not carried out; ``lost``, carried out and raised all the same;
                ``drop``, not carried out and nothing raised.
        """
        op = self.op
        if op is None:
            return
        failure: Exception | None = (
            OSError(f"{how}: {op.what}") if how in {"fail", "lost"} else None
        )
        answer = None
        if how in {"go", "lost"}:
            try:
                answer = op.run()
            except FAILURES as error:
                failure = failure or error
        if failure is None:
            self._resume(lambda: self._ops.send(answer))
        else:
            self._resume(lambda: self._ops.throw(failure))

    def end(self) -> None:
        """Stop where it is: its process is gone."""
        self._ops.close()
        self.op = None

    def ask(self) -> None:
        """Raise where the caller has given up.

        Raises:
            CallTimeoutError: It has.
        """
        if self.is_abandoned:
            message = f"{self.name} was abandoned"
            raise CallTimeoutError(message)

    def _resume(self, proceed: Callable[[], Op]) -> None:
        self.op = None
        try:
            self.op = proceed()
        except StopIteration as end:
            self.value = end.value
        except FAILURES as error:
            self.error = error


def _nothing() -> Ops:
    yield from ()


def question(what: str, ask: Callable[[Any], Any]) -> Hand:
    """Return what carries a step out that is one question."""

    def hand(of: object) -> Ops:
        return (yield Op(kind=Kind.QUESTION, what=what, run=lambda: ask(of)))

    return hand


def sending(
    attempt: Attempt,
    key: str,
    effects: Callable[[], list[Callable[[], object]]],
    *,
    what: str,
    is_removal: bool = False,
    may_be_dropped: bool = False,
) -> Ops:
    """Send a request about a name: wait, say, ask, and only then send.

    Args:
        attempt: Whose it is.
        key: The name.
        effects: Tells, when it is sent, what the storage does one after the other.
        what: It in words.
        is_removal: Whether it removes.
        may_be_dropped: Whether the storage may drop it and say that it was done.
    """
    mine = Pending(key=key, attempt=attempt, is_removal=is_removal, is_sent=is_removal)

    def enter() -> None:
        attempt.ask()
        attempt.pending.append(mine)

    def is_blocked() -> bool:
        return any(blocks(each.request, mine.request) for each in attempt.pending)

    def say() -> None:
        mine.is_sent = True

    yield Op(kind=Kind.WAIT, what=f"wait to {what}", run=enter, blocked=is_blocked)
    try:
        for act in BEFORE_SENDING:
            if act is Act.SAY:
                yield Op(kind=Kind.SAY, what=f"say it will {what}", run=say)
            else:
                yield Op(kind=Kind.ASK, what=f"ask whether to {what}", run=attempt.ask)
        for effect in effects():
            yield Op(kind=Kind.EFFECT, what=what, run=effect, may_be_dropped=may_be_dropped)
    finally:
        attempt.pending.remove(mine)


def troubles(op: Op, *, is_blocked: bool) -> list[tuple[str, str]]:
    """Return what may go wrong before an operation, each with what of it there is a limit of.

    Args:
        op: The operation.
        is_blocked: Whether it must wait.
    """
    found = [("abandon", "faults")]
    if op.kind is Kind.EFFECT:
        found += [("crash", "crashes"), ("lost", "faults")]
    if op.kind in {Kind.EFFECT, Kind.QUESTION, Kind.NODE} and not is_blocked:
        found.append(("fail", "faults"))
    if op.may_be_dropped:
        found.append(("drop", "faults"))
    return found
