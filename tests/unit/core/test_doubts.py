# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a start searches again when a load has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.doubts import MAX_STARTS, Doubts
from lightning_resilience.core.joint import error_of
from lightning_resilience.core.records import FinalRecord


if TYPE_CHECKING:
    from lightning_resilience.errors import JointError


DAMAGE = "CorruptCheckpointError: it has the digest b, saved was a"


def failed(error: str = DAMAGE) -> JointError:
    """Return what all ranks raise for a load that has failed with this first cause."""
    final = FinalRecord(
        op="load",
        subject="s3://bucket/last.ckpt",
        failure="permanent",
        error=error,
        first_rank=0,
        writer="n",
    )
    raised = error_of(final, seq=3)
    assert raised is not None
    return raised


def test_a_damaged_one_is_searched_for_again_once() -> None:
    """Where it fails after it was read through, storage has the right bytes and the way not."""
    doubts = Doubts()

    assert [doubts.adds("last.ckpt", failed()) for _ in range(2)] == [True, False]
    assert "last.ckpt" in doubts
    assert "other.ckpt" not in doubts


def test_a_path_that_was_given_is_not_replaced() -> None:
    """Nobody has searched for it, so nobody may choose another one."""
    assert not Doubts().adds("", failed())


@pytest.mark.parametrize(
    "error", ["PermissionError: AccessDenied", "CheckpointError: it was written again", ""]
)
def test_what_shows_no_damage_is_raised(error: str) -> None:
    """Another search would find the same checkpoint."""
    doubts = Doubts()

    assert not doubts.adds("last.ckpt", failed(error))
    assert "last.ckpt" not in doubts


def test_what_is_raised_on_one_rank_only_is_raised() -> None:
    """The others would not search with it."""
    error = failed()
    error.in_step = False

    assert not Doubts().adds("last.ckpt", error)


def test_the_number_of_loads_is_bounded() -> None:
    """Every checkpoint of a directory may be damaged."""
    doubts = Doubts()

    again = [doubts.adds(f"{number}.ckpt", failed()) for number in range(MAX_STARTS)]

    assert again == [*([True] * (MAX_STARTS - 1)), False]
