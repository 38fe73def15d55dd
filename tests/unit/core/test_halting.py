# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The batch after which all ranks leave a validation is one that none of them has passed."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core import halting
from lightning_resilience.core.halting import (
    OFF,
    STOP,
    Halt,
    HaltRecord,
    PlaceRecord,
    agreed_batch,
    limit_of,
)


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


def make(**fields: Any) -> Halt:
    """Make what a rank of two knows, which looks at second 100."""
    return Halt(**{"validation": 1, "world_size": 2, "looks_at_s": 100.0, **fields})


def due(halt: Halt, batch: int = 3, *, now_s: float = 0.0, wants_stop: bool = False) -> bool:
    """Tell whether something is to be done."""
    return halt.is_due(batch, now_s=now_s, wants_stop=wants_stop)


def test_a_rank_looks_when_it_is_time_or_at_once_where_it_wants_a_stop_itself() -> None:
    """And after that as often as who expects an answer."""
    halt = make()

    assert [due(halt, now_s=now_s) for now_s in (99.9, 100.0)] == [False, True]
    assert due(halt, now_s=5.0, wants_stop=True)
    halt.look_again(now_s=5.0, has_answered=True)
    assert not due(halt, now_s=5.0, wants_stop=True)
    assert due(halt, now_s=5.0 + halting.pause_s(2), wants_stop=True)


def test_a_store_that_does_not_answer_is_spared_more_by_who_wants_nothing() -> None:
    """Who wants a stop has half of its grace to reach the others."""
    waits = []
    for wants_stop in (True, False):
        halt = make(wants_stop=wants_stop)
        halt.look_again(now_s=0.0, has_answered=False)
        waits.append(halt.looks_at_s)

    assert 1.0 < waits[0] < waits[1]


def test_a_rank_that_has_said_how_far_it_goes_asks_nobody_before_it_is_there() -> None:
    """Nor after it knows what all do."""
    halt = make(limit=5)

    assert [due(halt, batch, now_s=1e9) for batch in (4, 5)] == [False, True]
    halt.answer = HaltRecord(state=OFF, writer="w")
    assert not due(halt, 5, now_s=1e9)


def test_all_leave_at_the_batch_of_the_answer_and_only_then() -> None:
    """An answer that says to go on has none."""
    stop, off = HaltRecord(state=STOP, batch=7, writer="w"), HaltRecord(state=OFF, writer="w")

    assert not make().is_reached(7)
    assert [make(answer=stop).is_reached(batch) for batch in (6, 7)] == [False, True]
    assert not make(answer=off).is_reached(7)
