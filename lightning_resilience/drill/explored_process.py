# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One process of a small world: what it does is decided by what it was told, and by nothing else.

A protocol is deterministic in what it is sent. So a process *is* the list of what it was sent, and
two interleavings that have told a process the same have the same process in them. ``History`` is
such a list: a node in a tree of all that any interleaving tells the process. A generator cannot be
copied; a history's first continuation takes its generator along, and each further one runs the
program again from its start. That is done once for each history, however many interleavings share
it.

The process's clock is its own: it shows how long the process has waited and worked, whatever the
others did meanwhile. So the order in which the waits of several processes end is free, which is
what clocks with any offset and rate, and processes that are stopped for any time, come to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.events import ProbeStarted
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import effects as fx


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable

    from lightning_resilience.core.events import Event
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["Cast", "History", "Over"]

_DONE: Final = "done"


class _Stopped(KeyboardInterrupt):
    """Ctrl-C in a process of a small world; not one of whoever explores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """One process of a scene.

    Args:
        name: Its name, without dots: its nonces begin with it.
        program: Makes what it runs, from nothing that another run has touched.
        draw: What its dice show, in [0, 1).
        clock_s: What its clock shows at first, in seconds.
        ills: How many of its calls, the first ones, may find the dependency ill. Each of these is
            also explored as well.
        beats: How often it may beat in one call.
        call_s: How long its calls take, in seconds of its clock.
        unanswered_s: How long it waits for the store where that does not answer, in seconds.
        pause_s: How far its clock is on where it was stopped, in seconds.
    """

    name: str
    program: Callable[[], Protocol[Any]]
    draw: float = 0.5
    clock_s: float = 0.0
    ills: int = 0
    beats: int = 0
    call_s: float = 0.25
    unanswered_s: float = 0.5
    pause_s: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A process that has ended: what is left of it to be looked at.

    Args:
        name: Its name.
        how: ``ended``, ``interrupted`` or ``crashed``.
        probes: Epochs of the claims for which it has sent a probe.
        result: What it returned.
        error: What it raised, as text; empty where nothing.
    """

    name: str
    how: str
    probes: tuple[int, ...]
    result: Hashable = None
    error: str = ""


class _Run:
    """A program under way."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.program: Generator[Effect, Any, Any] = cast.program()
        self.clock_s = cast.clock_s
        self.pending: Effect | None = None
        self.call: fx.Call | None = None
        self.calls = 0
        self.beats = 0
        self.events: list[Event] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self._nonces = 0
        self._stopped: BaseException | None = None
        self._go_on(partial(self.program.send, None))

    def take(self, what: str, value: Any) -> None:  # noqa: ANN401 - whatever a store answers
        """Tell it what has come of what it waits for."""
        self.events = []
        if what == "pause":
            self.clock_s += self.cast.pause_s
        elif what == "interrupt":
            self.call = None
            self._stopped = _Stopped()
            self._go_on(partial(self.program.throw, self._stopped))
        elif self.call is None:
            self._take_answer(what, value)
        elif self.pending is self.call:
            self._take_from_call(self.call, what)
        else:
            self._take_answer_to_beat(self.call, what, value)

    def _take_answer(self, what: str, value: Any) -> None:  # noqa: ANN401 - whatever a store answers
        if what == "answered":
            sent = list(value) if isinstance(self.pending, fx.MultiGet) else value
            self._go_on(partial(self.program.send, sent))
        elif what == "waited":
            self.clock_s += _duration_s(self.pending)
            sent = False if isinstance(self.pending, fx.WaitFor) else None
            self._go_on(partial(self.program.send, sent))
        else:
            self.clock_s += self.cast.unanswered_s
            error = StoreUnavailableError(f"no answer to {self.pending}")
            self._go_on(partial(self.program.throw, error))

    def _take_answer_to_beat(self, call: fx.Call, what: str, value: Any) -> None:  # noqa: ANN401 - whatever a store answers
        if what != "answered":
            self.clock_s += self.cast.unanswered_s
        elif call.renewal is not None:
            call.renewal.answered(value)
        self.pending = call

    def _take_from_call(self, call: fx.Call, what: str) -> None:
        if what == "beat":
            self.beats += 1
            if call.renewal is not None:
                self.clock_s += call.renewal.every_s
                # Lost: there is nothing to renew any more, and the call goes on.
                self.pending = call.renewal.request(self._nonce()) or call
            elif call.beat is not None:
                self.clock_s += call.beat.every_s
                self.pending = fx.Set(call.beat.key, self._nonce().encode())
            return
        self.call = None
        self.clock_s += self.cast.call_s
        if what == "well":
            self._go_on(partial(self.program.send, _DONE))
        else:
            error = ConnectionResetError("the dependency is ill")
            self._go_on(partial(self.program.throw, error))

    def _go_on(self, advance: Callable[[], Effect]) -> None:
        """Run to the next effect that others, or time, have a part in."""
        while True:
            try:
                effect = advance()
            except StopIteration as stop:
                self.pending, self.result = None, stop.value
                return
            except BaseException as error:
                if not isinstance(error, Exception) and error is not self._stopped:
                    raise
                self.pending, self.error = None, error
                return
            at_once = self._AT_ONCE.get(type(effect))
            if at_once is not None:
                advance = partial(self.program.send, at_once(self, effect))
            elif isinstance(effect, fx.Sleep) and effect.duration_s <= 0:
                advance = partial(self.program.send, None)
            else:
                break
        self.pending = effect
        if isinstance(effect, fx.Call):
            self.call, self.beats = effect, 0
            self.calls += 1

    def _nonce(self) -> str:
        self._nonces += 1
        return f"{self.cast.name}.{self._nonces}"

    _AT_ONCE: Final[dict[type, Callable[[_Run, Any], Any]]] = {
        fx.Now: lambda run, _: run.clock_s,
        fx.Draw: lambda run, _: run.cast.draw,
        fx.Nonce: lambda run, _: run._nonce(),  # noqa: SLF001 - its own
        fx.Emit: lambda run, emit: run.events.append(emit.event),
    }


def _duration_s(effect: Effect | None) -> float:
    if isinstance(effect, fx.Sleep):
        return max(0.0, effect.duration_s)
    return effect.timeout_s if isinstance(effect, fx.WaitFor) else 0.0


class History:
    """What a process was told so far, and where that has led it.

    Args:
        cast: The process.

    Attributes:
        pending: What it waits for; None once it has ended.
        call: The call that it is in, also while it speaks to the store meanwhile.
        clock_s: What its clock shows.
        depth: Length of the list.
        events: What it has reported since it was told the last.
        probes: Epochs of the claims for which it has sent a probe.
        sights: For each key what it last read there, and since when it has read the same.
        told: The last that it was told: what, and the value.
        parent: All before that; None at the start.
    """

    __slots__ = (
        "_branches",
        "_claim",
        "_run",
        "beats",
        "call",
        "calls",
        "cast",
        "clock_s",
        "depth",
        "error",
        "events",
        "parent",
        "pending",
        "probes",
        "result",
        "sights",
        "told",
    )

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.parent: History | None = None
        self.told: tuple[str, Any] = ("", None)
        self.depth = 0
        self.probes: tuple[int, ...] = ()
        self.sights: dict[str, tuple[bytes | None, float]] = {}
        self._claim = 0
        self._branches: dict[tuple[str, Any], History] = {}
        self._run: _Run | None = None
        self.call: fx.Call | None = None
        self._note(_Run(cast))

    def told_next(self, what: str, value: Any = None) -> History:  # noqa: ANN401 - whatever a store answers
        """Return the history that is one entry longer.

        Args:
            what: ``answered``, ``unanswered``, ``waited``, ``well``, ``ill``, ``beat``, ``pause``
                or ``interrupt``.
            value: What the store returned; that of a ``MultiGet`` as a tuple.
        """
        entry = (what, value)
        known = self._branches.get(entry)
        if known is None:
            known = self._branches[entry] = self._longer(entry)
        return known

    def entries(self) -> list[tuple[str, Any]]:
        """Return all that it was told, in order."""
        found = []
        node: History = self
        while node.parent is not None:
            found.append(node.told)
            node = node.parent
        return found[::-1]

    @property
    def name(self) -> str:
        """The process's name."""
        return self.cast.name

    @property
    def elapsed_s(self) -> float:
        """What its clock has gone on since its start, in seconds."""
        return self.clock_s - self.cast.clock_s

    def waits_s(self) -> float:
        """Return how long what it waits for lasts, in seconds of its clock."""
        return self.cast.call_s if self.pending is self.call else _duration_s(self.pending)

    def over(self) -> Over:
        """Return what is left of it where it goes on no more: it has ended, or crashes here."""
        how, error = "ended", ""
        if self.pending is not None:
            how = "crashed"
        elif isinstance(self.error, _Stopped):
            how = "interrupted"
        elif self.error is not None:
            error = f"{type(self.error).__name__}: {self.error}"
        return Over(name=self.name, how=how, probes=self.probes, result=self.result, error=error)

    def _longer(self, entry: tuple[str, Any]) -> History:
        run, self._run = self._run, None
        if run is None:
            run = _Run(self.cast)
            for what, value in self.entries():
                run.take(what, value)
        longer = History.__new__(History)
        longer._follow(self, entry, run)  # noqa: SLF001 - its own kind
        return longer

    def _follow(self, parent: History, entry: tuple[str, Any], run: _Run) -> None:
        self.cast, self.parent, self.told = parent.cast, parent, entry
        self.depth = parent.depth + 1
        self.probes, self.sights = parent.probes, parent._sights_after(entry)
        self._claim = parent._claim
        self._branches = {}
        self.call = parent.call
        run.take(*entry)
        self._note(run)

    def _note(self, run: _Run) -> None:
        was_in_call = self.call is not None
        self._run = run
        self.pending, self.call = run.pending, run.call
        self.calls, self.beats = run.calls, run.beats
        self.clock_s, self.events = run.clock_s, tuple(run.events)
        self.result, self.error = run.result, run.error
        for event in self.events:
            if isinstance(event, ProbeStarted):
                self._claim = event.epoch
        if self.call is not None and self.call.is_leased and not was_in_call:
            self.probes = (*self.probes, self._claim)

    def _sights_after(self, entry: tuple[str, Any]) -> dict[str, tuple[bytes | None, float]]:
        what, value = entry
        effect = self.pending
        if what != "answered":
            return self.sights
        read: dict[str, bytes | None] = {}
        if isinstance(effect, fx.Get):
            read = {effect.key: value}
        elif isinstance(effect, fx.MultiGet):
            read = dict(zip(effect.keys, value, strict=True))
        elif isinstance(effect, fx.CompareAndSet):
            is_gone = value == effect.expected != effect.desired
            read = {effect.key: None if is_gone else value}
        changed = {
            key: (raw, self.clock_s)
            for key, raw in read.items()
            if key not in self.sights or self.sights[key][0] != raw
        }
        return {**self.sights, **changed} if changed else self.sights
