# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs that resume: one for every seed, or every one that a small plan allows.

As ``drill.save_sweep`` is for runs that save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.load_plan import random_load
from lightning_resilience.drill.load_world import LoadWorld
from lightning_resilience.drill.save_plan import Script, SeededChance
from lightning_resilience.drill.sweep import CRASHED
from lightning_resilience.drill.virtual import SeededDice
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning_resilience.drill.load_plan import LoadPlan
    from lightning_resilience.drill.save_plan import Chance


__all__ = ["LoadRun", "explore_loads", "loads_of_seed", "run_loads", "sweep_loads", "told_of_loads"]

_LAST_LINES: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """How a job went.

    Args:
        plan: Its plan.
        seed: What has decided, or -1 for a script.
        script: The decisions of a script.
        steps: Things that its processes have done.
        check: The check that has failed; empty where none has.
        what: What that has said.
        story: What has happened, line by line.
    """

    plan: LoadPlan
    seed: int = -1
    script: tuple[int, ...] = ()
    steps: int
    check: str = ""
    what: str = ""
    story: tuple[str, ...]


def run_loads(
    plan: LoadPlan, chance: Chance, *, seed: int = -1, script: tuple[int, ...] = ()
) -> LoadRun:
    """Let a job come to its end, or to the first promise that is not kept.

    Args:
        plan: The job.
        chance: Who decides what goes wrong.
        seed: What has decided, to be told.
        script: Likewise.

    Returns:
        How it went; a failure is returned, not raised.
    """
    world = LoadWorld(plan, chance)
    check = what = ""
    try:
        world.run()
    except DrillFailedError as error:
        check, what = error.check, str(error)
    except Exception as error:  # noqa: BLE001 - a bug of ours is what a drill is to find
        check, what = f"{CRASHED}: {type(error).__name__}", f"{error!r}"
    return LoadRun(
        plan=plan,
        seed=seed,
        script=script,
        steps=world.steps,
        check=check,
        what=what,
        story=tuple(world.story),
    )


def loads_of_seed(seed: int) -> LoadRun:
    """Draw a job, and let it come to its end.

    Args:
        seed: Decides all of it.
    """
    plan = random_load(SeededDice(seed, "plan of loads"))
    return run_loads(plan, SeededChance(SeededDice(seed, "loads")), seed=seed)


def sweep_loads(seeds: Iterable[int]) -> Iterator[LoadRun]:
    """Run one after the other, up to the first that fails.

    Args:
        seeds: Their seeds.

    Yields:
        How each went; the last one may have failed.
    """
    for seed in seeds:
        run = loads_of_seed(seed)
        yield run
        if run.check:
            return


def explore_loads(plan: LoadPlan) -> Iterator[LoadRun]:
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
        yield run_loads(plan, script, script=prefix)
        taken = (*prefix, *(0 for _ in script.branches[len(prefix) :]))
        for at in range(len(prefix), len(script.branches)):
            prefixes += [(*taken[:at], other) for other in range(1, script.branches[at])]


def told_of_loads(run: LoadRun, *, lines: int = _LAST_LINES) -> list[str]:
    """Return what is said about a run: its plan, its end, and how to see it again.

    Args:
        run: The run.
        lines: How much of its story, at most.
    """
    last = run.story[-lines:] if lines else ()
    again = f"replay   make sim LOADS={run.seed}" if run.seed >= 0 else f"script   {run.script}"
    return [
        f"  plan     {run.plan}",
        f"  check    {run.check or 'every promise was kept'}",
        *([f"  what     {run.what}"] if run.check else []),
        "",
        *([f"The last {len(last)} of {len(run.story)} lines of its story:", ""] if last else []),
        *([*last, ""] if last else []),
        f"  {again}",
    ]
