# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One client in an outage asks as often as renewal theory says, whatever its delays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from lightning_resilience.core.backoff import BackoffKind
from lightning_resilience.drill.lone_client import LoneClient, attempts_during
from lightning_resilience.drill.virtual import SeededDice


# A client's count has a deviation of at most a tenth of its mean: the mean's is 0.2 % of it.
TRIALS = 2500
EXACT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """How long it lasts, how long an attempt takes to fail, base and cap; all in seconds."""

    outage_s: float
    failing_s: float
    base_s: float
    cap_s: float

    def __str__(self) -> str:
        return f"{self.outage_s:g}-{self.failing_s:g}-{self.base_s:g}-{self.cap_s:g}"

    def client(self, kind: BackoffKind) -> LoneClient:
        """Return the client with a scheme."""
        return LoneClient(kind=kind, base_s=self.base_s, cap_s=self.cap_s, failing_s=self.failing_s)

    def mean_attempts(self, client: LoneClient, *, trials: int) -> float:
        """Return how many attempts the client makes on average."""
        dice = SeededDice(1, f"{client.kind.value}/{self}")
        counts = [attempts_during(self.outage_s, client, dice) for _ in range(trials)]
        return sum(counts) / trials


OUTAGES = [
    Outage(outage_s=300, failing_s=0.05, base_s=0.5, cap_s=30),
    Outage(outage_s=600, failing_s=0.1, base_s=1, cap_s=60),
    Outage(outage_s=120, failing_s=0.05, base_s=0.1, cap_s=5),
]
rows = pytest.mark.parametrize("outage", OUTAGES, ids=str)


def doublings(outage: Outage) -> int:
    """Return after how many attempts the bound is at the cap."""
    return math.ceil(math.log2(outage.cap_s / outage.base_s))


def renewals(outage: Outage, *, share: float, variance: float) -> float:
    """Return the expected attempts where delays have a mean of ``share`` of their bound.

    Until the bound is at the cap, attempts are as good as fixed. From there on they are renewals:
    as many as intervals fit in, and a bit for the one that is under way at the end.

    Args:
        outage: The outage.
        share: The mean of a delay, as a share of its bound.
        variance: Its variance, as a share of the bound's square.
    """
    steps = doublings(outage)
    before_s = share * outage.base_s * (2.0**steps - 1) + steps * outage.failing_s
    mean_s = share * outage.cap_s + outage.failing_s
    squared = variance * outage.cap_s**2
    at_the_cap = (outage.outage_s - before_s) / mean_s
    return steps + 1 + at_the_cap + (squared - mean_s**2) / (2 * mean_s**2)


@rows
def test_without_delays_it_asks_all_the_time(outage: Outage) -> None:
    """There are as many attempts as fit into the outage."""
    found = outage.mean_attempts(outage.client(BackoffKind.NONE), trials=EXACT)

    assert found == pytest.approx(outage.outage_s / outage.failing_s, rel=0.01)


@rows
def test_a_fixed_delay_spaces_attempts_evenly(outage: Outage) -> None:
    """With a cap at the base, there are as many as attempts and delays fit in."""
    client = LoneClient(
        kind=BackoffKind.EXPONENTIAL,
        base_s=outage.base_s,
        cap_s=outage.base_s,
        failing_s=outage.failing_s,
    )

    found = outage.mean_attempts(client, trials=EXACT)

    expected = outage.outage_s / (outage.base_s + outage.failing_s)
    assert found == pytest.approx(expected, rel=0.01)


@rows
def test_exponential_delays_are_counted_exactly(outage: Outage) -> None:
    """The doublings take their time, and then an attempt comes with every cap."""
    steps = doublings(outage)
    before_s = outage.base_s * (2.0**steps - 1) + steps * outage.failing_s
    after_s = outage.outage_s - before_s

    found = outage.mean_attempts(outage.client(BackoffKind.EXPONENTIAL), trials=EXACT)

    assert found == steps + 1 + after_s // (outage.cap_s + outage.failing_s)


@rows
def test_full_jitter_asks_as_often_as_renewal_theory_says(outage: Outage) -> None:
    """Delays of half the cap on average: nearly twice the attempts of the unjittered schedule."""
    found = outage.mean_attempts(outage.client(BackoffKind.FULL), trials=TRIALS)

    assert found == pytest.approx(renewals(outage, share=1 / 2, variance=1 / 12), rel=0.01)


@rows
def test_equal_jitter_asks_as_often_as_renewal_theory_says(outage: Outage) -> None:
    """Delays of three quarters of the cap on average: fewer attempts than with full jitter."""
    found = outage.mean_attempts(outage.client(BackoffKind.EQUAL), trials=TRIALS)

    assert found == pytest.approx(renewals(outage, share=3 / 4, variance=1 / 48), rel=0.01)


@rows
def test_the_tolerance_tells_the_schemes_apart(outage: Outage) -> None:
    """No two schemes are within ten times the tolerance of each other."""
    expected = sorted(
        [
            outage.mean_attempts(outage.client(BackoffKind.EXPONENTIAL), trials=EXACT),
            renewals(outage, share=3 / 4, variance=1 / 48),
            renewals(outage, share=1 / 2, variance=1 / 12),
        ]
    )

    assert expected[1] > 1.1 * expected[0]
    assert expected[2] > 1.1 * expected[1]
