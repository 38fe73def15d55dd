# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Call a function that succeeds: bare, guarded, and under other libraries, side by side.

Every kind of call is measured once in each round, in turn, so that all meet the same neighbours;
what counts is the median over the rounds. Each library has a policy of five attempts or its default
breaker, and nothing ever fails: this is the price of being prepared. The import of ``Guard`` is
timed in fresh interpreters that have loaded msgspec already.

Run it::

    python benchmarks/guard_overhead.py

It prints nanoseconds and ratios, and ends with 1 where a guarded call or the import is dearer than
it may be.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import timeit
from functools import partial
from typing import TYPE_CHECKING

import backoff
import pybreaker
import stamina
import tenacity

from lightning_resilience import Guard


if TYPE_CHECKING:
    from collections.abc import Callable

NANOSECONDS = 1e9
MILLISECONDS = 1e3

GUARDED = "Guard.call"
STACK = "tenacity around pybreaker"
MOST_NS = 500.0
MOST_OF_STACK = 0.1
MOST_IMPORT_MS = 50.0

IMPORT = (
    "import msgspec, time\n"
    "start_s = time.perf_counter()\n"
    "import lightning_resilience\n"
    "lightning_resilience.Guard\n"
    "print(time.perf_counter() - start_s)"
)


def work() -> int:
    """Return at once."""
    return 1


def kinds() -> dict[str, Callable[[], object]]:
    """Return a call of each kind."""
    guard = Guard("benchmark")
    asking = Guard("benchmark", breaker={"view_max_age_s": 1e-9})
    breaker = pybreaker.CircuitBreaker()
    retry = tenacity.retry(
        stop=tenacity.stop_after_attempt(5), wait=tenacity.wait_random_exponential()
    )
    return {
        "bare": work,
        GUARDED: partial(guard.call, work),
        "Guard as decorator": guard(work),
        "Guard.call that reads the store": asking(work),
        "pybreaker": breaker(work),
        "backoff": backoff.on_exception(backoff.expo, Exception, max_tries=5)(work),
        "stamina": stamina.retry(on=Exception, attempts=5)(work),
        "tenacity": retry(work),
        STACK: retry(breaker(work)),
    }


def call_ns(*, calls: int, rounds: int) -> dict[str, float]:
    """Return the median of each kind, in nanoseconds a call."""
    timers = {name: timeit.Timer(call) for name, call in kinds().items()}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer.timeit(calls) / calls)
    return {name: statistics.median(each) * NANOSECONDS for name, each in seconds.items()}


def import_ms(*, interpreters: int) -> float:
    """Return the median cost of the import, in milliseconds beyond msgspec's."""
    seconds = [
        float(subprocess.check_output([sys.executable, "-c", IMPORT], text=True))
        for _ in range(interpreters + 1)
    ]
    # The first may have compiled the files.
    return statistics.median(seconds[1:]) * MILLISECONDS


def main() -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--imports", type=int, default=9)
    arguments = parser.parse_args()
    medians = call_ns(calls=arguments.calls, rounds=arguments.rounds)
    cost_ms = import_ms(interpreters=arguments.imports)
    for name, median_ns in medians.items():
        ratio = median_ns / medians[GUARDED]
        print(f"{name:32s} {median_ns:10.0f} ns a call   {ratio:8.2f} × {GUARDED}")
    print(f"import of Guard: {cost_ms:.1f} ms beyond msgspec")
    limits = [
        (f"{GUARDED}, ns", medians[GUARDED], MOST_NS),
        (f"{GUARDED} / {STACK}", medians[GUARDED] / medians[STACK], MOST_OF_STACK),
        ("import of Guard, ms", cost_ms, MOST_IMPORT_MS),
    ]
    missed = [f"{name}: {value:.3g} > {most:g}" for name, value, most in limits if value > most]
    print("\n".join(missed) or "within all limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
