# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of a few processes, with a fault at any point: what chance would not hit.

The explorer drives the shipped protocols, as the simulator does, but leaves nothing to chance: in
each state it takes every choice. A choice is one of

* a process's next store operation is performed and answered, on exact semantics (``core.cells``);
* a process's wait ends: its sleep, its wait for a key, or its call, well or ill. It may end however
  much the others have still to do, since each process has a clock of its own
  (``drill.explored_process``): a superset of what synchronous clocks would allow, so a promise that
  holds here needs no clock to be right. What it leaves out is a wait's end in the same instant as
  another thing, and time that passes *within* a store operation, but for a ``pause``;
* a fault, ``most_faults`` times in all: a process crashes, whatever it waits for; an operation is
  performed and not answered (``lost``); it is not performed and not answered (``away``); a process
  is stopped, and its clock goes on (``pause``); it is interrupted by Ctrl-C. A crash after an
  operation is a crash before whatever comes next;
* the store comes back empty, once, where a scene allows it.

Two choices that lead to the same store, with every process told the same, lead to the same state,
which is continued once. Each choice adds one entry to one process, or uses up one fault: so all
sequences that lead to a state are equally long, and none is left out.

Up to ``depth`` every choice is taken. From there on, and from every shorter end, everybody goes on
fairly and without faults until all have ended; then a newcomer comes and must get through, which
says that nothing was left behind that bars the way. Promises are checked after every step of all
this, from outside: in the store, and in what processes send.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from lightning_resilience.core.cells import Cells
from lightning_resilience.drill.explored_process import History, Over
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.store_effects import STORE_OPERATIONS, store_performers


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lightning_resilience.drill.explored_process import Cast
    from lightning_resilience.protocols.effects import Effect


__all__ = ["Choice", "Failure", "Report", "Scene", "State", "Step", "explore", "replay"]

STORE: Final = "store"
"""Who it is to whom it happens that the store comes back empty."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A promise that is broken, and how to see it again.

    Args:
        scene: Name of the scene.
        complaint: What is broken.
        choices: The choices that lead there; ``replay`` takes them.
    """

    scene: str
    complaint: str
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        """The complaint, and the choices as Python text."""
        listed = ", ".join(f"({choice.who!r}, {choice.what!r})" for choice in self.choices)
        return f"{self.scene}: {self.complaint}\nchoices = [{listed}]"


@dataclass(slots=True, kw_only=True)
class Report:
    """What an exploration has covered.

    Args:
        scene: Name of the scene.
        states: Different states that were seen up to the depth.
        fair_states: Different states that were seen on the way to the end.
        steps: Choices that were taken.
        paths: Sequences of choices that these states stand for.
        ends: Different states in which all had ended.
        events: How many histories have reported each kind of event.
        choices: How often each kind of choice was taken.
        is_whole: Whether everything had ended before the depth was reached, so that nothing was cut
            off.
        failure: The first promise that was found broken, or None.
    """

    scene: str
    states: int = 0
    fair_states: int = 0
    steps: int = 0
    paths: int = 0
    ends: int = 0
    events: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    is_whole: bool = False
    failure: Failure | None = None

    def __str__(self) -> str:
        """The numbers in a line."""
        whole = "all" if self.is_whole else "cut off"
        return (
            f"{self.scene}: {self.states} states, {self.steps} steps, {self.paths} paths ({whole}), "
            f"{self.fair_states} states on the way to {self.ends} ends"
        )


class _BrokenError(Exception):
    """A complaint on its way up."""


_Trail: TypeAlias = "tuple[_Trail, Choice] | None"


@dataclass(slots=True)
class _Reached:
    """A state, the first way to it, and the number of ways."""

    state: State
    trail: Any
    paths: int = 0


class _Exploration:
    """One exploration under way."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.report = Report(scene=scene.name)
        self._ending: set[tuple[object, ...]] = set()
        self._passed: set[frozenset[tuple[str, bytes]]] = set()
        self._newcomer = None if scene.newcomer is None else History(scene.newcomer)
        self._heard: set[History] = set()

    def run(self) -> Report:
        """Take every choice up to the depth, then see that all come to an end."""
        start = self.scene.start()
        level = {start.identity(): _Reached(start, None, 1)}
        try:
            for _ in range(self.scene.depth):
                level = self._following(level.values())
            self.report.is_whole = not level
            for reached in level.values():
                self.report.states += 1
                self.report.paths += reached.paths
                self._complete(reached.state, reached.trail)
        except _BrokenError as broken:
            complaint, trail = broken.args
            self.report.failure = Failure(
                scene=self.scene.name, complaint=complaint, choices=_choices(trail)
            )
        return self.report

    def _following(self, level: Iterable[_Reached]) -> dict[tuple[object, ...], _Reached]:
        following: dict[tuple[object, ...], _Reached] = {}
        for reached in level:
            self.report.states += 1
            choices = list(_moves(reached.state))
            if not choices:
                self.report.paths += reached.paths
                self._complete(reached.state, reached.trail)
                continue
            for choice in (*choices, *_strikes(self.scene, reached.state)):
                trail = (reached.trail, choice)
                after = self._take(reached.state, choice, trail)
                known = following.setdefault(after.identity(), _Reached(after, trail))
                known.paths += reached.paths
        return following

    def _take(self, state: State, choice: Choice, trail: Any) -> State:  # noqa: ANN401 - a recursive type
        step = _taken(state, choice)
        self.report.steps += 1
        self.report.choices[choice.what] += 1
        self._hear(step)
        for check in self.scene.checks:
            complaint = check(step)
            if complaint:
                raise _BrokenError(complaint, trail)
        return step.after

    def _hear(self, step: Step) -> None:
        for _, process in step.after.alive():
            if process not in self._heard:
                self._heard.add(process)
                self.report.events.update(type(event).__name__ for event in process.events)

    def _complete(self, state: State, trail: Any) -> None:  # noqa: ANN401 - a recursive type
        """Let all come to their end, and then a newcomer come."""
        state, trail = self._finish(state, trail)
        if any(state.alive()):
            return
        self.report.ends += 1
        for check in self.scene.end_checks:
            complaint = check(state)
            if complaint:
                raise _BrokenError(complaint, trail)
        left = frozenset(state.values.items())
        if self._newcomer is None or left in self._passed:
            return
        self._passed.add(left)
        come = State(values=state.values, processes=(self._newcomer,), faults=0)
        come, trail = self._finish(come, trail)
        for process in come.processes:
            if isinstance(process, Over) and process.error:
                message = f"whoever comes next does not get through: {process.error}"
                raise _BrokenError(message, trail)

    def _finish(self, state: State, trail: Any) -> tuple[State, Any]:  # noqa: ANN401 - a recursive type
        """Go on fairly; stops early where it has been before."""
        for _ in range(self.scene.most_fair_steps):
            identity = state.identity()
            if identity in self._ending:
                return state, trail
            self._ending.add(identity)
            self.report.fair_states += 1
            choice = _fair(state)
            if choice is None:
                return state, trail
            trail = (trail, choice)
            state = self._take(state, choice, trail)
        stuck = ", ".join(
            f"{process.name} waits for {process.pending}" for _, process in state.alive()
        )
        message = f"not over after {self.scene.most_fair_steps} steps without a fault: {stuck}"
        raise _BrokenError(message, trail)


def explore(scene: Scene) -> Report:
    """Take every choice of a scene.

    Args:
        scene: The small world.

    Returns:
        What was covered, up to the first promise that is broken.
    """
    return _Exploration(scene).run()


def replay(scene: Scene, choices: Sequence[tuple[str, str]]) -> list[str]:
    """Tell the story of one sequence of choices, as a failure prints it.

    Args:
        scene: The small world.
        choices: To whom, and what.

    Returns:
        A line for each choice: who, what, what the process did, and what it waits for now; and the
        complaints of the scene's checks where they arise.

    Raises:
        ValueError: A choice cannot be taken there: the scene, or the code, is another one.
    """
    state = scene.start()
    lines = []
    for number, (who, what) in enumerate(choices, start=1):
        if scene.newcomer is not None and who == scene.newcomer.name and not any(state.alive()):
            state = State(
                values=state.values, processes=(History(scene.newcomer),), faults=0
            )
        choice = Choice(who, what)
        if choice not in {*_moves(state), *_strikes(scene, state)}:
            message = (
                f"choice {number}, ({who!r}, {what!r}), cannot be taken there: the scene, or the "
                "code, is not the one in which it was found"
            )
            raise ValueError(message)
        step = _taken(state, choice)
        lines.append(f"{number:>3} {_line(step)}")
        lines += [f"    BROKEN: {said}" for check in scene.checks if (said := check(step))]
        state = step.after
    if not any(state.alive()) and len(state.processes) == len(scene.cast):
        lines += [f"    BROKEN: {said}" for check in scene.end_checks if (said := check(state))]
    return lines


def _line(step: Step) -> str:
    who, what = step.choice
    if step.actor is None:
        return f"{who} {what}"
    at = step.before.processes.index(step.actor)
    now = step.after.processes[at]
    said = "".join(f"; {event}" for event in now.events) if isinstance(now, History) else ""
    then = now.pending if isinstance(now, History) else now
    return f"{who} {what} at {step.actor.clock_s:g} s: {step.actor.pending}{said} -> {then}"


def _choices(trail: Any) -> tuple[Choice, ...]:  # noqa: ANN401 - a recursive type
    found = []
    while trail is not None:
        trail, choice = trail
        found.append(choice)
    return tuple(found[::-1])


def _settled(process: History) -> History | Over:
    return process if process.pending is not None else process.over()


def _moves(state: State) -> Iterator[Choice]:
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


def _strikes(scene: Scene, state: State) -> Iterator[Choice]:
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


def _fair(state: State) -> Choice | None:
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


def _taken(state: State, choice: Choice) -> Step:
    """Take a choice.

    Args:
        state: The state before it.
        choice: To whom, and what; one that can be taken there.
    """
    who, what = choice
    if who == STORE:
        after = State(values={}, processes=state.processes, faults=state.faults, lives=1)
        return Step(before=state, choice=choice, after=after, actor=None)
    at, process = next((at, process) for at, process in state.alive() if process.name == who)
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
    cells = Cells()
    cells.values = dict(values)
    value = store_performers(cells)[type(effect)](effect)
    if isinstance(effect, fx.MultiGet):
        value = tuple(value)
    return (values if cells.values == values else cells.values), value
