# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A sweep on all cores: which process runs a world makes no difference to it.

Worlds are told in the order of their seeds, whichever is done first, so that the first failure of a
sweep is the same one on every machine.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_resilience.drill.sweep import sweep


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from lightning_resilience.drill.job_sweep import JobKind, JobRun
    from lightning_resilience.drill.scenario import Scenario
    from lightning_resilience.drill.sweep import Run


__all__ = ["jobs_on_cores", "sweep_on_cores"]

R = TypeVar("R", bound=Any)

# Worlds that a process runs before it says how they went. The largest world takes a second, and
# handing over what a process is to do takes milliseconds.
_CHUNK: Final = 10


def sweep_on_cores(
    seeds: Sequence[int], scenario: Scenario | None = None, *, workers: int
) -> Generator[Run, None, None]:
    """Run worlds in several processes, up to the first that fails.

    Args:
        seeds: Their seeds.
        scenario: What is simulated; None draws a world for every seed.
        workers: How many processes, ≥ 1. One is this process.

    Yields:
        How each went, in the order of the seeds; the last one may have failed.
    """
    yield from _on_cores(partial(_worlds, scenario=scenario), seeds, workers=workers)


def jobs_on_cores(
    kind: JobKind[Any, Any], seeds: Sequence[int], *, workers: int
) -> Generator[JobRun[Any], None, None]:
    """Run jobs of a kind as ``sweep_on_cores`` runs worlds; their stories stay behind.

    Args:
        kind: The kind.
        seeds: Their seeds.
        workers: How many processes, ≥ 1. One is this process.

    Yields:
        How each went, in the order of the seeds, without its story; the last one may have failed.
    """
    chunk = _CHUNK * kind.per_seed
    yield from _on_cores(partial(_jobs, kind=kind), seeds, workers=workers, chunk=chunk)


def _on_cores(
    run: Callable[[Sequence[int]], list[R]],
    seeds: Sequence[int],
    *,
    workers: int,
    chunk: int = _CHUNK,
) -> Generator[R, None, None]:
    chunks = [seeds[at : at + chunk] for at in range(0, len(seeds), chunk)]
    if workers == 1:
        yield from _to_the_first_failure(chain.from_iterable(map(run, chunks)))
        return
    # Not forked: a process that has threads, as a test's may, cannot be copied safely.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        runs = chain.from_iterable(pool.map(run, chunks))
        try:
            yield from _to_the_first_failure(runs)
        finally:
            pool.shutdown(cancel_futures=True)


def _worlds(seeds: Sequence[int], scenario: Scenario | None) -> list[Run]:
    return list(sweep(seeds, scenario))


def _jobs(seeds: Sequence[int], kind: JobKind[Any, Any]) -> list[JobRun[Any]]:
    return [replace(run, story=()) for run in kind.sweep(seeds)]


def _to_the_first_failure(runs: Iterable[R]) -> Iterator[R]:
    for run in runs:
        yield run
        if run.failure is not None:
            return
