# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C33: a load straight after an asynchronous save got 404.

``GoogleCloudPlatform/gcs-connector-for-pytorch#138``: the save was handed over and is under way,
the load of the same path asks storage at once, and the checkpoint is not there yet.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, store_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


class LoadsAtOnce(Callback):
    """Saves, and loads the same path in the next line, on every rank."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Save and load."""
        if trainer.global_step == 3:
            path = f"{trainer.checkpoint_callback.dirpath}/mine.ckpt"
            trainer.save_checkpoint(path)
            loaded = trainer.strategy.load_checkpoint(path)
            assert loaded["global_step"] == 3


class GoesBackAtOnce(Callback):
    """Saves, and goes back to that state in the next line, on every rank, as a tuner does."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Save and restore, once."""
        if trainer.global_step == 3:
            path = f"{trainer.checkpoint_callback.dirpath}/mine.ckpt"
            trainer.save_checkpoint(path)
            trainer._checkpoint_connector.restore(path)
            assert trainer.global_step == 3


def add(trainer: Any, *, callback: type[Callback]) -> None:
    """Let a Trainer do that."""
    trainer.callbacks.insert(0, callback())


def run(
    warm_python: WarmPython, home: Path, rule: Rule, *, callback: type[Callback] = LoadsAtOnce
) -> tuple[Running, list[dict[str, Any]], FaultPlan]:
    """Run two ranks that save in the background."""
    job = Job(
        folder=f"faulty://{home}/checkpoints",
        trainer={"plugins": [AsyncCheckpointIO()]},
        group_timeout_s=20.0,
        before=partial(add, callback=callback),
    )
    plan = FaultPlan.write(home / "plan", rule)
    with store_server() as port:
        running = lightning_job.start(warm_python, job, home / "job", port=port, plan=plan)
        return running, running.wait(), plan


@pytest.mark.parametrize("callback", [LoadsAtOnce, GoesBackAtOnce])
def test_the_load_waits_for_the_save_on_both_ranks(
    callback: type[Callback], warm_python: WarmPython, tmp_path: Path
) -> None:
    """No rank asks storage for the checkpoint before it is there."""
    slow = Rule(operations=("put_file",), name="mine.ckpt", slow_s=0.15)

    running, reports, plan = run(warm_python, tmp_path, slow, callback=callback)

    assert [report["code"] for report in reports] == [0, 0], running.told()
    (put,) = plan.calls("put_file", name="mine.ckpt")
    opened = plan.calls("open", name="mine.ckpt")
    assert {call["rank"] for call in opened} == {"0", "1"}
    # It sends eight pieces.
    assert all(call["at_s"] > put["at_s"] + 8 * 0.15 for call in opened)


@pytest.mark.parametrize("callback", [LoadsAtOnce, GoesBackAtOnce])
def test_a_save_that_fails_is_the_answer_to_the_load(
    callback: type[Callback], warm_python: WarmPython, tmp_path: Path
) -> None:
    """Both ranks raise the same, which says what became of the save; nobody asks storage."""
    denied = Rule(operations=("put_file",), name="mine.ckpt", error="denied")

    running, reports, plan = run(warm_python, tmp_path, denied, callback=callback)

    assert [report.get("error") for report in reports] == ["JointError"] * 2, running.told()
    assert reports[0]["text"] == reports[1]["text"]
    assert "mine.ckpt failed in the background, permanent: " in reports[0]["text"]
    assert "Access Denied" in reports[0]["causes"][0]
    assert plan.calls("open", name="mine.ckpt") == []
