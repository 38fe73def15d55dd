# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is known of a checkpoint follows from what was seen of it, and the newest one counts."""

from __future__ import annotations

import itertools

import pytest

from lightning_resilience.core.manifest import Origin, manifest_of
from lightning_resilience.core.shards import Form
from lightning_resilience.core.verification import (
    Finding,
    Look,
    Seen,
    State,
    describe,
    newest_first,
    newest_is_good,
    of_described,
    of_undescribed,
    orphan,
    step_of,
)


DIGEST, OTHER = f"xxh3-128:{'0' * 32}", f"xxh3-128:{'1' * 32}"
FILE = manifest_of("run/a.ckpt", {"": (10, DIGEST)}, Origin(step=4))
SHARDS = manifest_of("run/a.ckpt", {"meta.pt": (5, DIGEST), "0.distcp": (7, DIGEST)}, Origin())


@pytest.mark.parametrize(
    ("size", "digest", "state", "reason"),
    [
        (10, DIGEST, State.VERIFIED, ""),
        (10, None, State.UNVERIFIED, "no digest was compared"),
        (10, OTHER, State.CORRUPT, "digest"),
        (9, DIGEST, State.CORRUPT, "it has 9 bytes, 10 were saved"),
        (9, None, State.CORRUPT, "it has 9 bytes, 10 were saved"),
    ],
)
def test_a_file_with_a_manifest_is_what_that_says(
    size: int, digest: str | None, state: State, reason: str
) -> None:
    """Size and digest, or else the size at least."""
    found, why = of_described(FILE, {"": (size, digest)})

    assert found is state
    assert reason in why


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"meta.pt": (5, DIGEST)}, "0.distcp is missing"),
        ({"meta.pt": (5, DIGEST), "0.distcp": (7, OTHER)}, "0.distcp has the digest"),
        ({"meta.pt": (5, DIGEST), "0.distcp": (8, None)}, "0.distcp has 8 bytes"),
    ],
)
def test_one_shard_that_differs_makes_a_checkpoint_corrupt(
    found: dict[str, tuple[int, str | None]], reason: str
) -> None:
    """The reason names it."""
    state, why = of_described(SHARDS, found)

    assert state is State.CORRUPT
    assert reason in why


@pytest.mark.parametrize("look", list(Look))
def test_every_look_of_a_file_is_judged(look: Look) -> None:
    """Damage is corrupt, and what nobody can check stays loadable."""
    bad = {Look.DAMAGED, Look.PREFIXED, Look.EMPTY, Look.ZEROS, Look.PAGE}

    state, reason = of_undescribed(
        Form.FILE, {"": Seen(look=look, size_bytes=12, detail="the very fault")}
    )

    assert state is (State.CORRUPT if look in bad else State.UNVERIFIED)
    assert ("no manifest" in reason) is (look not in bad)
    assert ("the very fault" in reason) is (look in {Look.DAMAGED, Look.PREFIXED})


def test_the_reason_says_how_much_was_seen() -> None:
    """No two kinds of unverified are said alike."""
    good = [Look.WHOLE, Look.LISTED, Look.UNSUMMED, Look.LEGACY, Look.OTHER]

    reasons = {of_undescribed(Form.FILE, {"": Seen(look=look, size_bytes=12)})[1] for look in good}

    assert len(reasons) == len(good)


@pytest.mark.parametrize(
    ("name", "look", "state"),
    [
        ("0.distcp", Look.PREFIXED, State.UNVERIFIED),
        ("0.distcp", Look.EMPTY, State.UNVERIFIED),
        ("0.distcp", Look.OTHER, State.UNVERIFIED),
        ("0.distcp", Look.DAMAGED, State.CORRUPT),
        ("0.distcp", Look.ZEROS, State.CORRUPT),
        (".metadata", Look.EMPTY, State.CORRUPT),
    ],
)
def test_a_file_of_a_directory_may_be_more_than_an_archive(
    name: str, look: Look, state: State
) -> None:
    """Shards are archives one after the other; a damaged one is named."""
    seen = {
        "meta.pt": Seen(look=Look.WHOLE, size_bytes=5),
        name: Seen(look=look, size_bytes=7, detail="why"),
    }

    found, reason = of_undescribed(Form.SHARDS, seen)

    assert found is state
    assert (name in reason) is (state is State.CORRUPT)


def test_a_directory_without_its_metadata_is_corrupt() -> None:
    """Nobody can load it."""
    seen = {"0.distcp": Seen(look=Look.OTHER, size_bytes=7)}

    state, reason = of_undescribed(Form.OTHER, seen)

    assert state is State.CORRUPT
    assert "without the metadata" in reason


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=1-step=40.ckpt", 40),
        ("step=7-v1.ckpt", 7),
        ("epoch=1-global_step=40.ckpt", 40),
        ("footstep=3.ckpt", None),
        ("last.ckpt", None),
    ],
)
def test_a_name_may_say_the_step(name: str, step: int | None) -> None:
    """A manifest says it better."""
    assert step_of(name, None) == step
    assert step_of(name, FILE) == 4
    assert step_of(name, SHARDS) == step


def finding(
    name: str, *, step: int | None = None, at_s: float | None = None, state: str = "verified"
) -> Finding:
    """Return a finding."""
    return Finding(name=name, state=State(state), step=step, modified_s=at_s)


ORDERS = [
    ("the higher step", [finding("a", step=9, at_s=1.0), finding("b", step=8, at_s=2.0)]),
    ("the later time", [finding("a", step=9, at_s=2.0), finding("b", step=9, at_s=1.0)]),
    ("the name", [finding("b", step=9, at_s=1.0), finding("a", step=9, at_s=1.0)]),
    ("a time before none", [finding("a", step=9, at_s=1.0), finding("b", step=9)]),
    (
        "no step, and written last",
        [finding("last", at_s=5.0), finding("b", step=9, at_s=4.0), finding("a", step=8, at_s=3.0)],
    ),
    (
        "no step, and written in between",
        [finding("b", step=9, at_s=6.0), finding("last", at_s=5.0), finding("a", step=8, at_s=4.0)],
    ),
    (
        "no step, and written first",
        [finding("b", step=9, at_s=6.0), finding("a", step=8, at_s=5.0), finding("last", at_s=4.0)],
    ),
    ("no step and no time", [finding("a", step=0, at_s=1.0), finding("b")]),
    ("orphans last", [finding("a", step=1), finding("b", step=9, state="orphan")]),
]


@pytest.mark.parametrize(("_what", "expected"), ORDERS, ids=[what for what, _ in ORDERS])
def test_the_newest_comes_first(_what: str, expected: list[Finding]) -> None:
    """In whatever order they were listed."""
    for listed in itertools.permutations(expected):
        assert newest_first(listed) == expected


@pytest.mark.parametrize(
    ("states", "good"),
    [
        (["verified", "corrupt"], True),
        (["unverified"], True),
        (["corrupt", "verified"], False),
        (["orphan"], False),
        ([], False),
    ],
)
def test_the_newest_decides(states: list[str], *, good: bool) -> None:
    """A directory without any checkpoint is not good either."""
    ordered = [finding(f"{number}.ckpt", state=state) for number, state in enumerate(states)]

    assert newest_is_good(ordered) is good


def test_one_line_says_what_was_found() -> None:
    """How many of each, and what the newest is."""
    ordered = [
        finding("b.ckpt", state="corrupt"),
        finding("a.ckpt"),
        orphan("c.ckpt", modified_s=None),
    ]

    assert describe(ordered).startswith("1 verified, 1 corrupt, 1 orphan; the newest, b.ckpt, is ")
    assert describe(ordered[1:]).endswith("the newest, a.ckpt, is verified")
    assert "no checkpoint (1 left over" in describe(ordered[2:])
    assert describe([]) == "no checkpoint: nothing to start from"


def test_an_orphan_says_what_it_is() -> None:
    """A manifest alone, or what a save has left."""
    alone = orphan("a.ckpt", modified_s=None, manifest=FILE)
    left = orphan(".resilience-1.staged", modified_s=2.0)

    assert (alone.state, alone.step) == (State.ORPHAN, 4)
    assert "manifest" in alone.reason
    assert (left.state, left.step, left.modified_s) == (State.ORPHAN, None, 2.0)
    assert "has not ended" in left.reason
