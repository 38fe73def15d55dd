# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs that are started again and again: one for every seed, or one that is given.

A run is decided by its plan and its seed, so that one that fails is seen again by its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.restart_plan import random_restarts
from lightning_resilience.drill.restart_world import RestartWorld
from lightning_resilience.drill.sweep import CRASHED
from lightning_resilience.drill.virtual import SeededDice
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning_resilience.drill.restart_plan import RestartPlan


__all__ = ["RestartRun", "restarts_of_seed", "run_restarts", "sweep_restarts", "told_of_restarts"]

_LAST_LINES: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRun:
    """How a job went.

    Args:
        plan: Its plan.
        seed: What has decided the rest.
        starts: How often its workers were started.
        agents: How many agents it had.
        entries: Entries of the agenda that have happened.
        statuses: With what its agents have left, in the order of their beginning; 0 where all went
            well, -1 where one was killed.
        check: The check that has failed; empty where none has.
        what: What that has said.
        story: What has happened, line by line.
    """

    plan: RestartPlan
    seed: int
    starts: int
    agents: int
    entries: int
    statuses: tuple[int, ...]
    check: str = ""
    what: str = ""
    story: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """The check that has failed, None where none has."""
        return self.check or None


def run_restarts(plan: RestartPlan, seed: int = 0) -> RestartRun:
    """Let a job come to its end, or to the first promise that is not kept.

    Args:
        plan: The job.
        seed: Decides what the plan leaves open.

    Returns:
        How it went; a failure is returned, not raised.
    """
    world = RestartWorld(plan, seed)
    check = what = ""
    try:
        world.run()
    except DrillFailedError as error:
        check, what = error.check, str(error)
    except Exception as error:  # noqa: BLE001 - a bug of ours is what a drill is to find
        check, what = f"{CRASHED}: {type(error).__name__}", f"{error!r}"
    return RestartRun(
        plan=plan,
        seed=seed,
        starts=len(world.starts),
        agents=len(world.agents),
        entries=world.agenda.happened,
        statuses=tuple(each.status for each in world.agents),
        check=check,
        what=what,
        story=tuple(world.story),
    )


def restarts_of_seed(seed: int) -> RestartRun:
    """Draw a job, and let it come to its end.

    Args:
        seed: Decides all of it.
    """
    return run_restarts(random_restarts(SeededDice(seed, "plan of restarts")), seed)


def sweep_restarts(seeds: Iterable[int]) -> Iterator[RestartRun]:
    """Run one after the other, up to the first that fails.

    Args:
        seeds: Their seeds.

    Yields:
        How each went; the last one may have failed.
    """
    for seed in seeds:
        run = restarts_of_seed(seed)
        yield run
        if run.check:
            return


def told_of_restarts(run: RestartRun, *, lines: int = _LAST_LINES) -> list[str]:
    """Return what is said about a run: its plan, its end, and how to see it again.

    Args:
        run: The run.
        lines: How much of its story, at most.
    """
    last = run.story[-lines:] if lines else ()
    return [
        f"  plan     {run.plan}",
        f"  starts   {run.starts}, agents left with {run.statuses}",
        f"  check    {run.check or 'every promise was kept'}",
        *([f"  what     {run.what}"] if run.check else []),
        "",
        *([f"The last {len(last)} of {len(run.story)} lines of its story:", ""] if last else []),
        *([*last, ""] if last else []),
        f"  replay   make sim RESTARTS={run.seed}",
    ]
