# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A driver for tests: several protocols, one virtual clock, one store, faults at will.

Store operations take about a millisecond of virtual time, a little different each time, so that
protocols interleave; the order depends on the seed alone. A fault may strike any effect of any
task: see ``Crash`` and its siblings.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_resilience.core.moved import Moved
from lightning_resilience.errors import CallTimeoutError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx


if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from lightning_resilience.core.events import Event
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = [
    "STORE_EFFECTS",
    "Away",
    "Crash",
    "Fault",
    "Interrupt",
    "Lost",
    "Pause",
    "Striking",
    "Task",
    "World",
    "run",
]

STORE_EFFECTS = (fx.Get, fx.MultiGet, fx.Set, fx.Delete, fx.CompareAndSet, fx.Add, fx.WaitFor)


@dataclass(frozen=True)
class Crash:
    """The process dies before it performs the effect."""


@dataclass(frozen=True)
class Lost:
    """The store performs the effect; its answer never comes."""


@dataclass(frozen=True)
class Away:
    """The store does not perform the effect, and does not answer; or its host says it is gone."""

    is_refused: bool = False


@dataclass(frozen=True)
class Interrupt:
    """The effect is not performed; this is thrown in instead."""

    error: BaseException


@dataclass(frozen=True)
class Pause:
    """The effect is performed; then the whole process is frozen for ``for_s`` seconds."""

    for_s: float


Fault: TypeAlias = Crash | Lost | Away | Interrupt | Pause

Striking: TypeAlias = "Callable[[Task, int, Effect], Fault | None]"
"""Which fault, if any, strikes a task's effect of this index."""


class Token:
    """A cancel token with which work says how long it takes."""

    def __init__(self) -> None:
        self.cancelled = False
        self.spent_s = 0.0
        self.moved = Moved()

    def spend(self, duration_s: float) -> None:
        """Let the work take ``duration_s`` seconds more, without a sign of progress."""
        self.spent_s += duration_s

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Count bytes only: for time, use ``spend`` with less than the timeout instead."""
        self.moved = self.moved.plus(written=written, sent=sent, read=read)

    def raise_if_cancelled(self) -> None:
        """Raise once the call was abandoned."""
        if self.cancelled:
            raise CallTimeoutError("abandoned")


@dataclass(eq=False)
class Task:
    """One protocol under way, as one process."""

    name: int
    protocol: Generator[Effect, Any, Any]
    performed: list[Effect] = field(default_factory=list)
    events: list[tuple[float, Event]] = field(default_factory=list)
    result: Any = None
    error: BaseException | None = None
    ended_at_s: float | None = None
    crashed: bool = False
    frozen_until_s: float = 0.0

    @property
    def ended(self) -> bool:
        """True once it has returned, raised or crashed."""
        return self.ended_at_s is not None

    def emitted(self, kind: type[Event]) -> list[Any]:
        """The events of one kind, in order."""
        return [event for _, event in self.events if isinstance(event, kind)]

    def store_operations(self) -> int:
        """How many operations reached for the store so far."""
        return sum(isinstance(effect, STORE_EFFECTS) for effect in self.performed)


def _no_fault(_task: Task, _index: int, _effect: Effect) -> Fault | None:
    return None


class World:
    """The virtual clock, the store, and the tasks.

    Args:
        seed: Decides draws, and in which order tasks reach the store.
        fault: Called before each effect with the task, the effect's index in it and the effect.
        skew: Offset of each task's clock, from its name.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        fault: Striking = _no_fault,
        skew: Callable[[int], float] = lambda name: 1000.0 * name,
    ) -> None:
        self.now_s = 0.0
        self.values: dict[str, bytes] = {}
        self.most_keys = 0
        self.fault = fault
        self.tasks: list[Task] = []
        self._skew = skew
        self._random = random.Random(seed)
        self._nonces = 0
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._entries = 0
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def spawn(self, protocol: Protocol[Any], *, name: int = 0, at_s: float | None = None) -> Task:
        """Start a protocol, now or at ``at_s``."""
        task = Task(name=name, protocol=protocol)
        self.tasks.append(task)
        start = partial(self._advance, task, partial(protocol.send, None))
        self.at(self.now_s if at_s is None else at_s, start)
        return task

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        """Do something at an instant of the virtual clock."""
        self._entries += 1
        heapq.heappush(self._agenda, (when_s, self._entries, action))

    def run(self, *, limit_s: float = 10_000.0, most_effects: int = 100_000) -> None:
        """Run until all tasks have ended.

        Fails where they have not by ``limit_s`` of virtual time, or loop without letting any pass.
        """
        steps = 0
        while any(not task.ended for task in self.tasks):
            assert self._agenda, f"stuck at {self.now_s:.3f} s: {self._unfinished()}"
            when_s, _, action = heapq.heappop(self._agenda)
            assert when_s <= limit_s, f"not over at {limit_s:g} s: {self._unfinished()}"
            self.now_s = max(self.now_s, when_s)
            action()
            steps += 1
            assert steps <= most_effects, f"busy at {self.now_s:.3f} s: {self._unfinished()}"

    def run_until(self, when_s: float) -> None:
        """Run what happens until ``when_s``, whether or not all tasks end."""
        while self._agenda and self._agenda[0][0] <= when_s:
            due_s, _, action = heapq.heappop(self._agenda)
            self.now_s = max(self.now_s, due_s)
            action()
        self.now_s = max(self.now_s, when_s)

    def _unfinished(self) -> str:
        return ", ".join(
            f"task {task.name} after {task.performed[-3:]}" for task in self.tasks if not task.ended
        )

    def _advance(self, task: Task, advance: Callable[[], Effect]) -> None:
        """Let a task run to its next effect, and see to that."""
        while not task.ended:
            try:
                effect = advance()
            except StopIteration as stop:
                self._end(task, result=stop.value)
                return
            except BaseException as error:  # noqa: BLE001 - a test looks at it
                self._end(task, error=error)
                return
            fault = self.fault(task, len(task.performed), effect)
            task.performed.append(effect)
            if isinstance(fault, Crash):
                task.crashed = True
                task.protocol.close()
                self._end(task)
            elif isinstance(fault, Interrupt):
                advance = partial(task.protocol.throw, fault.error)
            elif isinstance(effect, fx.Now | fx.Draw | fx.Nonce | fx.Emit) and fault is None:
                advance = partial(task.protocol.send, self._at_once(task, effect))
            else:
                self._schedule(task, effect, fault)
                return

    def _end(self, task: Task, *, result: Any = None, error: BaseException | None = None) -> None:
        task.result, task.error, task.ended_at_s = result, error, self.now_s

    def _at_once(self, task: Task, effect: Effect) -> Any:
        if isinstance(effect, fx.Now):
            return self.now_s + self._skew(task.name)
        if isinstance(effect, fx.Draw):
            return self._random.random()
        if isinstance(effect, fx.Nonce):
            self._nonces += 1
            return f"n{self._nonces}"
        assert isinstance(effect, fx.Emit)
        task.events.append((self.now_s, effect.event))
        return None

    def _schedule(self, task: Task, effect: Effect, fault: Fault | None) -> None:
        pause_s = fault.for_s if isinstance(fault, Pause) else 0.0
        if isinstance(fault, Pause) and isinstance(effect, fx.Call):
            # Its own beats stop at once; the work that it is about goes on elsewhere.
            task.frozen_until_s = self.now_s + pause_s

        def send(value: Any) -> None:
            resume = partial(self._advance, task, partial(task.protocol.send, value))
            self.at(self.now_s + pause_s, resume)

        def throw(error: BaseException) -> None:
            resume = partial(self._advance, task, partial(task.protocol.throw, error))
            self.at(self.now_s + pause_s, resume)

        if isinstance(effect, fx.Call):
            self._call(task, effect, send, throw)
        else:
            self._schedule_short(task, effect, fault, send, throw)

    def _schedule_short(
        self,
        task: Task,
        effect: Effect,
        fault: Fault | None,
        send: Callable[[Any], None],
        throw: Callable[[BaseException], None],
    ) -> None:
        if isinstance(effect, fx.Sleep):
            self.at(self.now_s + max(0.0, effect.duration_s), lambda: send(None))
        elif isinstance(effect, fx.WaitFor) and fault is None:
            self._wait(effect, send)
        elif isinstance(effect, fx.Local):
            self._locally(task, effect.effect, send)
        elif isinstance(effect, (fx.AtSite, *STORE_EFFECTS)):
            # Keys of a site are of no job, so all stores of a world may be one.
            asked = effect.effect if isinstance(effect, fx.AtSite) else effect
            answer = partial(self._answer, asked, fault, send, throw)
            self.at(self.now_s + self._latency_s(), answer)
        else:
            send(self._at_once(task, effect))

    def _locally(self, task: Task, effect: Any, send: Callable[[Any], None]) -> None:
        """Perform a store effect on the keys of this process alone: nothing strikes there."""
        prefix = f"own/{task.name}/"
        if isinstance(effect, fx.MultiGet):
            own: Any = fx.MultiGet(tuple(prefix + key for key in effect.keys))
        else:
            own = dataclasses.replace(effect, key=prefix + effect.key)
        if isinstance(own, fx.WaitFor):
            self._wait(own, send)
        else:
            send(self._perform(own))

    def _latency_s(self) -> float:
        return self._random.uniform(0.0005, 0.0015)

    def _answer(
        self,
        effect: Effect,
        fault: Fault | None,
        send: Callable[[Any], None],
        throw: Callable[[BaseException], None],
    ) -> None:
        value = None if isinstance(fault, Away) else self._perform(effect)
        if isinstance(fault, Away | Lost):
            is_refused = isinstance(fault, Away) and fault.is_refused
            text = f"no answer to {type(effect).__name__}"
            throw(StoreUnavailableError(text, is_refused=is_refused))
        else:
            send(value)

    def _perform(self, effect: Effect) -> Any:
        values = self.values
        performers: dict[type, Callable[[Any], Any]] = {
            fx.Get: lambda get: values.get(get.key),
            fx.MultiGet: lambda get: [values.get(key) for key in get.keys],
            fx.Set: lambda write: self._write(write.key, write.value),
            fx.Delete: lambda delete: values.pop(delete.key, None) is not None,
            fx.Add: lambda add: self._add(add.key, add.amount),
            fx.WaitFor: lambda wait: wait.key in values,
            fx.CompareAndSet: lambda cas: self.compare_and_set(cas.key, cas.expected, cas.desired),
        }
        return performers[type(effect)](effect)

    def _add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self._write(key, b"%d" % total)
        return total

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """The four cases of ``ports.SharedStore.compare_and_set``."""
        current = self.values.get(key)
        if current is None and expected:
            return expected
        if current is not None and current != expected:
            return current
        self._write(key, desired)
        return desired

    def _write(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self.most_keys = max(self.most_keys, len(self.values))
        for wake in self._waiting.pop(key, []):
            self.at(self.now_s + self._latency_s(), wake)

    def _wait(self, effect: fx.WaitFor, send: Callable[[Any], None]) -> None:
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered:
                answered = True
                send(effect.key in self.values)

        if effect.key in self.values:
            self.at(self.now_s + self._latency_s(), answer)
            return
        self._waiting.setdefault(effect.key, []).append(answer)
        self.at(self.now_s + max(0.0, effect.timeout_s), answer)

    def _call(
        self,
        task: Task,
        effect: fx.Call,
        send: Callable[[Any], None],
        throw: Callable[[BaseException], None],
    ) -> None:
        token = Token()
        finish: Callable[[], None]
        try:
            value = effect.work(token)
        except BaseException as error:  # noqa: BLE001 - it belongs to the protocol
            finish = partial(throw, error)
        else:
            finish = partial(send, value)
        lasts_s = token.spent_s
        if effect.timeout_s is not None and lasts_s > effect.timeout_s:
            lasts_s = effect.timeout_s
            token.cancelled = True
            late = CallTimeoutError(f"no progress for {lasts_s:g} s", moved=token.moved.told())
            finish = partial(throw, late)
        if effect.beat is not None:
            self._beat(effect.beat, until_s=self.now_s + lasts_s)
        if effect.renewal is not None:
            self._renew(task, effect.renewal, until_s=self.now_s + lasts_s)
        self.at(self.now_s + lasts_s, finish)

    def _renew(self, task: Task, renewal: fx.Renewal, *, until_s: float) -> None:
        """Renew a lease until the call ends, unless its process dies or stands still."""
        when_s = self.now_s + renewal.every_s
        if when_s >= until_s:
            return

        def renew() -> None:
            if task.ended or self.now_s < task.frozen_until_s:
                return
            self._nonces += 1
            effect = renewal.request(f"n{self._nonces}")
            if isinstance(effect, fx.Local):
                self._locally(task, effect.effect, renewal.answered)
            elif effect is not None:
                fault = self.fault(task, -1, effect)
                value: Any = None if isinstance(fault, Away) else self._perform(effect)
                if not isinstance(fault, Away | Lost):
                    renewal.answered(value)
            self._renew(task, renewal, until_s=until_s)

        self.at(when_s, renew)

    def _beat(self, beat: fx.Beat, *, until_s: float) -> None:
        when_s = self.now_s + beat.every_s
        while when_s < until_s:
            self._nonces += 1
            self.at(when_s, partial(self._write, beat.key, f"n{self._nonces}".encode()))
            when_s += beat.every_s


def run(protocol: Protocol[Any], world: World | None = None, *, name: int = 0) -> Any:
    """Run one protocol to its end, and return what it returns or raise what it raises."""
    world = world or World()
    task = world.spawn(protocol, name=name)
    world.run()
    if task.error is not None:
        raise task.error
    return task.result
