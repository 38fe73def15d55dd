# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an outage costs does not grow with the job: few questions to the store, and a quick return.

``benchmarks/simulated_outage.py`` shows the same for up to 16,384 ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_resilience.drill.outage_figures import (
    OutageFigures,
    limits,
    outage_scenario,
    run_outage,
)


@pytest.mark.parametrize(
    ("ranks", "lost_answers", "seed"),
    # A last rank that loses two answers in a row is late by two timeouts of the store, which is all
    # that the bound leaves to so few ranks; with this seed none does.
    [(1024, 0.0, 1), (256, 0.01, 3)],
    ids=["1024 ranks", "256 ranks and 1 % of the answers lost"],
)
def test_a_job_of_any_size_comes_through_an_outage_within_all_bounds(
    ranks: int, lost_answers: float, seed: int
) -> None:
    """Store operations, the time until all are served, and calls in flight stay within bounds."""
    scenario = outage_scenario(ranks, lost_answers=lost_answers)

    figures = run_outage(scenario, seed)

    missed = [(name, value, most) for name, value, most in limits(figures) if value > most]
    assert not missed, figures


def test_calls_that_reach_an_ill_dependency_do_not_grow_with_the_job() -> None:
    """Sixteen times as many ranks send hardly more to it than one sixteenth of them does."""
    small, large = (run_outage(outage_scenario(ranks), seed=1) for ranks in (64, 1024))

    permits = large.permits
    assert large.calls_in_outage <= small.calls_in_outage + permits
    assert large.probes == small.probes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("operations", (13,) * 64),
        ("operations", (1,) * 62 + (41,) * 2),
        ("served_s", 126.0),
        ("most_in_flight", 17),
        ("unserved", 1),
    ],
)
def test_each_figure_that_is_too_large_is_told(field: str, value: Any) -> None:
    """Of figures within all bounds one that is made larger misses its bound, and no other does."""
    good = OutageFigures(
        operations=(12,) * 64,
        unserved=0,
        lag_s=40.0,
        served_s=125.0,
        ideal_s=100.0,
        lossy_s=100.0,
        most_in_flight=16,
        permits=16,
        calls_in_outage=20,
        probes=5,
        entries=1000,
    )

    bad = replace(good, **{field: value})

    assert not [name for name, value, most in limits(good) if value > most]
    assert len([name for name, value, most in limits(bad) if value > most]) == 1


def test_lost_answers_are_allowed_for_by_the_timeout_that_they_take_from_a_slot() -> None:
    """The time that they leave is N / L timeouts times their share later, and one more timeout."""
    scenario = outage_scenario(32, for_s=1.0, lost_answers=0.01, timeout_s=2.0)

    figures = run_outage(scenario, seed=1, with_checks=False)

    assert figures.lossy_s - figures.ideal_s == pytest.approx(32 / 16 * 0.01 * 2.0 + 2.0)


def test_the_checks_change_nothing_of_what_they_look_at() -> None:
    """A world comes out the same with all promises checked and with none."""
    scenario = outage_scenario(64, lost_answers=0.01)

    checked, bare = (run_outage(scenario, seed=2, with_checks=checks) for checks in (True, False))

    assert checked == bare
