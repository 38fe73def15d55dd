# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A run is decided by its scenario and seed alone: not by the interpreter, nor by who looks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.random_worlds import random_scenario
from lightning_resilience.drill.scenario import Outage, Scenario, Store, Workload
from lightning_resilience.drill.trace import Story
from lightning_resilience.drill.world import World


if TYPE_CHECKING:
    from lightning_resilience.drill.process import Process


UNTIL_S = 3000.0
SEEDS = range(12)

DIGESTS = f"""
from lightning_resilience.drill.random_worlds import random_scenario
from lightning_resilience.drill.world import World

for seed in range({len(SEEDS)}):
    world = World(random_scenario(seed), seed)
    world.run(until_s={UNTIL_S})
    print(world.trace.digest)
"""


def digest_of(scenario: Scenario, seed: int, *observers: Observer) -> str:
    """The digest of a whole run."""
    world = World(scenario, seed, make_observers=lambda _world: observers)
    world.run(until_s=UNTIL_S)
    return world.trace.digest


def busy(**fields: float) -> Scenario:
    """A world in which much depends on chance."""
    return Scenario(
        ranks=16,
        hosts=4,
        workload=Workload(kinds=("single", "collective", "joint")),
        store=Store(**{"lost_answers": 0.01, "late_requests": 0.01, **fields}),
        faults=(Outage(at_s=1, for_s=60),),
    )


def test_a_run_does_not_depend_on_the_interpreters_hash_seed() -> None:
    """Fresh processes with other hash seeds have the digests of this one."""
    here = [digest_of(random_scenario(seed), seed) for seed in SEEDS]

    elsewhere = []
    for hash_seed in ("0", "1", "4294967295"):
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        elsewhere.append(done.stdout.split())

    assert elsewhere == [here] * 3
    assert len(set(here)) == len(SEEDS)


def test_another_seed_is_another_run() -> None:
    """Of one and the same scenario."""
    assert len({digest_of(busy(), seed) for seed in range(8)}) == 8


def test_another_scenario_is_another_run() -> None:
    """Of one and the same seed: a microsecond of the store's time is enough."""
    assert digest_of(busy(), 1) != digest_of(busy(latency_s=0.000501), 1)


class Nosy(Observer):
    """Looks at everything, and keeps it."""

    def __init__(self) -> None:
        self.seen = 0

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Count it."""
        del now_s, process, key, before
        self.seen += 1

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Count it."""
        del now_s, process, key
        self.seen += 1


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_does_not_depend_on_who_looks(seed: int) -> None:
    """Observers are told, and change nothing."""
    story, nosy = Story(), Nosy()

    observed = digest_of(busy(), seed, story, nosy)

    assert observed == digest_of(busy(), seed)
    assert nosy.seen > 0
    assert story.lines


def test_a_run_does_not_depend_on_the_runs_before_it() -> None:
    """What is remembered between runs makes them faster and not different."""
    first = digest_of(busy(), 5)
    digest_of(busy(), 6)
    digest_of(random_scenario(3), 3)

    assert digest_of(busy(), 5) == first


def test_a_story_is_the_same_for_the_same_seed() -> None:
    """Line by line, which is what a replay prints."""
    stories = [Story(), Story()]
    for story in stories:
        digest_of(busy(), 3, story)

    assert stories[0].lines == stories[1].lines
