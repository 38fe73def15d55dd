# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All checks together: silent in right worlds of every kind of fault, and none is forgotten."""

from __future__ import annotations

import pytest

from lightning_resilience import RetryPolicy
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.drill import checks
from lightning_resilience.drill.checks import all_checks, liveness_bound_s
from lightning_resilience.drill.scenario import (
    Brownout,
    Clocks,
    Crash,
    Fault,
    GroupRestart,
    Interrupt,
    Outage,
    Pause,
    Scenario,
    StoragePartition,
    Store,
    StoreGone,
    StorePartition,
    Workload,
)
from lightning_resilience.drill.world import World
from lightning_resilience.errors import DrillFailedError
from tests.drill_news import BREAKER, News


TOGETHER = Workload(kinds=("collective",), rounds=8, every_s=15.0)
APART = Workload(kinds=("single",), rounds=12, every_s=15.0)
SAVES = Workload(kinds=("joint", "single"), rounds=4, every_s=15.0, joint_timeout_s=40.0)
OUTAGE = Outage(at_s=1.0, for_s=60.0)

WORLDS: dict[str, tuple[Workload, tuple[Fault, ...]]] = {
    "an outage": (TOGETHER, (OUTAGE,)),
    "requests that hang": (TOGETHER, (Outage(at_s=1.0, for_s=60.0, error="hang"),)),
    "a brown-out": (APART, (Brownout(at_s=1.0, for_s=90.0, share=0.5, slowdown=3.0),)),
    "a dead prober": (TOGETHER, (OUTAGE, Crash(at_s=11.2, ranks=(0, 1, 2), effects=3))),
    "a paused prober": (TOGETHER, (OUTAGE, Pause(at_s=11.2, ranks=(0, 1), for_s=30.0, effects=3))),
    "an interruption": (TOGETHER, (OUTAGE, Interrupt(at_s=20.0, ranks=(3, 4)))),
    "dead holders": (TOGETHER, (Crash(at_s=0.06, ranks=(0, 1, 2, 3), effects=2),)),
    "a host cut off from the store": (
        APART,
        (OUTAGE, StorePartition(at_s=20.0, for_s=60.0, hosts=(1,))),
    ),
    "a host cut off from storage": (APART, (StoragePartition(at_s=1.0, for_s=60.0, hosts=(1,)),)),
    "a store that is gone": (TOGETHER, (StoreGone(at_s=5.0, for_s=60.0), OUTAGE)),
    "a store that comes back empty": (
        TOGETHER,
        (OUTAGE, StoreGone(at_s=30.0, for_s=3.0, comes_back_empty=True)),
    ),
    "a restart": (TOGETHER, (OUTAGE, GroupRestart(at_s=30.0))),
    "saves in an outage": (SAVES, (Outage(at_s=10.0, for_s=60.0),)),
    "a worker that dies": (SAVES, (OUTAGE, Crash(at_s=20.0, ranks=(0,)))),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("is_hard", [False, True], ids=["well", "lossy"])
def test_all_promises_are_kept(name: str, is_hard: bool) -> None:  # noqa: FBT001 - data
    """In worlds of every kind of fault, also where answers are lost and clocks differ."""
    workload, faults = WORLDS[name]
    scenario = Scenario(
        name=name,
        ranks=12,
        hosts=4,
        workload=workload,
        breaker=BreakerConfig(max_concurrent=4),
        retry=RetryPolicy(stall_timeout_s=10.0, deadline_s=600.0),
        clocks=Clocks(rate=1.2 if is_hard else 1.0),
        store=Store(lost_answers=0.01, lost_requests=0.01) if is_hard else Store(),
        faults=faults,
    )

    world = World(scenario, 3, make_observers=all_checks)

    assert world.run(until_s=world.healed_at_s + liveness_bound_s(scenario))


def test_each_check_has_its_place_in_the_table() -> None:
    """Whoever reads the table knows all that is looked at."""
    names = {type(check).__name__ for check in all_checks(World(Scenario(), 0))[1:]}
    table = checks.__doc__ or ""

    assert [name for name in names if f"``{name}``" not in table] == []
    assert table.count("\nI6 ") == table.count("\nI9 ") == 1


def test_a_failure_says_when_and_where() -> None:
    """The seed, the instant and the entry of the agenda lead back to it."""
    news = News()
    news.at(2.5).create()

    with pytest.raises(
        DrillFailedError, match=r"seed 7, 2\.500000 s, entry 0 of the agenda"
    ) as caught:
        news.write(0, BREAKER, None)

    assert (caught.value.seed, caught.value.step) == (7, 0)
    assert caught.value.check == "I2 OneHistory"
