# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A sweep on all cores: which process runs a world makes no difference to it.

Worlds are told in the order of their seeds, whichever is done first, so that the first failure of a
sweep is the same one on every machine.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.sweep import sweep


if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from lightning_resilience.drill.scenario import Scenario
    from lightning_resilience.drill.sweep import Run


__all__ = ["sweep_on_cores"]

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
    if workers == 1:
        yield from sweep(seeds, scenario)
        return
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    # Not forked: a process that has threads, as a test's may, cannot be copied safely.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        runs = chain.from_iterable(pool.map(partial(_worlds, scenario=scenario), chunks))
        try:
            yield from _to_the_first_failure(runs)
        finally:
            pool.shutdown(cancel_futures=True)


def _worlds(seeds: Sequence[int], scenario: Scenario | None) -> list[Run]:
    return list(sweep(seeds, scenario))


def _to_the_first_failure(runs: Iterable[Run]) -> Iterator[Run]:
    for run in runs:
        yield run
        if run.failure is not None:
            return
