# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""OPEN: nothing goes through until somebody has seen it for long enough and claims the probe."""

from __future__ import annotations

import pytest

from lightning_resilience.core.breaker import BreakerConfig, BreakerState, ForcedOpen, passes
from tests.unit.core.breaker.samples import EPOCH, WRITER, apply, claim, record_in, vote


OPEN = record_in(BreakerState.OPEN, open_s=20.0)


def test_open_does_not_pass() -> None:
    """An open circuit lets nothing through."""
    assert not passes(OPEN)


@pytest.mark.parametrize("unchanged_s", [20.0, 20.001, 1e9])
def test_who_has_waited_may_probe(unchanged_s: float) -> None:
    """Who has seen the record unchanged for its open wait gets the permit, in a new epoch."""
    record = apply(OPEN, claim(unchanged_s, holder="me")).record

    assert record.state == "half_open"
    assert record.holder == "me"
    assert record.epoch == EPOCH + 1
    assert record.writer == WRITER


@pytest.mark.parametrize("unchanged_s", [-1.0, 0.0, 10.0, 19.999])
def test_a_claim_before_its_time_writes_nothing(unchanged_s: float) -> None:
    """An early claim is denied with the numbers, and leaves the very same record."""
    stepped = apply(OPEN, claim(unchanged_s))

    assert stepped.record is OPEN
    assert not stepped.changed
    assert stepped.events == ()
    assert "20 s" in stepped.reason


def test_the_records_wait_counts_not_the_configs() -> None:
    """After failed probes the wait in the record is longer than the configured first one."""
    config = BreakerConfig(open_for_s=10.0)

    assert not apply(OPEN, claim(10.0), config=config).changed


def test_a_claim_keeps_the_wait_and_the_generation() -> None:
    """A claim is not a new trip: its waiters' bell and the length of the wait stay."""
    record = apply(OPEN, claim()).record

    assert record.generation == OPEN.generation
    assert record.open_s == 20.0
    assert record.limit == 0


def test_who_reads_open_writes_no_vote() -> None:
    """The requests that it takes to trip do not grow: votes for an open circuit are not written."""
    assert apply(OPEN, vote(hosts=1)).record is OPEN


def test_an_operator_holds_it() -> None:
    """A forced opening of an open circuit is no new trip: no bell has been rung."""
    record = apply(OPEN, ForcedOpen(reason="maintenance")).record

    assert record.state == "forced_open"
    assert record.generation == OPEN.generation
    assert record.epoch == EPOCH + 1
