# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a user's own ``CheckpointIO`` has written waits on the node as well, whole."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO

from lightning_resilience import ResilientCheckpointIO
from lightning_resilience.adapters.object_store import FsspecObjectStore
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan
from tests.lightning_job import Job, store_server
from tests.single_rank import names, plan_in_use
from tests.spooled_saves import MARKS, SPOOL, Spy, outage, run, unpublished, with_plugin


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.s3_server import S3Server
    from tests.warm_python import WarmPython


pytestmark = MARKS

ENDS_EARLY: dict[str, Any] = {**SPOOL, "spool": {"flush_timeout_s": 0.2}}


class FileIO(CheckpointIO):
    """Writes one file of its own format."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write it to a local path."""
        assert storage_options is None
        torch.save({"own": checkpoint}, path)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> Any:
        """Read it from a local path."""
        del map_location, weights_only
        return torch.load(path, weights_only=False)["own"]

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it from a local path."""
        Path(path).unlink()


class TreeIO(FileIO):
    """Writes a directory: weights first, then an index that makes them a checkpoint."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write it to a local path."""
        folder = Path(path, "weights")
        folder.mkdir(parents=True)
        super().save_checkpoint(checkpoint, folder / "0.pt", storage_options)
        Path(path, "index.json").write_text(json.dumps(["weights/0.pt"]), encoding="utf-8")

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        """Read it from a local path."""
        index = json.loads(Path(path, "index.json").read_text(encoding="utf-8"))
        return super().load_checkpoint(Path(path, index[0]), *args, **options)


FORMATS = pytest.mark.parametrize("own", [FileIO, TreeIO])


def folder_of(job: Job) -> Path:
    """Return the directory of a job's checkpoints on this disk."""
    return Path(job.folder.removeprefix("faulty://"))


def manifest_of(job: Job, name: str) -> Any:
    """Return what is said of a checkpoint in storage."""
    return json.loads((folder_of(job) / ".resilience" / f"{name}.json").read_text())


def left_of_staging(spool: Path) -> list[str]:
    """Return what is in the spool that is no checkpoint which waits."""
    return [path.name for path in spool.glob("*/*/.resilience-*")]


@FORMATS
def test_training_goes_on_and_all_are_there_in_the_end(
    own: type[Any], faulty: Callable[..., Job], spool: Path
) -> None:
    """As they were written, with a manifest of all files, and in that order."""
    job = faulty(outage(name="step=", lasting_s=6.0), steps=4, options=SPOOL)
    spy = Spy(spool)

    run(with_plugin(job, own(), spy))

    assert ["step=2.ckpt"] in spy.waiting
    assert names(job) == job.expected
    assert unpublished(spool) == left_of_staging(spool) == []
    for step, name in zip((2, 4), job.expected, strict=True):
        assert own().load_checkpoint(folder_of(job) / name)["global_step"] == step
        said = manifest_of(job, name)
        assert said["step"] == step
        files = [file["name"] for file in said.get("files", ())]
        assert files == ([] if own is FileIO else ["index.json", "weights/0.pt"])
    if own is TreeIO:
        put = [call for call in plan_in_use().calls("put_file") if "step=2" in call["path"]]
        assert [Path(call["path"]).name for call in put[-2:]] == ["0.pt", "index.json"]


@FORMATS
def test_a_filesystem_that_is_away_is_an_outage_as_well(
    own: type[Any], tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written beside the target is written to the node instead, and renamed later."""
    folder = tmp_path / "checkpoints"
    job = Job(folder=str(folder), ranks=1, steps=4, options=SPOOL)
    to_fail = list(range(12))
    landing = FsspecObjectStore.landing

    def land_if_well(self: Any, path: str, token: Any) -> Any:
        if "step=" in path and to_fail:
            to_fail.pop()
            raise ConnectionResetError(errno.ECONNRESET, "the file server is away")
        return landing(self, path, token)

    monkeypatch.setattr(FsspecObjectStore, "landing", land_if_well)

    run(with_plugin(job, own(), spy := Spy(spool)))

    assert ["step=2.ckpt"] in spy.waiting
    assert to_fail == []
    assert names(job) == job.expected
    assert own().load_checkpoint(folder / "step=2.ckpt")["global_step"] == 2
    assert list(folder.rglob(".resilience-*")) == []
    assert unpublished(spool) == left_of_staging(spool) == []


@pytest.mark.parametrize(
    "plugin",
    [TreeIO, lambda: AsyncCheckpointIO(ResilientCheckpointIO(TreeIO()))],
    ids=["at once", "in the background"],
)
def test_a_directory_gets_to_object_storage_file_by_file(
    plugin: Callable[[], Any],
    s3_server: S3Server,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its index comes last, and then the manifest that makes it a checkpoint."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.chdir(tmp_path)
    sent: list[str] = []
    to_fail = list(range(4))
    publish = FsspecObjectStore.publish

    def publish_if_well(self: Any, staged: str, path: str, token: Any, **how: Any) -> None:
        if "step=2" in path and to_fail:
            to_fail.pop()
            raise ConnectionResetError(errno.ECONNRESET, "storage is away")
        publish(self, staged, path, token, **how)
        if "step=2" in path:
            sent.append(path.removeprefix(f"{bucket}/run/"))

    monkeypatch.setattr(FsspecObjectStore, "publish", publish_if_well)
    options = {**SPOOL, "storage_options": s3_server.storage_options}
    job = Job(folder=f"s3://{bucket}/run", ranks=1, steps=2, options=options)

    trainer = run(with_plugin(job, plugin()))

    assert to_fail == []
    files = ["step=2.ckpt/weights/0.pt", "step=2.ckpt/index.json"]
    assert sent == [*files, ".resilience/step=2.ckpt.json"]
    found = s3_server.client().list_objects_v2(Bucket=bucket, Prefix="run/")["Contents"]
    assert {entry["Key"].removeprefix("run/") for entry in found} == set(sent)
    assert trainer.checkpoint_callback.best_model_path.endswith("step=2.ckpt")
    assert unpublished(tmp_path / "spool") == []


def test_what_is_to_be_removed_meanwhile_is_not_published(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With save_top_k=1 the older directory goes once the newer one is safe."""
    job = faulty(
        outage(name="step=", lasting_s=6.0), steps=6, options=SPOOL, checkpoint={"save_top_k": 1}
    )

    with caplog.at_level("INFO", logger="lightning_resilience"):
        run(with_plugin(job, TreeIO(), spy := Spy(spool)))

    assert max(len(waiting) for waiting in spy.waiting) == 1
    assert names(job) == ["step=6.ckpt"]
    assert "is not published any more: it was to be removed" in caplog.text


def test_of_one_path_only_the_newest_directory_waits(
    faulty: Callable[..., Job], spool: Path
) -> None:
    """It is written again and again, and published once."""
    job = faulty(
        outage(name="last", lasting_s=2.0),
        steps=8,
        options=SPOOL,
        checkpoint={"save_top_k": 0, "save_last": True},
    )

    run(with_plugin(job, TreeIO(), spy := Spy(spool)))

    assert max(len(waiting) for waiting in spy.waiting) == 1
    assert names(job) == ["last.ckpt"]
    assert manifest_of(job, "last.ckpt")["step"] == 8
    assert TreeIO().load_checkpoint(folder_of(job) / "last.ckpt")["global_step"] == 8


def test_at_a_bound_the_save_waits_and_nothing_is_written_twice(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """What was staged for the node's spool is what is published after the wait."""
    calls: list[str] = []

    class CountedIO(TreeIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    bounds = {"spool_max_items": 1}
    job = faulty(outage(name="step=", lasting_s=6.0), steps=4, options={**SPOOL, "spool": bounds})

    with caplog.at_level("INFO", logger="lightning_resilience"):
        run(with_plugin(job, CountedIO()))

    assert names(job) == job.expected
    assert calls == job.expected
    assert "1 checkpoints wait already (spool_max_items=1)" in caplog.text


def test_one_that_is_called_as_a_whole_waits_and_says_why(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else knows what it has written, so there is nothing to keep."""

    class WholeIO(FileIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            with fsspec.open(path, "wb") as file:
                super().save_checkpoint(checkpoint, file, storage_options)

    job = faulty(outage(name="step=2", lasting_s=3.0), steps=2, options=SPOOL)
    whole = ResilientCheckpointIO(WholeIO(), staging=False)

    with caplog.at_level("INFO", logger="lightning_resilience"):
        run(with_plugin(job, whole, spy := Spy(spool)))

    assert [waiting for waiting in spy.waiting if waiting] == []
    assert names(job) == job.expected
    why = "waits: what a CheckpointIO with staging=False writes is not spooled"
    assert f"while storage is ill, a save of this Trainer {why}" in caplog.text
    assert f"which is ill: CheckpointError: {why}" in caplog.text


class GoesBack(Callback):
    """Saves, and has the strategy load that in the next line."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save and load."""
        if trainer.global_step == 3:
            path = f"{trainer.checkpoint_callback.dirpath}/mine.ckpt"
            trainer.save_checkpoint(path)
            self.loaded = trainer.strategy.load_checkpoint(path)


@FORMATS
def test_a_load_waits_until_what_was_spooled_is_there(
    own: type[Any], faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """It would find nothing before, or an older one of that name."""
    job = faulty(outage(name="mine", lasting_s=3.0), options=SPOOL)
    goes_back = GoesBack()

    with caplog.at_level("INFO", logger="lightning_resilience"):
        run(with_plugin(job, own(), goes_back))

    assert goes_back.loaded["global_step"] == 3
    assert "mine.ckpt waits on this node until storage is well" in caplog.text


# The end, and the next start ----------------------------------------------------------------------


def left(job: Job, own: Any, spool: Path) -> Job:
    """Run a job that ends before storage is well, and leaves its last checkpoint on the node."""
    job = replace(job, steps=4, options=ENDS_EARLY)
    run(with_plugin(job, own))
    assert unpublished(spool) == ["step=4.ckpt"]
    return job


@FORMATS
def test_the_next_start_publishes_it_and_starts_from_it(
    own: type[Any], faulty: Callable[..., Job], spool: Path
) -> None:
    """From storage, where it is as it was written."""
    job = left(faulty(outage(name="step=4")), own(), spool)
    again = faulty(steps=6, options=SPOOL)

    trainer = run(with_plugin(again, own()), f"{job.folder}/step=4.ckpt")

    assert trainer.global_step == 6
    assert unpublished(spool) == []
    assert names(job) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert manifest_of(job, "step=4.ckpt")["step"] == 4


def flip(file: Path) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["changed", "missing"])
def test_a_damaged_one_is_set_aside(
    damage: Callable[[Path], None],
    faulty: Callable[..., Job],
    spool: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told, not published, and not removed: what is good of it may be all that there is."""
    job = left(faulty(outage(name="step=4")), TreeIO(), spool)
    (file,) = spool.glob("*/*/unpublished/*.checkpoint/weights/0.pt")
    damage(file)

    again = faulty(steps=3, options=SPOOL)
    trainer = run(with_plugin(again, TreeIO()), f"{job.folder}/step=2.ckpt")

    assert trainer.global_step == 3
    assert "is not what was written" in caplog.text
    assert names(job) == ["step=2.ckpt"]
    (aside,) = spool.glob("*/*/damaged/*.checkpoint")
    assert (aside / "index.json").exists()
    assert f"It is set aside as {aside}" in caplog.text
    (record,) = spool.glob("*/*/damaged/*.json")
    assert json.loads(record.read_text())["path"] == f"{job.folder}/step=4.ckpt"


class KillsItself(Callback):
    """Dies as a node does: nothing is flushed, nothing is said."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Die after the second save."""
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def own_io(trainer: Any) -> None:
    """Save directories."""
    trainer.strategy.checkpoint_io = TreeIO()


def own_io_and_death(trainer: Any) -> None:
    """Save directories, and be killed once the second was spooled."""
    own_io(trainer)
    trainer.callbacks.append(KillsItself())


@pytest.mark.multiprocess
def test_a_killed_job_goes_on_from_the_directory_that_it_had_spooled(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The next start finds it on the node, publishes it, and both ranks start from it."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="step=4"))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        steps=40,
        group_timeout_s=5.0,
        options=SPOOL,
        before=own_io_and_death,
    )
    with store_server() as port:
        lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan).wait()
    assert unpublished(tmp_path / "job") == ["step=4.ckpt"]
    resume = f"{job.folder}/step=4.ckpt"
    again = replace(job, steps=6, resume=resume, before=own_io)

    with store_server() as port:
        running = lightning_job.start(warm_python, again, tmp_path / "job", port=port)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert {Path(report["resumed"]).name for report in reports} == {"step=4.ckpt"}
    assert running.told().count("which an earlier start had left on this node, is published") == 1
    assert unpublished(tmp_path / "job") == left_of_staging(tmp_path / "job") == []
    assert TreeIO().load_checkpoint(tmp_path / "checkpoints" / "step=6.ckpt")["global_step"] == 6
