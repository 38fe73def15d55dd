# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One directory is tried on real storage: what is refused is noted, and nothing is left behind."""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters import preflight
from lightning_resilience.adapters.preflight import DirectoryTrial
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.preflight import bounded
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import CallTimeoutError
from tests import faulty_filesystem
from tests.faulty_filesystem import VARIABLE, FaultPlan, Rule
from tests.s3_server import denying_server
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.s3_server import S3Server


POLICY = bounded(RetryPolicy())
OLD_S = 2 * 3600


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., DirectoryTrial]:
    """Make a trial of a directory."""
    numbers = count()

    def make_trial(directory: str, **options: Any) -> DirectoryTrial:
        spool = tmp_path / "spool"
        spool.mkdir(exist_ok=True)
        return DirectoryTrial(
            Storage(options, spool=lambda: str(spool)),
            directory,
            nonce=lambda: f"nonce-{next(numbers)}",
            classify=classify,
            policy=POLICY,
        )

    return make_trial


def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *rules: Rule) -> FaultPlan:
    """Make storage with these faults."""
    faulty_filesystem.register()
    made = FaultPlan.write(tmp_path / "plan", *rules)
    monkeypatch.setenv(VARIABLE, str(made.folder))
    return made


def files_below(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_local_directory_is_made_and_left_empty(
    tmp_path: Path, make: Callable[..., DirectoryTrial]
) -> None:
    """The directory itself stays, since checkpoints will go there; nothing is in it."""
    folder = tmp_path / "new" / "checkpoints"

    tried = make(str(folder)).attempt(RecordingToken())

    assert tried.refused == ()
    assert list(folder.iterdir()) == []


def test_no_folder_is_left_in_storage_that_has_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., DirectoryTrial]
) -> None:
    """What is remote and has directories is left as empty as a local one."""
    plan(tmp_path, monkeypatch)

    make(f"faulty://{tmp_path}/checkpoints").attempt(RecordingToken())

    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_there_already_stays(tmp_path: Path, make: Callable[..., DirectoryTrial]) -> None:
    """Manifests and checkpoints are not touched."""
    manifest = tmp_path / ".resilience" / "last.ckpt.json"
    manifest.parent.mkdir()
    manifest.write_text("{}", encoding="utf-8")

    make(str(tmp_path)).attempt(RecordingToken())

    assert [path.name for path in manifest.parent.iterdir()] == ["last.ckpt.json"]


def test_a_directory_that_is_a_file_is_refused(
    tmp_path: Path, make: Callable[..., DirectoryTrial]
) -> None:
    """What can never be written to is noted, and nothing else is tried after it."""
    (tmp_path / "file").touch()
    trial = make(str(tmp_path / "file"))

    tried = trial.attempt(RecordingToken())

    assert [refusal.step for refusal in tried.refused] == ["write"]
    assert isinstance(trial.cause, OSError)


STEPS = {
    "write": "preflight_put_file",
    "read": "preflight_cat_file",
    "list": "preflight_ls",
    "remove": "preflight_rm_file",
}


@pytest.mark.parametrize(("step", "operation"), STEPS.items())
def test_what_is_denied_is_noted(
    step: str,
    operation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., DirectoryTrial],
) -> None:
    """A denial of one thing is its step's, with the code, after one request."""
    faults = plan(tmp_path, monkeypatch, Rule(operations=(operation,), error="denied"))
    trial = make(f"faulty://{tmp_path}/checkpoints")

    tried = trial.attempt(RecordingToken())

    assert [refusal.step for refusal in tried.refused] == [step]
    assert "AccessDenied" in tried.refused[0].error
    assert isinstance(trial.cause, PermissionError)
    # Whoever has written something has looked at its end before.
    assert len(faults.calls(operation)) == 1 + (step == "read")
    assert len(files_below(tmp_path / "checkpoints")) == (step == "remove")


@pytest.mark.parametrize(("number", "step"), [(1, "ask"), (2, "confirm")])
def test_two_questions_are_two_steps(
    number: int,
    step: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., DirectoryTrial],
) -> None:
    """To ask about a name that is not taken, and about an object, may need different rights."""
    denied = Rule(operations=("preflight_info",), error="denied", first=number, last=number)
    plan(tmp_path, monkeypatch, denied)

    tried = make(f"faulty://{tmp_path}/checkpoints").attempt(RecordingToken())

    assert [refusal.step for refusal in tried.refused] == [step]


@pytest.mark.parametrize("operation", sorted({*STEPS.values(), "preflight_info"}))
def test_what_may_pass_is_raised(
    operation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., DirectoryTrial],
) -> None:
    """The next attempt begins anew, and removes what the one before has left."""
    plan(tmp_path, monkeypatch, Rule(operations=(operation,), error="reset", last=1))
    trial = make(f"faulty://{tmp_path}/checkpoints")

    with pytest.raises(ConnectionResetError):
        trial.attempt(RecordingToken())
    tried = trial.attempt(RecordingToken())

    assert tried.refused == ()
    assert files_below(tmp_path / "checkpoints") == []


def test_a_write_that_says_nothing_and_does_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., DirectoryTrial]
) -> None:
    """What was written is asked for."""
    plan(tmp_path, monkeypatch, Rule(operations=("preflight_put_file",), swallow=True))

    with pytest.raises(Exception, match=r"bytes were written to .*, but nothing is there"):
        make(f"faulty://{tmp_path}/checkpoints").attempt(RecordingToken())


def test_an_abandoned_attempt_writes_nothing(
    tmp_path: Path, make: Callable[..., DirectoryTrial]
) -> None:
    """Whoever has given up is not surprised by an object."""
    with pytest.raises(CallTimeoutError):
        make(f"{tmp_path}/new").attempt(RecordingToken(cancelled=True))

    assert not (tmp_path / "new").exists()


def test_what_a_killed_job_has_left_is_removed_once_it_is_old(
    tmp_path: Path, make: Callable[..., DirectoryTrial]
) -> None:
    """An old object goes with the next trial, and that of a job which runs now stays."""
    folder = tmp_path / ".resilience" / "preflight"
    folder.mkdir(parents=True)
    for name in ("old", "new"):
        (folder / name).write_text(name, encoding="utf-8")
    long_ago_s = time.time() - OLD_S
    os.utime(folder / "old", (long_ago_s, long_ago_s))

    make(str(tmp_path)).attempt(RecordingToken())

    assert files_below(tmp_path) == ["new"]


def test_leftovers_that_cannot_be_removed_are_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., DirectoryTrial]
) -> None:
    """They are in nobody's way."""
    folder = tmp_path / "checkpoints" / ".resilience" / "preflight"
    folder.mkdir(parents=True)
    (folder / "old").touch()
    os.utime(folder / "old", (0, 0))
    denied = Rule(operations=("preflight_rm_file",), name="preflight/old", error="denied")
    plan(tmp_path, monkeypatch, denied)

    tried = make(f"faulty://{tmp_path}/checkpoints").attempt(RecordingToken())

    assert tried.refused == ()
    assert files_below(folder) == ["old"]


def test_two_jobs_try_one_directory_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., DirectoryTrial]
) -> None:
    """Neither removes the other's object, nor takes it for its own."""
    plan(tmp_path, monkeypatch)
    folder = f"faulty://{tmp_path}/checkpoints"
    other = make(folder)
    other_write, tried = other._write, []

    def interleaved(*args: Any) -> None:
        other_write(*args)
        tried.append(make(folder).attempt(RecordingToken()))

    monkeypatch.setattr(other, "_write", interleaved)
    tried.append(other.attempt(RecordingToken()))

    assert [each.refused for each in tried] == [(), ()]
    assert files_below(tmp_path / "checkpoints") == []


# Object storage -----------------------------------------------------------------------------------


def keys(server: S3Server, bucket: str) -> list[str]:
    """Return the names of all objects."""
    listed = server.client().list_objects_v2(Bucket=bucket)
    return [item["Key"] for item in listed.get("Contents", [])]


def test_a_new_prefix_passes(
    s3_server: S3Server, bucket: str, make: Callable[..., DirectoryTrial]
) -> None:
    """Nothing is there yet, and that is no refusal; nothing is left there."""
    trial = make(f"s3://{bucket}/new/prefix", **s3_server.storage_options)

    tried = trial.attempt(RecordingToken())

    assert tried.refused == ()
    assert keys(s3_server, bucket) == []


def test_a_bucket_that_is_not_there_is_refused_and_not_made(
    s3_server: S3Server, make: Callable[..., DirectoryTrial]
) -> None:
    """The code says so, and no bucket appears (C63)."""
    trial = make("s3://no-such-bucket-here/run", **s3_server.storage_options)

    tried = trial.attempt(RecordingToken())

    assert [refusal.step for refusal in tried.refused] == ["ask", "write"]
    assert "NoSuchBucket" in tried.refused[-1].error
    buckets = s3_server.client().list_buckets()["Buckets"]
    assert "no-such-bucket-here" not in [each["Name"] for each in buckets]


DENIALS: dict[str, tuple[Callable[[str, str], bool], list[str]]] = {
    "put": (lambda method, _path: method == "PUT", ["write"]),
    "get": (lambda method, path: method == "GET" and "list-type" not in path, ["read"]),
    "list": (lambda method, path: method == "GET" and "list-type" in path, ["ask", "list"]),
    "delete": (lambda method, _path: method in {"DELETE", "POST"}, ["remove"]),
}


@pytest.mark.parametrize("denied", DENIALS)
def test_rights_of_object_storage_are_told_apart(
    denied: str, s3_server: S3Server, bucket: str, make: Callable[..., DirectoryTrial]
) -> None:
    """Each right that is missing is found by what needs it."""
    denies, steps = DENIALS[denied]

    with denying_server(s3_server, denies) as denying:
        options = {**s3_server.storage_options, "endpoint_url": denying.url}
        tried = make(f"s3://{bucket}/run", **options).attempt(RecordingToken())

    assert [refusal.step for refusal in tried.refused] == steps
    assert all("AccessDenied" in refusal.error for refusal in tried.refused)
    assert len(keys(s3_server, bucket)) == (denied == "delete")


def test_old_objects_of_object_storage_are_removed_too(
    s3_server: S3Server,
    bucket: str,
    make: Callable[..., DirectoryTrial],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has been left there is seen, and judged by the storage's own clock."""
    for name in ("left-1", "left-2"):
        key = f"run/.resilience/preflight/{name}"
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=b"x")
    judged: list[float] = []

    def only_the_first(older_by_s: float, **_policy: Any) -> bool:
        judged.append(older_by_s)
        return len(judged) == 1

    monkeypatch.setattr(preflight, "is_leftover", only_the_first)

    make(f"s3://{bucket}/run", **s3_server.storage_options).attempt(RecordingToken())

    assert keys(s3_server, bucket) == ["run/.resilience/preflight/left-2"]
    assert all(0 <= each < 60 for each in judged)
