# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Small jobs that resume, in every way that goes wrong once: before each thing that a rank does.

A rank is killed, stopped or abandoned there, or what it does fails; whoever is killed is seen by
the ranks beside it, and by the next start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core import fetching
from lightning_resilience.core.pipeline import Do
from lightning_resilience.drill.job_kinds import LOADS
from lightning_resilience.drill.load_plan import LoadPlan, Place


if TYPE_CHECKING:
    from collections.abc import Iterator

# Each with how many places there are at least.
TROUBLES = {"crashes": 20, "faults": 35, "stops": 40, "outages": 12, "flips": 5, "damages": 3}


def explored(plan: LoadPlan) -> int:
    """Run a plan in every way, and return in how many."""
    count = 0
    for run in LOADS.explore(plan):
        assert not run.check, "\n".join(LOADS.told(run))
        count += 1
    return count


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_one_trouble_at_any_place_breaks_no_promise(place: Place, trouble: str) -> None:
    """Two ranks on each of two nodes, or three on one where the disk is its own."""
    limits: dict[str, Any] = {trouble: 1}
    is_local = place is Place.LOCAL
    plan = LoadPlan(place=place, nodes=1 if is_local else 2, ranks=3 if is_local else 2, **limits)

    assert explored(plan) >= (1 if is_local and trouble == "flips" else TROUBLES[trouble])


@pytest.mark.parametrize("trouble", ["crashes", "damages"])
def test_what_an_earlier_start_has_left_breaks_no_promise(trouble: str) -> None:
    """A copy in each cache, which is checked before it is used, and newer ones that waited."""
    limits: dict[str, Any] = {trouble: 1}

    assert explored(LoadPlan(is_cached=True, **limits)) > 2
    assert explored(LoadPlan(spooled=2, **limits)) > 2


@pytest.mark.parametrize("is_renewed", [True, False])
@pytest.mark.parametrize("place", Place)
def test_an_older_process_that_lives_on_breaks_no_promise(place: Place, is_renewed: Any) -> None:
    """It saves at any instant of the load, under a new name or the same one, and removes."""
    nodes = 1 if place is Place.LOCAL else 2
    for tenths in range(0, 90, 3):
        plan = LoadPlan(
            place=place, nodes=nodes, is_renewed=is_renewed, has_older=True, older_s=tenths / 10
        )
        assert explored(plan) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", [Place.OBJECTS, Place.SHARED])
def test_a_reader_that_is_stopped_and_one_that_is_killed_break_no_promise(place: Place) -> None:
    """On one node with two ranks, at every pair of instants."""
    assert explored(LoadPlan(place=place, nodes=1, saved=1, crashes=1, stops=1)) > 1000


def test_the_explorer_sees_a_file_that_nobody_has_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One flip on the way is enough, where what has arrived is taken as it is."""

    def trusting(*_: object, **__: object) -> Iterator[Do]:
        yield Do(fetching.Fetch.COPY)

    monkeypatch.setattr("lightning_resilience.drill.load_reading.fetching", trusting)

    runs = {run.check for run in LOADS.explore(LoadPlan(flips=1))}

    assert runs == {"", "I9 CheckedBytes"}
