# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of its shards arrives as it was, and is refused where it was damaged."""

from __future__ import annotations

import base64
import zlib

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.portions import (
    Entry,
    Portion,
    decode_portion,
    encode_portion,
    merge,
)
from lightning_resilience.errors import CheckpointError, CorruptRecordError


NUMBERS = st.integers(0, 2**40)
ENTRIES = st.builds(
    Entry,
    name=st.text(),
    offset=st.none() | st.lists(NUMBERS, max_size=3).map(tuple),
    index=st.none() | NUMBERS,
    size_bytes=NUMBERS,
    file=st.text(),
    start=NUMBERS,
    length=NUMBERS,
    transforms=st.none() | st.lists(st.text(), max_size=2).map(tuple),
)


def portion(rank: int, *names: str) -> Portion:
    """Return a portion with these files."""
    files = dict.fromkeys(names, (7, f"xxh3-128:{rank:032x}"))
    return Portion(rank=rank, files=files, entries=())


@given(entries=st.lists(ENTRIES, max_size=5))
def test_a_portion_survives_its_way(entries: list[Entry]) -> None:
    """Its files and all of its entries are the same afterwards."""
    sent = Portion(rank=3, files={"a": (1, "x")}, entries=tuple(entries))

    assert decode_portion(encode_portion(sent)) == sent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no base64!",
        base64.b64encode(b"not compressed").decode(),
        base64.b64encode(zlib.compress(b"{}")).decode(),
        encode_portion(portion(0, "a"))[:-8],
    ],
)
def test_what_is_no_portion_is_refused(text: str) -> None:
    """Nothing is guessed: it is empty, cut off, or something else."""
    with pytest.raises(CorruptRecordError):
        decode_portion(text)


def test_a_portion_of_another_version_is_refused() -> None:
    """The text says which version was found."""
    other = msgspec.structs.replace(portion(0), v=2)

    with pytest.raises(CorruptRecordError, match="version 2") as refused:
        decode_portion(encode_portion(other))

    assert refused.value.found_version == 2


def test_the_files_of_all_ranks_are_one_list() -> None:
    """A rank without files is there as well."""
    files = merge([portion(0, "a", "b"), portion(1), portion(2, "c")], world_size=3)

    assert sorted(files) == ["a", "b", "c"]


def test_a_rank_that_has_told_nothing_is_named() -> None:
    """Its shards may be missing, so there is no checkpoint."""
    with pytest.raises(CheckpointError, match="ranks 1 have not told"):
        merge([portion(0, "a"), portion(2, "c")], world_size=3)


def test_two_files_of_one_name_are_refused() -> None:
    """One of them would have taken the place of the other."""
    with pytest.raises(CheckpointError, match="rank 1 has written 'a'"):
        merge([portion(0, "a"), portion(1, "a")], world_size=2)
