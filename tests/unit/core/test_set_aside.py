# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Where a damaged checkpoint goes, under which name, and what is said of it."""

from __future__ import annotations

import json
import re

import pytest

from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.resolution import HPC_NAME, Inspection, last_name
from lightning_resilience.core.set_aside import (
    Moved,
    Note,
    aside_path,
    encode_note,
    is_final,
    mark_of,
    note_path,
    told,
)


MARK = mark_of("mtime=1", "")
DAMAGED = Inspection(path="s3://b/run/last.ckpt", rejected="it is empty", mark=MARK)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/run/last.ckpt", "s3://b/run/.resilience/set-aside/last.ckpt.0a1b2c3d"),
        ("/data/run/last.ckpt/", "/data/run/.resilience/set-aside/last.ckpt.0a1b2c3d"),
        ("last.ckpt", ".resilience/set-aside/last.ckpt.0a1b2c3d"),
    ],
)
def test_it_goes_below_its_own_directory(path: str, expected: str) -> None:
    """On the same storage, so that a rename or a copy by the storage itself gets it there."""
    assert aside_path(path, "0a1b2c3d") == expected


@pytest.mark.parametrize("name", ["last.ckpt", "last-v1.ckpt", "hpc_ckpt_7.ckpt"])
def test_neither_it_nor_its_note_has_a_name_that_is_looked_for(name: str) -> None:
    """Not even in a directory that is searched: the names end otherwise."""
    aside = aside_path(f"run/{name}", MARK)

    names = [path.rpartition("/")[2] for path in (aside, note_path(aside))]
    patterns = (last_name("last", ".ckpt"), HPC_NAME)
    assert not [each for each in names for pattern in patterns if re.match(pattern, each)]


def test_a_mark_is_the_same_for_the_same_and_another_for_another() -> None:
    """It depends on when a file was written and on its manifest, and on no clock or chance."""
    marks = [mark_of(written, manifest) for written in ("", "a", "b") for manifest in ("", "m")]

    assert mark_of("a", "m") == mark_of("a", "m")
    assert len(set(marks)) == len(marks)
    assert re.fullmatch("[0-9a-f]{8}", MARK)


def test_what_cannot_be_told_from_another_has_no_mark() -> None:
    """It stays where it is."""
    assert mark_of("", "") == ""


def test_a_note_can_be_read_by_a_person() -> None:
    """One field to a line, with what is known."""
    note = Note(path="last.ckpt", reason="it is empty", manifest="{}")

    raw = encode_note(note)

    assert json.loads(raw) == {
        "v": 1,
        "path": "last.ckpt",
        "reason": "it is empty",
        "manifest": "{}",
    }
    assert len(raw.splitlines()) == 6


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (FailureClass.PERMANENT, True),
        (FailureClass.CAPACITY, True),
        (FailureClass.TRANSIENT, False),
        (FailureClass.UNKNOWN, False),
        (FailureClass.AUTH, False),
        (None, False),
    ],
)
def test_a_move_is_given_up_only_where_another_attempt_cannot_help(
    failure: FailureClass | None,
    expected: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """Not allowed, or no room even for a note."""
    assert is_final(failure) == expected


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        (None, "It stays there, and is passed over."),
        (Moved(path="x", problem="PermissionError: no"), "set aside (PermissionError: no), so it"),
        (Moved(path="x", to="x/aside"), "It is set aside as x/aside; the file beside it"),
    ],
    ids=["left", "refused", "moved"],
)
def test_the_log_says_why_and_where_it_is(moved: Moved | None, said: str) -> None:
    """Whoever reads it knows what to do."""
    line = told(DAMAGED, moved)

    assert line.startswith("not loaded, it is empty: s3://b/run/last.ckpt. ")
    assert said in line
