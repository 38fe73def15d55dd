# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The orders of steps: each as a list, and what becomes of it where a step fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core import pipeline
from lightning_resilience.core.pipeline import Progress, Sent, Step, carry_out


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.pipeline import Steps


class Recorded:
    """Hands that note each step, answer from a table, and fail where they are told to."""

    def __init__(self, answers: dict[Step, Any] | None = None, *, fails_at: int = -1) -> None:
        self.done: list[str] = []
        self._answers = {Step.STAGE: "staged", Step.IS_SAME: True, **(answers or {})}
        self._fails_at = fails_at

    def run(self, steps: Steps[Any]) -> Any:
        """Carry the steps out."""
        return carry_out(steps, {step: self._hand(step) for step in Step})

    def _hand(self, step: Step) -> Callable[[Any], Any]:
        def hand(of: object) -> Any:
            self.done.append(step.value if of in {None, "staged"} else f"{step.value} {of}")
            if len(self.done) == self._fails_at:
                raise ConnectionResetError
            return self._answers.get(step)

        return hand


def steps_of(steps: Steps[Any], **answers: Any) -> list[str]:
    """Return the steps of an order in which nothing fails."""
    hands = Recorded({Step[name.upper()]: answer for name, answer in answers.items()})
    hands.run(steps)
    return hands.done


def test_a_save_marks_last() -> None:
    """The older manifest goes before its checkpoint is touched; the newer one comes last."""
    done = steps_of(pipeline.save(Progress(), keeps_staged=True))

    assert done == ["stage", "unmark", "publish", "verify", "ask", "mark"]


def test_an_attempt_goes_on_with_what_is_verified() -> None:
    """After a manifest that could not be written, only that is repeated."""
    known: Progress[str] = Progress()
    with pytest.raises(ConnectionResetError):
        Recorded(fails_at=6).run(pipeline.save(known, keeps_staged=False))

    assert steps_of(pipeline.save(known, keeps_staged=False)) == ["ask", "mark"]


@pytest.mark.parametrize(
    ("keeps_staged", "then"),
    [(True, ["unmark", "publish", "verify", "ask", "mark"]), (False, ["stage", "unmark"])],
)
def test_what_is_staged_is_used_again_where_it_is_kept(keeps_staged: Any, then: list[str]) -> None:
    """A rename uses it up, so there it is removed, and staged anew."""
    known: Progress[str] = Progress()
    failed = Recorded(fails_at=3)
    with pytest.raises(ConnectionResetError):
        failed.run(pipeline.save(known, keeps_staged=keeps_staged))

    assert (failed.done[-1] == "discard") is not keeps_staged
    assert steps_of(pipeline.save(known, keeps_staged=keeps_staged))[: len(then)] == then


def test_who_was_abandoned_leaves_no_word() -> None:
    """A successor publishes anew where the one before did not come past its question."""
    known: Progress[str] = Progress()
    with pytest.raises(ConnectionResetError):
        Recorded(fails_at=5).run(pipeline.save(known, keeps_staged=True))

    assert known.verified is None


def test_a_save_that_is_dropped_does_nothing_more() -> None:
    """Closing an order, as a killed process does, asks nobody for anything."""
    steps: Steps[str] = pipeline.save(Progress(), keeps_staged=False)
    assert [next(steps).step, steps.send("staged").step] == [Step.STAGE, Step.UNMARK]

    steps.close()


def test_a_tree_is_sent_file_by_file_once_the_older_is_gone() -> None:
    """Each is verified, and an attempt goes on where the last has ended."""
    sent = Sent()
    with pytest.raises(ConnectionResetError):
        Recorded(fails_at=5).run(pipeline.publication(sent, ["a", "b"], renames=False))

    assert sent.names == {"a"}
    done = steps_of(pipeline.publication(sent, ["a", "b"], renames=False))
    assert done == ["publish b", "verify b"]


def test_a_tree_that_is_renamed_is_not_cleared() -> None:
    """The older one is there until the newer one takes its place."""
    done = steps_of(pipeline.publication(Sent(), ["a", "b"], renames=True))

    assert done == ["publish ", "verify a", "verify b"]


def test_an_assembly_renames_only_what_it_has_seen() -> None:
    """What is renamed is what was there before the shards were looked at."""
    done = steps_of(pipeline.assembly(Progress(), "done", renames=True), stamp="inode")

    assert done == [
        *("stamp", "verify", "publish", "unmark", "move inode", "discard", "ask", "mark done")
    ]


def test_an_assembly_that_was_renamed_is_only_marked() -> None:
    """An attempt after one whose rename was carried out all the same."""
    done = steps_of(
        pipeline.assembly(Progress(staged="inode"), "done", renames=True), is_there=True
    )

    assert done == ["is there inode", "ask", "mark done"]


def test_removals_take_first_what_makes_a_checkpoint_look_complete() -> None:
    """The manifest, then the metadata, then the rest."""
    assert steps_of(pipeline.removal()) == ["unmark", "ask", "remove", "tidy"]
    done = steps_of(pipeline.removal_of_shards(), names=["0", ".metadata", "meta.pt"])
    assert [each for each in done if each != "ask"] == [
        *("names", "unmark", "remove file meta.pt", "remove file .metadata"),
        *("unmark", "remove", "tidy"),
    ]
    assert steps_of(pipeline.removal_of_shards()) == ["ask", "names"]


def test_a_link_and_a_whole_save_unmark_first() -> None:
    """Whatever has the name next is not what the manifest describes."""
    assert steps_of(pipeline.linking()) == ["unmark", "link"]
    assert steps_of(pipeline.whole_save()) == ["stamp", "unmark", "ask", "write", "stamp"]


def test_a_damaged_checkpoint_loses_its_manifest_last() -> None:
    """Moved at once, or copied before anything of it is removed."""
    moved = steps_of(pipeline.setting_aside(renames=True), is_there=True)
    copied = steps_of(pipeline.setting_aside(renames=False), is_there=True, names=["0", "meta.pt"])

    assert moved == ["is there", "is same", "note", "move", "unmark"]
    assert [each for each in copied if each != "ask"] == [
        *("is there", "is same", "note", "names", "copy 0", "copy meta.pt"),
        *("remove file meta.pt", "remove file 0", "tidy", "unmark"),
    ]


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({Step.IS_THERE: True, Step.IS_SAME: False}, "it was written again meanwhile"),
        ({Step.IS_THERE: False, Step.IS_ASIDE: False}, "it is no longer there"),
        ({Step.IS_THERE: False, Step.IS_ASIDE: True}, ""),
    ],
)
def test_what_is_not_set_aside_says_why(answers: dict[Step, Any], problem: str) -> None:
    """What was written again, or is gone, stays; what was moved already has only its manifest."""
    hands = Recorded(answers)

    assert hands.run(pipeline.setting_aside(renames=True)) == problem
    assert ("unmark" in hands.done) is (problem == "")
