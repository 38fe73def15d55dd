# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run starts from, given what one rank has seen."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core.candidates import Candidate
from lightning_resilience.core.manifest import Origin, manifest_of
from lightning_resilience.core.resolution import (
    HPC_NAME,
    Found,
    Inspection,
    Search,
    described,
    difference,
    last_name,
    may_describe,
    refusal,
    searches,
    sort_names,
)


LAST = last_name("last", ".ckpt")
SAVED, OTHER = (f"xxh3-128:{number:032x}" for number in (1, 2))


def listed(*names: str) -> list[Candidate]:
    """Return a listing in which the files were written one after the other."""
    return [Candidate(url=f"s3://b/run/{name}", modified_s=t) for t, name in enumerate(names)]


def names(candidates: list[Candidate] | tuple[Candidate, ...]) -> list[str]:
    """Return the names of candidates."""
    return [candidate.url.rpartition("/")[2] for candidate in candidates]


@pytest.mark.parametrize(
    ("asked", "on_slurm", "resumes_exceptions", "expected"),
    [
        ("last", False, False, (Search.LAST,)),
        ("last", True, True, (Search.LAST,)),
        ("hpc", False, False, (Search.HPC,)),
        ("hpc", True, True, (Search.HPC,)),
        (None, False, False, ()),
        (None, False, True, (Search.LAST,)),
        (None, True, False, (Search.HPC, Search.DEFAULT)),
        (None, True, True, (Search.HPC, Search.LAST)),
        ("best", True, True, ()),
        ("s3://b/run/last.ckpt", True, True, ()),
    ],
)
def test_what_is_looked_for_follows_from_what_is_asked(
    asked: str | None,
    on_slurm: bool,  # noqa: FBT001 - a column of the table
    resumes_exceptions: bool,  # noqa: FBT001 - a column of the table
    expected: tuple[Search, ...],
) -> None:
    """The table of the module, row by row."""
    found = searches(asked, on_slurm=on_slurm, resumes_exceptions=resumes_exceptions)

    assert found == expected


@pytest.mark.parametrize(
    ("name", "is_last"),
    [
        ("last.ckpt", True),
        ("last-v1.ckpt", True),
        ("last-v12.ckpt", True),
        ("step=2.ckpt", False),
        ("at_last.ckpt", False),
        ("last.ckpt.tmp", False),
        ("last.yaml", False),
        ("lastxckpt", False),
    ],
)
def test_a_last_checkpoint_is_known_by_its_name(
    name: str,
    is_last: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """It begins with the callback's name for it, and ends with a checkpoint's extension."""
    found = sort_names(listed(name), pattern=LAST, extension=".ckpt")

    assert bool(found.candidates) == is_last


def test_fields_in_the_name_of_the_last_checkpoint_stand_for_anything() -> None:
    """A callback may call it ``{epoch}-last``; dots and signs in that name stand for themselves."""
    pattern = last_name("{epoch}-la.st", ".ckpt")
    files = listed("epoch=3-la.st.ckpt", "epoch=3-laxst.ckpt", "epoch=3.ckpt")

    found = sort_names(files, pattern=pattern, extension=".ckpt")

    assert names(found.candidates) == ["epoch=3-la.st.ckpt"]


def test_other_checkpoints_are_counted_and_other_files_are_not() -> None:
    """Three are named; a user's notes are no checkpoint."""
    files = listed("d.ckpt", "c.ckpt", "b.ckpt", "a.ckpt", "notes.txt", "last.ckpt")

    found = sort_names(files, pattern=LAST, extension=".ckpt")

    assert names(found.candidates) == ["last.ckpt"]
    assert (found.others, found.other_count) == (("a.ckpt", "b.ckpt", "c.ckpt"), 4)


def test_only_the_schedulers_checkpoints_count_for_it() -> None:
    """``hpc_ckpt_<n>.ckpt``, and what else is in the root directory does not matter."""
    files = listed("hpc_ckpt_2.ckpt", "hpc_ckpt_x.ckpt", "my_hpc_ckpt_1.ckpt", "a.ckpt")

    found = sort_names(files, pattern=HPC_NAME, extension="")

    assert names(found.candidates) == ["hpc_ckpt_2.ckpt"]
    assert found.other_count == 0


def test_of_many_candidates_the_best_are_shared() -> None:
    """The record stays small, and the newest is in it."""
    files = listed(*(f"last-v{number}.ckpt" for number in range(40)))

    found = sort_names(files, pattern=LAST, extension=".ckpt")

    assert len(found.candidates) == 16
    assert names(found.candidates)[0] == "last-v39.ckpt"


def test_an_empty_directory_may_be_started_in() -> None:
    """A first run is no error."""
    assert refusal("last", [Found(), Found()], []) == ""


def test_a_damaged_checkpoint_is_no_empty_directory() -> None:
    """What was rejected is listed with why, and what to do next."""
    rejected = Inspection(path="s3://b/run/last.ckpt", size_bytes=0, rejected="it is empty")

    text = refusal("last", [Found()], [rejected])

    assert "s3://b/run/last.ckpt: it is empty" in text
    assert "Name the one to start from" in text


def test_checkpoints_with_other_names_are_no_empty_directory() -> None:
    """They are counted over all places, and three are named."""
    one = Found(others=("a.ckpt", "b.ckpt", "c.ckpt"), other_count=5)
    two = Found(others=("d.ckpt",), other_count=1)

    text = refusal("last", [one, two], [])

    assert "6 checkpoints with other names (a.ckpt, b.ckpt, c.ckpt, …)" in text


@pytest.mark.parametrize(
    ("size_bytes", "digest", "said"),
    [
        (10, "abc", ""),
        (None, "abc", ""),
        (11, "abc", "11 bytes here and 10 bytes on rank 0"),
        (10, "abx", "digest abx here and abc on rank 0"),
        (10, "", "digest none here"),
        (10, None, ""),
    ],
)
def test_a_file_is_compared_by_size_and_digest(
    size_bytes: int | None, digest: str | None, said: str
) -> None:
    """A size that storage does not say proves nothing."""
    expected = Inspection(path="x", size_bytes=10, digest="abc")

    text = difference(expected, size_bytes=size_bytes, digest=digest)

    assert said in text
    assert bool(said) == bool(text)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (SAVED, ""),
        (OTHER, f"its bytes have digest {OTHER} here and {SAVED} by the manifest of rank 0"),
        (None, ""),
    ],
)
def test_a_file_that_nobody_has_opened_is_compared_by_all_its_bytes(
    saved: str | None, said: str
) -> None:
    """Its table of contents, which nobody has seen, is compared with nothing."""
    expected = Inspection(path="x", size_bytes=10, saved=SAVED)

    assert difference(expected, size_bytes=10, digest="abc", saved=saved) == said


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("is_doubted", [True, False])
def test_a_manifest_stands_only_for_what_is_elsewhere_and_not_in_doubt(
    is_local: Any, is_doubted: Any
) -> None:
    """A look at a local file shows more, and one that has failed to load was as its manifest."""
    expected = not is_local and not is_doubted

    assert may_describe(is_local=is_local, is_doubted=is_doubted) is expected


def test_a_manifest_of_the_right_size_says_what_is_known_of_a_file() -> None:
    """That it is committed, and whether a training can go on from it."""
    for training in ("a training", ""):
        manifest = manifest_of("a.ckpt", {"": (10, SAVED)}, Origin(training=training))

        assert described("s3://b/a.ckpt", manifest, size_bytes=10) == Inspection(
            path="s3://b/a.ckpt",
            size_bytes=10,
            saved=SAVED,
            is_committed=True,
            is_resumable=bool(training),
        )


@pytest.mark.parametrize("size_bytes", [9, 11, 0, None])
def test_a_manifest_of_another_size_says_nothing(size_bytes: int | None) -> None:
    """Nor does one where the storage tells no size."""
    manifest = manifest_of("a.ckpt", {"": (10, SAVED)}, Origin())

    assert described("s3://b/a.ckpt", manifest, size_bytes=size_bytes) is None


@pytest.mark.parametrize("contents", [None, {"a": (10, SAVED)}, {"a": (4, SAVED), "b": (6, OTHER)}])
def test_only_a_manifest_of_one_file_says_what_one_file_is(contents: Any) -> None:
    """Not that of a directory which happens to be as long, and not the lack of any."""
    manifest = None if contents is None else manifest_of("a.ckpt", contents, Origin())

    assert described("s3://b/a.ckpt", manifest, size_bytes=10) is None


def test_what_nobody_has_looked_at_is_not_compared() -> None:
    """A directory, or a format of the user's."""
    assert difference(Inspection(path="x"), size_bytes=10, digest="", saved=SAVED) == ""
