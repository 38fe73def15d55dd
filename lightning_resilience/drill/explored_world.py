# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A small world, state by state: what can happen next in it, and what comes of that.

A choice is one of

* a process's next store operation is performed and answered, on exact semantics (``core.cells``);
* a process's wait ends: its sleep, its wait for a key, or its call, well or ill. It may end however
  much the others have still to do, since each process has a clock of its own
  (``drill.explored_process``): a superset of what synchronous clocks would allow, so a promise that
  holds here needs no clock to be right;
* a fault: a process crashes, whatever it waits for; an operation is performed and not answered
  (``lost``); it is not performed and not answered (``away``); a process is stopped, and its clock
  goes on (``pause``); it is interrupted by Ctrl-C. A crash after an operation is a crash before
  whatever comes next, and a read that was not answered is one kind of fault, not two;
* the store comes back empty, once, where a scene allows it.

What is left out: time that passes *within* a store operation, but for a ``pause`` and for one that
is not answered; a server that is gone for a while; and faults of the kinds that a scene leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from lightning_resilience.core.cells import Cells
from lightning_resilience.drill.explored_process import History, Over
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.store_effects import STORE_OPERATIONS, store_performers


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_resilience.drill.explored_process import Cast
    from lightning_resilience.protocols.effects import Effect


__all__ = [
    "Check",
    "Choice",
    "EndCheck",
    "Scene",
    "State",
    "Step",
    "fair",
    "moves",
    "strikes",
    "taken",
]

STORE: Final = "store"
"""Who it is to whom it happens that the store comes back empty."""

# One store for all worlds, which is given the content of the one that it works on.
_CELLS: Final = Cells()
_PERFORM: Final = store_performers(_CELLS)
_READS: Final = (fx.Get, fx.MultiGet)
_FAULTS: Final = frozenset({"crash", "lost", "away", "pause", "interrupt"})


class Choice(NamedTuple):
    """What happens next: to whom, and what."""

    who: str
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The store and the processes.

    Args:
        values: The store's keys and values.
        processes: Each process, in the order of the scene.
        faults: Faults that may still strike.
        lives: How often the store has come back empty.
    """

    values: Mapping[str, bytes]
    processes: tuple[History | Over, ...]
    faults: int
    lives: int = 0

    def identity(self) -> tuple[object, ...]:
        """What two states have in common that are the same."""
        return (frozenset(self.values.items()), self.processes, self.faults, self.lives)

    def alive(self) -> Iterator[tuple[int, History]]:
        """The processes that go on, with their places."""
        for at, process in enumerate(self.processes):
            if isinstance(process, History):
                yield at, process


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A choice, and what has come of it.

    Args:
        before: The state before it.
        choice: The choice.
        after: The state after it.
        actor: The process that it happened to, as it was; None where it happened to the store.
    """

    before: State
    choice: Choice
    after: State
    actor: History | None


Check: TypeAlias = "Callable[[Step], str]"
"""Says what is broken after a step; empty where nothing is."""
EndCheck: TypeAlias = "Callable[[State], str]"
"""Says what is broken once all have ended; empty where nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A small world, and how far it is explored.

    Args:
        name: What it is about.
        cast: The processes.
        values: The store's content at first.
        depth: Choices up to which all are taken.
        faults: Kinds of faults that may strike: ``crash``, ``lost``, ``away``, ``pause``,
            ``interrupt``.
        most_faults: Faults in one sequence.
        may_be_emptied: Whether the store may come back empty, once, besides the faults.
        checks: What must hold after every step.
        end_checks: What must hold once all have ended.
        newcomer: Who comes then, and must get through; None where nobody does.
        most_fair_steps: Steps in which all must have ended once nothing goes wrong any more.
    """

    name: str
    cast: tuple[Cast, ...]
    values: Mapping[str, bytes]
    depth: int
    faults: frozenset[str] = frozenset({"crash", "lost", "away"})
    most_faults: int = 1
    may_be_emptied: bool = False
    checks: tuple[Check, ...] = ()
    end_checks: tuple[EndCheck, ...] = ()
    newcomer: Cast | None = None
    most_fair_steps: int = 300

    def start(self) -> State:
        """Return the state in which nothing has happened."""
        processes = tuple(_settled(History(cast)) for cast in self.cast)
        return State(values=dict(self.values), processes=processes, faults=self.most_faults)


def _settled(process: History) -> History | Over:
    return process if process.pending is not None else process.over()


def moves(state: State) -> Iterator[Choice]:
    """What can happen next if nothing goes wrong."""
    for _, process in state.alive():
        pending = process.pending
        if isinstance(pending, fx.Call):
            yield Choice(process.name, "well")
            if process.calls <= process.cast.ills:
                yield Choice(process.name, "ill")
            beats = pending.renewal is not None or pending.beat is not None
            if beats and process.beats < process.cast.beats:
                yield Choice(process.name, "beat")
        elif isinstance(pending, STORE_OPERATIONS) or _is_there(pending, state.values):
            yield Choice(process.name, "answered")
        else:
            yield Choice(process.name, "waited")


def _is_there(pending: Effect | None, values: Mapping[str, bytes]) -> bool:
    return isinstance(pending, fx.WaitFor) and pending.key in values


def strikes(scene: Scene, state: State) -> Iterator[Choice]:
    """What can go wrong next."""
    if scene.may_be_emptied and not state.lives:
        yield Choice(STORE, "empty")
    if not state.faults:
        return
    for _, process in state.alive():
        kinds = {"crash", "pause", "interrupt"}
        if isinstance(process.pending, STORE_OPERATIONS):
            # A read that was not answered has changed nothing: one kind says it all.
            kinds |= {"away"} if isinstance(process.pending, _READS) else {"away", "lost"}
        elif isinstance(process.pending, fx.WaitFor):
            kinds |= {"away"}
        for what in sorted(kinds & scene.faults):
            yield Choice(process.name, what)


def fair(state: State) -> Choice | None:
    """What happens next where nothing goes wrong and everybody gets a turn.

    Whoever has something to do does it, the one that has done least first; where nobody has, that
    wait ends which ends first.
    """
    waiting, busy = [], []
    for at, process in state.alive():
        pending = process.pending
        if isinstance(pending, STORE_OPERATIONS) or _is_there(pending, state.values):
            busy.append((process.depth, at, process))
        else:
            waiting.append((process.elapsed_s + process.waits_s(), at, process))
    if busy:
        return Choice(min(busy)[2].name, "answered")
    if not waiting:
        return None
    process = min(waiting)[2]
    return Choice(process.name, "well" if process.pending is process.call else "waited")


def taken(state: State, choice: Choice) -> Step:
    """Take a choice.

    Args:
        state: The state before it.
        choice: To whom, and what; one that can be taken there.
    """
    who, what = choice
    if who == STORE:
        after = State(values={}, processes=state.processes, faults=state.faults, lives=1)
        return Step(before=state, choice=choice, after=after, actor=None)
    at, process = next(each for each in state.alive() if each[1].cast.name == who)
    values, then = _outcome(state.values, process, what)
    processes = (*state.processes[:at], then, *state.processes[at + 1 :])
    faults = state.faults - (what in _FAULTS)
    after = State(values=values, processes=processes, faults=faults, lives=state.lives)
    return Step(before=state, choice=choice, after=after, actor=process)


def _outcome(
    values: Mapping[str, bytes], process: History, what: str
) -> tuple[Mapping[str, bytes], History | Over]:
    if what == "crash":
        return values, process.over()
    if what not in {"answered", "lost", "away"}:
        return values, _settled(process.told_next(what))
    if what == "away":
        return values, _settled(process.told_next("unanswered"))
    values, value = _performed(values, process.pending)
    if what == "lost":
        return values, _settled(process.told_next("unanswered"))
    return values, _settled(process.told_next("answered", value))


def _performed(values: Mapping[str, bytes], effect: Any) -> tuple[Mapping[str, bytes], Any]:  # noqa: ANN401 - whatever a store answers
    if isinstance(effect, fx.WaitFor):
        return values, effect.key in values
    before = _CELLS.values = dict(values)
    value = _PERFORM[type(effect)](effect)
    if isinstance(effect, fx.MultiGet):
        value = tuple(value)
    return (values if before == values else before), value
