# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What killed processes have left is removed, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from datetime import datetime, timedelta, timezone
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.living import held, unless_held
from lightning_resilience.adapters.spool import SpoolDirectory
from lightning_resilience.adapters.staging import staging_name
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.sweeping import (
    sweep_directory,
    sweep_other_runs,
    sweep_spool,
    swept_spool,
)
from lightning_resilience.errors import CallTimeoutError
from tests.tokens import RecordingToken
from tests.uploads import GoogleSide, S3Side


if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

    from tests.gcs_server import GcsServer
    from tests.s3_server import S3Server


DAY_S = 24 * 3600.0
HANG_S = 60.0


def nonce() -> str:
    """Make a name."""
    return uuid.uuid4().hex


def age(path: Path, *, by_s: float) -> None:
    """Let a file have been touched so long ago."""
    stat = path.lstat()
    os.utime(path, (stat.st_atime - by_s, stat.st_mtime - by_s))


def make(path: Path, *, days: float) -> Path:
    """Make a file of an age."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    age(path, by_s=days * DAY_S)
    return path


def sweep(directory: str, options: dict[str, Any] | None = None) -> list[str]:
    """Sweep a directory of checkpoints."""
    storage = Storage(options or {}, spool=lambda: "/nonexistent")
    return sweep_directory(storage, directory, RecordingToken(), nonce=nonce)


def test_old_staged_files_go_and_all_else_stays(tmp_path: Path) -> None:
    """Neither a checkpoint, however old, nor a file that is being written, nor a directory."""
    old = make(tmp_path / staging_name("old"), days=1.1)
    aside = make(tmp_path / staging_name("aside") / "shard", days=3.0).parent
    age(aside, by_s=3 * DAY_S)
    old_manifest = make(tmp_path / ".resilience" / staging_name("manifest"), days=1.1)
    kept = [
        make(tmp_path / "step=1.ckpt", days=30.0),
        make(tmp_path / ".resilience" / "step=1.ckpt.json", days=30.0),
        make(tmp_path / ".resilience" / staging_name("fresh"), days=0.9),
        make(tmp_path / staging_name("fresh"), days=0.9),
        aside,
    ]

    assert sweep(str(tmp_path)) == [str(old), str(old_manifest)]

    assert not old.exists()
    assert not old_manifest.exists()
    assert all(path.exists() for path in kept)
    assert len(list(tmp_path.iterdir())) + 1 == len(kept)


@pytest.mark.parametrize("name", ["absent", "a-file"])
def test_where_there_is_no_directory_nothing_is_done(name: str, tmp_path: Path) -> None:
    """A first start has none, and none is made."""
    (tmp_path / "a-file").touch()

    assert sweep(str(tmp_path / name)) == []

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file"]


def test_where_nothing_is_unfinished_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where something might be removed is the filesystem asked for its time."""
    make(tmp_path / "step=1.ckpt", days=30.0)
    monkeypatch.setattr(type(tmp_path), "touch", lambda *_: pytest.fail("it was written to"))

    assert sweep(str(tmp_path)) == []


def test_the_spool_of_this_run_is_swept(tmp_path: Path) -> None:
    """There a directory is staged as well; one counts as touched when anything in it was."""
    own = tmp_path / "run-1"
    old = make(own / staging_name("old"), days=2.0)
    shards = make(own / staging_name("shards") / "deep" / "shard", days=2.0).parents[1]
    for directory in (shards / "deep", shards):
        age(directory, by_s=2 * DAY_S)
    growing = make(own / staging_name("growing") / "shard", days=0.5).parent
    age(growing, by_s=2 * DAY_S)
    foreign = make(own / "not-ours", days=9.0)
    waiting = make(tmp_path / "run-2" / staging_name("waiting"), days=9.0)

    removed = sweep_spool(str(own), RecordingToken(), nonce=nonce)

    assert sorted(removed) == sorted([str(old), str(shards)])
    assert not shards.exists()
    assert growing.exists()
    assert foreign.exists()
    assert waiting.exists()


def hold_and_wait(directory: str, ready: Any) -> None:
    """Be a process that uses a spool directory until it is killed."""
    held(lambda: directory)
    ready.set()
    time.sleep(HANG_S)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BaseProcess]:
    """Run a process that uses the directory of another run."""
    (tmp_path / "run-2").mkdir()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold_and_wait, args=(str(tmp_path / "run-2"), ready))
    process.start()
    assert ready.wait(HANG_S)
    yield process
    process.kill()
    process.join()


def sweep_others(own: Path) -> list[str]:
    """Sweep what is beside the directory of a run."""
    return sweep_other_runs(str(own), RecordingToken(), nonce=nonce)


def test_what_a_killed_run_without_a_name_has_left_goes_with_the_next_start(
    tmp_path: Path, holder: BaseProcess
) -> None:
    """As soon as its process is dead, and not while it waits for its storage, however long."""
    own = tmp_path / "run-1"
    own.mkdir()
    old = make(tmp_path / "run-2" / staging_name("waiting"), days=9.0)
    fresh = make(tmp_path / "run-2" / staging_name("fresh"), days=0.5)
    cached = make(tmp_path / ".node-cache" / staging_name("cached"), days=9.0)

    assert sweep_others(own) == []
    holder.kill()
    holder.join()
    removed = sweep_others(own)

    assert removed == [str(old)]
    assert fresh.exists()
    assert cached.exists()


def test_a_spooled_file_that_was_not_written_to_its_end_goes_and_a_complete_one_stays(
    tmp_path: Path,
) -> None:
    """A record is what makes it complete; its own training publishes it, whenever that starts."""
    own, spool = tmp_path / "run-1", tmp_path / "run-2" / "unpublished"
    own.mkdir()
    torn = make(spool / "torn.checkpoint", days=2.0)
    growing = make(spool / "growing.checkpoint", days=0.5)
    kept = [make(spool / f"whole{end}", days=9.0) for end in (".checkpoint", ".json")]

    assert sweep_others(own) == [str(torn)]

    assert growing.exists()
    assert all(path.exists() for path in kept)


def test_a_spooled_file_of_a_living_owner_stays(tmp_path: Path) -> None:
    """It holds its spool, and is stopped or slow."""
    own, run = tmp_path / "run-1", tmp_path / "run-2"
    own.mkdir()
    owner = SpoolDirectory(str(run))
    assert owner.claim()
    torn = make(run / "unpublished" / "torn.checkpoint", days=2.0)

    assert sweep_others(own) == []

    assert torn.exists()
    owner.release()


@pytest.mark.parametrize(("days", "stays"), [(2.0, False), (0.5, True)])
def test_an_empty_directory_of_a_dead_run_goes(
    days: float,
    stays: bool,  # noqa: FBT001 - a column of the table
    tmp_path: Path,
) -> None:
    """Every start without a name leaves one."""
    own, run = tmp_path / "run-1", tmp_path / "run-2"
    own.mkdir()
    run.mkdir()
    age(run, by_s=days * DAY_S)

    removed = sweep_others(own)

    assert run.exists() == stays
    assert removed == ([] if stays else [str(run)])


def test_a_directory_that_is_removed_before_it_is_held_is_made_again(tmp_path: Path) -> None:
    """Whoever clears up may be faster than whoever begins."""
    made: list[str] = []

    def make_it() -> str:
        made.append(str(tmp_path / "run"))
        (tmp_path / "run").mkdir(exist_ok=True)
        return made[-1]

    assert held(make_it) == str(tmp_path / "run")
    (tmp_path / "run").rmdir()
    (tmp_path / "other").mkdir()
    assert held(make_it) == str(tmp_path / "run")

    with unless_held(str(tmp_path / "run")) as is_free:
        assert not is_free
    with unless_held(str(tmp_path / "other")) as is_free:
        assert is_free
    assert len(made) == 2


def test_a_spool_that_cannot_be_swept_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the way of cleaning up must not be in the way of a save."""
    run = tmp_path / "run"
    run.mkdir()

    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(type(tmp_path), "iterdir", refuse)

    assert swept_spool(lambda: str(run), nonce=lambda: "n") == str(run)

    assert "was not removed" in caplog.text


def test_a_spool_is_swept_when_it_is_made(tmp_path: Path) -> None:
    """The first call that stages on the node cleans up behind its run's earlier starts."""
    old = make(tmp_path / "run-1" / staging_name("old"), days=2.0)

    swept_spool(lambda: str(tmp_path / "run-1"), nonce=lambda: "n")

    assert not old.exists()


def open_files() -> int:
    """Return how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_directories_of_fits_that_are_over_are_let_go(tmp_path: Path) -> None:
    """A process may make any number of them, and has a bounded number of open files."""
    before = open_files()

    for number in range(200):
        (tmp_path / f"{number}").mkdir()
        held(lambda number=number: str(tmp_path / f"{number}"))  # type: ignore[misc]

    assert open_files() - before <= 64
    assert not (tmp_path / "0").exists()
    with unless_held(str(tmp_path / "199")) as is_free:
        assert not is_free


def hold(directory: str) -> None:
    """Be a process that uses a spool directory and comes to its end."""
    held(lambda: directory)


def ended_well(directory: Path, method: str) -> None:
    """Let a process of that kind have used a directory."""
    if method == "program":
        script = f"from {__name__} import hold\nhold({str(directory)!r})"
        environ = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
        subprocess.run([sys.executable, "-c", script], env=environ, check=True)
        return
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=hold, args=(str(directory),))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 0


@pytest.mark.parametrize("method", ["program", "fork", "spawn"])
def test_an_empty_directory_goes_with_its_process(tmp_path: Path, method: str) -> None:
    """Every start without a run id has one of its own, and they piled up for a day."""
    own = tmp_path / "run-1"
    own.mkdir()

    ended_well(own, method)

    assert not own.exists()


def test_a_directory_with_something_in_it_stays(tmp_path: Path) -> None:
    """A checkpoint that could not be published waits there for the next start."""
    waiting = make(tmp_path / "run-1" / "unpublished" / "whole.checkpoint", days=0.0)

    ended_well(tmp_path / "run-1", "fork")

    assert waiting.exists()


def test_a_directory_that_another_process_uses_stays(tmp_path: Path, holder: BaseProcess) -> None:
    """A rank that ends is not the last of its node."""
    assert holder.is_alive()

    ended_well(tmp_path / "run-2", "fork")
    stays = (tmp_path / "run-2").exists()
    holder.kill()
    holder.join()
    ended_well(tmp_path / "run-2", "fork")

    assert stays
    assert not (tmp_path / "run-2").exists()


def test_a_child_leaves_its_parent_s_directory(tmp_path: Path) -> None:
    """A worker that loads data ends many times in a run."""
    own, other = tmp_path / "run-1", tmp_path / "run-2"
    own.mkdir()
    other.mkdir()
    held(lambda: str(own))

    ended_well(other, "fork")

    assert own.exists()
    assert not other.exists()


def test_a_directory_that_is_removed_before_it_is_opened_is_made_again(tmp_path: Path) -> None:
    """A run of the same name may end just then."""
    made: list[str] = []

    def make_it() -> str:
        made.append(str(tmp_path / "run"))
        if len(made) > 1:
            (tmp_path / "run").mkdir()
        return made[-1]

    assert held(make_it) == str(tmp_path / "run")

    with unless_held(str(tmp_path / "run")) as is_free:
        assert not is_free
    assert len(made) == 2


def test_whoever_has_given_up_removes_nothing(tmp_path: Path) -> None:
    """A call that was abandoned stops before the next removal."""
    old = make(tmp_path / staging_name("old"), days=2.0)
    storage = Storage({}, spool=lambda: "/nonexistent")

    with pytest.raises(CallTimeoutError):
        sweep_directory(storage, str(tmp_path), RecordingToken(cancelled=True), nonce=nonce)

    assert old.exists()


def aged_client(storage: Storage, url: str, **days: float) -> None:
    """Let a client of S3 be told when uploads began: the server says the same of all of them."""
    fs = storage.place(url).fs
    call = fs._call_s3

    async def aged(method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await call(method, *args, **kwargs)
        for upload in answer.get("Uploads", ()) if method == "list_multipart_uploads" else ():
            name = upload["Key"].rpartition("/")[2].partition(".")[0]
            upload["Initiated"] = datetime.now(timezone.utc) - timedelta(days=days[name])
        return answer

    fs._call_s3 = aged


@pytest.fixture
def s3_side(s3_server: S3Server) -> S3Side:
    """A bucket on S3."""
    pytest.importorskip("s3fs")
    return S3Side(s3_server)


def swept(storage: Storage, url: str) -> list[str]:
    """Sweep."""
    return sorted(sweep_directory(storage, url, RecordingToken(), nonce=nonce))


def test_old_uploads_are_aborted_and_no_others(s3_side: S3Side, tmp_path: Path) -> None:
    """Those below this directory only, and nothing is left of the question for the time."""
    for key in ("run/old.ckpt", "run/new.ckpt", "run/below/old.ckpt", "running/old.ckpt"):
        s3_side.begin(key)
    storage = Storage(s3_side.options, spool=lambda: str(tmp_path))
    aged_client(storage, s3_side.url("run"), old=2.0, new=0.5)

    assert swept(storage, s3_side.url("run")) == ["run/below/old.ckpt", "run/old.ckpt"]

    assert s3_side.uploads() == ["run/new.ckpt", "running/old.ckpt"]
    assert s3_side.names() == []
    assert list(tmp_path.iterdir()) == []


def test_a_whole_bucket_is_left_alone(s3_side: S3Side, tmp_path: Path) -> None:
    """Others may keep theirs in it, and nothing in their keys says whose they are."""
    s3_side.begin("old.ckpt")
    storage = Storage(s3_side.options, spool=lambda: str(tmp_path))
    aged_client(storage, f"s3://{s3_side.bucket}", old=9.0)

    assert swept(storage, f"s3://{s3_side.bucket}") == []

    assert s3_side.uploads() == ["old.ckpt"]


@pytest.fixture
def google(gcs_server: GcsServer, gcs_bucket: str) -> GoogleSide:
    """A bucket of Google's."""
    pytest.importorskip("gcsfs")
    return GoogleSide(gcs_server, gcs_bucket)


def begun(server: GcsServer, bucket: str, **days: float) -> None:
    """Begin uploads so many days ago, which have names after that."""
    for name, ago in days.items():
        when = datetime.now(timezone.utc) - timedelta(days=ago)
        for folder in ("run/", "run/below/", "running/", ""):
            server.parts.begin(bucket, f"{folder}{name} {{0}}.ckpt", begun=when)


def test_old_uploads_to_google_are_aborted_and_no_others(
    google: GoogleSide, gcs_server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same there, though they come page by page."""
    monkeypatch.setattr(gcs_server.parts, "page", 1)
    begun(gcs_server, google.bucket, old=2.0, new=0.5)
    storage = Storage(google.options, spool=lambda: str(tmp_path))

    removed = swept(storage, google.url("run"))
    of_all = swept(storage, f"gs://{google.bucket}")

    assert removed == ["run/below/old {0}.ckpt", "run/old {0}.ckpt"]
    assert of_all == []
    assert len(google.uploads()) == 6
    assert gcs_server.names(google.bucket) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [403, 501])
def test_uploads_that_nobody_may_list_are_left_alone(
    status: int,
    google: GoogleSide,
    gcs_server: GcsServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A role without that right saves all the same, and the start is not disturbed."""
    begun(gcs_server, google.bucket, old=2.0)
    gcs_server.parts.refusing[google.bucket] = HTTPStatus(status)
    storage = Storage(google.options, spool=lambda: str(tmp_path))

    assert swept(storage, google.url("run")) == []

    assert len(google.uploads()) == 4
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_a_storage_that_is_ill_is_told_to_whoever_sweeps(
    google: GoogleSide, gcs_server: GcsServer, tmp_path: Path
) -> None:
    """Nothing was found out."""
    gcs_server.parts.refusing[google.bucket] = HTTPStatus.SERVICE_UNAVAILABLE
    storage = Storage(google.options, spool=lambda: str(tmp_path))

    with pytest.raises(Exception, match="503"):
        swept(storage, google.url("run"))
