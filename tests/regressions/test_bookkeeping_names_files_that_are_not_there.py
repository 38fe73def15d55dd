# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C10: ``ModelCheckpoint`` wrote down what it was about to save, and the save failed.

``sdatkinson/neural-amp-modeler#671``: ``best_model_path`` named a file that never came to be, and
the next checkpoint would have carried that on.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback

from lightning_resilience import JointError
from tests.faulty_filesystem import Rule
from tests.lightning_job import Job, find, make_data, make_model, make_trainer
from tests.single_rank import plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = [pytest.mark.integration]

KINDS: dict[str, dict[str, Any]] = {
    "every": {"save_top_k": -1, "save_last": True},
    "newest": {"save_top_k": 1},
    "best": {"save_top_k": 1, "monitor": "loss", "save_last": True},
    "worst": {"save_top_k": 1, "monitor": "loss", "mode": "max", "save_last": True},
    "best two": {"save_top_k": 2, "monitor": "loss"},
    "last": {"save_top_k": 0, "save_last": True},
    "last by name": {"save_last": True, "filename": "{step}", "enable_version_counter": False},
}


TOLERANT = {"checkpoints": {"max_consecutive_save_failures": 3}}


def books(callback: Any) -> set[str]:
    """Return every file that the callback believes in."""
    paths = {callback.best_model_path, callback.last_model_path, callback.kth_best_model_path}
    return {path for path in paths | set(callback.best_k_models) if path}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["put_file", "rm_file", "info"])
def test_after_a_failure_the_books_name_only_what_is_there(
    operation: str, kind: str, faulty: Callable[..., Job]
) -> None:
    """Whichever call fails, best, last and top-k name files that exist."""
    checkpoint = KINDS[kind]
    for number in range(1, 30):
        rule = Rule(operations=(operation,), name="ckpt", error="denied", first=number)
        job = faulty(rule, checkpoint=checkpoint, steps=8)
        trainer = make_trainer(job)
        failed = True

        try:
            trainer.fit(make_model(), make_data())
        except JointError:
            pass
        else:
            failed = False

        callback = find(trainer, "ModelCheckpoint")
        assert absent(callback) == [], f"call {number} failed"
        if callback.best_k_models:
            assert callback.best_model_path in callback.best_k_models
        shutil.rmtree(job.folder.removeprefix("faulty://"), ignore_errors=True)
        if not failed:
            break
    else:
        pytest.fail("it never ran out of calls to fail")


def test_after_a_failure_the_score_is_that_of_the_best_file(faulty: Callable[..., Job]) -> None:
    """Scores, too, are what they were before the save that failed."""
    rule = Rule(operations=("put_file",), name="ckpt", error="denied", first=3)
    job = faulty(rule, checkpoint={"save_top_k": 1, "monitor": "step", "mode": "max"}, steps=20)
    trainer = make_trainer(job)

    with pytest.raises(JointError):
        trainer.fit(make_model(), make_data())

    callback = find(trainer, "ModelCheckpoint")
    assert callback.best_k_models == {callback.best_model_path: callback.best_model_score}
    assert callback.kth_value == callback.best_model_score
    assert callback.current_score == callback.best_model_score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["put_file", "rm_file"])
def test_after_a_tolerated_failure_training_goes_on_with_books_that_are_true(
    operation: str, kind: str, faulty: Callable[..., Job], spool: Path
) -> None:
    """Whichever call fails, the books name what is there at every step and at the end."""
    checkpoint = KINDS[kind]
    for number in range(1, 30):
        rule = Rule(operations=(operation,), name="ckpt", error="denied", first=number, last=number)
        job = faulty(rule, checkpoint=checkpoint, steps=8, options=TOLERANT)
        trainer, watch = make_trainer(job), Watch()
        trainer.callbacks.append(watch)

        error = error_of(partial(trainer.fit, make_model(), make_data()))

        callback = find(trainer, "ModelCheckpoint")
        assert (trainer.global_step, watch.missing) == (8, []), f"call {number} failed"
        assert absent(callback) == [], f"call {number} failed"
        # What could not be removed at the very end is left, and the error says so.
        is_left = "remove of" in error
        if callback.save_top_k != -1 and not is_left:
            assert listed(job) == books(callback), f"call {number} failed"
        shutil.rmtree(job.folder.removeprefix("faulty://"), ignore_errors=True)
        # What was denied while it waited on the node, the next job would publish.
        for left in spool.iterdir():
            shutil.rmtree(left)
        if not plan_in_use().calls(operation, name="ckpt")[number - 1 :]:
            break
    else:
        pytest.fail("it never ran out of calls to fail")


def error_of(train: Callable[[], None]) -> str:
    """Return the text of the error that training ends with, or nothing."""
    try:
        train()
    except JointError as error:
        return str(error)
    return ""


class Watch(Callback):
    """Looks after each step for files that the books name and that are not there."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.had_one = False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Look before the step: the checkpoints of the last one are done with."""
        callback = find(trainer, "ModelCheckpoint")
        self.missing += absent(callback)
        assert books(callback) or not self.had_one, "the last good file is forgotten"
        self.had_one = self.had_one or bool(books(callback))


def absent(callback: Any) -> list[str]:
    """Return the files that the callback believes in and that are not there."""
    return [path for path in books(callback) if not Path(path.removeprefix("faulty://")).exists()]


def listed(job: Job) -> set[str]:
    """Return the checkpoints that are there."""
    return {
        f"faulty://{path}" for path in Path(job.folder.removeprefix("faulty://")).glob("*.ckpt")
    }
