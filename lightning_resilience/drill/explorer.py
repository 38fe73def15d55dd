# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of a few processes, with a fault at any point: what chance would not hit.

The explorer drives the shipped protocols, as the simulator does, but leaves nothing to chance: in
each state of a small world it takes every choice (``drill.explored_world``).

Two choices that lead to the same store, with every process told the same, lead to the same state,
which is continued once. Each choice adds one entry to what one process was told, or uses up one
fault: so all sequences that lead to a state are equally long, and none is left out.

Up to ``depth`` every choice is taken. From there on, and from every shorter end, everybody goes on
fairly and without faults until all have ended; then a newcomer comes and must get through, which
says that nothing was left behind that bars the way. Promises are checked after every step of all
this, from outside: in the store, and in what processes send (``drill.explorer_checks``).
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_resilience.drill.explored_process import History, Over
from lightning_resilience.drill.explored_world import (
    Choice,
    State,
    fair,
    moves,
    strikes,
    taken,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lightning_resilience.drill.explored_world import Scene, Step


__all__ = ["Failure", "Report", "explore", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A promise that is broken, and how to see it again.

    Args:
        scene: Name of the scene.
        complaint: What is broken.
        choices: The choices that lead there, or to where everybody goes on fairly until it breaks;
            ``replay`` takes them.
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
            f"{self.scene}: {self.states} states, {self.steps} steps, {self.paths} paths "
            f"({whole}), {self.fair_states} states on the way to {self.ends} ends"
        )


@dataclass(slots=True)
class _Reached:
    """A state, the first way to it (the choices before the last, and that), and how many ways."""

    state: State
    trail: tuple[Any, Choice] | None
    paths: int = 0


class _BrokenError(Exception):
    """A promise does not hold. Never leaves this module.

    Attributes:
        trail: The choices that led there.
    """

    trail: tuple[Any, Choice] | None = None


@contextmanager
def _all_kept() -> Iterator[None]:
    """Let nobody look for garbage: there is next to none, and looking takes as long as the rest."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _leaving(trail: tuple[Any, Choice] | None) -> Iterator[None]:
    """Say of a broken promise where it broke."""
    try:
        yield
    except _BrokenError as broken:
        broken.trail = trail
        raise


class _Exploration:
    """One exploration under way."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.report = Report(scene=scene.name)
        self.story: list[str] | None = None
        self._ending: set[tuple[object, ...]] = set()
        self._passed: set[frozenset[tuple[str, bytes]]] = set()
        self._newcomer = None if scene.newcomer is None else History(scene.newcomer)
        self._heard: set[History] = set()

    def explore(self) -> None:
        """Take every choice up to the depth, then see that all come to an end."""
        start = self.scene.start()
        level = {start.identity(): _Reached(start, None, 1)}
        for _ in range(self.scene.depth):
            level = self._following(level.values())
        self.report.is_whole = not level
        for reached in level.values():
            self._close(reached)

    def follow(self, choices: Sequence[tuple[str, str]]) -> None:
        """Take these choices, then see that all come to an end."""
        state = self.scene.start()
        for number, (who, what) in enumerate(choices, start=1):
            choice = Choice(who, what)
            if choice not in {*moves(state), *strikes(self.scene, state)}:
                message = (
                    f"choice {number}, ({who!r}, {what!r}), cannot be taken there: the scene, or "
                    "the code, is not the one in which it was found"
                )
                raise ValueError(message)
            state = self._take(state, choice)
        self._complete(state)

    def _following(self, level: Iterable[_Reached]) -> dict[tuple[object, ...], _Reached]:
        following: dict[tuple[object, ...], _Reached] = {}
        for reached in level:
            choices = list(moves(reached.state))
            if not choices:
                self._close(reached)
                continue
            self.report.states += 1
            for choice in (*choices, *strikes(self.scene, reached.state)):
                trail = (reached.trail, choice)
                with _leaving(trail):
                    after = self._take(reached.state, choice)
                known = following.setdefault(after.identity(), _Reached(after, trail))
                known.paths += reached.paths
        return following

    def _close(self, reached: _Reached) -> None:
        self.report.states += 1
        self.report.paths += reached.paths
        with _leaving(reached.trail):
            self._complete(reached.state)

    def _take(self, state: State, choice: Choice) -> State:
        step = taken(state, choice)
        self.report.steps += 1
        self.report.choices[choice.what] += 1
        self._hear(step)
        if self.story is not None:
            self.story.append(f"{len(self.story) + 1:>3} {_line(step)}")
        for check in self.scene.checks:
            complaint = check(step)
            if complaint:
                raise _BrokenError(complaint)
        return step.after

    def _hear(self, step: Step) -> None:
        for _, process in step.after.alive():
            if process not in self._heard:
                self._heard.add(process)
                self.report.events.update(type(event).__name__ for event in process.events)

    def _complete(self, state: State) -> None:
        """Let all come to their end, and then a newcomer come."""
        ended = self._finish(state)
        if ended is None:
            return
        self.report.ends += 1
        for check in self.scene.end_checks:
            complaint = check(ended)
            if complaint:
                raise _BrokenError(complaint)
        left = frozenset(ended.values.items())
        if self._newcomer is None or left in self._passed:
            return
        self._passed.add(left)
        come = self._finish(State(values=ended.values, processes=(self._newcomer,), faults=0))
        for process in () if come is None else come.processes:
            if isinstance(process, Over) and process.error:
                message = f"whoever comes next does not get through: {process.error}"
                raise _BrokenError(message)

    def _finish(self, state: State) -> State | None:
        """Go on fairly until all have ended; None where it has been before."""
        for _ in range(self.scene.most_fair_steps):
            identity = state.identity()
            if identity in self._ending:
                return None
            self._ending.add(identity)
            self.report.fair_states += 1
            choice = fair(state)
            if choice is None:
                return state
            state = self._take(state, choice)
        names = ", ".join(process.name for _, process in state.alive())
        message = f"not over after {self.scene.most_fair_steps} steps without a fault: {names}"
        raise _BrokenError(message)


def explore(scene: Scene) -> Report:
    """Take every choice of a scene.

    Args:
        scene: The small world.

    Returns:
        What was covered, up to the first promise that is broken.
    """
    exploration = _Exploration(scene)
    try:
        with _all_kept():
            exploration.explore()
    except _BrokenError as broken:
        exploration.report.failure = Failure(
            scene=scene.name, complaint=str(broken), choices=_choices(broken.trail)
        )
    return exploration.report


def replay(scene: Scene, choices: Sequence[tuple[str, str]]) -> list[str]:
    """Tell the story of one sequence of choices, and of how it comes to its end.

    Args:
        scene: The small world.
        choices: To whom, and what, as a failure prints them.

    Returns:
        A line for each step: who, what, what the process asked for, and what it asks for then. The
        last line says what is broken, if anything is.

    Raises:
        ValueError: A choice cannot be taken there: the scene, or the code, is another one.
    """
    exploration = _Exploration(scene)
    exploration.story = story = []
    try:
        exploration.follow(choices)
    except _BrokenError as broken:
        story.append(f"BROKEN: {broken}")
    return story


def _line(step: Step) -> str:
    who, what = step.choice
    if step.actor is None:
        return f"{who} {what}"
    at = step.before.processes.index(step.actor)
    now = step.after.processes[at]
    said = "".join(f"; {event}" for event in now.events) if isinstance(now, History) else ""
    then = now.pending if isinstance(now, History) else now
    return f"{who} {what} at {step.actor.clock_s:g} s: {step.actor.pending}{said} -> {then}"


def _choices(trail: tuple[Any, Choice] | None) -> tuple[Choice, ...]:
    found = []
    while trail is not None:
        trail, choice = trail
        found.append(choice)
    return tuple(found[::-1])
