# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs of one kind: one for every seed, one that is given, or all that a plan allows.

A job is decided by its plan and by the decisions that are taken in it. Where dice take them, its
seed shows it again. Where a script does, ``explore`` repeats a plan with every first deviation from
a quiet job, then with every second one, and so on: as many as the plan allows. What a job has in
common with the one that it deviates from was looked at there.

Which kinds there are is in ``drill.job_kinds``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from lightning_resilience.drill.save_plan import Script
from lightning_resilience.drill.sweep import CRASHED
from lightning_resilience.drill.virtual import SeededDice
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lightning_resilience.drill.save_plan import Chance


__all__ = ["JobKind", "JobRun", "JobWorld", "ScriptedKind"]

_LAST_LINES: Final = 60


class JobWorld(Protocol):
    """A simulated job."""

    @property
    def story(self) -> Sequence[str]:
        """What has happened, line by line."""
        ...

    def run(self) -> None:
        """Let the job come to its end.

        Raises:
            DrillFailedError: A promise was not kept.
        """
        ...


P = TypeVar("P")
W = TypeVar("W", bound=JobWorld)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun(Generic[P]):
    """How a job went.

    Args:
        plan: Its plan.
        seed: What has decided, or -1 for a script.
        script: The decisions of a script.
        counts: What is summed up over a sweep, by name.
        statuses: With what its agents have left, in the order of their beginning; 0 where all went
            well, -1 where one was killed. Empty for a kind that has no agents.
        check: The check that has failed; empty where none has.
        what: What that has said.
        story: What has happened, line by line.
    """

    plan: P
    seed: int = -1
    script: tuple[int, ...] = ()
    counts: dict[str, int]
    statuses: tuple[int, ...] = ()
    check: str = ""
    what: str = ""
    story: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """The check that has failed, None where none has."""
        return self.check or None


def _nobody(_: object) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind(Generic[P, W]):
    """One kind of simulated job, and how its jobs are run.

    Its functions are those of a module, so that another process can be told of which kind its jobs
    are.

    Args:
        name: What the sweep calls it, and the option that replays one.
        per_seed: How many of its jobs a sweep runs for each world, ≥ 1.
        sums: What is said about a sweep; it names the counts.
        ended: What is said about the end of one job, from its run; empty for nothing.
        draw: Draws a plan.
        seeded: Makes the world of a plan in which a seed decides.
        counted: Returns what a job adds to the sums.
        statuses: Returns with what the agents of a job have left.
    """

    name: str
    per_seed: int = 1
    sums: str
    ended: str = ""
    draw: Callable[[SeededDice], P]
    seeded: Callable[[P, int], W]
    counted: Callable[[W], dict[str, int]]
    statuses: Callable[[W], tuple[int, ...]] = _nobody

    def of_plan(self, plan: P, seed: int = 0) -> JobRun[P]:
        """Let a job come to its end, or to the first promise that is not kept.

        Args:
            plan: The job.
            seed: Decides what the plan leaves open.

        Returns:
            How it went; a failure is returned, not raised.
        """
        return self._run(self.seeded(plan, seed), plan, seed=seed)

    def of_seed(self, seed: int) -> JobRun[P]:
        """Draw a job, and let it come to its end.

        Args:
            seed: Decides all of it.
        """
        return self.of_plan(self.draw(SeededDice(seed, f"plan of {self.name}")), seed)

    def sweep(self, seeds: Iterable[int]) -> Iterator[JobRun[P]]:
        """Run one after the other, up to the first that fails.

        Args:
            seeds: Their seeds.

        Yields:
            How each went; the last one may have failed.
        """
        for seed in seeds:
            run = self.of_seed(seed)
            yield run
            if run.check:
                return

    def told(self, run: JobRun[P], *, lines: int = _LAST_LINES) -> list[str]:
        """Return what is said about a run: its plan, its end, and how to see it again.

        Args:
            run: The run.
            lines: How much of its story, at most.
        """
        last = run.story[-lines:] if lines else ()
        again = f"replay   make sim {self.name.upper()}={run.seed}"
        return [
            f"  plan     {run.plan}",
            *([f"  {self.ended.format(run=run)}"] if self.ended else []),
            f"  check    {run.check or 'every promise was kept'}",
            *([f"  what     {run.what}"] if run.check else []),
            "",
            *(
                [f"The last {len(last)} of {len(run.story)} lines of its story:", ""]
                if last
                else []
            ),
            *([*last, ""] if last else []),
            f"  {again if run.seed >= 0 else f'script   {run.script}'}",
        ]

    def _run(self, world: W, plan: P, *, seed: int = -1, script: tuple[int, ...] = ()) -> JobRun[P]:
        check = what = ""
        try:
            world.run()
        except DrillFailedError as error:
            check, what = error.check, str(error)
        except Exception as error:  # noqa: BLE001 - a bug of ours is what a drill is to find
            check, what = f"{CRASHED}: {type(error).__name__}", f"{error!r}"
        return JobRun(
            plan=plan,
            seed=seed,
            script=script,
            counts=self.counted(world),
            statuses=self.statuses(world),
            check=check,
            what=what,
            story=tuple(world.story),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedKind(JobKind[P, W]):
    """A kind in whose jobs a script may decide what goes wrong.

    Args:
        scripted: Makes the world of a plan in which somebody else decides.
    """

    scripted: Callable[[P, Chance], W]

    def explore(self, plan: P) -> Iterator[JobRun[P]]:
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
            yield self._run(self.scripted(plan, script), plan, script=prefix)
            taken = (*prefix, *(0 for _ in script.branches[len(prefix) :]))
            for at in range(len(prefix), len(script.branches)):
                prefixes += [(*taken[:at], other) for other in range(1, script.branches[at])]
