# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of many files is complete with every shard and its metadata, and not before."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import shards
from lightning_resilience.core.shards import Form, ShardRecord
from lightning_resilience.errors import ConfigError


NAMES = st.sampled_from([*shards.METADATA_NAMES, "__0_0.distcp", "checkpoint/latest", "a.pt"])
SIZES = st.dictionaries(NAMES, st.integers(0, 99))


def record(rank: int, **sizes: int) -> ShardRecord:
    """Return what a rank has written; rank 0 writes the metadata as well."""
    metadata = {} if rank else {".metadata": 7, "meta.pt": 8}
    return ShardRecord(rank=rank, sizes={**metadata, **sizes})


@given(sizes=SIZES)
def test_every_file_is_a_shard_or_metadata(sizes: dict[str, int]) -> None:
    """Nothing that a rank has written is left out, or published twice."""
    parts = shards.shards_of(sizes), shards.metadata_of(sizes)

    assert {**parts[0], **parts[1]} == sizes
    assert not parts[0].keys() & parts[1].keys()


@given(sizes=SIZES)
def test_metadata_comes_in_its_order(sizes: dict[str, int]) -> None:
    """Whatever the order of writing, and what Lightning looks for is the last of torch's two."""
    names = list(shards.metadata_of(sizes))

    assert names == [name for name in (".metadata", "latest", "meta.pt") if name in sizes]


@given(sizes=SIZES)
def test_what_looks_complete_goes_in_the_opposite_order(sizes: dict[str, int]) -> None:
    """What is published last is removed first."""
    assert shards.removal_order(sizes) == tuple(reversed(shards.metadata_of(sizes)))


def test_a_plan_holds_the_shards_of_all_ranks() -> None:
    """Metadata is none of them."""
    records = [record(1, b=2), record(0, a=1), record(2)]

    assert shards.check_plan(records, world_size=3) == {"a": 1, "b": 2}


def test_a_file_that_two_ranks_have_written_alike_counts_once() -> None:
    """DeepSpeed's script is such a file."""
    records = [record(0, a=1), record(1, a=1)]

    assert shards.check_plan(records, world_size=2) == {"a": 1}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record(0, a=1)], "ranks 1, 2 have not told"),
        ([record(0, a=1), record(1, a=2), record(2)], "ranks 0 and 1 have both written"),
        ([record(0), record(1), record(2)], "none of 3 ranks has written a shard"),
        (
            [ShardRecord(rank=0, sizes={"a": 1, "meta.pt": 1}), record(1), record(2)],
            "has not written the metadata",
        ),
        ([ShardRecord(rank=0, sizes={}), record(1, a=1), record(2)], "but nothing"),
    ],
)
def test_what_makes_no_checkpoint_is_refused(records: list[ShardRecord], said: str) -> None:
    """Before anything is published, and the error says what is wrong."""
    with pytest.raises(ConfigError, match=said):
        shards.check_plan(records, world_size=3)


@given(expected=st.dictionaries(NAMES, st.integers(0, 99), min_size=1), data=st.data())
def test_any_shard_that_is_absent_or_differs_is_missed(
    expected: dict[str, int], data: st.DataObject
) -> None:
    """And it is named, unless there are too many to name."""
    name = data.draw(st.sampled_from(sorted(expected)))
    absent = {other: size for other, size in expected.items() if other != name}

    assert shards.missing(expected, found={**expected, "older": 1}) == ""
    assert name in shards.missing(expected, found=absent)
    assert name in shards.missing(expected, found={**expected, name: expected[name] + 1})
    assert shards.missing(expected, found={**expected, name: None}) == ""


def test_of_many_shards_that_are_missing_some_are_named() -> None:
    """A thousand names would be no message."""
    expected = {f"{number:03}": 1 for number in range(100)}

    assert "100 of 100 shards are not there (000, 001, 002 and 97 more)" in shards.missing(
        expected, found={}
    )


@pytest.mark.parametrize(
    ("kind", "names", "form"),
    [
        ("", (), Form.ABSENT),
        ("file", (), Form.FILE),
        ("directory", (), Form.OTHER),
        ("directory", ("__0_0.distcp", ".metadata"), Form.OTHER),
        ("directory", ("__0_0.distcp", "meta.pt"), Form.OTHER),
        ("directory", (".metadata", "meta.pt"), Form.SHARDS),
        ("directory", ("checkpoint", "latest"), Form.SHARDS),
        ("directory", ("checkpoint",), Form.OTHER),
    ],
)
def test_what_is_under_a_name_is_told_by_its_metadata(
    kind: str, names: tuple[str, ...], form: Form
) -> None:
    """A directory that lacks a part of it is no checkpoint."""
    assert shards.form_of(kind, names) is form
