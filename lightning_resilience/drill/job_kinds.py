# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The kinds of simulated jobs beside the worlds of ranks: that save, that resume, that start again.

Each is what ``drill.job_sweep`` has to know about it.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_resilience.drill.job_sweep import JobKind, ScriptedKind
from lightning_resilience.drill.load_plan import LoadPlan, random_load
from lightning_resilience.drill.load_world import LoadWorld
from lightning_resilience.drill.restart_plan import random_restarts
from lightning_resilience.drill.restart_world import RestartWorld
from lightning_resilience.drill.save_plan import SavePlan, SeededChance, random_plan
from lightning_resilience.drill.save_world import SaveWorld
from lightning_resilience.drill.virtual import SeededDice


__all__ = ["KINDS", "LOADS", "RESTARTS", "SAVES"]


def _seeded_saves(plan: SavePlan, seed: int) -> SaveWorld:
    return SaveWorld(plan, SeededChance(SeededDice(seed, "saves")))


def _counted_saves(world: SaveWorld) -> dict[str, int]:
    return {"effects": world.storage.effects}


def _seeded_loads(plan: LoadPlan, seed: int) -> LoadWorld:
    return LoadWorld(plan, SeededChance(SeededDice(seed, "loads")))


def _counted_loads(world: LoadWorld) -> dict[str, int]:
    return {"steps": world.steps}


def _counted_restarts(world: RestartWorld) -> dict[str, int]:
    return {"starts": len(world.starts), "entries": world.agenda.happened}


def _statuses(world: RestartWorld) -> tuple[int, ...]:
    return tuple(each.status for each in world.agents)


SAVES: Final = ScriptedKind(
    name="saves",
    # They are small: a hundred take half a second.
    per_seed=4,
    sums="runs, {effects:,} effects on their storage",
    draw=random_plan,
    seeded=_seeded_saves,
    counted=_counted_saves,
    scripted=SaveWorld,
)
"""Runs that save, are killed, and start again."""

LOADS: Final = ScriptedKind(
    name="loads",
    per_seed=2,
    sums="jobs, {steps:,} steps of their processes",
    draw=random_load,
    seeded=_seeded_loads,
    counted=_counted_loads,
    scripted=LoadWorld,
)
"""Jobs that resume, on several nodes."""

RESTARTS: Final = JobKind(
    name="restarts",
    sums="jobs, {starts:,} starts, {entries:,} entries",
    ended="starts   {run.counts[starts]}, agents left with {run.statuses}",
    draw=random_restarts,
    seeded=RestartWorld,
    counted=_counted_restarts,
    statuses=_statuses,
)
"""Jobs that are started again and again, by the agents of their nodes."""

KINDS: Final[tuple[JobKind[Any, Any], ...]] = (SAVES, LOADS, RESTARTS)
"""All of them, in the order of a sweep."""
