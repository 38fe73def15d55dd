# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What all ranks act on at a step boundary, and what still fits before a process has to be gone."""

from __future__ import annotations

import itertools

import pytest

from lightning_resilience.core import agenda
from lightning_resilience.core.agenda import AgendaItem, AgendaKind, AgendaRecord
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import CorruptRecordError


def asked(kind: AgendaKind, *, rank: int = 0, left_s: float | None = None) -> AgendaRecord:
    """What a rank asks for."""
    item = AgendaItem(kind=kind, reason="why", detail="what", left_s=left_s)
    return agenda.record_of(item, rank=rank, writer="w")


def test_an_item_keeps_what_it_says_in_its_record() -> None:
    """Nothing of an item is lost on its way through the store."""
    record = decode(AgendaRecord, encode(asked(AgendaKind.FAIL, rank=3, left_s=7.5)), key="k")

    assert (record.kind, record.rank, record.reason) == ("fail", 3, "why")
    assert (record.detail, record.left_s, record.saves) == ("what", 7.5, False)


def test_a_kind_that_this_version_does_not_know_is_a_corrupt_record() -> None:
    """It is refused where it is read, and not in the middle of a decision."""
    raw = encode(asked(AgendaKind.SAVE)).replace(b'"save"', b'"dance"')

    with pytest.raises(CorruptRecordError):
        decode(AgendaRecord, raw, key="k")


def test_the_most_urgent_kind_comes_first_whoever_asks() -> None:
    """A stop comes before a failure, that before a pause, and that before a save."""
    order = [AgendaKind.STOP, AgendaKind.FAIL, AgendaKind.PAUSE, AgendaKind.SAVE]
    records = [asked(kind, rank=9 - place) for place, kind in enumerate(order)]

    for one, other in itertools.combinations(records, 2):
        assert agenda.outranks(one, other)
        assert not agenda.outranks(other, one)
    for shuffled in itertools.permutations(records):
        assert agenda.most_urgent(shuffled) == records[0]


def test_of_two_of_a_kind_the_lower_ranks_comes_first() -> None:
    """So two ranks that ask at once do not take turns in the cell."""
    assert agenda.outranks(asked(AgendaKind.STOP, rank=1), asked(AgendaKind.STOP, rank=2))
    assert not agenda.outranks(asked(AgendaKind.STOP, rank=1), asked(AgendaKind.STOP, rank=1))


def test_nothing_asked_for_is_nothing_to_do() -> None:
    """An empty agenda has no most urgent item."""
    assert agenda.most_urgent([]) is None


@pytest.mark.parametrize(
    ("left_s", "save_s", "fits"),
    [
        (None, 1e6, True),
        (30.0, None, True),
        (2.0, None, False),
        (-1.0, None, False),
        (30.0, 18.0, True),
        (30.0, 19.0, False),
    ],
)
def test_a_save_fits_if_one_and_a_half_of_the_last_and_the_leaving_do(
    left_s: float | None,
    save_s: float | None,
    fits: bool,  # noqa: FBT001 - the last column of a table
) -> None:
    """Two seconds are for leaving; without a save to compare with, one is tried."""
    record = asked(AgendaKind.STOP, left_s=left_s)

    assert agenda.fits(left_s, save_s=save_s) is fits
    assert agenda.with_save(record, save_s=save_s).saves is fits


def test_what_was_heard_a_while_ago_leaves_less_time() -> None:
    """The time that is left runs on while nobody looks; where nothing ends, nothing runs."""
    ending = agenda.aged(asked(AgendaKind.STOP, left_s=30.0), by_s=4.0)
    endless = agenda.aged(asked(AgendaKind.PAUSE), by_s=4.0)

    assert ending.left_s == 26.0
    assert endless.left_s is None


@pytest.mark.parametrize(
    ("option_s", "is_warning", "ends_in_s", "grace_s"),
    [
        (None, False, None, 30.0),
        (None, True, None, 30.0),
        (None, False, 90.0, 30.0),
        (None, True, 90.0, 90.0),
        (None, True, 9.0, 30.0),
        (None, True, -9.0, 30.0),
        (None, True, 1e6, 3600.0),
        (5.0, True, 90.0, 5.0),
        (300.0, False, None, 300.0),
    ],
)
def test_the_grace_is_the_users_or_the_schedulers_or_half_a_minute(
    option_s: float | None,
    is_warning: bool,  # noqa: FBT001 - a column of a table
    ends_in_s: float | None,
    grace_s: float,
) -> None:
    """A warning is sent some time before the end; SIGTERM leaves what SLURM and torchrun leave."""
    assert agenda.grace_s(option_s, is_warning=is_warning, ends_in_s=ends_in_s) == grace_s


@pytest.mark.parametrize(
    ("option_s", "is_warning", "grace_s"),
    [(None, False, 7.0), (None, True, 90.0), (5.0, False, 5.0)],
)
def test_what_the_launcher_leaves_takes_the_place_of_half_a_minute(
    option_s: float | None,
    is_warning: bool,  # noqa: FBT001 - a column of a table
    grace_s: float,
) -> None:
    """It was told how long its workers may take, and they cannot take longer."""
    granted_s = agenda.grace_s(option_s, is_warning=is_warning, ends_in_s=90.0, launcher_s=7.0)

    assert granted_s == grace_s


def test_a_rank_leaves_alone_once_half_of_its_time_is_over() -> None:
    """Until then the others may still agree; the other half is for them to find out."""
    assert not agenda.leaves_alone(15.0, granted_s=30.0)
    assert agenda.leaves_alone(14.9, granted_s=30.0)


def test_a_look_that_is_a_collective_comes_every_tenth_step() -> None:
    """All ranks count the same steps, and begin with the first."""
    assert [step for step in range(25) if agenda.looks(step)] == [0, 10, 20]


def test_an_item_that_is_not_there_is_an_error_that_says_where_to_look() -> None:
    """It names the item and the rank, and rank 0 as the one that should have written it."""
    error = agenda.vanished_error(3, rank=2)

    assert (error.op, error.seq, error.first_rank) == ("agenda", 3, 0)
    assert "item 3" in str(error)
    assert "rank 2" in str(error)
