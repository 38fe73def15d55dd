# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""HALF_OPEN: one holder probes, and a holder that dies is replaced."""

from __future__ import annotations

import pytest

from lightning_resilience.core.breaker import (
    BreakerConfig,
    BreakerInput,
    BreakerState,
    ForcedOpen,
    ProbeFailed,
    ProbeReleased,
    ProbeSucceeded,
    passes,
)
from lightning_resilience.core.events import ResultDropped
from tests.unit.core.breaker.samples import (
    CONFIG,
    DEPENDENCY,
    EPOCH,
    HOLDER,
    apply,
    claim,
    record_in,
)


HALF_OPEN = record_in(BreakerState.HALF_OPEN, open_s=20.0)


def results(epoch: int, holder: str) -> list[BreakerInput]:
    """Return every result that a probe may have."""
    return [
        ProbeSucceeded(epoch=epoch, holder=holder),
        ProbeFailed(epoch=epoch, holder=holder, reason="timeout"),
        ProbeReleased(epoch=epoch, holder=holder),
    ]


def test_half_open_does_not_pass() -> None:
    """While one probes, no other call goes through."""
    assert not passes(HALF_OPEN)


@pytest.mark.parametrize("unchanged_s", [8.0, 8.5, 1e9])
def test_a_silent_prober_is_replaced(unchanged_s: float) -> None:
    """Who has seen the claim unchanged for a lease takes over, in a new epoch."""
    stepped = apply(HALF_OPEN, claim(unchanged_s, holder="me"))

    assert stepped.record.state == "half_open"
    assert stepped.record.holder == "me"
    assert stepped.record.epoch == EPOCH + 1
    assert stepped.record.generation == HALF_OPEN.generation
    assert stepped.record.open_s == 20.0
    assert "took over" in stepped.reason


@pytest.mark.parametrize("unchanged_s", [0.0, 7.999])
def test_a_denied_claim_does_not_renew_the_lease(unchanged_s: float) -> None:
    """A claim within the lease leaves the very same record: nobody's clock starts anew."""
    stepped = apply(HALF_OPEN, claim(unchanged_s))

    assert stepped.record is HALF_OPEN
    assert not stepped.changed
    assert "8 s" in stepped.reason


def test_a_result_of_a_replaced_prober_changes_nothing() -> None:
    """A prober that wakes up after its lease cannot change what its successor does."""
    taken = apply(HALF_OPEN, claim(holder="me")).record

    for late in results(EPOCH, HOLDER):
        stepped = apply(taken, late)

        assert stepped.record is taken
        assert stepped.events == (
            ResultDropped(dependency=DEPENDENCY, epoch=EPOCH, current_epoch=EPOCH + 1),
        )


@pytest.mark.parametrize(
    ("epoch", "holder"), [(EPOCH - 1, HOLDER), (EPOCH + 1, HOLDER), (EPOCH, "other"), (EPOCH, "")]
)
def test_only_the_holder_of_this_epoch_settles_the_probe(epoch: int, holder: str) -> None:
    """A result that names another epoch or holder is reported as dropped."""
    for result in results(epoch, holder):
        stepped = apply(HALF_OPEN, result)

        assert stepped.record is HALF_OPEN
        assert [type(fact) for fact in stepped.events] == [ResultDropped]


def test_an_answered_probe_begins_the_recovery() -> None:
    """After a success the circuit recovers, with the first limit and no failures."""
    record = apply(HALF_OPEN, ProbeSucceeded(epoch=EPOCH, holder=HOLDER)).record

    assert record.state == "recovering"
    assert (record.limit, record.failures, record.holder) == (CONFIG.ramp_start, 0, "")
    assert record.epoch == EPOCH + 1
    assert record.generation == HALF_OPEN.generation


@pytest.mark.parametrize(
    ("ramp_start", "max_concurrent", "state"),
    [(1, 1, "closed"), (16, 16, "closed"), (15, 16, "recovering"), (1, 2, "recovering")],
)
def test_there_may_be_nothing_to_ramp(ramp_start: int, max_concurrent: int, state: str) -> None:
    """Where the first limit is the last one, an answered probe closes the circuit at once."""
    config = BreakerConfig(ramp_start=ramp_start, max_concurrent=max_concurrent)

    record = apply(HALF_OPEN, ProbeSucceeded(epoch=EPOCH, holder=HOLDER), config=config).record

    assert (record.state, record.limit) == (state, ramp_start)


@pytest.mark.parametrize(
    ("open_s", "next_s"), [(10.0, 20.0), (20.0, 40.0), (29.0, 58.0), (40.0, 60.0), (60.0, 60.0)]
)
def test_a_failed_probe_doubles_the_wait(open_s: float, next_s: float) -> None:
    """The open wait after k failed probes is min(max_open_for_s, open_for_s · 2^k)."""
    half_open = record_in(BreakerState.HALF_OPEN, open_s=open_s)

    stepped = apply(half_open, ProbeFailed(epoch=EPOCH, holder=HOLDER, reason="timeout"))

    assert stepped.record.state == "open"
    assert stepped.record.open_s == next_s
    assert stepped.record.holder == ""
    assert stepped.record.generation == half_open.generation
    assert "timeout" in stepped.reason


def test_a_cancelled_probe_says_nothing() -> None:
    """A probe that was cancelled gives its permit back, and the wait stays as it was."""
    record = apply(HALF_OPEN, ProbeReleased(epoch=EPOCH, holder=HOLDER)).record

    assert record.state == "open"
    assert record.open_s == 20.0
    assert record.holder == ""


def test_an_operator_ends_the_probe() -> None:
    """A forced opening takes the permit away; the probe's result is late."""
    forced = apply(HALF_OPEN, ForcedOpen(reason="maintenance")).record

    assert (forced.state, forced.holder) == ("forced_open", "")
    assert apply(forced, ProbeSucceeded(epoch=EPOCH, holder=HOLDER)).record is forced
