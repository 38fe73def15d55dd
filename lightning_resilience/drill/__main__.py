# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m lightning_resilience.drill``: sweep over simulated worlds, or replay one.

Ends with 0 where every promise was kept, 1 where one was not, and 2 where the question was wrong:
an option that makes no sense, a scenario that cannot be read, or a run that is not the one whose
digest was given.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lightning_resilience.drill.job_kinds import KINDS
from lightning_resilience.drill.parallel import jobs_on_cores, sweep_on_cores
from lightning_resilience.drill.random_worlds import random_scenario
from lightning_resilience.drill.report import failure_lines, is_another_run, story_lines
from lightning_resilience.drill.scenario_file import read_scenario
from lightning_resilience.drill.sweep import Run, Tally, run_world
from lightning_resilience.errors import ScenarioError


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_resilience.drill.job_sweep import JobKind
    from lightning_resilience.drill.scenario import Scenario


__all__ = ["app"]

_FAILED: Final = 1
_WRONG_QUESTION: Final = 2
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _read(path: str) -> Scenario | None:
    if not path:
        return None
    try:
        return read_scenario(path)
    except (OSError, ScenarioError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_WRONG_QUESTION) from error


def _say(lines: Iterable[str], *, err: bool = False) -> None:
    for line in lines:
        typer.echo(line, err=err)


def _replay(scenario: Scenario, seed: int, *, path: str, digest: str) -> None:
    run = run_world(scenario, seed, tells=True)
    _say(story_lines(run))
    another = is_another_run(run, digest)
    if another:
        typer.echo(another, err=True)
        raise typer.Exit(_WRONG_QUESTION)
    if run.failure is not None:
        _say(failure_lines(run, path=path), err=True)
        raise typer.Exit(_FAILED)


def _sweep(seeds: Sequence[int], scenario: Scenario | None, *, path: str, workers: int) -> None:
    tally = Tally()
    with closing(sweep_on_cores(seeds, scenario, workers=workers)) as runs:
        for run in runs:
            tally.add(run)
            if run.failure is not None:
                told = run_world(run.scenario, run.seed, tells=True)
                _say(tally.lines())
                _say(failure_lines(told, path=path), err=True)
                _say(_differs(run, told), err=True)
                raise typer.Exit(_FAILED)
    _say(tally.lines())
    if scenario is None:
        for kind in KINDS:
            own = range(kind.per_seed * seeds[0], kind.per_seed * (seeds[-1] + 1))
            _sweep_jobs(kind, own, workers=workers)
    typer.echo(f"Every promise was kept, by seeds {seeds[0]} to {seeds[-1]}.")


def _sweep_jobs(kind: JobKind[Any, Any], seeds: Sequence[int], *, workers: int) -> None:
    sums: Counter[str] = Counter()
    with closing(jobs_on_cores(kind, seeds, workers=workers)) as runs:
        for run in runs:
            sums.update(run.counts)
            if run.check:
                told = kind.told(kind.of_seed(run.seed))
                which = f"the {kind.name} of seed {run.seed}"
                _say([f"A promise was not kept, by {which}.", "", *told], err=True)
                raise typer.Exit(_FAILED)
    typer.echo(f"{kind.name}: {len(seeds):,} {kind.sums.format_map(sums)}")


def _replay_job(kind: JobKind[Any, Any], seed: int) -> None:
    run = kind.of_seed(seed)
    _say(run.story)
    _say(kind.told(run, lines=0), err=bool(run.check))
    if run.check:
        raise typer.Exit(_FAILED)


def _differs(run: Run, told: Run) -> list[str]:
    if run.digest == told.digest:
        return []
    message = (
        f"The same seed has made two different runs, {run.digest} and {told.digest}: something in "
        "the world depends on more than the seed. Mend that first; the story is of the second run."
    )
    return [message]


@app.command()
def main(  # noqa: PLR0913 - the options that a person has
    *,
    seed: Annotated[int | None, typer.Option(help="Replay this world and print its story.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds to run.")] = 300,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    scenario: Annotated[
        str, typer.Option(help="A scenario file; by default every seed draws a world.")
    ] = "",
    digest: Annotated[
        str, typer.Option(help="Digest of the run to replay, as the failure has printed it.")
    ] = "",
    saves: Annotated[
        int | None, typer.Option(help="Replay this run that saves, and print its story.")
    ] = None,
    loads: Annotated[
        int | None, typer.Option(help="Replay this job that resumes, and print its story.")
    ] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Replay this job of many starts, and print its story.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default as many as there are cores.")
    ] = None,
) -> None:
    """Run simulated worlds with every promise checked after everything that happens."""
    if digest and seed is None:
        raise typer.BadParameter("a digest belongs to one run: give its --seed too (SEED=n).")
    for kind, job in zip(KINDS, (saves, loads, restarts), strict=True):
        if job is not None:
            _replay_job(kind, job)
            return
    given = _read(scenario)
    if seed is not None:
        _replay(given or random_scenario(seed), seed, path=scenario, digest=digest)
        return
    workers = workers or os.cpu_count() or 1
    _sweep(range(first, first + seeds), given, path=scenario, workers=workers)


if __name__ == "__main__":
    app(prog_name="python -m lightning_resilience.drill")
