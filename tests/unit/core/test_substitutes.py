# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Where there is no last checkpoint that can be loaded, one of another name may stand in for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.fallback import Choice, choosing
from lightning_resilience.core.pipeline import Step, carry_out
from lightning_resilience.core.resolution import (
    Candidate,
    Found,
    Inspection,
    Search,
    last_name,
    sort_names,
)
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable


LAST = last_name("last", ".ckpt")
COMMITTED, PLAIN, DAMAGED = "committed", "plain", "damaged"


def choose(
    files: dict[str, str], *, allow_fresh_start: bool = False
) -> tuple[Choice, list[str], list[str]]:
    """Choose among files, the oldest first; return the choice, and what was looked at and left."""
    looked: list[str] = []
    left: list[str] = []
    listed = [Candidate(url=f"s3://b/{name}", modified_s=age) for age, name in enumerate(files)]

    def judge(url: str) -> Inspection:
        name = url.rpartition("/")[2]
        looked.append(name)
        return Inspection(
            path=url,
            rejected="it is torn" if files[name] == DAMAGED else "",
            is_committed=files[name] == COMMITTED,
        )

    hands: dict[Step, Callable[[Any], object]] = {
        Step.LIST: lambda _: sort_names(listed, pattern=LAST, extension=".ckpt"),
        Step.JUDGE: judge,
        Step.LEAVE: lambda damaged: left.append(damaged.path.rpartition("/")[2]),
    }
    search = choosing(Search.LAST, 1, allow_fresh_start=allow_fresh_start)
    return carry_out(search, hands), looked, left


def test_a_last_one_counts_for_more_than_a_newer_one_of_another_name() -> None:
    """The others are not even looked at."""
    choice, looked, _ = choose({"last.ckpt": PLAIN, "step=4.ckpt": COMMITTED})

    assert choice.seen is not None
    assert choice.seen.path == "s3://b/last.ckpt"
    assert looked == ["last.ckpt"]


def test_without_a_last_one_the_newest_with_a_manifest_is_taken() -> None:
    """A job that was killed in its first save point has left nothing else."""
    files = {"step=2.ckpt": COMMITTED, "step=4.ckpt": COMMITTED, "step=6.ckpt": PLAIN}

    choice, looked, left = choose(files)

    assert choice.seen is not None
    assert choice.seen.path == "s3://b/step=4.ckpt"
    assert looked == ["step=6.ckpt", "step=4.ckpt"]
    assert left == []


def test_behind_damaged_last_ones_it_is_taken_and_they_are_set_aside() -> None:
    """What has another name and is damaged as well stays where it is."""
    files = {"step=2.ckpt": COMMITTED, "step=4.ckpt": DAMAGED, "last.ckpt": DAMAGED}

    choice, _, left = choose(files)

    assert choice.seen is not None
    assert choice.seen.path == "s3://b/step=2.ckpt"
    assert left == ["last.ckpt"]


@pytest.mark.parametrize("state", [PLAIN, DAMAGED])
def test_one_without_a_manifest_stands_in_for_nothing(state: str) -> None:
    """It may be anybody's, for example what somebody has downloaded to begin with."""
    with pytest.raises(CheckpointError, match="1 checkpoints with other names"):
        choose({"step=2.ckpt": state})


def test_a_fresh_start_is_none_where_one_stands_in() -> None:
    """It is allowed where nothing can be loaded, and something can."""
    choice, _, _ = choose({"step=2.ckpt": COMMITTED}, allow_fresh_start=True)

    assert choice.seen is not None
    assert not choice.is_overridden


def test_no_files_are_looked_at_that_no_name_was_asked_of() -> None:
    """What a scheduler has left is looked for by its name alone."""
    found = sort_names([Candidate(url="s3://b/step=2.ckpt")], pattern=LAST, extension="")

    assert found == Found()
