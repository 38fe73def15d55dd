# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""RECOVERING: calls go through up to a limit that successes double and failures halve."""

from __future__ import annotations

import pytest

from lightning_resilience.core.breaker import (
    AttemptFailed,
    AttemptSucceeded,
    BreakerConfig,
    BreakerState,
    ForcedOpen,
    passes,
)
from lightning_resilience.core.events import ResultDropped
from tests.unit.core.breaker.samples import CONFIG, EPOCH, apply, claim, record_in, vote


RECOVERING = record_in(BreakerState.RECOVERING, limit=4, open_s=20.0)
SUCCESS = AttemptSucceeded(epoch=EPOCH)
FAILURE = AttemptFailed(epoch=EPOCH, reason="timeout")


def test_recovering_passes() -> None:
    """A recovering circuit lets calls through, up to its limit."""
    assert passes(RECOVERING)


@pytest.mark.parametrize(
    ("limit", "state", "after"),
    [(1, "recovering", 2), (4, "recovering", 8), (7, "recovering", 14), (8, "closed", 16)],
)
def test_a_success_doubles_the_limit(limit: int, state: str, after: int) -> None:
    """Each success doubles the limit; at max_concurrent the circuit is closed."""
    record = apply(record_in(BreakerState.RECOVERING, limit=limit), SUCCESS).record

    assert (record.state, record.limit) == (state, after)
    assert record.epoch == EPOCH + 1


def test_the_last_limit_is_that_of_the_config() -> None:
    """A limit that would double past max_concurrent stops there."""
    record = apply(record_in(BreakerState.RECOVERING, limit=12), SUCCESS).record

    assert (record.state, record.limit) == ("closed", 16)


def test_closing_forgets_the_outage() -> None:
    """A closed circuit has no failures left, and its next open wait is the first one again."""
    record = apply(
        record_in(BreakerState.RECOVERING, limit=8, failures=2, open_s=60.0), SUCCESS
    ).record

    assert record.state == "closed"
    assert (record.failures, record.open_s) == (0, CONFIG.open_for_s)
    assert record.generation == RECOVERING.generation


def test_a_ramp_takes_the_logarithm_of_the_limit() -> None:
    """From 1 to 16 it takes four successes, each in the epoch of the one before."""
    record = record_in(BreakerState.RECOVERING, limit=1)

    limits = []
    while record.state == "recovering":
        record = apply(record, AttemptSucceeded(epoch=record.epoch)).record
        limits.append(record.limit)

    assert limits == [2, 4, 8, 16]


def test_one_epoch_counts_one_result() -> None:
    """Calls that were admitted together move the limit once: the second result is late."""
    doubled = apply(RECOVERING, SUCCESS).record

    for late in (SUCCESS, FAILURE):
        stepped = apply(doubled, late)
        assert stepped.record is doubled
        assert [type(fact) for fact in stepped.events] == [ResultDropped]


@pytest.mark.parametrize(("limit", "after"), [(2, 1), (3, 1), (4, 2), (8, 4), (15, 7)])
def test_a_failure_halves_the_limit(limit: int, after: int) -> None:
    """One failure halves the limit and is counted."""
    record = apply(record_in(BreakerState.RECOVERING, limit=limit), FAILURE).record

    assert (record.state, record.limit, record.failures) == ("recovering", after, 1)
    assert record.epoch == EPOCH + 1


def test_successes_do_not_forget_failures() -> None:
    """Failures are counted since the probe: a ramp that stumbles often enough has failed."""
    record = apply(record_in(BreakerState.RECOVERING, limit=4, failures=1), SUCCESS).record

    assert record.failures == 1


@pytest.mark.parametrize(
    ("limit", "ramp_start", "state"),
    [(1, 1, "open"), (3, 2, "open"), (4, 2, "recovering"), (5, 3, "open"), (6, 3, "recovering")],
)
def test_a_ramp_fails_when_nothing_is_left_to_halve(
    limit: int, ramp_start: int, state: str
) -> None:
    """A limit that would fall below the first one opens the circuit again."""
    config = BreakerConfig(ramp_start=ramp_start)

    stepped = apply(record_in(BreakerState.RECOVERING, limit=limit), FAILURE, config=config)

    assert stepped.record.state == state
    assert "timeout" in stepped.reason or state == "recovering"


@pytest.mark.parametrize(("failures", "state"), [(0, "recovering"), (1, "recovering"), (2, "open")])
def test_so_many_failures_reopen(failures: int, state: str) -> None:
    """The third failure since the probe opens the circuit, whatever the limit."""
    record = apply(record_in(BreakerState.RECOVERING, limit=8, failures=failures), FAILURE).record

    assert record.state == state


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"limit": 1}, "the ramp failed at limit 1"), ({"limit": 8, "failures": 2}, "3 failures")],
)
def test_reopening_is_a_new_trip_with_twice_the_wait(fields: dict[str, object], why: str) -> None:
    """A failed recovery begins a new generation, since its bell was rung, and waits longer."""
    before = record_in(BreakerState.RECOVERING, open_s=20.0, **fields)

    record = apply(before, FAILURE).record

    assert record.state == "open"
    assert record.generation == before.generation + 1
    assert record.open_s == 40.0
    assert (record.limit, record.failures, record.holder) == (0, 0, "")
    assert why in record.reason


@pytest.mark.parametrize(("open_s", "next_s"), [(29.0, 58.0), (31.0, 60.0), (60.0, 60.0)])
def test_the_wait_is_bounded(open_s: float, next_s: float) -> None:
    """However often it reopens, the open wait is at most max_open_for_s."""
    before = record_in(BreakerState.RECOVERING, limit=1, open_s=open_s)

    assert apply(before, FAILURE).record.open_s == next_s


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_a_result_of_another_epoch_changes_nothing(epoch: int) -> None:
    """Calls that were admitted before the trip do not move the recovery's limit."""
    for result in (AttemptSucceeded(epoch=epoch), AttemptFailed(epoch=epoch, reason="timeout")):
        stepped = apply(RECOVERING, result)

        assert stepped.record is RECOVERING
        assert [type(fact) for fact in stepped.events] == [ResultDropped]


def test_a_result_of_another_store_changes_nothing() -> None:
    """A record that was rebuilt in a new store may have the epoch of one in the old."""
    for result in (
        AttemptSucceeded(epoch=EPOCH, store_id="another"),
        AttemptFailed(epoch=EPOCH, store_id="another", reason="timeout"),
    ):
        stepped = apply(RECOVERING, result)

        assert stepped.record is RECOVERING
        assert [type(fact) for fact in stepped.events] == [ResultDropped]


def test_neither_votes_nor_claims_matter() -> None:
    """While the circuit recovers, its own results decide."""
    assert apply(RECOVERING, vote(hosts=1)).record is RECOVERING
    assert apply(RECOVERING, claim()).record is RECOVERING


def test_an_operator_opens_it() -> None:
    """A forced opening is a new trip, since the bell was rung."""
    record = apply(
        record_in(BreakerState.RECOVERING, failures=2), ForcedOpen(reason="maintenance")
    ).record

    assert record.state == "forced_open"
    assert (record.limit, record.failures) == (0, 0)
    assert record.generation == RECOVERING.generation + 1
