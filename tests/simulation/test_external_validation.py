# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Clock, dice and delays give the numbers of a public simulator that shares no code with them.

The reference has its origin in its first lines. A mean agrees with it where the two are no more
than four combined standard errors apart, in calls and in time, in all 95 cells. With
``--log-cli-level=INFO`` every cell is shown with its numbers.
"""

from __future__ import annotations

import csv
import logging
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.backoff import BackoffKind
from lightning_resilience.drill.contention import BASE_S, CAP_S, contend, delays_of
from lightning_resilience.drill.virtual import SeededDice


if TYPE_CHECKING:
    from lightning_resilience.drill.contention import Delays


REFERENCE = Path(__file__).resolve().parent.parent / "data" / "aws_occ_reference.csv"
KINDS = {
    "none": BackoffKind.NONE,
    "expo": BackoffKind.EXPONENTIAL,
    "equal": BackoffKind.EQUAL,
    "full": BackoffKind.FULL,
    "decorr": BackoffKind.DECORRELATED,
}
CLIENTS = range(10, 200, 10)
TOLERANCE = 4.0
SEED = 1
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}"

    def apart(self, other: Estimate) -> float:
        """Return how far two are apart, in combined standard errors."""
        return abs(self.mean - other.mean) / math.hypot(self.error, other.error)


@dataclass(frozen=True, slots=True)
class Cell:
    """What a number of clients with one scheme took."""

    calls: Estimate
    time_ms: Estimate


def estimate(sample: list[float]) -> Estimate:
    """Return the mean of a sample and its standard error."""
    count = len(sample)
    mean = math.fsum(sample) / count
    variance = math.fsum((value - mean) ** 2 for value in sample) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


@cache
def reference() -> dict[tuple[int, BackoffKind], Cell]:
    """Return the published model's cells."""
    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {
        (int(row["clients"]), KINDS[row["policy"]]): Cell(
            calls=Estimate(float(row["calls_mean"]), float(row["calls_se"])),
            time_ms=Estimate(float(row["time_ms_mean"]), float(row["time_ms_se"])),
        )
        for row in rows
    }


def simulated(clients: int, delays: Delays, *, name: str) -> Cell:
    """Return a cell of ours: the more clients, the longer a trial and the fewer of them."""
    dice = SeededDice(SEED, f"{name}/{clients}")
    trials = [contend(clients, delays, dice) for _ in range(max(40, 4000 // clients))]
    return Cell(
        calls=estimate([float(trial.writes) for trial in trials]),
        time_ms=estimate([trial.lasted_s * 1000 for trial in trials]),
    )


@cache
def ours(clients: int, kind: BackoffKind) -> Cell:
    """Return our cell with the delays as they are."""
    return simulated(clients, delays_of(kind), name=kind.value)


def comparison(found: Cell, expected: Cell) -> dict[str, float]:
    """Return how far a cell's numbers are apart, by words that say them."""
    pairs = {
        "calls": (found.calls, expected.calls),
        "ms": (found.time_ms, expected.time_ms),
    }
    return {
        f"{here} {what} here, {there} there, {here.apart(there):.2f} errors apart": here.apart(
            there
        )
        for what, (here, there) in pairs.items()
    }


def differences(found: Cell, expected: Cell) -> list[str]:
    """Return what is too far apart in a cell, with its numbers."""
    return [said for said, apart in comparison(found, expected).items() if apart > TOLERANCE]


def test_the_reference_has_all_cells() -> None:
    """There are 19 numbers of clients, and five schemes for each."""
    assert set(reference()) == {(clients, kind) for clients in CLIENTS for kind in BackoffKind}


@pytest.mark.parametrize("kind", BackoffKind, ids=lambda kind: str(kind.value))
@pytest.mark.parametrize("clients", CLIENTS)
def test_a_cell_agrees_with_the_public_simulator(clients: int, kind: BackoffKind) -> None:
    """Calls and time are those of the published model, up to four combined standard errors."""
    found, expected = ours(clients, kind), reference()[clients, kind]

    apart = differences(found, expected)

    for said in comparison(found, expected):
        LOG.info("%d clients, %s: %s", clients, kind.value, said)
    assert not apart, f"{clients} clients, {kind.value}: {'; '.join(apart)}"


# The comparison can fail --------------------------------------------------------------------------


def bound_s(failures: int) -> float:
    """Return the published bound after so many failures, without the cap."""
    return BASE_S * 2.0**failures


def capped_after_the_draw(failures: int, _: float, draw: float) -> float:
    """Full jitter, but a cap that comes too late: an atom grows there."""
    return min(CAP_S, draw * bound_s(failures))


def half_of_it_late(failures: int, _: float, draw: float) -> float:
    """Equal jitter, but a cap that comes after the draw."""
    return min(CAP_S, (0.5 + draw / 2) * bound_s(failures))


def one_doubling_behind(failures: int, _: float, draw: float) -> float:
    """Full jitter, but the first delay is from the base itself."""
    return draw * min(CAP_S, bound_s(failures - 1))


def never_below_the_base(failures: int, _: float, draw: float) -> float:
    """Full jitter, but from the base up instead of from 0."""
    return BASE_S + draw * (min(CAP_S, bound_s(failures)) - BASE_S)


def reset_each_time(_: int, __: float, draw: float) -> float:
    """Decorrelated jitter that forgets its previous delay."""
    return BASE_S + draw * 2 * BASE_S


def decorrelated_before_the_cap(_: int, previous_s: float, draw: float) -> float:
    """Decorrelated jitter, but with its interval cut at the cap: the atom there is gone."""
    return BASE_S + draw * (min(CAP_S, 3 * max(previous_s, BASE_S)) - BASE_S)


@pytest.mark.parametrize(
    ("kind", "delays", "cells"),
    [
        (BackoffKind.FULL, capped_after_the_draw, (130, 160, 190)),
        (BackoffKind.EQUAL, half_of_it_late, (70, 130, 190)),
        (BackoffKind.FULL, one_doubling_behind, (10, 100, 190)),
        (BackoffKind.FULL, never_below_the_base, (10,)),
        (BackoffKind.DECORRELATED, reset_each_time, (10, 100, 190)),
        (BackoffKind.DECORRELATED, decorrelated_before_the_cap, (130, 160, 190)),
    ],
    ids=[
        "full, capped after the draw",
        "equal, capped after the draw",
        "full, one doubling behind",
        "full, never below the base",
        "decorrelated, reset each time",
        "decorrelated, before the cap",
    ],
)
def test_a_wrong_scheme_is_rejected(
    kind: BackoffKind, delays: Delays, cells: tuple[int, ...]
) -> None:
    """Each of the usual mistakes is seen: with few clients, or where many come to the cap."""
    for clients in cells:
        found = simulated(clients, delays, name="wrong")

        assert differences(found, reference()[clients, kind]), clients


@pytest.mark.parametrize("kind", BackoffKind, ids=lambda kind: str(kind.value))
def test_a_scheme_is_not_taken_for_another(kind: BackoffKind) -> None:
    """The delays of any other scheme are rejected where this one is expected."""
    for other in set(BackoffKind) - {kind}:
        assert differences(ours(100, other), reference()[100, kind]), other


# What the model is known for ----------------------------------------------------------------------


def test_jitter_halves_the_calls_of_an_exponential_schedule() -> None:
    """With 100 clients full jitter makes less than half the calls of the unjittered schedule."""
    full, exponential = ours(100, BackoffKind.FULL), ours(100, BackoffKind.EXPONENTIAL)

    assert full.calls.mean * 2 < exponential.calls.mean


def test_jitter_makes_a_third_of_the_calls_of_no_backoff() -> None:
    """With 100 clients full jitter makes less than a third of the calls without delays."""
    full, none = ours(100, BackoffKind.FULL), ours(100, BackoffKind.NONE)

    assert full.calls.mean * 3 < none.calls.mean


def test_an_exponential_schedule_without_jitter_takes_longest() -> None:
    """With 100 clients it takes nine times as long as any other scheme, or more."""
    times_ms = {kind: ours(100, kind).time_ms.mean for kind in BackoffKind}
    longest = times_ms.pop(BackoffKind.EXPONENTIAL)

    assert longest > 9 * max(times_ms.values())


def test_equal_jitter_saves_no_calls_and_takes_longer() -> None:
    """With 100 clients equal jitter is within 3 % of full jitter's calls, and a quarter slower."""
    full, equal = ours(100, BackoffKind.FULL), ours(100, BackoffKind.EQUAL)

    assert equal.calls.mean == pytest.approx(full.calls.mean, rel=0.03)
    assert equal.time_ms.mean > 1.25 * full.time_ms.mean


def test_decorrelated_jitter_pays_with_calls() -> None:
    """From 100 clients on it makes a quarter more calls than full jitter, or above."""
    for clients in (100, 150, 190):
        full, decorrelated = (
            ours(clients, BackoffKind.FULL),
            ours(clients, BackoffKind.DECORRELATED),
        )
        assert decorrelated.calls.mean > 1.25 * full.calls.mean
