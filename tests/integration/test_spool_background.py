# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ``AsyncCheckpointIO`` cannot write in its thread waits on the node as any other save."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_resilience.adapters.object_store import FsspecObjectStore
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan
from tests.lightning_job import Job, store_server
from tests.single_rank import fit, names
from tests.spooled_saves import (
    MARKS,
    SPOOL,
    LoadsThroughThePlugin,
    outage,
    run,
    unpublished,
    with_plugin,
)


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_python import WarmPython


pytestmark = MARKS

SPOOLED = "waits on this node until storage is well"


def in_background(job: Job, *callbacks: Callback) -> Any:
    """Make the Trainer of a job that saves in the background."""
    return with_plugin(job, AsyncCheckpointIO(), *callbacks)


def step_of(job: Job, name: str) -> int:
    """Return the step of a checkpoint in storage, by its manifest."""
    folder = Path(job.folder.removeprefix("faulty://"))
    step: int = json.loads((folder / ".resilience" / f"{name}.json").read_text())["step"]
    return step


class WaitsForTheNode(Callback):
    """Holds each step up until what was saved at the one before has got somewhere.

    Args:
        spool: The spool's folder.
    """

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.waiting: list[list[str]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Wait until the thread is through, and look."""
        callback = lightning_job.find(trainer, "ResilienceCallback")
        callback._session.background.wait_for_all()
        self.waiting.append(unpublished(self.spool))


def test_training_goes_on_and_all_checkpoints_are_there_in_the_end(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread is free for the next save at once, and nothing of the outage sticks."""
    job = faulty(
        outage(name="step=", lasting_s=6.0),
        steps=6,
        options={**SPOOL, "max_pending_saves": 1},
    )
    trainer = in_background(job, spy := WaitsForTheNode(spool))

    with caplog.at_level("INFO", logger="lightning_resilience"):
        run(trainer)

    assert "step=2.ckpt" in spy.waiting[2]
    assert names(job) == job.expected
    assert [step_of(job, name) for name in job.expected] == [2, 4, 6]
    assert unpublished(spool) == []
    assert SPOOLED in caplog.text
    assert "not written in the background" not in caplog.text
    assert lightning_job.patched(trainer) == []
    assert lightning_job.our_threads() == []


def test_what_is_to_be_removed_meanwhile_is_not_published(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its removal was asked for before the newer one was safe, and is remembered until then."""
    job = faulty(
        outage(name="step=", lasting_s=6.0), steps=10, options=SPOOL, checkpoint={"save_top_k": 1}
    )
    trainer = in_background(job, spy := WaitsForTheNode(spool))

    with caplog.at_level("INFO", logger="lightning_resilience"):
        run(trainer)

    assert max(len(waiting) for waiting in spy.waiting) == 1
    assert names(job) == ["step=10.ckpt"]
    assert "is not published any more: it was to be removed" in caplog.text


def test_of_one_path_the_newest_is_there_in_the_end(faulty: Callable[..., Job]) -> None:
    """Also where the next one was handed over before the last was written."""
    job = faulty(
        outage(name="last", lasting_s=1.5),
        steps=8,
        every=1,
        options={**SPOOL, "max_pending_saves": 4},
        checkpoint={"save_top_k": 0, "save_last": True},
    )

    run(in_background(job))

    assert names(job) == ["last.ckpt"]
    assert step_of(job, "last.ckpt") == 8


def test_a_link_is_made_once_its_target_is_there(
    faulty: Callable[..., Job], spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that publishes makes it, not the one that has spooled the target."""
    to_fail = list(range(8))
    publish = FsspecObjectStore.publish

    def publish_if_well(self: Any, staged: str, path: str, token: Any, **how: Any) -> None:
        if "step=" in path and to_fail:
            to_fail.pop()
            raise ConnectionResetError(errno.ECONNRESET, "the file server is away")
        publish(self, staged, path, token, **how)

    monkeypatch.setattr(FsspecObjectStore, "publish", publish_if_well)
    folder = tmp_path / "local"
    job = replace(
        faulty(steps=4, options=SPOOL, checkpoint={"save_last": "link", "save_top_k": -1}),
        folder=str(folder),
    )
    trainer = in_background(job, spy := WaitsForTheNode(spool))

    run(trainer)

    assert ["step=2.ckpt"] in spy.waiting
    assert names(job) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert (folder / "last.ckpt").resolve() == folder / "step=4.ckpt"


def test_a_load_waits_until_what_was_spooled_is_there(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """It would find nothing before."""
    job = faulty(outage(name="mine", lasting_s=3.0), options=SPOOL)
    loads = LoadsThroughThePlugin()

    with caplog.at_level("INFO", logger="lightning_resilience"):
        run(in_background(job, loads))

    assert loads.loaded["global_step"] == 3
    assert SPOOLED in caplog.text


class Fails(Callback):
    """Ends training by an exception once something waits on the node.

    Args:
        spool: The spool's folder.
    """

    def __init__(self, spool: Path) -> None:
        self.spool = spool

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Fail."""
        if trainer.global_step > 2:
            ends_at_s = time.monotonic() + lightning_job.HANG_S
            while not unpublished(self.spool) and time.monotonic() < ends_at_s:
                time.sleep(0.01)
            message = "a bug in training"
            raise ValueError(message)


def test_after_an_exception_what_waits_is_kept_for_the_next_start(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception is what the user sees, and the next start publishes it and goes on from it."""
    job = faulty(outage(name="step="), options={**SPOOL, "spool": {"flush_timeout_s": 0.2}})
    trainer = in_background(job, Fails(spool))

    with pytest.raises(ValueError, match="a bug in training"):
        run(trainer)

    assert unpublished(spool) == ["step=2.ckpt"]
    assert "could not be published" in caplog.text
    assert lightning_job.our_threads() == []
    again = faulty(steps=4, options=SPOOL, resume=f"{job.folder}/step=2.ckpt")
    assert fit(again).global_step == 4
    assert unpublished(spool) == []


# Several ranks ------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_no_rank_waits_for_storage(warm_python: WarmPython, tmp_path: Path) -> None:
    """The outage is longer than the group's timeout, and all is there when both ranks leave."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="step=", lasting_s=6.0))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        steps=6,
        group_timeout_s=5.0,
        options={**SPOOL, "joint": {"joint_timeout_s": 4.0}, "max_pending_saves": 1},
        trainer={"plugins": [AsyncCheckpointIO()]},
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.names() == job.expected
    assert running.steps() == [2, 4, 6]
    assert SPOOLED in running.told()
    for report in reports:
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], [])


class KillsItself(Callback):
    """Dies as a node does, once the thread has spooled two checkpoints."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Die after the second save."""
        if trainer.global_step == 5:
            callback = lightning_job.find(trainer, "ResilienceCallback")
            callback._session.background.wait_for_all()
            os.kill(os.getpid(), signal.SIGKILL)


def die(trainer: Any) -> None:
    """Let a rank be killed."""
    trainer.callbacks.append(KillsItself())


@pytest.mark.multiprocess
def test_a_killed_job_goes_on_from_what_its_thread_had_spooled(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The next start finds it on the node, publishes it, and both ranks start from it."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="step=4"), outage(name="last"))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        steps=40,
        group_timeout_s=5.0,
        options=SPOOL,
        checkpoint={"save_last": True},
        trainer={"plugins": [AsyncCheckpointIO()]},
        before=die,
    )
    with store_server() as port:
        lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan).wait()
    assert sorted(unpublished(tmp_path / "job")) == ["last.ckpt", "step=4.ckpt"]
    again = replace(job, steps=6, resume="last", before=None)

    with store_server() as port:
        running = lightning_job.start(warm_python, again, tmp_path / "job", port=port)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert {Path(report["resumed"]).name for report in reports} == {"last.ckpt"}
    assert running.told().count("which an earlier start had left on this node, is published") == 2
    assert unpublished(tmp_path / "job") == []
