# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads to a server of the S3 protocol that does not answer one of the requests."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters import object_store
from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.adapters.staging import stage
from lightning_resilience.errors import CallTimeoutError, CheckpointError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.s3_server import S3Server


pytest.importorskip("s3fs")

PART_BYTES = 5 * 2**20
"""The smallest that the protocol allows."""
HANG_S = 30.0


class Silence:
    """Lets one request of a client have no answer.

    Args:
        fs: The client.
        method: Which request.
        is_sent: Whether the request reaches the server all the same.
    """

    def __init__(self, fs: Any, method: str, *, is_sent: bool) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self._released = threading.Event()
        self._call, self._method, self._is_sent = fs._call_s3, method, is_sent
        self.fs = fs
        fs._call_s3 = self.call

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Pass a request on, or keep its answer back."""
        if method != self._method:
            return await self._call(method, *args, **kwargs)
        self._method = ""
        if self._is_sent:
            kwargs["Body"] = kwargs["Body"].read()
        self.begun.set()
        try:
            await asyncio.to_thread(self._released.wait, HANG_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            self.end()
            raise
        return await self._call(method, *args, **kwargs)

    def end(self) -> None:
        """Let the server answer."""
        self._released.set()


class Publishing:
    """One publication in a thread of its own, that is abandoned once the server is silent."""

    def __init__(self, publish: Callable[[RecordingToken], Any], silence: Silence) -> None:
        self.error: BaseException | None = None
        self.token = RecordingToken()
        self._publish = publish
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert silence.begun.wait(HANG_S)
        self.token.cancelled = True

    def _run(self) -> None:
        try:
            self._publish(self.token)
        except CallTimeoutError as error:
            self.error = error

    def ends(self) -> bool:
        """Wait for its end."""
        self.thread.join(HANG_S)
        return not self.thread.is_alive()


@pytest.fixture
def store(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FsspecObjectStore:
    """A store that sends in parts what is longer than a part."""
    monkeypatch.setattr(object_store, "_PUT_OBJECT_BYTES_MAX", PART_BYTES)
    monkeypatch.setattr(object_store, "_PART_BYTES", PART_BYTES)
    fs, _ = private_filesystem("s3://", s3_server.storage_options)
    return FsspecObjectStore(fs, spool_directory=str(tmp_path), patience_s=0.2)


def publish(store: FsspecObjectStore, path: str, data: bytes, token: RecordingToken) -> None:
    """Stage and publish."""
    name = store.staging_path(path, uuid.uuid4().hex)
    staged = stage(lambda file: file.write(data), name, RecordingToken())
    store.publish(staged.path, path, token)


def uploads(s3_server: S3Server, bucket: str) -> list[Any]:
    """Return the uploads in parts that are neither complete nor aborted."""
    found = s3_server.client().list_multipart_uploads(Bucket=bucket)
    return list(found.get("Uploads", []))


def test_a_part_that_is_never_answered_has_its_upload_aborted(
    store: FsspecObjectStore, s3_server: S3Server, bucket: str
) -> None:
    """Nobody has to come again for that: the request is cancelled, and no part is left."""
    path, data = f"s3://{bucket}/a.ckpt", b"x" * (PART_BYTES + 1)
    silence = Silence(store._fs, "upload_part", is_sent=False)

    call = Publishing(lambda token: publish(store, path, data, token), silence)

    assert call.ends()
    assert isinstance(call.error, CallTimeoutError)
    assert silence.cancelled.wait(HANG_S)
    assert uploads(s3_server, bucket) == []
    publish(store, path, data, RecordingToken())
    assert store.size(path) == len(data)


def test_an_object_that_was_not_sent_is_called_off(store: FsspecObjectStore, bucket: str) -> None:
    """Its body is not all gone, so it can never become an object."""
    path = f"s3://{bucket}/a.ckpt"
    silence = Silence(store._fs, "put_object", is_sent=False)

    call = Publishing(lambda token: publish(store, path, b"older", token), silence)

    assert call.ends()
    assert silence.cancelled.wait(HANG_S)
    assert store.size(path) is None


def test_an_object_that_was_sent_is_waited_for(store: FsspecObjectStore, bucket: str) -> None:
    """It may still appear, so its name is not used until the server has answered."""
    path = f"s3://{bucket}/last.ckpt"
    silence = Silence(store._fs, "put_object", is_sent=True)
    call = Publishing(lambda token: publish(store, path, b"older", token), silence)

    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be used yet"):
        publish(store, path, b"newer", RecordingToken())
    silence.end()

    assert call.ends()
    assert not silence.cancelled.is_set()
    assert store.size(path) == len(b"older")
    publish(store, path, b"the newest", RecordingToken())
    assert store.size(path) == len(b"the newest")


def test_a_completion_that_was_sent_is_waited_for(
    store: FsspecObjectStore, s3_server: S3Server, bucket: str
) -> None:
    """It lands as a whole object or not at all, and leaves no parts."""
    path, data = f"s3://{bucket}/last.ckpt", b"x" * (PART_BYTES + 1)
    silence = Silence(store._fs, "complete_multipart_upload", is_sent=False)
    call = Publishing(lambda token: publish(store, path, data, token), silence)

    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be used yet"):
        publish(store, path, b"newer", RecordingToken())
    silence.end()

    assert call.ends()
    assert store.size(path) == len(data)
    assert uploads(s3_server, bucket) == []


def test_parts_are_left_behind_only_with_a_warning(
    store: FsspecObjectStore, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the abort fails as well, its upload is named, and the first error is raised."""
    path, data = f"s3://{bucket}/a.ckpt", b"x" * (PART_BYTES + 1)
    call_s3 = store._fs._call_s3

    async def fail(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "upload_part":
            raise ConnectionResetError("the first")
        if method == "abort_multipart_upload":
            raise ConnectionResetError("the second")
        return await call_s3(method, *args, **kwargs)

    store._fs._call_s3 = fail

    with pytest.raises(ConnectionResetError, match="the first"):
        publish(store, path, data, RecordingToken())

    assert "were left behind" in caplog.text
    assert "the second" in caplog.text
