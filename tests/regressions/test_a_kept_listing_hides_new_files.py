# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C29: another process wrote a checkpoint, and a listing from before said that it was not there.

``fsspec/s3fs#851``, ``#903``, ``fsspec/gcsfs#138``, ``#473``: listings are kept for ever, per
instance and thread, until somebody calls ``invalidate_cache``. Here nobody does.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.private_filesystem import private_instance
from lightning_resilience.adapters.storage import Storage
from tests.http_server import Answer, Request, serving
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsspec import AbstractFileSystem

    from tests.s3_server import S3Server


s3fs = pytest.importorskip("s3fs")

QUESTIONS: dict[str, Callable[[AbstractFileSystem, str], Any]] = {
    "exists": lambda fs, folder: fs.exists(f"{folder}/new.ckpt"),
    "isfile": lambda fs, folder: fs.isfile(f"{folder}/new.ckpt"),
    "info": lambda fs, folder: fs.info(f"{folder}/new.ckpt")["size"] == 3,
    "size": lambda fs, folder: fs.size(f"{folder}/new.ckpt") == 3,
    "find": lambda fs, folder: f"{folder}/new.ckpt" in fs.find(folder),
    "ls": lambda fs, folder: f"{folder}/new.ckpt" in fs.ls(folder, detail=False),
    "glob": lambda fs, folder: f"{folder}/new.ckpt" in fs.glob(f"{folder}/*.ckpt"),
    "walk": lambda fs, folder: any("new.ckpt" in files for _, _, files in fs.walk(folder)),
}


def prime(fs: AbstractFileSystem, folder: str) -> None:
    """Ask for everything that a filesystem may keep."""
    # Order: before the listings, since it drops those that are kept.
    assert not fs.exists(f"{folder}/new.ckpt")
    fs.find(folder)
    fs.ls(folder)


@pytest.fixture
def folder(s3_server: S3Server, bucket: str) -> str:
    """A folder with one object in it."""
    s3_server.client().put_object(Bucket=bucket, Key="runs/1/old.ckpt", Body=b"1")
    return f"{bucket}/runs/1"


def put(s3_server: S3Server, folder: str, body: bytes) -> None:
    """Write ``new.ckpt`` as another process does."""
    bucket, _, prefix = folder.partition("/")
    s3_server.client().put_object(Bucket=bucket, Key=f"{prefix}/new.ckpt", Body=body)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_file_of_another_process_is_seen(question: str, s3_server: S3Server, folder: str) -> None:
    """By every question that a guarded filesystem answers, in the thread that has listed before."""
    fs = guarded(s3fs.S3FileSystem, (), s3_server.storage_options, run=None)
    prime(fs, folder)

    put(s3_server, folder, b"two")

    assert QUESTIONS[question](fs, folder)


def test_every_thread_sees_it(s3_server: S3Server, folder: str) -> None:
    """A kept listing belongs to a thread; none keeps one."""
    fs = guarded(s3fs.S3FileSystem, (), s3_server.storage_options, run=None)
    with ThreadPoolExecutor(max_workers=1) as other:
        other.submit(prime, fs, folder).result()
        fs.ls(folder)

        put(s3_server, folder, b"two")

        assert other.submit(QUESTIONS["ls"], fs, folder).result()
        assert QUESTIONS["ls"](fs, folder)


def test_the_size_after_a_save_is_what_is_there_now(
    s3_server: S3Server, folder: str, tmp_path: Path
) -> None:
    """What another process put in its place, or removed, is what the check after a save finds."""
    storage = Storage(s3_server.storage_options, spool=lambda: str(tmp_path))
    place = storage.place(f"s3://{folder}/new.ckpt")
    (tmp_path / "staged").write_bytes(b"1")
    place.fs.find(folder)
    place.store.publish(str(tmp_path / "staged"), place.path, RecordingToken())
    assert place.store.size(place.path) == 1

    put(s3_server, folder, b"two")
    replaced = place.store.size(place.path)
    bucket, _, prefix = folder.partition("/")
    s3_server.client().delete_object(Bucket=bucket, Key=f"{prefix}/new.ckpt")

    assert replaced == 3
    assert place.store.size(place.path) is None
    assert storage.exists(f"s3://{folder}/new.ckpt", RecordingToken()) is False


def test_google_storage_is_listed_anew() -> None:
    """Gcsfs keeps listings as s3fs does, and ours keeps none."""
    core = pytest.importorskip("gcsfs.core")
    there = ["runs/old.ckpt"]

    def answer(_request: Request) -> Answer:
        items = [{"name": name, "bucket": "bucket", "size": "1"} for name in there]
        return Answer(
            body=json.dumps({"kind": "storage#objects", "items": items}).encode(),
            headers={"Content-Type": "application/json"},
        )

    with serving(answer) as server:
        options = {"token": "anon", "endpoint_url": server.url}
        fs = private_instance(core.GCSFileSystem, (), options)
        before = fs.find("bucket/runs"), fs.ls("bucket/runs", detail=False)
        there.append("runs/new.ckpt")
        after = fs.ls("bucket/runs", detail=False), fs.find("bucket/runs")

    assert all("bucket/runs/new.ckpt" not in names for names in before)
    assert all("bucket/runs/new.ckpt" in names for names in after)


def test_a_user_who_wants_listings_kept_has_them_kept(s3_server: S3Server, folder: str) -> None:
    """The option is the user's; whether a file exists is asked of the storage all the same."""
    options = {**s3_server.storage_options, "use_listings_cache": True}
    fs = guarded(s3fs.S3FileSystem, (), options, run=None)
    fs.ls(folder)

    put(s3_server, folder, b"two")

    assert not QUESTIONS["ls"](fs, folder)
    assert QUESTIONS["exists"](fs, folder)
