# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which candidate is taken when a run starts, and what is looked at twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from lightning_resilience.core.candidates import Candidate
from lightning_resilience.core.fallback import Choice, choosing, judging
from lightning_resilience.core.pipeline import Step, carry_out
from lightning_resilience.core.resolution import Found, Inspection, Search
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Sequence


DAMAGED: dict[str, Any] = {"rejected": "it is empty", "mark": "1234"}
DOUBTED: dict[str, Any] = {"doubt": "nobody can look into it"}


def chosen(
    *candidates: dict[str, Any], allows: bool = False, before: Sequence[Inspection] = ()
) -> tuple[Choice, list[str]]:
    """Return what is chosen of candidates, the newest first, and what was left."""
    seen = {f"{at}.ckpt": Inspection(path=f"{at}.ckpt", **c) for at, c in enumerate(candidates)}
    found = Found(candidates=tuple(Candidate(url=url, modified_s=-float(url[0])) for url in seen))
    left: list[str] = []
    hands: dict[Step, Any] = {
        Step.LIST: lambda _: found,
        Step.JUDGE: seen.__getitem__,
        Step.LEAVE: lambda damaged: left.append(f"{damaged.path} {damaged.mark}".strip()),
    }
    search = choosing(Search.LAST, 1, allow_fresh_start=allows, before=before)
    return carry_out(search, hands), left


def test_the_newest_that_can_be_loaded_is_taken() -> None:
    """What is damaged is passed over, and left with its mark."""
    choice, left = chosen(DAMAGED, {}, {})

    assert choice.seen is not None
    assert (choice.seen.path, left) == ("1.ckpt", ["0.ckpt 1234"])


def test_what_nobody_can_look_into_is_taken_last() -> None:
    """An older one that is known to be complete is better; the newer one stays, without a mark."""
    choice, left = chosen(DOUBTED, DAMAGED, {})

    assert choice.seen is not None
    assert (choice.seen.path, left) == ("2.ckpt", ["1.ckpt 1234", "0.ckpt"])


def test_what_nobody_can_look_into_is_taken_where_it_is_all_there_is() -> None:
    """It may be from a time without manifests."""
    choice, left = chosen(DOUBTED, DAMAGED, DOUBTED)

    assert choice.seen is not None
    assert (choice.seen.path, left) == ("0.ckpt", ["1.ckpt 1234"])


def test_damaged_ones_only_are_an_error_and_stay() -> None:
    """With allow_fresh_start they are left, and named."""
    with pytest.raises(CheckpointError, match=r"0\.ckpt: it is empty"):
        chosen(DAMAGED)

    choice, left = chosen(DAMAGED, allows=True)

    assert (choice.seen, choice.is_overridden, left) == (None, True, ["0.ckpt 1234"])
    assert "0.ckpt" in choice.unused


MOVED = Inspection(path="9.ckpt", rejected="its digest is another")


@pytest.mark.parametrize("candidates", [(), (DAMAGED,)], ids=["nothing is left", "one is left"])
def test_what_earlier_searches_of_a_start_have_set_aside_is_named(
    candidates: tuple[dict[str, Any], ...],
) -> None:
    """Its damage was found while it was loaded; a start from the beginning would hide it."""
    with pytest.raises(CheckpointError, match=r"9\.ckpt: its digest is another \(set aside by"):
        chosen(*candidates, before=[MOVED])

    assert chosen({}, before=[MOVED])[0].seen is not None
    assert "9.ckpt" in chosen(*candidates, allows=True, before=[MOVED])[0].unused


def test_nothing_at_all_is_a_fresh_start() -> None:
    """There is nothing to hide."""
    assert chosen() == (Choice(), [])


def judged(
    *seen: Inspection, differs: str | None = None, marks: tuple[str, ...] = ("a", "a")
) -> Any:
    """Return what is thought of a candidate that is seen so, one look after the other."""
    looks, told = iter(seen), iter(marks)
    hands = {
        Step.INSPECT: lambda _: next(looks),
        Step.COMPARE: lambda _: differs,
        Step.IDENTIFY: lambda _: next(told),
    }
    return carry_out(judging(), hands)


GOOD = Inspection(path="a.ckpt", size_bytes=3)
BAD = replace(GOOD, rejected="it is empty")


def test_a_good_one_is_looked_at_once() -> None:
    """A second look would find nothing to say."""
    assert judged(GOOD) == GOOD


@pytest.mark.parametrize(
    ("second", "marks", "mark"), [(BAD, ("a", "a"), "a"), (BAD, ("a", "b"), ""), (GOOD, ("a",), "")]
)
def test_only_what_is_damaged_twice_and_the_same_has_a_mark(
    second: Inspection, marks: tuple[str, ...], mark: str
) -> None:
    """Else it may be being written."""
    assert judged(BAD, second, marks=marks) == replace(second, mark=mark)


def test_what_its_manifest_stands_for_is_not_compared_once_more() -> None:
    """Whoever has seen nothing else has nothing to compare."""
    seen = replace(GOOD, saved="xxh3-128:00", is_committed=True)

    assert judged(seen, differs="it was asked for") == seen


def test_a_manifest_that_differs_rejects() -> None:
    """Whatever can be seen without it."""
    assert judged(GOOD, GOOD, differs="it is shorter").rejected == "it is shorter"


@pytest.mark.parametrize(("differs", "doubt"), [(None, "who knows"), ("", "")])
def test_a_manifest_that_matches_takes_the_doubt(differs: str | None, doubt: str) -> None:
    """Without one it stays."""
    assert judged(replace(GOOD, doubt="who knows"), differs=differs).doubt == doubt
