# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The other driver: thousands of the shipped protocols on one virtual clock.

The blocking driver (``runtime.driver``) performs effects on a real store; this one performs the
same effects in a world that a scenario and a seed decide. It holds no policy, as that one does not:
what is simulated is what ships, from the first byte of a record to the last decision.

A process goes on, effect by effect, until it asks for something that takes time; then the next
entry of the agenda happens. Between two effects a process can be killed, stopped or interrupted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.drill.call_model import LAST_WORDS_S, RunningCall
from lightning_resilience.drill.store_model import Watch
from lightning_resilience.errors import (
    DrillFailedError,
    ResilienceError,
    StoreError,
    StoreUnavailableError,
)
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.store_effects import STORE_OPERATIONS, store_performers


if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from lightning_resilience.core.events import Event
    from lightning_resilience.drill.observer import Observers
    from lightning_resilience.drill.process import Process, Strike
    from lightning_resilience.drill.storage_model import StorageModel
    from lightning_resilience.drill.store_model import StoreModel
    from lightning_resilience.drill.virtual import Agenda
    from lightning_resilience.protocols.effects import Effect, StoreEffect


__all__ = ["Simulator"]


class _Later:
    """What a handler returns whose result comes later."""


_LATER: Final = _Later()


class _Unperformed:
    """An effect that a process was about to ask for when it was stopped."""

    __slots__ = ("effect",)

    def __init__(self, effect: Effect) -> None:
        self.effect = effect


class Simulator:
    """Drives processes.

    Args:
        agenda: The virtual clock.
        store: The shared store.
        storage: The dependency.
        observers: Are told what processes do and report.
        store_timeout_s: How long a process waits for the store, in seconds of its clock.
        site: The store that several jobs share, where there is one.
        site_timeout_s: How long a process waits for that, in seconds of its clock.

    Attributes:
        living: Processes that have neither ended nor crashed.
        struck_until_s: When the last is over that has happened to a process, on the virtual clock.
    """

    def __init__(
        self,
        agenda: Agenda,
        *,
        store: StoreModel,
        storage: StorageModel,
        observers: Observers,
        store_timeout_s: float,
        site: StoreModel | None = None,
        site_timeout_s: float = 0.0,
    ) -> None:
        self.agenda = agenda
        self.store = store
        self.storage = storage
        self.living = 0
        self.struck_until_s = 0.0
        self._observers = observers
        self._store_timeout_s = store_timeout_s
        self._site, self._site_timeout_s = site, site_timeout_s
        self._handlers: dict[type, Callable[[Process, Any], Any]] = {
            fx.Now: lambda process, _effect: process.host.clock.read_s(agenda.now_s),
            fx.Draw: lambda process, _effect: process.dice.draw(),
            fx.Nonce: lambda process, _effect: process.dice.nonce(),
            fx.Emit: lambda process, effect: self.emit(process, effect.event),
            fx.Sleep: self._sleep,
            fx.Call: self._call,
            fx.WaitFor: self._wait_for,
            fx.Local: self._locally,
            fx.AtSite: self._ask_site,
            **dict.fromkeys(STORE_OPERATIONS, self._ask_store),
        }

    # --- what happens to processes -------------------------------------------------------------

    def start(self, process: Process, program: Generator[Effect, Any, Any]) -> None:
        """Let a process begin now."""
        process.program = program
        self.living += 1
        self._tell(process, "started")
        self._advance(process, program.send, None)

    def crash(self, process: Process) -> None:
        """Kill a process: nothing that it has not sent yet is ever sent."""
        if process.is_alive:
            self._has_struck(0.0)
            self._end(process, "crashed")
            process.program.close()

    def pause(self, process: Process, for_s: float) -> None:
        """Let a process stand still for ``for_s`` seconds of the virtual clock."""
        if process.is_alive and not process.is_paused:
            self._has_struck(for_s)
            process.is_paused, process.paused_at_s = True, self.agenda.now_s
            self._tell(process, f"paused for {for_s:.3f} s")
            self.agenda.after(for_s, self._wake, process)

    def interrupt(self, process: Process) -> None:
        """Throw what Ctrl-C throws into whatever a process waits for."""
        if not process.is_alive:
            return
        self._has_struck(0.0)
        self._tell(process, "is interrupted")
        process.hurries = True
        error = KeyboardInterrupt()
        if process.is_paused:
            process.inbox.insert(0, (process.turn, error))
        elif process.call is not None:
            process.call.interrupt(error)
        else:
            self._deliver(process, process.turn, error)

    def _has_struck(self, for_s: float) -> None:
        self.struck_until_s = max(self.struck_until_s, self.agenda.now_s + for_s)

    def _wake(self, process: Process) -> None:
        if not process.is_alive:
            return
        process.is_paused, process.woken_at_s = False, self.agenda.now_s
        self._tell(process, "woke")
        # Bounded: whatever is delivered now begins a new turn, for which nothing has come yet.
        waiting, process.inbox = process.inbox, []
        for turn, value in waiting:
            if isinstance(value, Watch):
                self._hear(process, turn, value)
            else:
                self._deliver(process, turn, value)
        if process.call is not None:
            process.call.woken()

    def _end(self, process: Process, state: str) -> None:
        process.state = state
        self.living -= 1
        process.turn += 1
        if process.call is not None:
            process.call.cancel(is_dead=True)
            process.call = None
        if process.watch is not None:
            self.store.forget(process.watch)
            process.watch = None
        self._tell(process, state)

    def _tell(self, process: Process, what: str) -> None:
        for changed in self._observers.changed:
            changed(self.agenda.now_s, process, what)

    def emit(self, process: Process, event: Event) -> None:
        """Report what a process reports."""
        for emitted in self._observers.emitted:
            emitted(self.agenda.now_s, process, event)

    # --- the loop ------------------------------------------------------------------------------

    def _deliver(self, process: Process, turn: int, value: Any) -> None:  # noqa: ANN401 - a result, or an error
        if process.turn != turn:
            return
        if process.is_paused:
            process.inbox.append((turn, value))
            return
        program = process.program
        if isinstance(value, _Unperformed):
            self._perform(process, value.effect)
        elif isinstance(value, BaseException):
            self._abandon_call(process)
            process.hurries = process.hurries or not isinstance(value, Exception)
            self._advance(process, program.throw, value)
        else:
            process.call = None
            self._advance(process, program.send, value)

    def _abandon_call(self, process: Process) -> None:
        if process.call is not None:
            process.call.cancel(is_dead=False)
            process.call = None

    def _advance(self, process: Process, send: Callable[[Any], Effect], value: Any) -> None:  # noqa: ANN401 - as above
        """Let a process go on until it asks for something that takes time.

        Bounded by the program: each turn advances it by one effect.
        """
        process.turn += 1
        program = process.program
        handlers = self._handlers
        try:
            while True:
                effect = send(value)
                process.effects += 1
                if process.strikes:
                    value = self._strike(process, effect)
                else:
                    value = handlers[type(effect)](process, effect)
                if value is _LATER:
                    return
                send = program.throw if isinstance(value, BaseException) else program.send
        except StopIteration:
            self._end(process, "ended")
        except (KeyboardInterrupt, SystemExit):
            self._end(process, "interrupted")
        except DrillFailedError:
            # Not of this process: a check has seen that a promise was not kept.
            raise
        except ResilienceError as error:
            # As an exception that nobody catches ends a rank. Any other one is a bug, and is seen.
            process.error = error
            self._end(process, "failed")

    def _perform(self, process: Process, effect: Effect) -> None:
        value = self._handlers[type(effect)](process, effect)
        if value is not _LATER:
            self._deliver(process, process.turn, value)

    def _strike(self, process: Process, effect: Effect) -> Any:  # noqa: ANN401 - as the effect, or what strikes
        due = [strike for at, strike in process.strikes if at <= process.effects]
        if not due:
            return self._handlers[type(effect)](process, effect)
        process.strikes = [left for left in process.strikes if left[1] is not due[0]]
        return self._hit(process, due[0], effect)

    def _hit(self, process: Process, strike: Strike, effect: Effect) -> KeyboardInterrupt | _Later:
        if strike.what == "crash":
            # The generator is running: it is closed once it has let go.
            self._has_struck(0.0)
            self.agenda.after(0.0, self._close, process.program)
            self._end(process, "crashed")
            return _LATER
        if strike.what == "interrupt":
            self._has_struck(0.0)
            self._tell(process, "is interrupted")
            process.hurries = True
            return KeyboardInterrupt()
        self.pause(process, strike.for_s)
        process.inbox.append((process.turn, _Unperformed(effect)))
        return _LATER

    @staticmethod
    def _close(program: Generator[Effect, Any, Any]) -> None:
        program.close()

    # --- effects that take time ----------------------------------------------------------------

    def _sleep(self, process: Process, effect: fx.Sleep) -> _Later:
        lasts_s = process.host.clock.lasts_s(effect.duration_s)
        self.agenda.after(lasts_s, partial(self._deliver, process, process.turn))
        return _LATER

    def _timeout_s(self, process: Process) -> float:
        timeout_s = self._store_timeout_s
        if process.hurries:
            timeout_s = min(timeout_s, LAST_WORDS_S)
        return process.host.clock.lasts_s(timeout_s)

    def _ask_store(self, process: Process, effect: StoreEffect) -> _Later:
        self.send(process, effect, partial(self._deliver, process, process.turn))
        return _LATER

    def _ask_site(self, process: Process, effect: fx.AtSite) -> Any:  # noqa: ANN401 - an error, or later
        if self._site is None:
            return StoreUnavailableError("this world has no site")
        timeout_s = process.host.clock.lasts_s(self._site_timeout_s)
        answer = partial(self._deliver, process, process.turn)
        self._site.send(process, effect.effect, answer, timeout_s=timeout_s)
        return _LATER

    def send(self, process: Process, effect: StoreEffect, answer: Callable[[Any], None]) -> None:
        """Send an operation to the store on a process's behalf."""
        process.store_operations += 1
        self.store.send(process, effect, answer, timeout_s=self._timeout_s(process))

    def _wait_for(self, process: Process, effect: fx.WaitFor) -> Any:  # noqa: ANN401 - True, False, an error, or later
        watch = process.watch
        if watch is None or watch.key != effect.key:
            if watch is not None:
                self.store.forget(watch)
            process.store_operations += 1
            rang = partial(self._rang, process)
            watch = process.watch = self.store.watch(process, effect.key, rang)
        if effect.timeout_s <= 0:
            return False
        if watch.is_over:
            # It rang, or broke, while nobody was waiting.
            process.watch = None
            return watch.value
        process.waiting_turn = process.turn
        lasts_s = process.host.clock.lasts_s(effect.timeout_s)
        self.agenda.after(lasts_s, partial(self._deliver, process, process.turn), value=False)
        return _LATER

    def _rang(self, process: Process, _value: object) -> None:
        watch = process.watch
        if watch is None or process.waiting_turn != process.turn:
            # It is heard when the process waits for this key again.
            return
        if process.is_paused:
            process.inbox.append((process.turn, watch))
        else:
            self._hear(process, process.turn, watch)

    def _hear(self, process: Process, turn: int, watch: Watch) -> None:
        if process.turn == turn:
            process.watch = None
            self._deliver(process, turn, watch.value)

    def _locally(self, process: Process, effect: fx.Local) -> Any:  # noqa: ANN401 - as the effect in it
        inner = effect.effect
        if not isinstance(inner, fx.WaitFor):
            return self.perform_own(process, inner)
        if inner.timeout_s <= 0:
            return False
        if inner.key in process.own.values:
            return True
        # Nobody else writes there, so nothing wakes it before its time is up.
        lasts_s = process.host.clock.lasts_s(inner.timeout_s)
        self.agenda.after(lasts_s, partial(self._deliver, process, process.turn), value=False)
        return _LATER

    def perform_own(self, process: Process, effect: StoreEffect) -> Any:  # noqa: ANN401 - whatever it returns, or the error
        """Perform an operation on a process's own store."""
        performers = process.on_its_own
        if not performers:
            performers.update(store_performers(process.own))
        try:
            return performers[type(effect)](effect)
        except StoreError as error:
            return error

    def _call(self, process: Process, effect: fx.Call) -> _Later:
        answer = partial(self._deliver, process, process.turn)
        process.call = RunningCall(self, process, effect, answer=answer)
        process.call.begin()
        return _LATER
