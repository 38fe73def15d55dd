# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is missing for checkpoints is found before the first step, on all ranks, or told."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resilience import JointError, ResilientCheckpointIO
from lightning_resilience.adapters.lightning import preflight
from lightning_resilience.adapters.staging import staging_name
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, Running, make_data, make_model, make_trainer, store_server
from tests.s3_server import denying_server
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.s3_server import S3Server
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration]

HASTY = {"retry": {"deadline_s": 12.0}}
"""The trial is bounded by 1.2 s."""
TRIED = ("preflight_info", "preflight_put_file", "preflight_cat_file", "preflight_ls")
DENIED_PUT = Rule(operations=("preflight_put_file",), error="denied")
DENIED_REMOVAL = Rule(operations=("preflight_rm_file",), error="denied")
DENIED_READ = Rule(operations=("preflight_cat_file",), error="denied")
DENIED_LIST = Rule(operations=("preflight_ls",), error="denied")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Catch what is logged."""
    with caplog.at_level(logging.INFO, logger="lightning_resilience"):
        yield caplog


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    """Return our warnings."""
    return [
        record.getMessage()
        for record in log.records
        if record.levelno == logging.WARNING and record.name.startswith("lightning_resilience")
    ]


def left_in(job: Job) -> list[str]:
    """Return the names of objects that a trial has left in a folder."""
    folder = Path(job.folder.removeprefix("faulty://"), ".resilience", "preflight")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# One rank -----------------------------------------------------------------------------------------


def test_a_directory_is_tried_once_and_left_as_it_was(faulty: Callable[..., Job]) -> None:
    """One object is written, read, listed and removed, and training goes on."""
    job = faulty()

    fit(job)

    assert names(job) == job.expected
    assert left_in(job) == []
    for operation in ("preflight_put_file", "preflight_ls", "preflight_rm_file"):
        assert len(plan_in_use().calls(operation)) == 1
    # By its end, as whatever is written, and as a whole.
    assert len(plan_in_use().calls("preflight_cat_file")) == 2


def test_what_cannot_be_written_ends_training_before_it_begins(faulty: Callable[..., Job]) -> None:
    """The error names directory, operation and code, and the denial is its cause; one attempt."""
    job = faulty(DENIED_PUT)
    trainer = make_trainer(job)

    with pytest.raises(JointError) as caught:
        trainer.fit(make_model(), make_data())

    assert trainer.global_step == 0
    assert f"preflight of {job.folder} failed on all ranks, before the first step" in str(
        caught.value
    )
    assert "writing there was refused to rank 0: PermissionError" in str(caught.value)
    assert "(AccessDenied)" in str(caught.value)
    assert (caught.value.op, caught.value.outcome) == ("preflight", "permanent")
    assert isinstance(caught.value.__cause__, PermissionError)
    assert len(plan_in_use().calls("preflight_put_file")) == 1
    assert lightning_job.patched(trainer) == []


def twice(trainer: Any) -> None:
    """Let a Trainer have a second checkpoint callback in the same directory."""
    folder = lightning_job.find(trainer, "ModelCheckpoint").dirpath
    trainer.callbacks.append(ModelCheckpoint(folder, filename="other-{step}", save_top_k=1))


def test_two_callbacks_in_one_directory_try_it_once(
    faulty: Callable[..., Job], log: pytest.LogCaptureFixture
) -> None:
    """And what was refused is told for the one that needs it."""
    job = faulty(DENIED_REMOVAL)
    trainer = make_trainer(job)
    twice(trainer)

    trainer.fit(make_model(), make_data())

    assert len(plan_in_use().calls("preflight_put_file")) == 1
    assert len([text for text in warnings(log) if "retention cannot work" in text]) == 1


@pytest.mark.parametrize("answer", ["allowed", "refused"])
def test_what_a_killed_job_has_left_is_removed_before_the_first_step(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Where even that is refused, training goes on, with a warning."""
    job = Job(folder=str(tmp_path / "checkpoints"), ranks=1)
    left = Path(job.folder, staging_name("left"))
    left.parent.mkdir()
    left.write_bytes(b"half a checkpoint")
    a_day_ago_s = time.time() - 25 * 3600.0
    os.utime(left, (a_day_ago_s, a_day_ago_s))
    if answer == "refused":

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied", str(left))

        monkeypatch.setattr(preflight, "sweep_directory", refuse)

    fit(job)

    assert set(job.expected) <= set(names(job))
    assert left.exists() == (answer == "refused")
    told = [text for text in warnings(log) if "was not removed" in text]
    assert len(told) == (answer == "refused")


OFF: dict[str, dict[str, Any]] = {
    "off": {"options": {"checkpoints": {"preflight": False}}},
    "fast_dev_run": {"trainer": {"fast_dev_run": True}},
    "nothing is saved": {"checkpoint": {"save_top_k": 0}},
}


@pytest.mark.parametrize("why", OFF)
def test_nothing_is_tried_where_nothing_is_saved_or_asked(
    why: str, faulty: Callable[..., Job]
) -> None:
    """Storage that would deny everything is not asked."""
    job = faulty(Rule(operations=TRIED, error="denied"), **OFF[why])

    fit(job)

    assert plan_in_use().calls(*TRIED) == []


def test_a_checkpoint_io_that_is_called_as_a_whole_is_not_tried(
    faulty: Callable[..., Job],
) -> None:
    """Where and how it writes is its own business."""

    class Own:
        def save_checkpoint(self, _checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            assert storage_options is None
            Path(str(path).removeprefix("faulty://")).parent.mkdir(parents=True, exist_ok=True)
            Path(str(path).removeprefix("faulty://")).touch()

        def load_checkpoint(self, path: Any) -> Any:
            return path

        def remove_checkpoint(self, path: Any) -> None:
            del path

    own = ResilientCheckpointIO(Own(), staging=False)
    job = faulty(Rule(operations=TRIED, error="denied"), trainer={"plugins": [own]})

    fit(job)

    assert plan_in_use().calls(*TRIED) == []


def test_without_checkpoint_callbacks_nothing_is_tried(faulty: Callable[..., Job]) -> None:
    """``enable_checkpointing=False`` leaves nothing to try."""
    alone = {"enable_checkpointing": False, "callbacks": [lightning_job.make_callback({})]}
    job = faulty(Rule(operations=TRIED, error="denied"), trainer=alone)

    fit(job)

    assert plan_in_use().calls(*TRIED) == []


@pytest.mark.parametrize(("kept", "told"), [(1, True), (-1, False)])
def test_what_cannot_be_removed_is_told_where_something_will_be(
    kept: int, *, told: bool, faulty: Callable[..., Job], log: pytest.LogCaptureFixture
) -> None:
    """Retention that cannot work is a warning, never an error; a job that keeps all has none."""
    job = faulty(DENIED_REMOVAL, checkpoint={"save_top_k": kept})

    fit(job)

    assert any("retention cannot work" in text for text in warnings(log)) is told
    assert len(left_in(job)) == 1


@pytest.mark.parametrize(("rule", "what"), [(DENIED_READ, "reading"), (DENIED_LIST, "listing")])
def test_rights_that_only_a_search_needs(rule: Rule, what: str, faulty: Callable[..., Job]) -> None:
    """To read and to list there is needed by a run that looks for ``"last"``, and by no other."""
    fit(faulty(rule))

    with pytest.raises(JointError, match=f"{what}.* there was refused to rank 0"):
        fit(faulty(rule, resume="last", steps=6))


def test_storage_that_is_ill_for_longer_is_left_to_the_first_save(
    faulty: Callable[..., Job], log: pytest.LogCaptureFixture
) -> None:
    """Under ``wait`` a trial ends no job that its saves would survive; it says so."""
    ill = Rule(operations=("preflight_put_file", "put_file"), error="reset", lasting_s=3.0)
    job = faulty(ill, options=HASTY)

    fit(job)

    assert names(job) == job.expected
    (told,) = [text for text in warnings(log) if "training begins without knowing" in text]
    assert job.folder in told


def test_storage_that_cannot_even_be_listed_is_waited_for_once(
    faulty: Callable[..., Job], log: pytest.LogCaptureFixture
) -> None:
    """The listing of the directory has the same bound, and nothing more is tried after it."""
    job = faulty(Rule(operations=("isdir",), error="reset"), options=HASTY)

    fit(job)

    assert names(job) == job.expected
    assert plan_in_use().calls("preflight_put_file") == []
    assert any("training begins without knowing" in text for text in warnings(log))


def test_storage_that_is_ill_ends_a_job_that_is_not_to_wait(faulty: Callable[..., Job]) -> None:
    """Under ``fail`` it is an error before the first step."""
    ill = Rule(operations=("preflight_put_file",), error="reset")
    trainer = make_trainer(faulty(ill, options={**HASTY, "on_outage": "fail"}))

    with pytest.raises(JointError, match="preflight of") as caught:
        trainer.fit(make_model(), make_data())

    assert caught.value.outcome == "transient"
    assert trainer.global_step == 0


# Real S3 ------------------------------------------------------------------------------------------


def s3_job(server: S3Server, folder: str, **options: Any) -> Job:
    """A job of one rank on S3."""
    return Job(
        folder=folder, ranks=1, options={"storage_options": server.storage_options}, **options
    )


def test_a_new_prefix_is_trained_into(s3_server: S3Server, bucket: str, spool: Path) -> None:
    """Nothing is there yet, and afterwards there are the checkpoints and their manifests."""
    assert spool.exists()
    fit(s3_job(s3_server, f"s3://{bucket}/new/prefix"))

    listed = s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]
    assert sorted(item["Key"] for item in listed) == [
        *(f"new/prefix/.resilience/step={step}.ckpt.json" for step in (2, 4)),
        *(f"new/prefix/step={step}.ckpt" for step in (2, 4)),
    ]


DENIALS: dict[str, tuple[Callable[[str, str], bool], str]] = {
    "put": (lambda method, _path: method == "PUT", "writing"),
    "list": (lambda method, path: method == "GET" and "list-type" in path, "asking whether"),
}


@pytest.mark.parametrize("denied", DENIALS)
def test_a_right_that_is_missing_ends_training_before_it_begins(
    denied: str, s3_server: S3Server, bucket: str, spool: Path
) -> None:
    """The bucket, what was tried, and the code are in the error."""
    assert spool.exists()
    denies, what = DENIALS[denied]

    with denying_server(s3_server, denies) as denying:
        job = s3_job(s3_server, f"s3://{bucket}/run")
        options = {**s3_server.storage_options, "endpoint_url": denying.url}
        trainer = make_trainer(
            Job(folder=job.folder, ranks=1, options={"storage_options": options})
        )
        with pytest.raises(JointError, match=rf"s3://{bucket}/run.*{what}.*AccessDenied"):
            trainer.fit(make_model(), make_data())

    assert trainer.global_step == 0


# Two ranks ----------------------------------------------------------------------------------------


@pytest.fixture
def start(warm_python: WarmPython, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a job of two ranks on storage with these faults."""
    with store_server() as port:

        def start_job(*rules: Rule, **job: Any) -> Running:
            made = Job(**{"folder": f"faulty://{tmp_path}/checkpoints", **job})
            plan = FaultPlan.write(tmp_path / "plan", *rules)
            return lightning_job.start(warm_python, made, tmp_path / "job", port=port, plan=plan)

        yield start_job


def failed_alike(running: Running) -> dict[str, Any]:
    """Wait for the end of a job that fails with the same error on both ranks, untrained."""
    first, second = running.wait()
    assert first["code"] != 0, running.told()
    assert (first["error"], first["text"]) == (second["error"], second["text"]), running.told()
    assert (first["step"], second["step"]) == (0, 0)
    return first


@pytest.mark.multiprocess
def test_a_missing_bucket_is_the_same_error_on_all_ranks(
    start: Callable[..., Running], s3_server: S3Server
) -> None:
    """Both raise it before the first step; it names the bucket and the code, and none is made."""
    name = "nobody-made-this-bucket"
    options = {"storage_options": s3_server.storage_options}

    failed = failed_alike(start(folder=f"s3://{name}/run", options=options))

    assert failed["error"] == "JointError"
    assert failed["text"].startswith(f"preflight of s3://{name}/run failed on all ranks")
    assert "NoSuchBucket" in failed["text"]
    buckets = s3_server.client().list_buckets()["Buckets"]
    assert name not in [each["Name"] for each in buckets]


@pytest.mark.multiprocess
def test_one_rank_tries_and_the_other_has_the_verdict(start: Callable[..., Running]) -> None:
    """A denial is one request of rank 0."""
    running = start(DENIED_PUT)

    failed = failed_alike(running)

    assert "(AccessDenied)" in failed["text"]
    assert [call["rank"] for call in running.plan.calls("preflight_put_file")] == ["0"]


@pytest.mark.multiprocess
def test_an_outage_is_the_same_decision_on_all_ranks(start: Callable[..., Running]) -> None:
    """Where the trial is given up, both ranks train, and rank 0 says so."""
    ill = Rule(operations=("preflight_put_file", "put_file"), error="reset", lasting_s=4.0)

    running = start(ill, options=HASTY)

    assert [report["code"] for report in running.wait()] == [0, 0], running.told()
    assert running.names() == running.job.expected
    told = [process.text().count("training begins without knowing") for process in running.ranks]
    assert told == [1, 0]


@pytest.mark.multiprocess
def test_a_job_that_is_killed_while_it_tries_leaves_one_object(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """It is small and in our own folder, and the next start removes it once it is old."""
    running = start(Rule(operations=("preflight_rm_file",), kill=True), ranks=1)
    running.wait()
    (left,) = left_in(running.job)
    path = tmp_path / "checkpoints" / ".resilience" / "preflight" / left
    assert path.stat().st_size < 100
    os.utime(path, (0, 0))

    again = start(ranks=1)

    assert [report["code"] for report in again.wait()] == [0], again.told()
    assert left_in(again.job) == []
    assert again.names() == again.job.expected
