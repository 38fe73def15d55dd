# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is known of saves in the background: what is pending, what has failed, and who is told."""

from __future__ import annotations

import pytest

from lightning_resilience.core import background
from lightning_resilience.core.agenda import AgendaKind, record_of
from lightning_resilience.core.background import Backlog, FailedSave
from lightning_resilience.core.records import OutcomeRecord


def failed(path: str, *, failure: str = "permanent", attempts: int = 1) -> FailedSave:
    """A save that has failed."""
    report = OutcomeRecord(rank=0, failure=failure, error="OSError: no.", attempts=attempts)
    return FailedSave(path=path, subject=f"s3://b{path}", report=report)


def backlog(*paths: str) -> Backlog:
    """A backlog to which these were handed over."""
    known = Backlog()
    for path in paths:
        known = known.handed_over(path)
    return known


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_there_is_room_until_the_limit_is_reached(limit: int) -> None:
    """As many as the limit may be pending, and one that ends makes room for another."""
    known = Backlog()
    for number in range(limit):
        assert known.has_room(limit)
        known = known.handed_over(f"/{number}")

    assert not known.has_room(limit)
    assert known.written("/0").has_room(limit)
    assert known.not_written(failed("/0")).has_room(limit)
    assert known.withdrawn("/0").has_room(limit)


def test_a_path_is_awaited_until_its_last_save_has_ended() -> None:
    """One that was handed over twice is pending until both are done with."""
    known = backlog("/a", "/b", "/a")

    assert known.written("/a").awaits("/a")
    assert not known.written("/a").written("/a").awaits("/a")
    assert known.written("/a").written("/a").awaits("/b")


def test_what_ended_under_another_name_is_the_earliest() -> None:
    """Its place would be taken for ever otherwise, and a save would wait for it for ever."""
    assert backlog("/a", "/b").written("/elsewhere").pending == ("/b",)


def test_a_failure_is_reported_once() -> None:
    """Of several, the first comes first; once they are told, nothing is left to tell."""
    known = backlog("/a", "/b").not_written(failed("/a")).not_written(failed("/b"))

    assert [one.path for one in known.unreported] == ["/a", "/b"]
    assert known.reported().unreported == ()


def test_a_failure_answers_for_its_path_until_that_is_written() -> None:
    """Also once it was reported; and a later success of the path is what counts then."""
    known = backlog("/a", "/b").not_written(failed("/a")).reported()

    assert known.failure_of("/a") == failed("/a")
    assert known.failure_of("/b") is None
    assert known.handed_over("/a").written("/a").failure_of("/a") is None


def test_a_success_later_does_not_take_a_failure_back() -> None:
    """The checkpoint is there, but nobody was told yet that one was not."""
    known = backlog("/a").not_written(failed("/a")).handed_over("/a").written("/a")

    assert known.unreported == (failed("/a"),)


def test_of_a_path_the_last_failure_counts() -> None:
    """An older one is not kept beside it."""
    later = failed("/a", failure="capacity")
    known = backlog("/a", "/a").not_written(failed("/a")).not_written(later)

    assert known.unwritten == (later,)


def test_the_error_says_what_happened_where_and_what_to_do() -> None:
    """It depends on the record only, so all ranks raise the same text."""
    item = background.item_of(failed("/a", attempts=3))
    error = background.error_of(record_of(item, rank=0, writer="w"))

    assert item.kind is AgendaKind.FAIL
    assert str(error) == (
        "save of s3://b/a failed in the background after 3 attempts, permanent: OSError: no. "
        "It was written by rank 0 while training went on, and all ranks raise this now. "
        "Mend the cause (rights, bucket, path), then start again."
    )
    assert (error.op, error.outcome, error.first_rank) == ("save", "permanent", 0)


@pytest.mark.parametrize(
    ("failure", "ending"),
    [
        ("permanent", "permanent: OSError: no."),
        ("cancelled", "OSError: no; it was given up because training was ending."),
    ],
)
def test_a_note_says_which_checkpoint_is_not_there(failure: str, ending: str) -> None:
    """Beside the exception that has ended training; a write that was given up is not storage's."""
    note = background.note_of(failed("/a", failure=failure))

    assert note.startswith("A checkpoint was not written in the background: save of s3://b/a ")
    assert note.endswith(ending)
