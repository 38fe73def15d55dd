# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C68: options had no way to storage, an absent file failed a removal, a save masked the cause.

``Lightning-AI/pytorch-lightning#5836``, ``#1366``, ``#5766``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, find, make_data, make_model, make_trainer, store_server
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.s3_server import S3Server
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration]

HAS_NOTES = sys.version_info >= (3, 11)


class Raises(Callback):
    """A user's error in the third step."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Raise it."""
        if trainer.global_step == 3:
            message = "the user's own"
            raise ValueError(message)


def raise_in_the_third_step(trainer: Any) -> None:
    """Plug it in."""
    trainer.callbacks.insert(0, Raises())


@pytest.mark.parametrize("error", ["denied", "odd"])
def test_an_error_while_saving_on_an_exception_does_not_replace_it(
    error: str, faulty: Callable[..., Job]
) -> None:
    """The user's exception comes out, with a note of what happened to the checkpoint."""
    rule = Rule(operations=("put_file",), name="step=3", error=error)
    job = faulty(rule, checkpoint={"save_on_exception": True})
    trainer = make_trainer(job)
    raise_in_the_third_step(trainer)

    with pytest.raises(ValueError, match="the user's own") as caught:
        trainer.fit(make_model(), make_data())

    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == HAS_NOTES
    assert all("Saving a checkpoint on this exception failed as well" in note for note in notes)
    assert names(job) == ["step=2.ckpt"]
    assert find(trainer, "ModelCheckpoint").best_model_path.endswith("step=2.ckpt")


def test_a_checkpoint_is_saved_on_an_exception_where_storage_is_well(
    faulty: Callable[..., Job],
) -> None:
    """What the user asked for works: the checkpoint is there, and the exception comes out."""
    job = faulty(checkpoint={"save_on_exception": True})
    trainer = make_trainer(job)
    raise_in_the_third_step(trainer)

    with pytest.raises(ValueError, match="the user's own") as caught:
        trainer.fit(make_model(), make_data())

    assert getattr(caught.value, "__notes__", []) == []
    assert names(job) == ["step=2.ckpt", "step=3.ckpt"]


@pytest.mark.multiprocess
def test_it_is_so_on_all_ranks(warm_python: WarmPython, tmp_path: Path) -> None:
    """Every rank raises the user's exception, and rank 0, which saves, notes the failure."""
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        checkpoint={"save_on_exception": True},
        before=raise_in_the_third_step,
        group_timeout_s=40.0,
    )
    rule = Rule(operations=("put_file",), name="step=3", error="denied")
    with store_server() as port:
        plan = FaultPlan.write(tmp_path / "plan", rule)
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        first, second = running.wait()

    for report in (first, second):
        assert (report["error"], report["text"]) == ("ValueError", "the user's own"), running.told()
        failures = [note for note in report["notes"] if "failed as well" in note]
        assert len(failures) == HAS_NOTES * (report is first)
    assert abs(first["ended_at_s"] - second["ended_at_s"]) < 5


class Removes(Callback):
    """Somebody else removes a checkpoint while training runs."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Remove the first one."""
        path = find(trainer, "ModelCheckpoint").best_model_path.removeprefix("faulty://")
        if trainer.global_step == 3:
            Path(path).unlink()


def test_removing_a_checkpoint_that_is_gone_is_a_success(faulty: Callable[..., Job]) -> None:
    """Top-1 removes what somebody else has removed already, and goes on."""
    job = faulty(checkpoint={"save_top_k": 1})
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, Removes())

    trainer.fit(make_model(), make_data())

    assert names(job) == ["step=4.ckpt"]
    assert [call["struck"] for call in plan_in_use().calls("rm_file")] == []


@pytest.mark.parametrize("folder", ["", "/run/checkpoints"])
def test_storage_options_reach_the_storage(
    folder: str, s3_server: S3Server, bucket: str, spool: Path
) -> None:
    """An endpoint and keys that nobody else knows are enough, also at the root of a bucket."""
    job = Job(
        folder=f"s3://{bucket}{folder}",
        ranks=1,
        checkpoint={"save_top_k": 1, "save_last": True},
        options={"storage_options": s3_server.storage_options},
    )

    trainer = fit(job)

    listed = s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]
    keys = {item["Key"].removeprefix(f"{folder.lstrip('/')}/") for item in listed}
    manifests = {".resilience/last.ckpt.json", ".resilience/step=4.ckpt.json"}
    assert keys == {"last.ckpt", "step=4.ckpt"} | manifests
    assert find(trainer, "ModelCheckpoint").best_model_path == f"{job.folder}/step=4.ckpt"
    assert list(spool.rglob("*.staged")) == []
