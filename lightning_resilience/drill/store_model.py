# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The shared store of a simulated world: exact semantics, one slow thread, and a way that loses.

What an operation does is what ``core.cells`` says, as in every store. Around it is what makes a
real one hard: its server is one thread with a queue; a request can be lost, or come late, after its
client has given up on it; an answer can be lost, after the operation was performed; hosts can be
cut off; the server can be gone, and come back with what it had or with nothing. Keys never expire.

An operation is performed when it reaches the server, in the order of arrival; the queue before its
thread delays the answer. A client waits ``timeout_s`` for that and is then told
``StoreUnavailableError``, whatever has become of its request. One whose connection the server has
closed, because it is gone, is told so at once, unless it is cut off: then it hears nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from lightning_resilience.core.cells import Cells
from lightning_resilience.errors import StoreError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.drill.observer import Observers
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.scenario import Store
    from lightning_resilience.drill.virtual import Agenda, SeededDice
    from lightning_resilience.protocols.effects import StoreEffect


__all__ = ["StoreModel", "Watch"]

_NEVER_S: Final = float("-inf")


class _Sent(NamedTuple):
    """A request on its way; its ``answer`` is None where its client will have given up."""

    process: Process
    effect: StoreEffect
    answer: Callable[[Any], None] | None
    timeout_s: float
    gives_up_at_s: float
    life: int


@dataclass(slots=True, eq=False)
class Watch:
    """A client that waits for a key, at the server.

    Args:
        process: The client.
        key: What it waits for.
        answer: Is told True, or an error; nothing once ``is_over``.
    """

    process: Process
    key: str
    answer: Callable[[Any], None]
    is_over: bool = False
    value: Any = None


class StoreModel:
    """The store's server, and the network before it.

    Args:
        agenda: The virtual clock.
        config: Times, and what gets lost.
        dice: Decide what gets lost.
        observers: Are told of every write and read.

    Attributes:
        cells: What it holds.
        is_gone: Whether its server is away.
        operations: Operations that it has performed.
        longest_queue_s: Longest time that an operation waited for its thread, in seconds.
    """

    def __init__(
        self, agenda: Agenda, config: Store, *, dice: SeededDice, observers: Observers
    ) -> None:
        self.cells = Cells()
        self.is_gone = False
        self.operations = 0
        self.longest_queue_s = 0.0
        self._agenda = agenda
        self._config = config
        self._is_lossy = bool(config.lost_requests or config.lost_answers or config.late_requests)
        self._chance = dice.random.random
        self.observers = observers
        self._free_at_s = 0.0
        # How many faults keep it away, and what it is to have when the last of them is over.
        self._absences = 0
        self._has_lost_all = False
        # Requests that were under way to a server which has gone since are refused.
        self._lives = 0
        self._went_at_s = _NEVER_S
        self._watches: dict[str, dict[Watch, None]] = {}

    # --- what clients do -----------------------------------------------------------------------

    def send(
        self,
        process: Process,
        effect: StoreEffect,
        answer: Callable[[Any], None],
        *,
        timeout_s: float,
    ) -> None:
        """Send an operation.

        Args:
            process: The client.
            effect: The operation; not ``WaitFor``.
            answer: Takes the result, once, in the client's time; errors are handed in.
            timeout_s: How long the client waits, in seconds of the virtual clock.
        """
        now_s = self._agenda.now_s
        sent = _Sent(process, effect, answer, timeout_s, now_s + timeout_s, self._lives)
        if process.host.is_cut_off(now_s):
            self._let_wait(sent)
            return
        if self.is_gone:
            back_at_s = now_s + 2 * self._config.latency_s
            self._agenda.at(min(back_at_s, sent.gives_up_at_s), answer, _refused(effect))
            return
        late_s: float | None = 0.0
        is_answered = True
        if self._is_lossy:
            late_s, is_answered = self._luck()
        if late_s is None:
            self._let_wait(sent)
            return
        arrives_at_s = now_s + self._config.latency_s + late_s
        if not is_answered or arrives_at_s >= sent.gives_up_at_s:
            self._let_wait(sent)
            sent = sent._replace(answer=None)
        self._agenda.at(arrives_at_s, self._arrive, sent)

    def _let_wait(self, sent: _Sent) -> None:
        """Let a client hear nothing until it gives up."""
        if sent.answer is not None:
            self._agenda.at(sent.gives_up_at_s, sent.answer, _unanswered(sent))

    def watch(self, process: Process, key: str, answer: Callable[[Any], None]) -> Watch:
        """Wait for a key at the server, for as long as it takes; ``answer`` is told True.

        Its message is never lost: a connection that is not answered is tried again.

        Returns:
            The wait, to be ended with ``forget`` by who is interested no longer.
        """
        watch = Watch(process, key, answer)
        self._agenda.after(self._config.latency_s, self._begin_watch, (watch, self._lives))
        return watch

    def forget(self, watch: Watch) -> None:
        """End a wait: its connection is closed, and its client is told nothing more."""
        watch.is_over = True
        waiting = self._watches.get(watch.key)
        if waiting is not None:
            waiting.pop(watch, None)
            if not waiting:
                del self._watches[watch.key]

    def _luck(self) -> tuple[float | None, bool]:
        config = self._config
        if self._chance() < config.lost_requests:
            return None, False
        late_s = 0.0
        if self._chance() < config.late_requests:
            late_s = config.late_s * self._chance()
        return late_s, self._chance() >= config.lost_answers

    # --- what the server does ------------------------------------------------------------------

    def _arrive(self, sent: _Sent) -> None:
        if sent.life != self._lives:
            self._refuse(sent)
            return
        answered_at_s = self._take_a_turn() + self._config.latency_s
        value = self.perform(sent.process, sent.effect)
        if sent.answer is None:
            return
        if answered_at_s >= sent.gives_up_at_s:
            self._let_wait(sent)
        else:
            self._agenda.at(answered_at_s, self._return, (sent, value))

    def _return(self, answered: tuple[_Sent, Any]) -> None:
        sent, value = answered
        if sent.process.host.is_cut_off(self._agenda.now_s):
            self._let_wait(sent)
        elif sent.life != self._lives and self._went_at_s <= self._sent_back_at_s():
            # It was performed, but its server went before it could say so.
            self._refuse(sent)
        elif sent.answer is not None:
            sent.answer(value)

    def _sent_back_at_s(self) -> float:
        return self._agenda.now_s - self._config.latency_s

    def _refuse(self, sent: _Sent) -> None:
        if sent.process.host.is_cut_off(self._agenda.now_s):
            self._let_wait(sent)
        elif sent.answer is not None:
            sent.answer(_refused(sent.effect))

    def _take_a_turn(self) -> float:
        """Return when the server's thread has done with what has just come."""
        now_s = self._agenda.now_s
        begins_at_s = max(now_s, self._free_at_s)
        self.longest_queue_s = max(self.longest_queue_s, begins_at_s - now_s)
        self._free_at_s = begins_at_s + self._config.service_s
        return self._free_at_s

    def perform(self, process: Process, effect: StoreEffect) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Perform an operation now.

        Returns:
            Its result, or the error with which the store answers it.
        """
        self.operations += 1
        return self._PERFORM[type(effect)](self, process, effect)

    def _get(self, process: Process, effect: fx.Get) -> bytes | None:
        for read in self.observers.read:
            read(self._agenda.now_s, process, effect.key)
        return self.cells.get(effect.key)

    def _multi_get(self, process: Process, effect: fx.MultiGet) -> list[bytes | None]:
        for read in self.observers.read if effect.keys else ():
            read(self._agenda.now_s, process, effect.keys[0])
            if len(effect.keys) > 1:
                read(self._agenda.now_s, process, effect.keys[-1])
        return self.cells.multi_get(effect.keys)

    def _set(self, process: Process, effect: fx.Set) -> None:
        before = self.cells.values.get(effect.key)
        self.cells.set(effect.key, effect.value)
        self._has_changed(process, effect.key, before)

    def _delete(self, process: Process, effect: fx.Delete) -> bool:
        before = self.cells.values.get(effect.key)
        existed = self.cells.delete(effect.key)
        if existed:
            self._has_changed(process, effect.key, before)
        return existed

    def _compare_and_set(self, process: Process, effect: fx.CompareAndSet) -> bytes:
        before = self.cells.values.get(effect.key)
        returned = self.cells.compare_and_set(effect.key, effect.expected, effect.desired)
        if self.cells.values.get(effect.key) != before:
            self._has_changed(process, effect.key, before)
        return returned

    def _add(self, process: Process, effect: fx.Add) -> int | StoreError:
        before = self.cells.values.get(effect.key)
        try:
            total = self.cells.add(effect.key, effect.amount)
        except StoreError as error:
            return error
        self._has_changed(process, effect.key, before)
        return total

    _PERFORM: ClassVar[dict[type, Callable[..., Any]]] = {
        fx.Get: _get,
        fx.MultiGet: _multi_get,
        fx.Set: _set,
        fx.Delete: _delete,
        fx.CompareAndSet: _compare_and_set,
        fx.Add: _add,
    }

    def _has_changed(self, process: Process, key: str, before: bytes | None) -> None:
        now_s = self._agenda.now_s
        for wrote in self.observers.wrote:
            wrote(now_s, process, key, before=before)
        for watch in self._watches.pop(key, ()):
            self._free_at_s = max(self._free_at_s, now_s) + self._config.service_s
            self._agenda.at(self._free_at_s + self._config.latency_s, self._wake, watch)

    def _begin_watch(self, request: tuple[Watch, int]) -> None:
        watch, life = request
        if watch.is_over:
            return
        host = watch.process.host
        if host.is_cut_off(self._agenda.now_s):
            # A connection that is not answered is tried again: it waits once the way is free.
            self._agenda.at(host.cut_off_until_s, self._begin_watch, request)
        elif self.is_gone or life != self._lives:
            self._agenda.after(self._config.latency_s, self._refuse_watch, watch)
        else:
            answered_at_s = self._take_a_turn() + self._config.latency_s
            if watch.key in self.cells.values:
                self._agenda.at(answered_at_s, self._wake, watch)
            else:
                self._watches.setdefault(watch.key, {})[watch] = None

    def _wake(self, watch: Watch) -> None:
        self._end_watch(watch, self._wake, value=True)

    def _refuse_watch(self, watch: Watch) -> None:
        self._end_watch(watch, self._refuse_watch, _refused(fx.WaitFor(watch.key, 0.0)))

    def _end_watch(self, watch: Watch, again: Callable[[Watch], None], value: Any) -> None:  # noqa: ANN401 - True, or an error
        host = watch.process.host
        if watch.is_over:
            return
        if host.is_cut_off(self._agenda.now_s):
            # It is sent again until the way is free.
            self._agenda.at(host.cut_off_until_s, again, watch)
        else:
            watch.is_over, watch.value = True, value
            watch.answer(value)

    # --- what happens to the server ------------------------------------------------------------

    def go(self) -> None:
        """Let the server be gone: whoever waits at it, or is under way, is refused."""
        self._absences += 1
        self.is_gone = True
        self._lives += 1
        self._went_at_s = self._free_at_s = self._agenda.now_s
        watches, self._watches = self._watches, {}
        for waiting in watches.values():
            for watch in waiting:
                self._agenda.after(self._config.latency_s, self._refuse_watch, watch)

    def come_back(self, *, empty: bool) -> None:
        """Let the server be back, with what it had or with nothing.

        Where several faults keep it away it is back after the last, and empty after any such.
        """
        self._absences -= 1
        self._has_lost_all = self._has_lost_all or empty
        if self._absences:
            return
        self.is_gone = False
        if self._has_lost_all:
            self._has_lost_all = False
            self.cells.values.clear()
            for emptied in self.observers.emptied:
                emptied(self._agenda.now_s)


def _refused(effect: StoreEffect) -> StoreUnavailableError:
    text = f"{type(effect).__name__} was refused: the store's server is gone"
    return StoreUnavailableError(text, is_refused=True)


def _unanswered(sent: _Sent) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{type(sent.effect).__name__} was not answered within {sent.timeout_s:.3g} s"
    )
