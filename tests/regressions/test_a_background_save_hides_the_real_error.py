# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C08: a failure of a background save appeared late and hid the error that ended training.

``google/orbax#605``, ``NVIDIA-NeMo/RL#2828``, and the same in Lightning's ``AsyncCheckpointIO``:
the save fails in its thread, user code raises ``ValueError`` later, and ``fit`` raises the save's
error at its end, on rank 0 alone, with the user's demoted to its context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, make_data, make_model, make_trainer, store_server
from tests.single_rank import plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration]

MANY = 400
"""More steps than a job makes until it is told of a failure."""


class Fails(Callback):
    """A bug in training, in the step in which the save fails in the background."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Let the save fail, and fail."""
        if trainer.global_step == 3:
            plan_in_use().release()
            message = "a bug in training"
            raise ValueError(message)


def add_bug(trainer: Any) -> None:
    """Let training fail on every rank."""
    trainer.callbacks.insert(0, Fails())


# The first save is under way until the bug comes.
HELD_BACK = Rule(operations=("put_file",), error="denied", hang=True)


def run_two(
    warm_python: WarmPython, home: Path, rule: Rule, **options: Any
) -> tuple[Running, list[dict[str, Any]]]:
    """Run two ranks that save in the background."""
    job = Job(
        folder=f"faulty://{home}/checkpoints",
        trainer={"plugins": [AsyncCheckpointIO()]},
        group_timeout_s=20.0,
        **options,
    )
    plan = FaultPlan.write(home / "plan", rule)
    with store_server() as port:
        running = lightning_job.start(warm_python, job, home / "job", port=port, plan=plan)
        return running, running.wait()


def left_nothing(reports: list[dict[str, Any]]) -> bool:
    """Tell whether no rank has left anything behind."""
    return all(
        (report["patched"], report["threads"], report["handlers"]) == ([], [], [])
        for report in reports
    )


def test_the_users_exception_is_what_fit_raises(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The save's failure is in the log and in a note, and the exception that ended training out."""
    plugins = {"plugins": [AsyncCheckpointIO()]}
    trainer = make_trainer(faulty(HELD_BACK, trainer=plugins))
    add_bug(trainer)

    with pytest.raises(ValueError, match="a bug in training") as caught:
        trainer.fit(make_model(), make_data())

    assert caught.value.__context__ is None
    assert len(plan_in_use().calls("put_file")) == 1
    assert "was not written in the background" in caplog.text
    if hasattr(caught.value, "add_note"):
        (note,) = getattr(caught.value, "__notes__", [])
        assert "was not written in the background" in note
        assert "step=2.ckpt" in note


@pytest.mark.multiprocess
def test_on_two_ranks_the_users_exception_stays_and_has_a_note(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Both raise it; on the rank that saves, a note says which checkpoint is not there."""
    running, reports = run_two(warm_python, tmp_path, HELD_BACK, before=add_bug)

    told = [(report["error"], report["text"]) for report in reports]
    assert told == [("ValueError", "a bug in training")] * 2, running.told()
    assert "step=2.ckpt" in running.ranks[0].text()
    if hasattr(ValueError(), "add_note"):
        assert "was not written in the background" in "".join(reports[0]["notes"])
    assert left_nothing(reports), running.told()


@pytest.mark.multiprocess
def test_a_failure_of_the_first_save_ends_training_on_both_ranks_at_the_same_step(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Soon, and not at the end; with the same text, and its cause on the rank that saves."""
    denied = Rule(operations=("put_file",), name="step=2.ckpt", error="denied")

    running, reports = run_two(warm_python, tmp_path, denied, steps=MANY)

    assert [report.get("error") for report in reports] == ["JointError"] * 2, running.told()
    assert reports[0]["text"] == reports[1]["text"]
    assert "step=2.ckpt failed in the background, permanent: " in reports[0]["text"]
    assert reports[0]["step"] == reports[1]["step"] < MANY, running.told()
    assert "Access Denied" in reports[0]["causes"][0]
    assert left_nothing(reports), running.told()


@pytest.mark.multiprocess
def test_a_failure_of_the_last_save_does_not_let_any_rank_end_well(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Nothing is trained any more when it comes, and both ranks raise it all the same."""
    denied = Rule(operations=("put_file",), name="step=4.ckpt", error="denied")

    running, reports = run_two(warm_python, tmp_path, denied, steps=4)

    assert [report.get("error") for report in reports] == ["JointError"] * 2, running.told()
    assert reports[0]["text"] == reports[1]["text"]
    assert "step=4.ckpt failed in the background" in reports[0]["text"]
    assert [report["step"] for report in reports] == [4, 4]
    assert [report["outcome"] for report in reports] == ["permanent"] * 2
    assert left_nothing(reports), running.told()
