# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Two copies of a checkpoint have one digest, and a damaged one has none."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest
import torch

from lightning_resilience.adapters.contents import contents_digest, holds_training_state


def saved(value: float, *, legacy: bool = False) -> bytes:
    """Return what ``torch.save`` writes."""
    buffer = io.BytesIO()
    state = {"weight": torch.full((1000,), value), "step": 4}
    torch.save(state, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    """Return the digest of these bytes."""
    return contents_digest(io.BytesIO(data))


def test_the_same_content_has_the_same_digest() -> None:
    """Also from the middle of the file."""
    file = io.BytesIO(saved(1.0))
    file.seek(100)

    assert contents_digest(file) == digest_of(saved(1.0)) != ""


def test_another_content_of_the_same_size_has_another_digest() -> None:
    """One number differs, and no length does."""
    one, two = saved(1.0), saved(2.0)

    assert len(one) == len(two)
    assert digest_of(one) != digest_of(two)


@pytest.mark.parametrize("kept", [4, 40, 63, 64, 100, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_damaged(kept: float) -> None:
    """Wherever that was, if its first four bytes are there."""
    data = saved(1.0)
    end = int(kept * len(data)) if isinstance(kept, float) else kept

    with pytest.raises(zipfile.BadZipFile):
        digest_of(data[:end])


def test_a_file_with_zeros_for_an_end_is_damaged() -> None:
    """As a filesystem leaves one whose host has died: the size is right."""
    data = saved(1.0)

    with pytest.raises(zipfile.BadZipFile):
        digest_of(data[:-200] + bytes(200))


@pytest.mark.parametrize(
    "data",
    [bytes(3), bytes(1000), b"<!DOCTYPE html><html></html>", b'\n<?xml version="1.0"?><Error/>'],
    ids=["few zeros", "zeros", "HTML", "XML"],
)
def test_what_begins_as_no_checkpoint_does_is_damaged(data: bytes) -> None:
    """Where a size alone would say that it is complete."""
    with pytest.raises(zipfile.BadZipFile, match=r"zeros|page"):
        digest_of(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"PK", b"no checkpoint", b"x" * 1000, pickle.dumps({"step": 4}), saved(1.0, legacy=True)],
    ids=["empty", "two bytes", "text", "long text", "pickle", "legacy"],
)
def test_another_format_has_no_digest(data: bytes) -> None:
    """That is no damage: whoever knows the format will tell."""
    assert digest_of(data) == ""


@pytest.mark.parametrize(
    ("content", "holds"),
    [
        ({"state_dict": {}, "optimizer_states": []}, True),
        ({"state_dict": {"weight": torch.zeros(2)}, "global_step": 3}, False),
    ],
    ids=["a run can go on from it", "weights only"],
)
def test_what_a_run_can_go_on_from_is_known_without_making_anything_of_it(
    content: dict[str, Any],
    holds: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """By what Lightning always saves beside weights; a damaged record says nothing."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    damaged = bytearray(buffer.getvalue())
    damaged[damaged.index(b"state_dict")] ^= 1

    assert holds_training_state(buffer) == holds
    assert not holds_training_state(io.BytesIO(bytes(damaged)))
