# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What retries do after an outage: stuck for ever where λ · A > μ, and safe where it is not."""

from __future__ import annotations

import pytest

from lightning_resilience.core.backoff import BackoffKind
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.drill.metastability import Aftermath, OpenLoad, aftermath
from lightning_resilience.drill.virtual import SeededDice


SERVER_PER_S = 300.0
BUDGET = BudgetConfig()
BUDGETED = 1 + BUDGET.retry_ratio


def watched(load: OpenLoad, *, watched_s: float = 240.0) -> Aftermath:
    """Return what comes of a system, with the chance of its own name."""
    return aftermath(load, SeededDice(1, repr(load)), watched_s=watched_s)


def recovers(load: OpenLoad, *, watched_s: float = 240.0) -> bool:
    """Tell whether nearly all are answered in time at the end, or nearly none."""
    after = watched(load, watched_s=watched_s)
    assert not 0.01 < after.answered < 0.99, f"neither up nor down: {after}"
    return after.answered >= 0.99


@pytest.mark.parametrize(
    ("retries", "budget", "kind", "amplification"),
    [
        (1, None, BackoffKind.NONE, 2.0),
        (3, None, BackoffKind.NONE, 4.0),
        (3, None, BackoffKind.FULL, 4.0),
        (3, BUDGET, BackoffKind.NONE, BUDGETED),
        (3, BUDGET, BackoffKind.FULL, BUDGETED),
    ],
    ids=["1 retry", "3 retries", "3 with full jitter", "budget", "budget with full jitter"],
)
def test_the_boundary_is_where_all_attempts_together_are_too_many(
    retries: int, budget: BudgetConfig | None, kind: BackoffKind, amplification: float
) -> None:
    """3 % below λ · A = μ the system recovers, 3 % above it never does."""
    boundary_per_s = SERVER_PER_S / amplification

    outcomes = [
        recovers(
            OpenLoad(
                per_s=factor * boundary_per_s,
                server_per_s=SERVER_PER_S,
                retries=retries,
                budget=budget,
                kind=kind,
            ),
            watched_s=800.0,
        )
        for factor in (0.97, 1.03)
    ]

    assert outcomes == [True, False]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_without_an_outage_nothing_happens(retries: int) -> None:
    """The same load that never recovers is served for ever as long as nothing goes wrong."""
    assert recovers(OpenLoad(per_s=280, retries=retries, outage_s=0))


def test_without_retries_the_whole_capacity_is_safe() -> None:
    """280 requests per second recover at a server for 300 where nobody asks again."""
    assert recovers(OpenLoad(per_s=280, retries=0))


def test_the_published_example_never_recovers() -> None:
    """280 per second with one retry each are 560, which a server for 300 never gets through."""
    after = watched(OpenLoad(per_s=280, retries=1))

    assert after.answered == 0
    assert after.sent_per_s == pytest.approx(560, rel=0.01)


def test_the_queue_grows_by_what_is_too_much() -> None:
    """A system that is stuck falls behind by (λ · A − μ) / μ seconds every second."""
    load = OpenLoad(per_s=280, retries=1)

    early, late = (watched(load, watched_s=watched_s).queue_s for watched_s in (120.0, 240.0))

    assert (late - early) / 120 == pytest.approx((560 - 300) / 300, rel=0.02)


def test_delays_do_not_help_where_callers_never_run_out() -> None:
    """Full jitter with three retries is as stuck as without it, and sends four times the load."""
    after = watched(OpenLoad(per_s=200, retries=3, kind=BackoffKind.FULL))

    assert after.answered == 0
    assert after.sent_per_s == pytest.approx(800, rel=0.02)


@pytest.mark.parametrize(
    ("per_s", "expected"), [(200, True), (260, True), (280, False)], ids=["200", "260", "280"]
)
def test_the_budget_of_the_product_moves_the_boundary(per_s: float, *, expected: bool) -> None:
    """With one retry for ten calls, 200 and 260 per second recover; 280 are 308 with retries."""
    load = OpenLoad(per_s=per_s, retries=3, budget=BUDGET)

    # At 260 the queue loses 14 of its 2900 requests per second: that takes 200 s.
    assert recovers(load, watched_s=480.0) is expected
