# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Eight processes share one retry budget at a dependency that fails often and never trips.

What is measured is the charge: the compare-and-set of the budget's record, which every process
notes with the instants at which it was sent and answered; the store has executed it in between. So
a charge is counted in a window only where it lies in it for certain. The dependency's own count of
requests shows that no retry was made without a charge.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core import budget
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.events import BreakerChanged, RetryDenied, RetryScheduled
from lightning_resilience.core.records import BudgetRecord, decode
from lightning_resilience.protocols.circuit_memory import Limits
from tests.integration.contention_ranks import CONFIG, Part


if TYPE_CHECKING:
    import torch.distributed as dist

    from tests.integration.contention_ranks import Change, Crew, Dependency, Report, Request


pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

RANKS = 8
BUDGET = BudgetConfig(retry_ratio=0.1, retry_floor=8, budget_window_s=0.8)
NEVER_TRIPS = replace(CONFIG, trip_failures=1000)


@pytest.fixture
def part(tcp_store: dist.TCPStore, dependency: Dependency, request: pytest.FixtureRequest) -> Part:
    """What the ranks are in a test, with records of its own."""
    return Part(
        dependency=request.node.name,
        store_port=tcp_store.port,
        port=dependency.port,
        config=NEVER_TRIPS,
        limits=Limits(budget=BUDGET),
        collective=False,
    )


def charges(reports: list[Report]) -> list[tuple[Change, BudgetRecord]]:
    """All charges of a retry, in the order of the budget's history."""
    written = {
        change.raw: (change, decode(BudgetRecord, change.raw, key=change.key))
        for report in reports
        for change in report.changes
        if change.has_won and "/budget/" in change.key
    }
    # A record that only puts a bucket away has no retry in its present bucket.
    charged = [each for each in written.values() if each[1].retries[0]]
    return sorted(charged, key=lambda each: (each[1].bucket, each[1].retries[0]))


def test_retries_of_all_stay_within_the_budget_of_every_window(
    crew: Crew, dependency: Dependency, part: Part
) -> None:
    """No window holds more charges than the quota, no retry is made without one, and all get in.

    A retry that is denied waits, and is made later: no call fails for it.
    """
    crew.do("begin", part)
    chance = random.Random(1)
    dependency.judge = lambda _: chance.random() >= 0.4
    reports = crew.do("calls", 6)

    history = charges(reports)
    busiest, most = 0, 0
    for last, record in history:
        since_s = last.answered_at_s - BUDGET.budget_window_s
        certain = sum(
            since_s <= change.sent_at_s and change.answered_at_s <= last.answered_at_s
            for change, _ in history
        )
        quota = budget.quota(BUDGET, record)
        assert certain <= quota
        busiest, most = max(busiest, certain), max(most, quota)
    calls = RANKS * 6
    retries = len(dependency.of("call")) - calls
    denied = sum(len(report.emitted(RetryDenied)) for report in reports)
    operations = sum(report.operations.total() for report in reports)
    print(  # noqa: T201 - the figures of this test
        f"{calls} calls, {retries} retries for {len(history)} charges, at most {busiest} of up to "
        f"{most} in {BUDGET.budget_window_s} s, {denied} denials, {operations / calls:.1f} store "
        "operations a call"
    )
    assert [ended.error for report in reports for ended in report.calls] == [""] * calls
    assert not any(report.emitted(BreakerChanged) for report in reports)
    assert retries == len(history)
    assert denied >= 1
    assert busiest > BUDGET.retry_floor / 2, "nobody came near the quota"


def test_a_retry_that_is_denied_is_made_later(
    crew: Crew, dependency: Dependency, part: Part
) -> None:
    """The failure of a caller that waits is followed by denials, a charge, and a success."""
    scarce = BudgetConfig(retry_ratio=0.0, retry_floor=1, budget_window_s=1.2)
    crew.do("begin", replace(part, limits=Limits(budget=scarce)), ranks=[0, 1])
    failed: set[int] = set()

    def judge(request: Request) -> bool:
        is_first = request.rank not in failed
        failed.add(request.rank)
        return not is_first

    dependency.judge = judge
    reports = crew.do("calls", 1, ranks=[0, 1])

    denied = [report for report in reports if report.emitted(RetryDenied)]
    assert [ended.attempts for report in reports for ended in report.calls] == [2, 2]
    assert len(denied) == 1
    names = [type(event).__name__ for _, event in denied[0].events]
    assert names.index("RetryDenied") < names.index("RetryScheduled")
    assert len(denied[0].emitted(RetryScheduled)) == 1
    first = denied[0].emitted(RetryDenied)[0]
    assert (first.used, first.quota, first.window_s) == (1, 1, scarce.budget_window_s)


def test_a_caller_that_does_not_wait_is_told_what_failed(
    crew: Crew, dependency: Dependency, part: Part
) -> None:
    """With ``raise`` a denial is ``BudgetExhaustedError``, and its cause is the call's failure."""
    scarce = BudgetConfig(retry_ratio=0.0, retry_floor=2, budget_window_s=60.0)
    crew.do("begin", replace(part, limits=Limits(budget=scarce), when_open="raise"))
    dependency.judge = lambda _: False
    reports = crew.do("calls", 1)

    ended = [ended for report in reports for ended in report.calls]
    requests = len(dependency.of("call"))
    print(f"{requests} requests of {RANKS} calls: {ended[0].text}")  # noqa: T201
    assert {each.error for each in ended} == {"BudgetExhaustedError"}
    assert {each.cause for each in ended} == {"ConnectionResetError"}
    assert all("2 of 2" in each.text for each in ended)
    assert requests == RANKS + scarce.retry_floor
