# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Run a world with all checks on, and many worlds one after the other.

A run has two parts. Until the last fault is over, the checks look at everything that happens. Then
the world is well, and every process must come to its end within a bound that is known beforehand.

A run is decided by its scenario and its seed. So one that fails needs nothing kept but these two:
it is run again with its story, and the digests of both runs are equal, or something in the world
depends on what it must not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.checks import all_checks, liveness_bound_s
from lightning_resilience.drill.random_worlds import random_scenario
from lightning_resilience.drill.trace import Story
from lightning_resilience.drill.world import World
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lightning_resilience.drill.observer import Observer
    from lightning_resilience.drill.scenario import Scenario

    Checks = Callable[[World], Iterable[Observer]]


__all__ = ["Failure", "Run", "Tally", "liveness_s", "run_world", "sweep", "troubles"]

LIVENESS: Final = "I3 Liveness"
"""Name of the check that everything ends once the world is well."""

CRASHED: Final = "unexpected error"
"""Begins the name of the check that has failed where the simulated code itself did."""

_NAMED_PROCESSES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A promise that was not kept.

    Args:
        check: Which promise, and the check that has seen it.
        at_s: When, on the virtual clock, in seconds.
        entry: Entry of the agenda at which it was seen, counted from 1.
        what: What happened, with the numbers.
    """

    check: str
    at_s: float
    entry: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a world went.

    Args:
        seed: Its seed.
        scenario: Its scenario.
        entries: Entries of the agenda that have happened.
        ended_at_s: When it ended, on the virtual clock, in seconds.
        digest: Tells it from every other run.
        failure: The promise that was not kept, or None.
        story: What has happened, line by line; empty unless asked for.
    """

    seed: int
    scenario: Scenario
    entries: int
    ended_at_s: float
    digest: str
    failure: Failure | None
    story: tuple[str, ...] = ()


def run_world(
    scenario: Scenario, seed: int, *, tells: bool = False, checks: Checks = all_checks
) -> Run:
    """Run a world to its end, or to the first promise that is not kept.

    Args:
        scenario: What is simulated.
        seed: Decides what the scenario leaves open.
        tells: Whether to keep the story. It changes nothing else.
        checks: Makes what looks at the world.

    Returns:
        How it went; a failure is returned, not raised.
    """
    story = Story()
    observers = (lambda world: [story, *checks(world)]) if tells else checks
    world = World(scenario, seed, make_observers=observers)
    failure = None
    try:
        _run_to_the_end(world)
    except DrillFailedError as error:
        failure = _failure(world, error.check, str(error))
    except Exception as error:  # noqa: BLE001 - a bug of ours is what a drill is to find
        kind = type(error).__name__
        failure = _failure(world, f"{CRASHED}: {kind}", f"{kind}: {error} ({_place(error)})")
    return Run(
        seed=seed,
        scenario=scenario,
        entries=world.agenda.happened,
        ended_at_s=world.agenda.now_s,
        digest=world.trace.digest,
        failure=failure,
        story=tuple(story.lines),
    )


def liveness_s(scenario: Scenario) -> float:
    """Return how long after the last fault everything must have ended, in seconds."""
    return liveness_bound_s(scenario) if scenario.ends_at_s is None else scenario.ends_at_s


def _run_to_the_end(world: World) -> None:
    bound_s = liveness_s(world.scenario)
    until_s = -1.0
    while True:
        # A pause that strikes late is a late fault, and the bound counts from the last one.
        last_s, until_s = until_s, world.healed_at_s + bound_s
        if world.run(until_s=until_s):
            return
        if until_s <= last_s:
            break
    living = [process.name for process in world.processes if process.is_alive]
    names = ", ".join(living[:_NAMED_PROCESSES])
    more = ", …" if len(living) > _NAMED_PROCESSES else ""
    message = (
        f"{LIVENESS} does not hold: {len(living)} of {world.scenario.ranks} processes ({names}"
        f"{more}) have not ended {bound_s:.3f} s after the last fault, which was over at "
        f"{world.healed_at_s:.3f} s."
    )
    raise DrillFailedError(message, seed=world.seed, step=world.agenda.happened, check=LIVENESS)


def _failure(world: World, check: str, what: str) -> Failure:
    agenda = world.agenda
    return Failure(check=check, at_s=agenda.now_s, entry=agenda.happened, what=what)


def _place(error: Exception) -> str:
    trace = error.__traceback__
    place = "no traceback"
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rpartition('lightning_resilience')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"at {place.lstrip('/')}"


def troubles(scenario: Scenario) -> frozenset[str]:
    """Return what goes wrong in a world: its kinds of faults, and what its store and clocks do."""
    store = scenario.store
    quiet = {
        "lost_requests": store.lost_requests,
        "lost_answers": store.lost_answers,
        "late_requests": store.late_requests,
        "clock_rates": scenario.clocks.rate > 1 and scenario.hosts > 1,
        "throttling": scenario.storage.per_s,
    }
    kinds = {str(type(fault).__struct_config__.tag) for fault in scenario.faults}
    return frozenset(kinds | {name for name, holds in quiet.items() if holds})


@dataclass(slots=True, kw_only=True)
class Tally:
    """What many runs have covered.

    Attributes:
        worlds: How many runs.
        ranks: Their ranks in all.
        entries: Entries of the agenda that have happened in all.
        worlds_with: Runs in which something went wrong, by its kind.
        entries_with: Entries of the agenda in these, likewise.
        largest: The run with the most entries: the slowest.
    """

    worlds: int = 0
    ranks: int = 0
    entries: int = 0
    worlds_with: Counter[str] = field(default_factory=Counter)
    entries_with: Counter[str] = field(default_factory=Counter)
    largest: Run | None = None

    def add(self, run: Run) -> None:
        """Count a run."""
        self.worlds += 1
        self.ranks += run.scenario.ranks
        self.entries += run.entries
        for trouble in troubles(run.scenario):
            self.worlds_with[trouble] += 1
            self.entries_with[trouble] += run.entries
        if self.largest is None or run.entries > self.largest.entries:
            self.largest = run

    def lines(self) -> list[str]:
        """Return it as a table."""
        rows = [f"{'trouble':<18} {'worlds':>7} {'entries':>12}"]
        rows += [
            f"{name:<18} {worlds:>7,} {self.entries_with[name]:>12,}"
            for name, worlds in sorted(self.worlds_with.items())
        ]
        rows.append(f"{'all':<18} {self.worlds:>7,} {self.entries:>12,}")
        if self.largest is not None:
            most = self.largest
            rows.append(
                f"slowest: seed {most.seed} with {most.scenario.ranks} ranks, "
                f"{most.entries:,} entries, {most.ended_at_s:.1f} s of virtual time"
            )
        return rows


def sweep(seeds: Iterable[int], scenario: Scenario | None = None) -> Iterator[Run]:
    """Run worlds one after the other, up to the first that fails.

    Args:
        seeds: Their seeds.
        scenario: What is simulated; None draws a world for every seed.

    Yields:
        How each went; the last one may have failed.
    """
    for seed in seeds:
        run = run_world(random_scenario(seed) if scenario is None else scenario, seed)
        yield run
        if run.failure is not None:
            return
