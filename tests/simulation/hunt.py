# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Run worlds in a fresh interpreter until one of them shows that a promise is not kept.

A program of its own, because the package that it runs is whichever comes first on the path: a copy
with a planted bug, usually. It reads its task as JSON from stdin and writes what it has found as
JSON to stdout.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_resilience
from lightning_resilience.drill.job_kinds import KINDS
from lightning_resilience.drill.random_worlds import random_scenario
from lightning_resilience.drill.scenario_file import read_scenario
from lightning_resilience.drill.sweep import run_world


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.drill.scenario import Scenario


def worlds(task: dict[str, Any]) -> Iterator[tuple[str, Scenario | None, int]]:
    """Yield where each world comes from, its scenario and its seed: given files first.

    A world of saves, of loads, or of restarts has no scenario.
    """
    for path in task["scenarios"]:
        scenario = read_scenario(path)
        for seed in task["seeds"]:
            yield path, scenario, seed
    for seed in task["worlds"]:
        is_own = any(task[f"of_{kind.name}"] for kind in KINDS)
        yield "", None if is_own else random_scenario(seed), seed


def failure_of(scenario: Scenario | None, seed: int, task: dict[str, Any]) -> tuple[str, str]:
    """Return which check has failed in a world, empty where none has, and what it said."""
    if scenario is None:
        (kind,) = (kind for kind in KINDS if task[f"of_{kind.name}"])
        run = kind.of_seed(seed)
        return run.check, run.what
    failure = run_world(scenario, seed).failure
    return ("", "") if failure is None else (failure.check, failure.what)


def hunt(task: dict[str, Any]) -> dict[str, Any]:
    """Return the first failure by a check that counts, and what else was seen before it."""
    others: dict[str, int] = {}
    ran = 0
    spared = {(path, seed) for path, seed in task["spared"]}
    for path, scenario, seed in worlds(task):
        if (path, seed) in spared:
            continue
        ran += 1
        # A world that does not end is a find too, and nothing else would end it.
        faulthandler.dump_traceback_later(task["longest_s"], exit=True)
        check, what = failure_of(scenario, seed, task)
        faulthandler.cancel_dump_traceback_later()
        if not check:
            continue
        if check.startswith(tuple(task["found_by"])):
            found = {"check": check, "what": what, "path": path, "seed": seed}
            return {**found, "ran": ran, "others": others}
        others[check] = others.get(check, 0) + 1
    return {"check": "", "ran": ran, "others": others}


if __name__ == "__main__":
    # Or another copy of the package, on the path before, would be what is hunted.
    assert Path(lightning_resilience.__file__).resolve().is_relative_to(Path.cwd().resolve())
    json.dump(hunt(json.load(sys.stdin)), sys.stdout)
