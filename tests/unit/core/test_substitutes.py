# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Where there is no last checkpoint that can be loaded, one of another name may stand in for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from lightning_resilience.core.candidates import Candidate
from lightning_resilience.core.fallback import Choice, choosing
from lightning_resilience.core.pipeline import Step, carry_out
from lightning_resilience.core.resolution import (
    Found,
    Inspection,
    Search,
    last_name,
    sort_names,
)
from lightning_resilience.core.verification import step_of
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable


LAST = last_name("last", ".ckpt")
COMMITTED, PLAIN, DAMAGED, WEIGHTS, DOUBTED = "committed", "plain", "damaged", "weights", "doubted"
OTHERS, STALE, OLD = "of another training", "not what its manifest says", "committed long ago"
MARKED = {COMMITTED: "a training", OTHERS: "another training", STALE: "a training", OLD: ""}
DAMAGES = {DAMAGED: "it is torn", STALE: "it differs"}


def candidate(name: str, state: str, at_s: float) -> Candidate:
    """Return what a listing and the manifest say of a checkpoint."""
    return Candidate(
        url=f"s3://b/{name}",
        modified_s=at_s,
        is_marked=state in MARKED,
        step=step_of(name, None) if state in MARKED else None,
        training=MARKED.get(state, ""),
    )


def choose(
    files: dict[str, str], *, allow_fresh_start: bool = False
) -> tuple[Choice, list[str], list[str]]:
    """Choose among files, the oldest first; return the choice, and what was looked at and left.

    A name may begin with another one and a blank, so that it says a step that is not seen.
    """
    looked: list[str] = []
    left: list[str] = []
    states = {name.rpartition(" ")[2]: state for name, state in files.items()}
    listed = [
        replace(candidate(name, state, at_s), url=f"s3://b/{name.rpartition(' ')[2]}")
        for at_s, (name, state) in enumerate(files.items())
    ]

    def judge(url: str) -> Inspection:
        name = url.rpartition("/")[2]
        looked.append(name)
        return Inspection(
            path=url,
            rejected=DAMAGES.get(states[name], ""),
            is_committed=states[name] in {COMMITTED, OTHERS, OLD},
            is_resumable=states[name] != WEIGHTS,
            doubt="who knows" if states[name] == DOUBTED else "",
        )

    hands: dict[Step, Callable[[Any], object]] = {
        Step.LIST: lambda _: sort_names(listed, pattern=LAST, extension=".ckpt"),
        Step.JUDGE: judge,
        Step.LEAVE: lambda damaged: left.append(damaged.path.rpartition("/")[2]),
    }
    search = choosing(Search.LAST, 1, allow_fresh_start=allow_fresh_start)
    return carry_out(search, hands), looked, left


def chosen(files: dict[str, str]) -> str:
    """Return the name of what is chosen."""
    seen = choose(files)[0].seen
    assert seen is not None
    return seen.path.rpartition("/")[2]


def test_a_later_step_of_the_same_training_counts_for_more_than_a_last_one() -> None:
    """A job that is killed between the two has left a last one that is older; the log says so."""
    choice, looked, left = choose({"step=2 last.ckpt": COMMITTED, "step=4.ckpt": COMMITTED})

    assert choice.seen is not None
    assert (choice.seen.path, looked, left) == ("s3://b/step=4.ckpt", ["step=4.ckpt"], [])
    assert choice.seen.training == "a training"
    assert choice.note == "s3://b/step=4.ckpt is newer than s3://b/last.ckpt"


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ("step=4 last.ckpt", COMMITTED),
        ("step=5 last.ckpt", COMMITTED),
        ("step=2 last.ckpt", OTHERS),
        ("step=2 last.ckpt", COMMITTED),
    ],
    ids=["the same step", "an earlier step", "another training", "no manifest"],
)
def test_a_last_one_is_taken_that_nothing_is_known_to_be_newer_than(last: str, state: str) -> None:
    """Whatever reached storage last; the others are not even looked at."""
    other = PLAIN if (last, state) == ("step=2 last.ckpt", COMMITTED) else COMMITTED

    choice, looked, _ = choose({last: state, "step=4.ckpt": other})

    assert choice.seen is not None
    assert (choice.seen.path, choice.note, looked) == ("s3://b/last.ckpt", "", ["last.ckpt"])


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"last.ckpt": PLAIN, "step=4.ckpt": COMMITTED}, "step=4.ckpt"),
        ({"step=4.ckpt": COMMITTED, "last.ckpt": PLAIN}, "last.ckpt"),
        ({"last.ckpt": PLAIN, "step=4.ckpt": OLD}, "last.ckpt"),
    ],
    ids=["before it was replaced", "after it was replaced", "of an earlier version"],
)
def test_a_last_one_without_its_manifest_is_dated_by_storage(
    files: dict[str, str], name: str
) -> None:
    """The manifest is taken away before it is replaced, and written once it is verified."""
    assert chosen(files) == name


def test_a_newer_one_that_is_damaged_is_passed_over_and_set_aside() -> None:
    """It is the newest, and does not verify."""
    choice, _, left = choose({"step=2 last.ckpt": COMMITTED, "step=4.ckpt": STALE})

    assert choice.seen is not None
    assert (choice.seen.path, choice.note, left) == ("s3://b/last.ckpt", "", ["step=4.ckpt"])


def test_without_a_last_one_the_furthest_with_a_manifest_is_taken() -> None:
    """A job that was killed in its first save point has left nothing else."""
    files = {"step=4.ckpt": COMMITTED, "step=2.ckpt": COMMITTED, "step=6.ckpt": PLAIN}

    choice, looked, left = choose(files)

    assert choice.seen is not None
    assert (choice.seen.path, looked, left) == ("s3://b/step=4.ckpt", ["step=4.ckpt"], [])


def test_behind_damaged_last_ones_it_is_taken_and_they_are_set_aside() -> None:
    """What has another name, no manifest, and is damaged as well is nobody's to judge."""
    files = {"step=2.ckpt": COMMITTED, "step=4.ckpt": DAMAGED, "last.ckpt": DAMAGED}

    choice, _, left = choose(files)

    assert choice.seen is not None
    assert (choice.seen.path, left) == ("s3://b/step=2.ckpt", ["last.ckpt"])


def test_one_without_a_manifest_is_taken_where_there_is_nothing_else() -> None:
    """A job that was killed between its first checkpoint and the manifest has left it so."""
    choice, looked, left = choose({"step=2.ckpt": PLAIN, "step=4.ckpt": DAMAGED})

    assert choice.seen is not None
    assert choice.seen.path == "s3://b/step=2.ckpt"
    assert (looked, left) == (["step=4.ckpt", "step=2.ckpt"], ["step=4.ckpt"])
    assert "has no manifest" in choice.note


@pytest.mark.parametrize("state", [DAMAGED, WEIGHTS, DOUBTED])
def test_one_without_a_manifest_that_no_run_can_go_on_from_stands_in_for_nothing(
    state: str,
) -> None:
    """It may be anybody's, for example weights that somebody has downloaded to begin with."""
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
