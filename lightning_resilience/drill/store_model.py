# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The shared store of a simulated world: exact semantics, one slow thread, and a way that loses.

What an operation does is what ``core.cells`` says, as in every store. Around it is what makes a
real one hard: its server is one thread with a queue; a request can be lost, or come late, after its
client has given up on it; an answer can be lost, after the operation was performed; hosts can be
cut off; the server can be gone, and come back with what it had or with nothing. Keys never expire.

A client waits ``timeout_s`` for an answer and is then told ``StoreUnavailableError``, whatever has
become of its request. One that a server refuses is told so at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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


@dataclass(slots=True)
class Watch:
    """A client that waits for a key, at the server."""

    process: Process
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
        # Requests that were under way to a server which has gone since are refused.
        self._lives = 0
        self._watches: dict[str, list[Watch]] = {}

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
        gives_up_at_s = now_s + timeout_s
        if self.is_gone:
            self._agenda.at(now_s + 2 * self._config.latency_s, answer, _refused(effect))
            return
        if process.host.is_cut_off(now_s):
            self._agenda.at(gives_up_at_s, answer, _unanswered(effect, timeout_s))
            return
        arrives_at_s = now_s + self._config.latency_s
        is_answered = True
        if self._is_lossy:
            late_s, is_answered = self._luck()
            if late_s is None:
                self._agenda.at(gives_up_at_s, answer, _unanswered(effect, timeout_s))
                return
            arrives_at_s += late_s
        request = (process, effect, answer if is_answered else None, gives_up_at_s, self._lives)
        if arrives_at_s >= gives_up_at_s or not is_answered:
            self._agenda.at(gives_up_at_s, answer, _unanswered(effect, timeout_s))
            request = (process, effect, None, gives_up_at_s, self._lives)
        self._agenda.at(arrives_at_s, self._arrive, request)

    def watch(self, process: Process, key: str, answer: Callable[[Any], None]) -> Watch:
        """Wait for a key at the server, for as long as it takes; ``answer`` is told True.

        Returns:
            The wait; whoever sets its ``is_over`` is told nothing more.
        """
        watch = Watch(process, answer)
        self._agenda.after(self._config.latency_s, self._begin_watch, (key, watch, self._lives))
        return watch

    def _luck(self) -> tuple[float | None, bool]:
        config = self._config
        if self._chance() < config.lost_requests:
            return None, False
        late_s = 0.0
        if self._chance() < config.late_requests:
            late_s = config.late_s * self._chance()
        return late_s, self._chance() >= config.lost_answers

    # --- what the server does ------------------------------------------------------------------

    def _arrive(
        self, request: tuple[Process, StoreEffect, Callable[[Any], None] | None, float, int]
    ) -> None:
        process, effect, answer, gives_up_at_s, life = request
        if life != self._lives:
            if answer is not None:
                answer(_refused(effect))
            return
        now_s = self._agenda.now_s
        began_at_s = max(now_s, self._free_at_s)
        self._free_at_s = began_at_s + self._config.service_s
        self.longest_queue_s = max(self.longest_queue_s, began_at_s - now_s)
        value = self.perform(process, effect)
        if answer is None:
            return
        answered_at_s = self._free_at_s + self._config.latency_s
        if answered_at_s >= gives_up_at_s or process.host.is_cut_off(answered_at_s):
            waited_s = gives_up_at_s - now_s + self._config.latency_s
            self._agenda.at(gives_up_at_s, answer, _unanswered(effect, waited_s))
        else:
            self._agenda.at(answered_at_s, answer, value)

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
        for read in self.observers.read:
            read(self._agenda.now_s, process, effect.keys[0])
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
        if self.cells.values.get(effect.key) is not before:
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

    def _begin_watch(self, request: tuple[str, Watch, int]) -> None:
        key, watch, life = request
        now_s = self._agenda.now_s
        if watch.is_over:
            return
        if self.is_gone or life != self._lives:
            self._end_watch(watch, _refused(fx.WaitFor(key, 0.0)))
        elif watch.process.host.is_cut_off(now_s):
            # A connection that is not answered is tried again: it waits once the way is free.
            self._agenda.at(watch.process.host.cut_off_until_s, self._begin_watch, request)
        elif key in self.cells.values:
            self._agenda.after(self._config.latency_s, self._wake, watch)
        else:
            self._watches.setdefault(key, []).append(watch)

    def _wake(self, watch: Watch) -> None:
        host = watch.process.host
        if host.is_cut_off(self._agenda.now_s) and not watch.is_over:
            # It is sent again until the way is free.
            self._agenda.at(host.cut_off_until_s, self._wake, watch)
        else:
            self._end_watch(watch, value=True)

    def _end_watch(self, watch: Watch, value: Any) -> None:  # noqa: ANN401 - True, or an error
        if not watch.is_over:
            watch.is_over, watch.value = True, value
            watch.answer(value)

    # --- what happens to the server ------------------------------------------------------------

    def go(self) -> None:
        """Let the server be gone: whoever waits at it, or is under way, is refused."""
        self.is_gone = True
        self._lives += 1
        watches, self._watches = self._watches, {}
        for key, waiting in watches.items():
            for watch in waiting:
                self._end_watch(watch, _refused(fx.WaitFor(key, 0.0)))

    def come_back(self, *, empty: bool) -> None:
        """Let the server be back, with what it had or with nothing."""
        self.is_gone = False
        if empty:
            self.cells.values.clear()
            for emptied in self.observers.emptied:
                emptied(self._agenda.now_s)


def _refused(effect: StoreEffect) -> StoreUnavailableError:
    return StoreUnavailableError(f"{type(effect).__name__} was refused: the store's server is gone")


def _unanswered(effect: StoreEffect, timeout_s: float) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{type(effect).__name__} was not answered within {timeout_s:.3g} s"
    )
