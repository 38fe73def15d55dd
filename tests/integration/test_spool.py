# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Training goes on through an outage of storage, and what was saved meanwhile gets there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback

from lightning_resilience import JointError
from tests import lightning_job
from tests.failing_ranks import assert_clean, fail
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, make_data, make_model, make_trainer, store_server
from tests.signalled_job import Signalled, left_together, signalled_job, stopped_together
from tests.single_rank import fit, names, plan_in_use
from tests.spooled_saves import MARKS, SPOOL, STORAGE, Spy, outage, unpublished


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_python import WarmPython


pytestmark = MARKS


def test_training_goes_on_and_all_checkpoints_are_there_in_the_end(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No step waits for storage, and what was saved meanwhile is published once it is well."""
    job = faulty(outage(name="step=", lasting_s=3.0), steps=6, options=SPOOL)
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, spy := Spy(spool))

    with caplog.at_level("INFO", logger="lightning_resilience"):
        trainer.fit(make_model(), make_data())

    assert spy.waiting[-1] == ["step=2.ckpt", "step=4.ckpt"]
    assert names(job) == job.expected
    assert unpublished(spool) == []
    assert "step=2.ckpt waits on this node until storage is well" in caplog.text
    assert "could not be published" not in caplog.text


def test_what_was_spooled_is_as_good_as_what_was_saved(
    faulty: Callable[..., Job], spool: Path
) -> None:
    """With a manifest, and a later run starts from it."""
    job = faulty(outage(name="step=4", lasting_s=1.0), steps=4, options=SPOOL)
    fit(job)
    folder = Path(job.folder.removeprefix("faulty://"))

    trainer = fit(replace(job, steps=6, resume=f"{job.folder}/step=4.ckpt"))

    assert trainer.global_step == 6
    manifest = json.loads((folder / ".resilience" / "step=4.ckpt.json").read_text())
    assert (manifest["step"], manifest["path"]) == (4, "step=4.ckpt")
    assert unpublished(spool) == []


def test_what_is_to_be_removed_meanwhile_is_not_published(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With save_top_k=1 the older one goes once the newer one is safe, wherever that is."""
    job = faulty(
        outage(name="step=", first=4, lasting_s=2.5),
        steps=10,
        options=SPOOL,
        checkpoint={"save_top_k": 1},
    )
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, spy := Spy(spool))

    with caplog.at_level("INFO", logger="lightning_resilience"):
        trainer.fit(make_model(), make_data())

    assert max(len(waiting) for waiting in spy.waiting) == 1
    assert names(job) == ["step=10.ckpt"]
    assert trainer.checkpoint_callback.best_model_path.endswith("step=10.ckpt")
    assert "is not published any more: it was to be removed" in caplog.text


def test_a_removal_that_storage_is_too_ill_for_is_made_up_for_at_the_end(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """No step waits for it, the end does, and what is there is what the books say."""
    ill = Rule(operations=("rm_file",), name="step=2.ckpt", error="reset", lasting_s=2.0)
    job = faulty(ill, steps=6, options=SPOOL, checkpoint={"save_top_k": 1})

    fit(job)

    assert names(job) == ["step=6.ckpt"]
    assert "remove by hand" not in caplog.text


def test_a_removal_is_waited_for_at_the_end_no_longer_than_is_said(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends well, and names what it could not remove."""
    ill = Rule(operations=("rm_file",), name="step=2.ckpt", error="reset")
    brief = {**SPOOL, "spool": {"flush_timeout_s": 0.5}}
    job = faulty(ill, options=brief, checkpoint={"save_top_k": 1})

    fit(job)

    assert names(job) == ["step=2.ckpt", "step=4.ckpt"]
    assert "remove by hand: faulty://" in caplog.text


def test_of_one_path_only_the_newest_waits(faulty: Callable[..., Job], spool: Path) -> None:
    """last.ckpt is written again and again, and published once."""
    job = faulty(
        outage(name="last", lasting_s=2.0),
        steps=12,
        options=SPOOL,
        checkpoint={"save_top_k": 0, "save_last": True},
    )
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, spy := Spy(spool))

    trainer.fit(make_model(), make_data())

    assert max(len(waiting) for waiting in spy.waiting) == 1
    assert names(job) == ["last.ckpt"]
    folder = Path(job.folder.removeprefix("faulty://"))
    assert json.loads((folder / ".resilience" / "last.ckpt.json").read_text())["step"] == 12


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ({"spool_max_items": 1}, "1 checkpoints wait already (spool_max_items=1)"),
        ({"spool_max_bytes": 6000}, "(spool_max_bytes=6000)"),
        ({"max_unpublished_s": 0.001}, "(max_unpublished_s=0.001)"),
    ],
)
def test_at_a_bound_the_save_waits_for_storage(
    bounds: dict[str, Any],
    why: str,
    faulty: Callable[..., Job],
    spool: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not lost, and nothing beyond the bound waits on the node."""
    job = faulty(outage(name="step=", lasting_s=1.5), steps=6, options={**SPOOL, "spool": bounds})
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, spy := Spy(spool))

    with caplog.at_level("INFO", logger="lightning_resilience"):
        trainer.fit(make_model(), make_data())

    assert max(len(waiting) for waiting in spy.waiting) == 1
    assert names(job) == job.expected
    assert why in caplog.text


def test_one_that_is_longer_than_all_may_be_is_not_spooled(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where nothing else waits: it waits for storage, and is not lost."""
    bounds = {"spool_max_bytes": 1000}
    job = faulty(outage(name="step=", lasting_s=1.5), options={**SPOOL, "spool": bounds})
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, spy := Spy(spool))

    with caplog.at_level("INFO", logger="lightning_resilience"):
        trainer.fit(make_model(), make_data())

    assert max(len(waiting) for waiting in spy.waiting) == 0
    assert names(job) == job.expected
    assert "0 bytes wait already" in caplog.text


def test_a_denial_is_no_outage(faulty: Callable[..., Job], spool: Path) -> None:
    """What would wait for ever is told at once."""
    job = faulty(Rule(operations=("put_file",), name="step=2", error="denied"), options=SPOOL)

    with pytest.raises(JointError, match="permanent"):
        fit(job)

    assert unpublished(spool) == []


def test_a_denial_after_an_outage_ends_the_run_with_an_error(
    faulty: Callable[..., Job], spool: Path
) -> None:
    """What had waited is refused for good: nobody hears of that by a warning alone."""
    ill = Rule(operations=("put_file",), name="step=4", error="reset", last=3)
    denied = Rule(operations=("put_file",), name="step=4", error="denied")
    job = faulty(ill, denied, options=SPOOL)

    with pytest.raises(JointError, match="AccessDenied") as caught:
        fit(job)

    assert caught.value.outcome == "permanent"
    assert unpublished(spool) == ["step=4.ckpt"]
    assert names(job) == ["step=2.ckpt"]


def test_a_denial_in_the_background_is_made_up_for_by_a_later_save(
    faulty: Callable[..., Job],
) -> None:
    """It goes to storage itself, however soon it comes, and then nothing is missing."""
    denied = Rule(operations=("put_file",), name="last", error="denied", first=2, last=2)
    job = faulty(denied, steps=6, options=SPOOL, checkpoint={"save_top_k": 0, "save_last": True})
    trainer = make_trainer(job)

    class Waits(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if trainer.global_step == 5:
                while len(plan_in_use().calls("put_file", name="last")) < 2 or our_spool_threads():
                    time.sleep(0.01)

    trainer.callbacks.append(Waits())
    trainer.fit(make_model(), make_data())

    folder = Path(job.folder.removeprefix("faulty://"))
    assert json.loads((folder / ".resilience" / "last.ckpt.json").read_text())["step"] == 6
    calls = plan_in_use().calls("put_file", name="last")
    assert [call["struck"] for call in calls] == [False, True, False]


def our_spool_threads() -> list[str]:
    """Return the threads that publish now."""
    return lightning_job.our_threads("lightning-resilience-spool", within_s=0.0)


def test_a_tuners_file_is_never_spooled(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """A tuner goes back to it at once: so it waits for storage."""
    job = faulty(outage(name=".lr_find", lasting_s=1.0), steps=2, options=SPOOL)
    trainer = make_trainer(job)

    class Saves(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            trainer.save_checkpoint(f"{job.folder}/.lr_find_1.ckpt")
            assert ".lr_find_1.ckpt" in names(job)

    trainer.callbacks.insert(0, Saves())

    with caplog.at_level("INFO", logger="lightning_resilience"):
        trainer.fit(make_model(), make_data())

    assert "lr_find_1.ckpt waits on this node" not in caplog.text


def test_a_name_that_waits_is_taken(faulty: Callable[..., Job]) -> None:
    """ModelCheckpoint asks whether a name is taken, and storage does not know of it yet."""
    job = faulty(outage(name="step=", lasting_s=2.0), steps=3, options=SPOOL)
    trainer = make_trainer(job)
    answers: list[tuple[bool, bool, bool]] = []

    class Asks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                ask = trainer.checkpoint_callback.file_exists
                paths = [f"{job.folder}/step={step}.ckpt" for step in (2, 3)]
                there = "step=2.ckpt" in names(job)
                answers.append((ask(paths[0], trainer), ask(paths[1], trainer), there))

    trainer.callbacks.append(Asks())

    trainer.fit(make_model(), make_data())

    assert answers == [(True, False, False)]


def test_a_name_of_an_earlier_run_is_taken_as_well(faulty: Callable[..., Job]) -> None:
    """What was in the directory at the beginning is not overwritten, though nobody can ask."""
    job = faulty(steps=2, options=SPOOL, checkpoint={"filename": "same"})
    fit(job)
    folder = Path(job.folder.removeprefix("faulty://"))
    before = (folder / "same.ckpt").read_bytes()
    again = faulty(
        outage(name="same", lasting_s=2.0), steps=2, options=SPOOL, checkpoint={"filename": "same"}
    )

    fit(again)

    assert names(job) == ["same-v1.ckpt", "same.ckpt"]
    assert (folder / "same.ckpt").read_bytes() == before


def test_a_link_is_made_once_its_target_is_there(
    faulty: Callable[..., Job], spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save_last="link" would point to nothing meanwhile."""
    from lightning_resilience.adapters.object_store import FsspecObjectStore  # noqa: PLC0415

    folder = tmp_path / "local"
    publish = FsspecObjectStore.publish
    ill_until_s = time.monotonic() + 3.0

    def publish_if_well(self: Any, staged: str, path: str, token: Any, **how: Any) -> None:
        if "step=" in path and time.monotonic() < ill_until_s:
            raise ConnectionResetError(errno.ECONNRESET, "the file server is away")
        publish(self, staged, path, token, **how)

    monkeypatch.setattr(FsspecObjectStore, "publish", publish_if_well)
    job = replace(
        faulty(steps=4, options=SPOOL, checkpoint={"save_last": "link", "save_top_k": -1}),
        folder=str(folder),
    )
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, spy := Spy(spool))

    trainer.fit(make_model(), make_data())

    assert spy.waiting[-1] == ["step=2.ckpt"]
    assert names(job) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert (folder / "last.ckpt").resolve() == folder / "step=4.ckpt"


def test_a_save_point_is_left_out_under_skip(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, the books say what is there, and later save points are kept."""
    job = faulty(
        outage(name="step=4"),
        steps=8,
        options={"on_outage": "skip"},
        checkpoint={"save_top_k": 1},
    )
    trainer = make_trainer(job)

    class Slow(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > 6:
                # The circuit opens for 2.5 s, and only a call looks whether storage is well.
                time.sleep(3.0)

    trainer.callbacks.append(Slow())

    with caplog.at_level("WARNING", logger="lightning_resilience"):
        trainer.fit(make_model(), make_data())

    skipped = [text for text in caplog.messages if "is left out" in text]
    assert ["step 4" in skipped[0], "step 6" in skipped[1], len(skipped)] == [True, True, 2]
    assert names(job) == ["step=8.ckpt"]
    assert trainer.checkpoint_callback.best_model_path.endswith("step=8.ckpt")
    assert unpublished(spool) == []


def test_a_name_is_not_written_again_at_once(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of saves that come too soon the newest is published, and none fails or waits."""
    # As Google's storage does: it takes one write of a name in a second.
    limit = Rule(operations=("put_file",), name="last", error="throttled", apart_s=0.5)
    job = faulty(
        limit,
        steps=20,
        every=1,
        options={**SPOOL, "spool": {"same_path_interval_s": 0.6}},
        checkpoint={"save_top_k": 0, "save_last": True},
    )

    with caplog.at_level("INFO", logger="lightning_resilience"):
        fit(job)

    written = plan_in_use().calls("put_file", name="last")
    assert 2 <= len(written) < 20
    assert "rate limit" not in caplog.text
    assert "last.ckpt waits on this node for its turn" in caplog.text
    assert "until storage is well" not in caplog.text
    folder = Path(job.folder.removeprefix("faulty://"))
    assert json.loads((folder / ".resilience" / "last.ckpt.json").read_text())["step"] == 20
    assert unpublished(spool) == []


# The end, and the next start ---------------------------------------------------------------------


def left(job: Job, spool: Path, **options: Any) -> Job:
    """Run a job that ends before storage is well, and leaves its last checkpoint on the node."""
    ends_early = {"flush_timeout_s": 0.2}
    job = replace(job, steps=4, options={**SPOOL, "spool": ends_early, **options})
    fit(job)
    assert unpublished(spool)[0] == "step=4.ckpt"
    return job


def test_the_end_says_what_is_not_published_and_where_it_lies(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait at the end is bounded, and nobody has to find out by himself."""
    job = faulty(outage(name="step=4"))

    began_s = time.monotonic()
    left(job, spool)

    assert time.monotonic() - began_s < lightning_job.HANG_S
    (told,) = [text for text in caplog.messages if "could not be published" in text]
    assert f"{job.folder}/step=4.ckpt lies at {spool}/" in told
    assert "The next start of this training on this node publishes it" in told


@pytest.mark.parametrize("resume", ["last", "path"])
def test_the_next_start_publishes_it_and_starts_from_it(
    resume: str, faulty: Callable[..., Job], spool: Path
) -> None:
    """Whatever it is called by, and though its run has another name."""
    job = left(
        faulty(outage(name="step=4"), checkpoint={"save_last": True, "save_top_k": -1}, steps=4)
        if resume == "last"
        else faulty(outage(name="step=4")),
        spool,
    )
    path = None if resume == "last" else f"{job.folder}/step=4.ckpt"
    job = faulty(steps=6, options=SPOOL, resume=path or "last", checkpoint=job.checkpoint)
    trainer = make_trainer(job)
    began: list[int] = []

    class Begins(Callback):
        def on_train_start(self, trainer: Any, _module: Any) -> None:
            began.append(trainer.global_step)

    trainer.callbacks.insert(0, Begins())
    trainer.fit(make_model(), make_data(), ckpt_path=job.resume)

    assert began == [4]
    assert unpublished(spool) == []
    assert "step=4.ckpt" in names(job)


def test_a_spooled_checkpoint_that_is_damaged_is_not_published(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, and the run starts from what is in storage."""
    job = left(faulty(outage(name="step=4")), spool)
    (file,) = spool.glob("*/*/unpublished/*.checkpoint")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    trainer = fit(faulty(steps=4, options=SPOOL, resume=f"{job.folder}/step=2.ckpt"))

    assert trainer.global_step == 4
    assert "is not what was written" in caplog.text
    manifest = Path(job.folder.removeprefix("faulty://")) / ".resilience" / "step=4.ckpt.json"
    assert json.loads(manifest.read_text())["step"] == 4


def test_what_another_process_still_has_is_left_to_it(
    faulty: Callable[..., Job], spool: Path
) -> None:
    """A living owner publishes it itself."""
    job = left(faulty(outage(name="step=4")), spool)
    (owner,) = spool.glob("*/*/unpublished/owner")
    with owner.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        fit(faulty(steps=6, options=SPOOL, resume=f"{job.folder}/step=2.ckpt"))

    assert unpublished(spool) == ["step=4.ckpt"]


def test_a_newer_one_in_storage_is_not_overwritten(faulty: Callable[..., Job], spool: Path) -> None:
    """Another node went on meanwhile, and saved under the same name at a later step."""
    last = {"save_last": True, "save_top_k": 0}
    job = left_last(faulty(outage(name="last"), checkpoint=last, every=4), spool)
    folder = Path(job.folder.removeprefix("faulty://"))
    kept = spool.rename(spool.parent / "away")
    spool.mkdir()
    fit(faulty(steps=8, options=SPOOL, checkpoint=last, every=8))
    spool.rmdir() if not any(spool.iterdir()) else shutil.rmtree(spool)
    kept.rename(spool)

    fit(faulty(steps=8, options=SPOOL, resume="last", checkpoint=last, every=8))

    assert json.loads((folder / ".resilience" / "last.ckpt.json").read_text())["step"] == 8
    assert unpublished(spool) == []


def test_one_of_another_training_is_not_lost_to_what_was_spooled(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody began anew on another node; the older training had gone further, and was spooled."""
    last = {"save_last": True, "save_top_k": 0}
    job = left_last(faulty(outage(name="last"), checkpoint=last, every=4), spool, steps=8)
    folder = Path(job.folder.removeprefix("faulty://"))
    kept = spool.rename(spool.parent / "away")
    spool.mkdir()
    fit(faulty(steps=4, options=SPOOL, checkpoint=last, every=4))
    verified = (folder / "last.ckpt").read_bytes()
    shutil.rmtree(spool)
    kept.rename(spool)

    fit(faulty(steps=12, options=SPOOL, resume="last", checkpoint=last, every=4))

    aside = folder / ".resilience" / "set-aside"
    (found,) = [path for path in aside.iterdir() if path.suffix != ".json"]
    assert found.read_bytes() == verified
    assert "of another training, of no earlier step, takes its place" in caplog.text
    assert unpublished(spool) == []


def test_what_was_spooled_is_not_lost_to_one_of_another_training(
    faulty: Callable[..., Job], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has gone back to an earlier step, and what was saved since is on the node alone."""
    checkpoint = {"save_last": True, "save_top_k": -1}
    job = faulty(steps=8, options=SPOOL, checkpoint=checkpoint)
    fit(job)
    back = f"{job.folder}/step=4.ckpt"
    # Of everything: the manifest of the older one stays as well.
    ill = Rule(operations=(*STORAGE, "manifest_rm_file"), name="last", error="reset")
    left_last(faulty(ill, checkpoint=checkpoint, resume=back), spool, steps=6)
    (file,) = spool.glob("*/*/unpublished/*.checkpoint")
    spooled = file.read_bytes()

    fit(faulty(steps=8, options=SPOOL, checkpoint=checkpoint, resume="last"))

    (kept,) = spool.glob("*/*/damaged/*.checkpoint")
    assert kept.read_bytes() == spooled
    assert "what is there is of another training, and of a later step" in caplog.text


def test_a_damaged_manifest_in_storage_says_nothing_of_what_was_spooled(
    faulty: Callable[..., Job], spool: Path
) -> None:
    """The good one on the node is published, and the one that nobody can tell of is kept."""
    job = left(faulty(outage(name="step=4")), spool)
    folder = Path(job.folder.removeprefix("faulty://"))
    shutil.copy(folder / "step=2.ckpt", folder / "step=4.ckpt")
    (folder / ".resilience" / "step=4.ckpt.json").write_text("{", encoding="utf-8")

    trainer = fit(faulty(steps=4, options=SPOOL, resume=f"{job.folder}/step=4.ckpt"))

    assert trainer.global_step == 4
    assert list((folder / ".resilience" / "set-aside").iterdir()) != []
    manifest = folder / ".resilience" / "step=4.ckpt.json"
    assert json.loads(manifest.read_text(encoding="utf-8"))["step"] == 4
    assert list(spool.glob("*/*/damaged")) == []


def left_last(job: Job, spool: Path, *, steps: int = 4) -> Job:
    """Leave last.ckpt of the last step on the node."""
    job = replace(job, steps=steps, options={**SPOOL, "spool": {"flush_timeout_s": 0.2}})
    fit(job)
    assert unpublished(spool) == ["last.ckpt"]
    return job


# Several ranks ------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_waits_for_storage(ranks: int, warm_python: WarmPython, tmp_path: Path) -> None:
    """The outage is as long as training, and longer than the process group's timeout."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="step=", lasting_s=6.0))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        ranks=ranks,
        steps=6,
        group_timeout_s=5.0,
        options={**SPOOL, "joint": {"joint_timeout_s": 4.0}},
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0] * ranks, running.told()
    assert running.names() == job.expected
    assert running.steps() == [2, 4, 6]
    assert len({tuple(report["best_k"]) for report in reports}) == 1
    for report in reports:
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], [])


@pytest.mark.multiprocess
def test_at_a_bound_all_ranks_wait_for_longer_than_the_process_group(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """None is in a collective meanwhile, and both checkpoints are there in the end."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="step=", lasting_s=8.0))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        group_timeout_s=5.0,
        options={**SPOOL, "spool": {"spool_max_items": 1}, "joint": {"joint_timeout_s": 4.0}},
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.names() == job.expected
    assert "1 checkpoints wait already (spool_max_items=1)" in running.ranks[0].text()
    assert "waiting since" in running.ranks[1].text()


class Late(Callback):
    """Has rank 0 do something by itself at the end of training, as an export would.

    Args:
        for_s: For how long, in seconds.
    """

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Take the time."""
        if trainer.is_global_zero:
            time.sleep(self._for_s)


def come_late(for_s: float, trainer: Any) -> None:
    """Give the Trainer that callback."""
    trainer.callbacks.append(Late(for_s))


@pytest.mark.multiprocess
def test_a_rank_that_comes_late_to_its_end_fails_nothing(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Training is over, and all checkpoints are there; what is said is a warning."""
    joint = {"joint_timeout_s": 2.5}
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        options={**SPOOL, "joint": joint},
        before=partial(come_late, 3 * joint["joint_timeout_s"]),
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.names() == job.expected
    for process in running.ranks:
        assert "The run has come to its end all the same" in process.text(), running.told()


def kill_at_the_end(trainer: Any) -> None:
    """Let rank 0 be killed once it has spooled its second checkpoint."""
    trainer.callbacks.append(KillsItself())


class KillsItself(Callback):
    """Dies as a node does: nothing is flushed, nothing is said."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Die after the second save."""
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.multiprocess
def test_a_killed_job_goes_on_from_what_it_had_spooled(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The next start finds it on the node, publishes it, and all ranks start from it."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="step=4"))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        steps=40,
        group_timeout_s=5.0,
        options=SPOOL,
        checkpoint={"save_last": True},
        before=kill_at_the_end,
    )
    with store_server() as port:
        lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan).wait()
    assert set(unpublished(tmp_path / "job")) == {"step=4.ckpt", "last.ckpt"}
    again = replace(job, steps=6, resume="last", before=None)

    with store_server() as port:
        running = lightning_job.start(warm_python, again, tmp_path / "job", port=port)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert {Path(report["resumed"]).name for report in reports} == {"last.ckpt"}
    assert running.told().count("which an earlier start had left on this node, is published") == 2
    assert unpublished(tmp_path / "job") == []
    assert [name for name in running.names() if "step=4" in name] == ["step=4.ckpt"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_in_an_outage_leaves_time_to_say_what_is_left(
    ranks: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Half of the grace is waited for storage, once, and not again on the way out."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="last"))
    grace_s = 8.0
    job = signalled_job(
        f"faulty://{tmp_path}/checkpoints",
        Signalled(signal.SIGTERM, ranks=(ranks - 1,)),
        ranks=ranks,
        options={**SPOOL, "termination_grace_s": grace_s},
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    left_together(running, reports)
    saved_at_s = plan.calls("put_file", name="last")[0]["at_s"]
    assert max(report["ended_at_s"] for report in reports) - saved_at_s < grace_s
    assert unpublished(tmp_path / "job") == ["last.ckpt"]
    assert running.told().count("could not be published before the end of the run") == 1


@pytest.mark.multiprocess
def test_a_stop_waits_for_an_outage_that_ends_in_time(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """As long as the rank that was told to stop has said, though it is not the one that waits."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="last", lasting_s=1.0))
    job = signalled_job(
        f"faulty://{tmp_path}/checkpoints", Signalled(signal.SIGTERM, ranks=(1,)), options=SPOOL
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    stopped_together(running, reports)
    assert "flush" in running.ranks[1].text()
    assert unpublished(tmp_path / "job") == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_leaves_rank_zero_the_time_to_publish(
    failing: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Whichever rank has failed: what waits gets there, and the exception stays what is seen."""
    plan = FaultPlan.write(tmp_path / "plan", outage(name="step=", lasting_s=1.0))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        steps=6,
        group_timeout_s=60.0,
        options=SPOOL,
        before=partial(fail, (failing,), 3),
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    errors = ["PeerFailedError", "PeerFailedError"]
    errors[failing] = "ValueError"
    assert [report["error"] for report in reports] == errors, running.told()
    assert_clean(reports)
    assert running.names() == ["step=2.ckpt"]
    assert unpublished(tmp_path / "job") == []
