# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whether what storage has is what it said that it had taken."""

from __future__ import annotations

import pytest

from lightning_resilience.core.receipts import Receipt, contradiction, tag_of


FILE = Receipt(inode=7, modified_s=100.0)


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        (Receipt(tag="a"), Receipt(tag="a")),
        (Receipt(tag="a"), Receipt()),
        (Receipt(), Receipt(tag="a")),
        (Receipt(generation="1"), Receipt(generation="1")),
        (Receipt(generation="1"), Receipt(tag="a")),
        (FILE, FILE),
        (FILE, Receipt(inode=8, modified_s=100.0)),
        (FILE, Receipt(inode=8, modified_s=102.0)),
        (FILE, Receipt(inode=7, modified_s=1.0)),
        (FILE, Receipt(inode=8)),
        (FILE, Receipt()),
    ],
    ids=[
        *("the same tag", "none is there", "none was given", "the same generation"),
        *("another kind of name", "the same file"),
        *("another inode", "coarse times", "another time", "no time", "nothing"),
    ],
)
def test_what_may_be_the_same_is_not_refused(taken: Receipt, found: Receipt) -> None:
    """A storage that says less, or says it in another way, is no reason to save again."""
    assert contradiction(taken, found) == ""


def test_another_tag_is_another_object() -> None:
    """The text names both."""
    what = contradiction(Receipt(tag="new"), Receipt(tag="old"))

    assert "old" in what
    assert "new" in what


def test_another_generation_is_another_object() -> None:
    """The text names both."""
    what = contradiction(Receipt(generation="8"), Receipt(generation="7", tag="a"))

    assert "generation 7" in what
    assert "generation 8" in what


def test_another_file_of_another_time_is_another_file() -> None:
    """A rename takes both along."""
    assert "they were written 40 s apart" in contradiction(FILE, Receipt(inode=8, modified_s=60.0))


@pytest.mark.parametrize(
    ("said", "tag"), [(None, ""), ('"a-2"', "a-2"), ("a-2", "a-2"), ('W/"a"', "a")]
)
def test_a_tag_is_compared_without_what_some_answers_put_around_it(said: object, tag: str) -> None:
    """A header quotes it, and not every answer's body does."""
    assert tag_of(said) == tag


SENT = Receipt(tail="new", size_bytes=7)


def test_another_end_is_another_object() -> None:
    """The text says that its length does not tell."""
    assert "right length, 7 bytes" in contradiction(SENT, Receipt(tail="old", size_bytes=7))


@pytest.mark.parametrize("found", [SENT, Receipt(size_bytes=7), Receipt()])
def test_an_end_that_is_the_same_or_was_not_read_says_nothing(found: Receipt) -> None:
    """Whoever could not be told from others is believed."""
    assert contradiction(SENT, found) == ""


@pytest.mark.parametrize(
    ("taken", "size_bytes", "expected"),
    [(SENT, 7, True), (SENT, 8, False), (SENT, None, False), (Receipt(size_bytes=7), 7, False)],
)
def test_an_end_is_read_only_where_it_tells_something(
    *, taken: Receipt, size_bytes: int | None, expected: bool
) -> None:
    """Another length says all by itself, and without an end to compare there is nothing to read."""
    assert taken.is_told_by_its_tail(size_bytes) is expected
