# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Run worlds in a fresh interpreter until one of them shows that a promise is not kept.

A program of its own, because the package that it runs is whichever comes first on the path: a copy
with a planted bug, usually. It reads its task as JSON from stdin and writes what it has found as
JSON to stdout.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from lightning_resilience.drill.random_worlds import random_scenario
from lightning_resilience.drill.scenario_file import read_scenario
from lightning_resilience.drill.sweep import run_world


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.drill.scenario import Scenario


def worlds(task: dict[str, Any]) -> Iterator[tuple[str, Scenario, int]]:
    """Yield where each world comes from, its scenario and its seed: given files first."""
    for path in task["scenarios"]:
        scenario = read_scenario(path)
        for seed in range(task["seeds"]):
            yield path, scenario, seed
    for seed in range(task["worlds"]):
        yield "", random_scenario(seed), seed


def hunt(task: dict[str, Any]) -> dict[str, Any]:
    """Return the first failure by a check that counts, and what else was seen before it."""
    others: dict[str, int] = {}
    ran = 0
    for path, scenario, seed in worlds(task):
        ran += 1
        failure = run_world(scenario, seed).failure
        if failure is None:
            continue
        if failure.check.startswith(tuple(task["found_by"])):
            found = {"check": failure.check, "what": failure.what, "path": path, "seed": seed}
            return {**found, "ran": ran, "others": others}
        others[failure.check] = others.get(failure.check, 0) + 1
    return {"check": "", "ran": ran, "others": others}


if __name__ == "__main__":
    json.dump(hunt(json.load(sys.stdin)), sys.stdout)
