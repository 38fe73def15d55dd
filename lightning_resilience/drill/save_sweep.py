# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated runs that save: one for every seed, or every one that a small plan allows.

A run is decided by its plan and by the decisions that are taken in it. ``explore`` repeats a plan
with every first deviation from a quiet run, then with every second one, and so on: as many as the
plan allows. What a run has in common with the one that it deviates from was looked at there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.save_plan import Script, SeededChance, random_plan
from lightning_resilience.drill.save_world import SaveWorld
from lightning_resilience.drill.sweep import CRASHED
from lightning_resilience.drill.virtual import SeededDice
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning_resilience.drill.save_plan import Chance, SavePlan


__all__ = ["SaveRun", "explore", "run_saves", "saves_of_seed", "sweep_saves", "told_of_saves"]

_LAST_LINES: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRun:
    """How a run went.

    Args:
        plan: Its plan.
        seed: What has decided, or -1 for a script.
        script: The decisions of a script.
        effects: Effects on the storage.
        check: The check that has failed; empty where none has.
        what: What that has said.
        story: What has happened, line by line.
    """

    plan: SavePlan
    seed: int = -1
    script: tuple[int, ...] = ()
    effects: int
    check: str = ""
    what: str = ""
    story: tuple[str, ...]


def run_saves(
    plan: SavePlan, chance: Chance, *, seed: int = -1, script: tuple[int, ...] = ()
) -> SaveRun:
    """Let a run come to its end, or to the first promise that is not kept.

    Args:
        plan: The run.
        chance: Who decides what goes wrong.
        seed: What has decided, to be told.
        script: Likewise.

    Returns:
        How it went; a failure is returned, not raised.
    """
    world = SaveWorld(plan, chance)
    check = what = ""
    try:
        world.run()
    except DrillFailedError as error:
        check, what = error.check, str(error)
    except Exception as error:  # noqa: BLE001 - a bug of ours is what a drill is to find
        check, what = f"{CRASHED}: {type(error).__name__}", f"{error!r}"
    return SaveRun(
        plan=plan,
        seed=seed,
        script=script,
        effects=world.storage.effects,
        check=check,
        what=what,
        story=tuple(world.story),
    )


def saves_of_seed(seed: int) -> SaveRun:
    """Draw a run, and let it come to its end.

    Args:
        seed: Decides all of it.
    """
    plan = random_plan(SeededDice(seed, "plan of saves"))
    return run_saves(plan, SeededChance(SeededDice(seed, "saves")), seed=seed)


def sweep_saves(seeds: Iterable[int]) -> Iterator[SaveRun]:
    """Run one after the other, up to the first that fails.

    Args:
        seeds: Their seeds.

    Yields:
        How each went; the last one may have failed.
    """
    for seed in seeds:
        run = saves_of_seed(seed)
        yield run
        if run.check:
            return


def explore(plan: SavePlan) -> Iterator[SaveRun]:
    """Run a plan in every way that it allows.

    Args:
        plan: The plan; a small one.

    Yields:
        How each run went, the quiet one first.
    """
    prefixes: list[tuple[int, ...]] = [()]
    while prefixes:
        prefix = prefixes.pop()
        script = Script(prefix)
        yield run_saves(plan, script, script=prefix)
        taken = (*prefix, *(0 for _ in script.branches[len(prefix) :]))
        for at in range(len(prefix), len(script.branches)):
            prefixes += [(*taken[:at], other) for other in range(1, script.branches[at])]


def told_of_saves(run: SaveRun, *, lines: int = _LAST_LINES) -> list[str]:
    """Return what is said about a run: its plan, its end, and how to see it again.

    Args:
        run: The run.
        lines: How much of its story, at most.
    """
    last = run.story[-lines:] if lines else ()
    again = f"replay   make sim SAVES={run.seed}" if run.seed >= 0 else f"script   {run.script}"
    return [
        f"  plan     {run.plan}",
        f"  check    {run.check or 'every promise was kept'}",
        *([f"  what     {run.what}"] if run.check else []),
        "",
        *([f"The last {len(last)} of {len(run.story)} lines of its story:", ""] if last else []),
        *([*last, ""] if last else []),
        f"  {again}",
    ]
