# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What nobody works on any more."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lightning_resilience.core.sweeping import Leftover, orphans


DAY_S = 24 * 3600.0
NOW_S = 1e9


def test_what_was_not_touched_for_a_day_is_orphaned() -> None:
    """A day and a second is too long, a day is not; what is from the future is somebody's."""
    ages = {"old": DAY_S + 1, "older": 9 * DAY_S, "at work": 1.0, "a day": DAY_S, "ahead": -60.0}
    leftovers = [Leftover(name=name, touched_s=NOW_S - age_s) for name, age_s in ages.items()]

    assert [item.name for item in orphans(leftovers, now_s=NOW_S)] == ["older", "old"]


@given(st.lists(st.floats(-1e6, 1e6)), st.floats(-1e9, 1e9))
def test_only_differences_of_one_clock_count(ages_s: list[float], now_s: float) -> None:
    """Whatever the storage's clock says, the same ones are removed."""
    names = [f"{place}" for place in range(len(ages_s))]

    def found(at_s: float) -> set[str]:
        pairs = zip(names, ages_s, strict=True)
        leftovers = [Leftover(name=name, touched_s=at_s - age_s) for name, age_s in pairs]
        return {item.name for item in orphans(leftovers, now_s=at_s)}

    clear = {name for name, age_s in zip(names, ages_s, strict=True) if abs(age_s - DAY_S) > 1.0}
    assert found(0.0) & clear == found(now_s) & clear
