# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks of a random world do together, and how some of them fail the others.

In some worlds all ranks load as well, and storage refuses some of those that do. In a few, ranks
fall out of lock-step: they leave a joint operation out, or make it twice. In others the store's
server is gone, for about as long as ranks wait before they leave a save without a verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

import msgspec

from lightning_resilience.drill.scenario import (
    JOINT_KINDS,
    Refusal,
    RefusalError,
    Scenario,
    StoreGone,
    Stray,
)


if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from lightning_resilience.drill.scenario import Fault


__all__ = ["seconds", "with_joint_work"]

# Worlds in which all ranks work together as well, and in which some stray, out of one.
_LOADING: Final = 0.3
_STRAYING: Final = 0.1
# Worlds in which saves are deferred, and in which the store's server is gone for long enough.
_DEFERRING: Final = 0.4


def seconds(chance: Random, least: float, most: float) -> float:
    """Draw a time, in seconds."""
    # A millisecond is all that anything here depends on, and reads well in a file.
    return round(chance.uniform(least, most), 3)


def with_joint_work(chance: Random, scenario: Scenario) -> Scenario:
    """Let the ranks of some worlds work together, and those of some of them fail each other.

    Args:
        chance: The dice.
        scenario: The world without.
    """
    if chance.random() < _LOADING:
        scenario = _with_load(chance, scenario)
    if chance.random() < _STRAYING:
        return _with_strays(chance, scenario)
    return _with_deferrals(chance, scenario) if chance.random() < _DEFERRING else scenario


def _with_faults(scenario: Scenario, more: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted((*scenario.faults, *more), key=lambda fault: fault.at_s))


def _with_load(chance: Random, scenario: Scenario) -> Scenario:
    kinds = list(scenario.workload.kinds)
    if "joint" in kinds and chance.choice((False, True)):
        kinds = ["load" if kind == "joint" else kind for kind in kinds]
    else:
        kinds.insert(chance.randint(0, len(kinds)), "load")
    workload = msgspec.structs.replace(scenario.workload, kinds=tuple(kinds))
    refusals = [_refusal(chance, scenario) for _ in range(chance.choice((0, 0, 1, 2)))]
    faults = _with_faults(scenario, refusals)
    return msgspec.structs.replace(scenario, workload=workload, faults=faults)


def _refusal(chance: Random, scenario: Scenario) -> Refusal:
    work = scenario.workload
    # Long enough for whoever comes late, and not before the last round is over.
    start_s = chance.randrange(work.rounds) * work.every_s
    most = chance.choice((1, scenario.ranks))
    return Refusal(
        at_s=round(max(0.0, start_s + chance.uniform(-1, 1)), 3),
        for_s=seconds(chance, 1, 20),
        ranks=tuple(sorted(chance.sample(range(scenario.ranks), chance.randint(1, most)))),
        error=chance.choice(get_args(RefusalError)),
    )


def _with_strays(chance: Random, scenario: Scenario) -> Scenario:
    # With joint operations alone: their numbers follow on each other, as those of a job do.
    kinds = [kind for kind in scenario.workload.kinds if kind in JOINT_KINDS] or ["joint"]
    workload = msgspec.structs.replace(scenario.workload, kinds=tuple(kinds))
    start_s = chance.randrange(workload.rounds) * workload.every_s
    most = chance.choice((1, scenario.ranks))
    stray = Stray(
        at_s=round(max(0.0, start_s + chance.uniform(-1, 1)), 3),
        ranks=tuple(sorted(chance.sample(range(scenario.ranks), chance.randint(1, most)))),
        twice=chance.choice((False, True)),
    )
    faults = _with_faults(scenario, [stray])
    return msgspec.structs.replace(scenario, workload=workload, faults=faults)


def _with_deferrals(chance: Random, scenario: Scenario) -> Scenario:
    work = scenario.workload
    kinds = work.kinds if "joint" in work.kinds else (*work.kinds, "joint")
    # What a rank beats, and how often it looks, has to fit into it; and a store that is gone for
    # good is one that outlasts everything else.
    after_s = seconds(chance, 3, 20)
    workload = msgspec.structs.replace(
        work,
        kinds=kinds,
        rounds=max(work.rounds, 3),
        defer_after_s=after_s,
        joint_timeout_s=max(work.joint_timeout_s, 8 * after_s),
    )
    gone = [
        StoreGone(
            at_s=seconds(chance, 0, workload.rounds * workload.every_s),
            for_s=seconds(chance, 0.1, chance.choice((1.5, 3)) * after_s),
            comes_back_empty=True,
        )
        for _ in range(chance.choice((1, 1, 2)))
    ]
    # A server that has refused has lost what it held: that is what a deferral rests on.
    faults = tuple(
        msgspec.structs.replace(fault, comes_back_empty=True)
        if isinstance(fault, StoreGone)
        else fault
        for fault in _with_faults(scenario, gone)
    )
    return msgspec.structs.replace(scenario, workload=workload, faults=faults)
