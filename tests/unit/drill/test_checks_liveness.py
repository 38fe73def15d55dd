# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I3 is seen to be kept and broken: bounds, and what is still under way when they are over."""

from __future__ import annotations

import pytest

from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.records import GateRecord, OutcomeRecord, encode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.drill.checks import liveness_bound_s
from lightning_resilience.drill.checks_liveness import closing_bound_s, operation_bound_s
from lightning_resilience.drill.scenario import Clocks, Scenario, Storage, Store, Workload
from tests.drill_news import KEYS, RESET, News, broken


CLOSES = "I3 Closes"
ENDS = "I3 Ends"


def test_the_bound_is_the_scenarios_own_where_it_has_one() -> None:
    """Whoever writes a scenario may know better."""
    assert liveness_bound_s(Scenario(ends_at_s=12.5)) == 12.5


@pytest.mark.parametrize(
    "worse",
    [
        Scenario(ranks=64, clocks=Clocks(rate=1.2)),
        Scenario(ranks=64, store=Store(lost_answers=0.01)),
        Scenario(ranks=64, storage=Storage(service_s=0.5)),
        Scenario(ranks=64, storage=Storage(slots=64), breaker=BreakerConfig(max_concurrent=64)),
    ],
    ids=["clocks", "answers", "service", "permits"],
)
def test_a_harder_world_has_more_time_to_close(worse: Scenario) -> None:
    """Slow clocks, lost answers, slow storage, and a longer ramp."""
    assert closing_bound_s(worse) > closing_bound_s(Scenario(ranks=64))


def test_an_operation_ends_long_before_a_long_deadline() -> None:
    """Else a wedge that lasts until the deadline would go unseen."""
    scenario = Scenario(workload=Workload(joint_timeout_s=40.0))

    assert operation_bound_s(scenario, is_joint=True) < scenario.retry.deadline_s


def test_an_operation_ends_soon_after_a_short_deadline() -> None:
    """An attempt, and what follows it, may come after it."""
    scenario = Scenario(retry=RetryPolicy(deadline_s=30.0), workload=Workload(joint_timeout_s=40.0))

    assert operation_bound_s(scenario, is_joint=True) < 30.0 + 60.0 + 40.0 + 80.0 + 20.0 + 1.0


def test_all_operations_have_their_time() -> None:
    """The bound of a job grows with its rounds."""
    one, ten = (Scenario(workload=Workload(rounds=rounds)) for rounds in (1, 10))

    assert liveness_bound_s(ten) > 5 * liveness_bound_s(one)


def test_a_circuit_that_stays_open_is_seen() -> None:
    """Somebody waits, storage is well, and nobody closes it."""
    news = News()
    news.trip()
    news.begin(2)
    bound_s = closing_bound_s(news.world.scenario)
    news.at(bound_s - 1.0).read(2)

    with broken(CLOSES):
        news.at(bound_s + 1.0).read(2)


def test_a_circuit_need_not_close_while_nobody_calls() -> None:
    """Nobody would know that storage is well again."""
    news = News()
    news.trip()

    news.at(closing_bound_s(news.world.scenario) + 1.0).read(2)


def test_a_circuit_need_not_close_for_who_is_alone() -> None:
    """It follows a breaker of its own."""
    news = News()
    news.trip()
    news.begin(2)
    news.go_alone(2)

    news.at(closing_bound_s(news.world.scenario) + 1.0).read(2)


def test_a_failure_at_storage_begins_the_bound_anew() -> None:
    """The dependency is not well after all."""
    news = News()
    news.trip()
    news.begin(2)
    news.claim()
    news.at(11.0).answer(news.send(0, "probe"), RESET)
    news.move(0, "open", open_s=20.0)
    bound_s = closing_bound_s(news.world.scenario)
    news.at(bound_s + 10.0).read(2)

    with broken(CLOSES):
        news.at(bound_s + 12.0).read(2)


def test_an_operation_that_never_ends_is_seen() -> None:
    """It polls, and so it is alive, and it does not come to its end."""
    news = News()
    news.create()
    news.begin(2)
    bound_s = operation_bound_s(news.world.scenario, is_joint=False)
    news.at(bound_s - 1.0).read(2)

    with broken(ENDS):
        news.at(bound_s + 1.0).read(2)


@pytest.mark.parametrize("end", ["ended", "crashed"])
def test_an_operation_that_is_over_is_forgotten(end: str) -> None:
    """Whether its process is alive or not."""
    news = News()
    news.create()
    news.begin(2)
    if end == "ended":
        news.end(2)
    else:
        news.crash(2)

    news.at(operation_bound_s(news.world.scenario, is_joint=False) + 1.0).read(3)


@pytest.mark.parametrize("why", ["reported", "refused"])
def test_a_circuit_need_not_close_for_who_only_waits_for_the_verdict(why: str) -> None:
    """It has reported its failure, or a gate has refused all: nobody calls storage any more."""
    news = News()
    news.trip()
    for rank in (2, 3):
        news.begin(rank, "load")
        if why == "reported":
            report = OutcomeRecord(rank=rank, failure="transient")
            news.write(rank, KEYS.joint("out", 1, rank), encode(report))
    if why == "refused":
        writer = news.ranks[2].dice.nonce()
        gate = GateRecord(
            op="load", digest="", verdict="fail", epoch=2, rank=2, reason="open", writer=writer
        )
        news.write(2, KEYS.joint("gate", 1, 0), encode(gate))

    news.at(closing_bound_s(news.world.scenario) + 1.0).read(2)


def test_who_was_served_need_not_close_the_circuit() -> None:
    """It waits for other ranks, and calls no more."""
    news = News()
    news.trip()
    news.claim()
    news.answer(news.send(0, "probe"))
    news.move(0, "recovering")
    news.begin(0, "joint")
    news.take(0, 0)
    news.answer(news.send(0))
    news.move(0, "recovering", limit=2)

    news.at(news.now_s + closing_bound_s(news.world.scenario) + 1.0).read(0)
