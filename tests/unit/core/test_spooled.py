# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The record of a spooled checkpoint, and what is said of those that wait instead."""

from __future__ import annotations

import msgspec
import pytest

from lightning_resilience.core.manifest import Origin, digest_of
from lightning_resilience.core.spooled import (
    SHARDS_WAIT,
    WHOLE_WAITS,
    SpoolEntry,
    entry_of,
    shards_note,
    shards_wait,
    why_saves_wait,
)


DIGEST = "xxh3-128:" + "0" * 32
ORIGIN = Origin(step=4, epoch=1, run="r", versions={"torch": "2"})


def test_a_record_of_a_directory_keeps_the_order_of_its_files() -> None:
    """They are published in it, and a manifest of them has another."""
    contents = {"weights/0.pt": (3, DIGEST), "index.json": (2, DIGEST)}

    record = entry_of("s3://b/a", contents, ORIGIN, digest=digest_of(contents), number=7)
    again = msgspec.json.decode(msgspec.json.encode(record), type=SpoolEntry)

    assert again == record
    assert list(again.contents.items()) == list(contents.items())
    assert (again.size_bytes, again.digest, again.number) == (5, digest_of(contents), 7)
    assert (again.step, again.epoch, again.run, again.versions) == (4, 1, "r", {"torch": "2"})


def test_a_record_of_a_file_lists_no_files() -> None:
    """One that was written before directories were spooled reads the same."""
    record = entry_of("s3://b/a", {"": (3, DIGEST)}, ORIGIN, digest=DIGEST, number=1)

    assert record.files == ()
    assert record.contents == {"": (3, DIGEST)}


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", ""])
def test_a_record_names_nothing_outside_its_directory(name: str) -> None:
    """Whatever wrote it."""
    record = entry_of("s3://b/a", {"in": (3, DIGEST)}, ORIGIN, digest=DIGEST, number=1)
    raw = msgspec.json.encode(record).replace(b'"in"', msgspec.json.encode(name))

    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw, type=SpoolEntry)


@pytest.mark.parametrize("on_outage", ["spool", "wait", "skip", "fail"])
@pytest.mark.parametrize("outcome", ["transient", "throttle", "permanent", "lost"])
def test_why_shards_wait_is_said_where_the_user_expects_a_spool(
    on_outage: str, outcome: str
) -> None:
    """And of an end only where storage was ill until then."""
    assert bool(shards_wait(on_outage)) is (on_outage == "spool")
    note = shards_note(on_outage, outcome=outcome)
    assert bool(note) is (on_outage == "spool" and outcome in {"transient", "throttle"})
    assert not note or "sharded checkpoints are not spooled" in note


@pytest.mark.parametrize(
    ("is_sharded", "is_staged", "why"),
    [
        (False, True, ""),
        (True, True, SHARDS_WAIT),
        (True, False, SHARDS_WAIT),
        (False, False, WHOLE_WAITS),
    ],
)
def test_what_a_trainer_does_not_spool(is_sharded: bool, is_staged: bool, why: str) -> None:  # noqa: FBT001 - a table
    """It is said before the first step, and not only in an outage."""
    assert why_saves_wait(is_sharded=is_sharded, is_staged=is_staged) == why
