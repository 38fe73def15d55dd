# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The batch after which all ranks leave a validation is one that none of them has passed."""

from __future__ import annotations

import pytest

from lightning_resilience.core import halting
from lightning_resilience.core.halting import PlaceRecord, agreed_batch, limit_of


def places(*limits: int, lengths: str = "aaaa") -> list[PlaceRecord]:
    """Return what some ranks have said; an empty length is written as a dash."""
    return [
        PlaceRecord(limit=limit, length=length.strip("-"))
        for limit, length in zip(limits, lengths, strict=False)
    ]


def test_the_farthest_limit_is_the_batch() -> None:
    """Every other rank has it before itself, and goes there."""
    assert agreed_batch(places(3, 9, 4)) == 9


@pytest.mark.parametrize("lengths", ["aab", "---", "a-a"])
def test_validations_of_different_or_unknown_lengths_have_no_batch_in_common(lengths: str) -> None:
    """A rank might end before it."""
    assert agreed_batch(places(3, 9, 4, lengths=lengths)) is None


def test_each_raise_of_a_limit_is_twice_as_long() -> None:
    """A rank soon comes to the collective in which another one waits for it."""
    assert [limit_of(10, raises=raises) for raises in range(4)] == [11, 12, 14, 18]


@pytest.mark.parametrize("ranks", [2, 1000, 10_000])
def test_looks_of_all_ranks_are_bounded(ranks: int) -> None:
    """The shared store has work besides, however many ranks look."""
    assert ranks / halting.look_s(ranks) <= 1000
    assert ranks / halting.pause_s(ranks) <= 20_000
