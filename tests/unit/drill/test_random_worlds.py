# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every seed is a valid world, the same everywhere, and few seeds together show everything."""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
from collections import Counter
from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience import config
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.lease import CLOCK_RATE_FACTOR
from lightning_resilience.drill.random_worlds import random_scenario
from lightning_resilience.drill.scenario import (
    BrownoutFailure,
    Crash,
    Fault,
    GroupRestart,
    Interrupt,
    Kind,
    OutageFailure,
    Refusal,
    RefusalError,
    Scenario,
)
from lightning_resilience.drill.scenario_file import parse_scenario, scenario_text


SEEDS = range(1000)
SWEEP = range(300)
OFTEN_ENOUGH = 5
LATEST_S = 300.0


@cache
def worlds() -> tuple[Scenario, ...]:
    """Return the worlds of the first seeds."""
    return tuple(random_scenario(seed) for seed in SEEDS)


def faults_of(seeds: range) -> list[Fault]:
    """Return all faults of the worlds of some seeds."""
    return [fault for seed in seeds for fault in worlds()[seed].faults]


def end_s(fault: Fault) -> float:
    """Return when a fault is over."""
    return fault.at_s + getattr(fault, "for_s", 0.0)


def test_every_seed_is_a_valid_world() -> None:
    """Types, ranges and relations of every field are those that a scenario file is held to."""
    for world in worlds():
        assert msgspec.convert(msgspec.to_builtins(world), Scenario) == world
        config.check_relations(world.retry, world.breaker, JointConfig(), budget=world.budget)


@given(st.integers())
def test_any_whole_number_is_a_seed(seed: int) -> None:
    """Not only the first ones: a world is drawn for negative and for huge seeds as well."""
    world = random_scenario(seed)

    assert world == random_scenario(seed)
    assert world.name.endswith(f" {seed}")


@pytest.mark.parametrize("seed", range(40))
def test_a_world_can_be_kept_as_a_file(seed: int) -> None:
    """What is printed of a failing world is the world."""
    text = scenario_text(worlds()[seed])

    assert parse_scenario(text) == worlds()[seed]


def test_worlds_are_small_and_short() -> None:
    """From 1 to 64 ranks on 1 to 8 hosts, about a dozen on average; all is over in 300 s."""
    sizes = [world.ranks for world in worlds()]

    assert (min(sizes), max(sizes)) == (1, 64)
    assert 10 <= statistics.mean(sizes[: len(SWEEP)]) <= 15
    assert {world.hosts for world in worlds()} == set(range(1, 9))
    assert {world.workload.rounds for world in worlds()} == {1, 2, 3, 4}
    assert max(map(end_s, faults_of(SEEDS))) <= LATEST_S


def test_clocks_differ_by_no_more_than_leases_allow_for() -> None:
    """The fastest clock of a world and its slowest one are within the factor of every lease."""
    rates = [world.clocks.rate for world in worlds()]

    assert max(rates) ** 2 <= CLOCK_RATE_FACTOR
    assert min(rates) == 1.0


def test_somebody_stays_alive() -> None:
    """Those who die after the last restart, or may do so that late, are never all ranks."""
    for world in worlds():
        restarts = [fault.at_s for fault in world.faults if isinstance(fault, GroupRestart)]
        last_s = max(restarts, default=0.0)
        dead = {
            rank
            for fault in world.faults
            if isinstance(fault, Crash | Interrupt) and (fault.at_s >= last_s or fault.effects)
            for rank in fault.ranks
        }
        assert len(dead) < world.ranks, world


def shown_by(world: Scenario) -> set[str]:
    """Return everything of a world that a sweep must have shown."""
    breaker, store, storage = world.breaker, world.store, world.storage
    facts = {
        "no fault": not world.faults,
        "one rank": world.ranks == 1,
        "more than 48 ranks": world.ranks > 48,
        "several hosts": world.hosts > 1,
        "offset": world.clocks.offset_s > 0,
        "rate": world.clocks.rate > 1,
        "even clocks": world.clocks.rate == 1,
        "mixture": len(set(world.workload.kinds)) > 1,
        "one slot": breaker.max_concurrent == 1,
        "16 slots": breaker.max_concurrent == 16,
        "as many slots as permits": storage.slots == breaker.max_concurrent,
        "lost requests": store.lost_requests > 0,
        "lost answers": store.lost_answers > 0,
        "late requests": store.late_requests > 0 and store.late_s > store.timeout_s,
        "a store that loses nothing": store.lost_requests == store.lost_answers == 0,
        "throttles": storage.per_s > 0,
        "jitter": storage.jitter > 0,
        "short deadline": world.retry.deadline_s < 300,
        f"may go alone: {world.may_go_alone}": True,
        f"on_outage: {world.workload.on_outage}": True,
        f"when_open: {world.workload.when_open}": True,
        "crash, then restart": is_followed(world, Crash, GroupRestart),
        "faults that overlap": overlaps(world),
    }
    return {name for name, is_shown in facts.items() if is_shown} | set(world.workload.kinds)


def is_followed(world: Scenario, first: type, second: type) -> bool:
    """Tell whether a fault of one kind comes before one of another."""
    kinds = [type(fault) for fault in world.faults]
    return first in kinds and second in kinds[kinds.index(first) :]


def overlaps(world: Scenario) -> bool:
    """Tell whether a fault begins before an earlier one has ended."""
    pairs = zip(world.faults, world.faults[1:], strict=False)
    return any(later.at_s < end_s(earlier) for earlier, later in pairs)


def test_a_sweep_shows_every_kind_of_world() -> None:
    """Every workload, option and kind of trouble occurs at least five times in 300 seeds."""
    shown = Counter(name for seed in SWEEP for name in shown_by(worlds()[seed]))

    assert set(get_args(Kind)) <= set(shown)
    assert len(shown) == 30
    assert {name: count for name, count in shown.items() if count < OFTEN_ENOUGH} == {}


def test_a_sweep_shows_every_fault() -> None:
    """Every kind of fault, every way to fail and both ways back occur at least five times."""
    faults = faults_of(SWEEP)
    kinds = Counter(type(fault) for fault in faults)
    ways: Counter[Any] = Counter(
        (type(fault).__name__, getattr(fault, "error", None), getattr(fault, "effects", 0) > 0)
        for fault in faults
    )
    empty = Counter(getattr(fault, "comes_back_empty", None) for fault in faults)

    expected = {("Outage", error, False) for error in get_args(OutageFailure)}
    expected |= {("Refusal", error, False) for error in get_args(RefusalError)}
    expected |= {("Brownout", error, False) for error in get_args(BrownoutFailure)}
    expected |= {
        (name, None, late) for name in ("Crash", "Pause", "Interrupt") for late in (False, True)
    }
    assert set(kinds) == set(get_args(Fault))
    assert min(kinds.values()) >= OFTEN_ENOUGH
    assert min(ways[way] for way in expected) >= OFTEN_ENOUGH
    assert min(empty[True], empty[False]) >= OFTEN_ENOUGH


def test_only_some_of_those_who_load_are_refused() -> None:
    """All of one world may be, and in most some are served, so that outcomes differ."""
    loads = [world for world in worlds() if "load" in world.workload.kinds]
    shares = [
        len(fault.ranks) / world.ranks
        for world in loads
        for fault in world.faults
        if isinstance(fault, Refusal) and world.ranks > 1
    ]

    assert 0.25 < len(loads) / len(worlds()) < 0.35
    assert max(shares) == 1.0
    assert sum(share < 1.0 for share in shares) > 0.7 * len(shares)


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_a_seed_is_the_same_world_in_every_process(hash_seed: str) -> None:
    """The digest of 300 worlds does not depend on the hash seed of the interpreter."""
    code = (
        "import hashlib\n"
        "from lightning_resilience.drill.random_worlds import random_scenario\n"
        "worlds = [random_scenario(seed) for seed in range(300)]\n"
        "print(hashlib.sha256(repr(worlds).encode()).hexdigest())"
    )
    environ = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )

    here = [worlds()[seed] for seed in SWEEP]
    assert done.stdout.strip() == hashlib.sha256(repr(here).encode()).hexdigest()
