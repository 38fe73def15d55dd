# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints of a requeued job are needless: only those that are surely its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightning_resilience.core.manifest import Manifest, Origin, manifest_of
from lightning_resilience.core.requeueing import clearing_s, earlier, is_needless


DIGEST = f"xxh3-128:{'0' * 32}"
SAVED = "hpc_ckpt_3.ckpt"
OLDER = "hpc_ckpt_2.ckpt"


def manifest(name: str = OLDER, **said: Any) -> Manifest:
    """Return the manifest of a checkpoint."""
    origin = Origin(**{"step": 8, "run": "4711", "training": "t", **said})
    return manifest_of(f"/root/{name}", {"": (1, DIGEST)}, origin)


# Names --------------------------------------------------------------------------------------------


def test_only_lower_numbers_are_looked_at_the_highest_first() -> None:
    """Numbers and not texts; nothing else in the directory is one of them."""
    names = [f"hpc_ckpt_{number}.ckpt" for number in (1, 9, 10, 11, 12)]
    others = ["last.ckpt", "hpc_ckpt_x.ckpt", "my_hpc_ckpt_2.ckpt", "hpc_ckpt_3.ckpt.old", ""]

    found = earlier("hpc_ckpt_11.ckpt", [*names, *others])

    assert found == ["hpc_ckpt_10.ckpt", "hpc_ckpt_9.ckpt", "hpc_ckpt_1.ckpt"]


@pytest.mark.parametrize("saved", ["last.ckpt", "hpc_ckpt_.ckpt", "hpc_ckpt_1.ckpt", ""])
def test_nothing_is_looked_at_beside_another_or_the_first(saved: str) -> None:
    """Whatever is saved by another name replaces none of them."""
    assert earlier(saved, ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]) == []


def test_of_many_the_latest_are_looked_at() -> None:
    """So that a stop does not depend on how many there are."""
    found = earlier("hpc_ckpt_500.ckpt", [f"hpc_ckpt_{number}.ckpt" for number in range(500)])

    assert found == [f"hpc_ckpt_{number}.ckpt" for number in range(499, 467, -1)]


# The rule -----------------------------------------------------------------------------------------

RUNS = ("4711", "4712", "")
TRAININGS = ("t", "u", "")
STEPS = (None, 7, 8, 9)
SIDES = tuple(itertools.product(RUNS, TRAININGS, STEPS))


@pytest.mark.parametrize("saved", SIDES)
def test_the_whole_table(saved: tuple[str, str, int | None]) -> None:
    """Of all that two manifests can say, one kind of pair is removed: own, and no later."""
    run, training, step = saved
    new = manifest(SAVED, run=run, training=training, step=step)
    needless = {
        (other_run, other_training, other_step)
        for other_run, other_training, other_step in SIDES
        if is_needless(
            manifest(run=other_run, training=other_training, step=other_step),
            name=OLDER,
            saved=new,
        )
    }

    own = {(run, training, one) for one in STEPS if one is not None and step and one <= step}
    assert needless == (own if run and training else set())


@pytest.mark.parametrize(
    ("older", "saved"),
    [(None, manifest(SAVED)), (manifest(), None), (None, None)],
    ids=["older", "saved", "both"],
)
def test_what_has_no_manifest_stays(older: Manifest | None, saved: Manifest | None) -> None:
    """Nobody knows whose it is, or whether what was saved is still there."""
    assert not is_needless(older, name=OLDER, saved=saved)


def test_a_manifest_of_another_name_says_nothing() -> None:
    """Somebody has moved something there."""
    assert not is_needless(manifest("hpc_ckpt_1.ckpt"), name=OLDER, saved=manifest(SAVED))


# Time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "expected_s"),
    [(None, 10.0), (3600.0, 10.0), (32.0, 10.0), (17.0, 5.0), (3.5, 0.5), (3.4, 0.0), (-1.0, 0.0)],
)
def test_clearing_leaves_time_to_be_requeued(left_s: float | None, expected_s: float) -> None:
    """It has a third of what is left but for two seconds, ten at most; and less than half: none."""
    assert clearing_s(left_s) == expected_s
