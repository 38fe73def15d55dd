# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whoever moves the bytes of a checkpoint tells the call how many: once each, and all of them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import fsspec
import pytest

from lightning_resilience.adapters.landings import Landing, Progress
from lightning_resilience.adapters.marked_file import MarkedFile
from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.adapters.staging import stage
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.trees import digest_of_open, fetch
from lightning_resilience.core.moved import Moved
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3_server import S3Server


DATA = b"checkpoint" * 300_000
PARTED_BYTES = 16 * 2**20 + 1
"""More than goes in one request."""


def test_a_staged_file_counts_as_written(tmp_path: Path) -> None:
    """Every piece of it."""
    token = RecordingToken()

    stage(lambda file: file.write(DATA), str(tmp_path / "staged"), token)

    assert token.moved == Moved(written=len(DATA))


def test_what_a_foreign_upload_tells_counts_as_sent() -> None:
    """By the callback that filesystems have for progress bars."""
    token = RecordingToken()
    progress = Progress(Landing("memory://a.ckpt", token), size_bytes=5)

    progress.relative_update(2)
    progress.relative_update(3)

    assert token.moved == Moved(sent=5)


def test_parts_count_as_sent_once_they_are_there(
    s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    """Not when they are read for it, which happens for a checksum too."""
    pytest.importorskip("s3fs")
    fs, _ = private_filesystem("s3://", s3_server.storage_options)
    store = FsspecObjectStore(fs, spool_directory=str(tmp_path), patience_s=0.2)
    (tmp_path / "staged").write_bytes(b"x" * PARTED_BYTES)
    token = RecordingToken()

    store.publish(str(tmp_path / "staged"), f"s3://{bucket}/a.ckpt", token)

    assert token.moved == Moved(sent=PARTED_BYTES)


@pytest.mark.parametrize("read", [digest_of_open, MarkedFile])
def test_what_is_read_through_counts_as_read(read: object) -> None:
    """For a digest, or by a library that is given a file."""
    token = RecordingToken()

    found = read(io.BytesIO(DATA), token)  # type: ignore[operator] # one of the two above
    if isinstance(found, MarkedFile):
        io.BufferedReader(found).read()

    assert token.moved == Moved(read=len(DATA))


def test_what_is_fetched_counts_as_read_and_as_written(tmp_path: Path) -> None:
    """From storage, to a file on this node."""
    fsspec.filesystem("memory").pipe_file("/fetched/a/weights", DATA)
    token = RecordingToken()

    storage = Storage({}, spool=lambda: str(tmp_path))
    fetch(storage.place("memory://fetched/a"), str(tmp_path / "copy"), token)

    assert token.moved == Moved(read=len(DATA), written=len(DATA))
