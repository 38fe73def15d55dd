# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Who has not come, when to look for them again, and what is said of them."""

from __future__ import annotations

import pytest

from lightning_resilience.core import muster


@pytest.mark.parametrize(
    ("arrived", "absent"),
    [
        ({1: b"3", 2: b"3"}, ()),
        ({1: b"2", 2: b"3"}, (1,)),
        ({3: b"0", 1: None, 2: b"3"}, (1, 3)),
        ({1: b"4", 2: b"10"}, ()),
    ],
    ids=["all", "one behind", "one at the beginning, one never enlisted", "all have gone on"],
)
def test_whoever_has_not_written_the_number_or_a_later_one_is_absent(
    arrived: dict[int, bytes | None], absent: tuple[int, ...]
) -> None:
    """Numbers are compared as numbers, and ranks are named in their order."""
    assert muster.absent_ranks(arrived, seq=3) == absent


def test_looks_become_rarer_up_to_a_beat() -> None:
    """At first it looks at once, then an eighth of the wait later, and never less than a beat."""
    pauses = [muster.next_look_s(watched_s, beat_s=5.0) for watched_s in (0.0, 1.0, 16.0, 400.0)]

    assert pauses == [0.01, 0.125, 2.0, 5.0]


def test_an_absent_rank_is_told_from_a_silent_one() -> None:
    """Of the one it is said what usually keeps it away; the other was there."""
    absent = muster.lost_error(3, is_absent=True, silent_s=8.0)
    silent = muster.lost_error(3, is_absent=False, silent_s=8.0)

    assert absent.startswith("rank 3 has not come to it within 8.0 s")
    assert "is_global_zero" in absent
    assert silent == "rank 3 gave no sign of life for 8.0 s"


def test_the_first_of_many_ranks_are_named() -> None:
    """A job of thousands of ranks has a sentence of one line."""
    assert muster.named(range(3)) == "0, 1, 2"
    assert muster.named(range(16_384)) == "0, 1, 2, 3, 4, 5, 6, 7 and 16376 more"
