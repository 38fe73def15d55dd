# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store on a server of Google Cloud Storage's protocols."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore, find_info
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import CallTimeoutError, CheckpointError
from tests.contracts.object_store import DATA
from tests.contracts.parted_object_store import LONG, NO_BUCKET, PartedObjectStoreContract
from tests.tokens import RecordingToken
from tests.uploads import ABORT, PART, PUT, GoogleSide, watch


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.gcs_server import GcsServer
    from tests.uploads import Asked, Side


pytest.importorskip("gcsfs")

BOTH = pytest.mark.parametrize("data", [DATA, LONG], ids=["one request", "parts"])


@pytest.mark.usefixtures("short_parts")
class TestGcsObjectStore(PartedObjectStoreContract):
    """Published by one request, or an upload in parts."""

    @pytest.fixture
    def side(self, gcs_server: GcsServer, gcs_bucket: str) -> Side:
        """The server."""
        return GoogleSide(gcs_server, gcs_bucket)

    @BOTH
    def test_size_and_checksum_are_the_storages_own(
        self, store: FsspecObjectStore, path: str, token: RecordingToken, data: bytes
    ) -> None:
        """What has come in parts has a checksum of the whole."""
        store.publish(self.stage(store, path, data).path, path, token)

        found = find_info(store._fs, path)
        assert self.read(path) == data
        assert found is not None
        assert found["size"] == len(data)
        assert found["crc32c"]

    @BOTH
    def test_an_upload_that_fails_leaves_nothing(
        self, store: FsspecObjectStore, path: str, side: Side, data: bytes
    ) -> None:
        """No object appears, under this name or another, and the next attempt has a free way."""
        staged = self.stage(store, path, data)
        words: list[str] = []
        fails = True

        async def fail(asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
            words.append(asked.what)
            if fails and asked.what in {PART, PUT}:
                raise ConnectionResetError("halfway")
            return await go()

        watch(store._fs, fail)
        with pytest.raises(ConnectionResetError, match="halfway"):
            store.publish(staged.path, path, RecordingToken())
        fails = False

        assert (ABORT in words) == (data is LONG)
        assert side.uploads() == []
        assert self.read(path) is None
        assert store.size(path) is None
        store.publish(staged.path, path, RecordingToken())
        assert self.read(path) == data

    @BOTH
    def test_an_upload_that_was_given_up_before_its_end_leaves_nothing(
        self, store: FsspecObjectStore, path: str, side: Side, data: bytes
    ) -> None:
        """Whoever gave up is told so, and nothing is sent any more."""
        staged = self.stage(store, path, data)

        with pytest.raises(CallTimeoutError):
            store.publish(staged.path, path, RecordingToken(cancelled=True))

        assert self.read(path) is None
        assert side.uploads() == []

    @BOTH
    def test_content_that_was_damaged_on_the_way_is_noticed(
        self, store: FsspecObjectStore, path: str, token: RecordingToken, data: bytes
    ) -> None:
        """Its length is right; the storage's checksum tells."""
        staged = self.stage(store, path, data)
        damages = True

        async def damage(asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
            if damages and asked.what in {PART, PUT}:
                asked.take_body()
                body = bytearray(asked.arguments["data"])
                body[len(body) // 2] ^= 1
                asked.arguments["data"] = io.BytesIO(body)
            return await go()

        watch(store._fs, damage)
        with pytest.raises(CheckpointError, match="CRC32C"):
            store.publish(staged.path, path, token)
        damages = False
        assert store.size(path) == staged.size_bytes

        store.publish(staged.path, path, token)
        assert self.read(path) == data

    def test_a_missing_bucket_has_the_code_that_it_has_on_s3(
        self, store: FsspecObjectStore, token: RecordingToken
    ) -> None:
        """To gcsfs it is what a missing object is."""
        path = f"gs://{NO_BUCKET}/runs/1/a.ckpt"
        staged = self.stage(store, path, b"x")

        for call in (
            lambda: store.size(path),
            lambda: store.remove(path),
            lambda: store.publish(staged.path, path, token),
        ):
            with pytest.raises(FileNotFoundError, match=NO_BUCKET) as caught:
                call()
            assert classify(caught.value).code == "NoSuchBucket"

    def test_what_is_gone_while_its_bucket_is_there_is_no_missing_bucket(
        self, store: FsspecObjectStore, path: str, token: RecordingToken
    ) -> None:
        """Whatever the storage cannot find, it tells by the same status."""
        staged = self.stage(store, path, b"x")

        async def gone(asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
            if asked.what == PUT:
                raise FileNotFoundError(path)
            return await go()

        watch(store._fs, gone)

        with pytest.raises(FileNotFoundError) as caught:
            store.publish(staged.path, path, token)

        assert classify(caught.value).failure is FailureClass.UNKNOWN

    def test_a_bucket_that_may_not_be_asked_for_is_there(
        self, store: FsspecObjectStore, path: str, side: Side
    ) -> None:
        """Rights on objects are often all that a job has."""
        inner: Any = store._fs._call

        async def call(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
            if (method, path) == ("GET", f"b/{side.bucket}"):
                raise OSError("Forbidden: storage.buckets.get")
            return await inner(method, path, *args, **kwargs)

        store._fs._call = call

        assert store.size(path) is None
