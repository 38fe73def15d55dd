# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store on a server of Google Cloud Storage's protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore, find_info
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import CallTimeoutError, CheckpointError
from tests.contracts.object_store import DATA, ObjectStoreContract
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from tests.gcs_server import GcsServer


pytest.importorskip("gcsfs")

# aiohttp says so of what gcsfs gives it.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

LONG = DATA * 2
"""More than gcsfs sends in one request: a resumable upload."""


class TestGcsObjectStore(ObjectStoreContract):
    """Published by one request up to 5 MiB, and by a resumable upload above that."""

    server: GcsServer

    @pytest.fixture
    def store(self, gcs_server: GcsServer, gcs_bucket: str, tmp_path: Path) -> FsspecObjectStore:
        """A store in a bucket."""
        del gcs_bucket
        self.server = gcs_server
        fs, _ = private_filesystem("gs://", gcs_server.storage_options)
        return FsspecObjectStore(fs, spool_directory=str(tmp_path))

    @pytest.fixture
    def folder(self, gcs_bucket: str) -> str:
        """A prefix."""
        return f"gs://{gcs_bucket}/runs/1"

    def read(self, path: str) -> bytes | None:
        """Read without a library."""
        return self.server.read(path)

    def test_a_long_object_is_what_was_staged(
        self, store: FsspecObjectStore, path: str, token: RecordingToken
    ) -> None:
        """It goes by a resumable upload, and size and checksum are the storage's own."""
        store.publish(self.stage(store, path, LONG).path, path, token)

        found = find_info(store._fs, path)
        assert self.read(path) == LONG
        assert found is not None
        assert found["size"] == len(LONG)
        assert found["crc32c"]

    @pytest.mark.parametrize("data", [DATA, LONG], ids=["one request", "resumable"])
    def test_an_upload_that_fails_leaves_nothing(
        self,
        store: FsspecObjectStore,
        path: str,
        gcs_bucket: str,
        token: RecordingToken,
        data: bytes,
    ) -> None:
        """No object appears, under this name or another, and the next attempt has a free way."""
        staged = self.stage(store, path, data)
        inner: Any = store._fs._call
        uploads: list[str] = []
        aborted: list[str] = []

        async def fail(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
            if method == "POST" and "data" in kwargs:
                uploads.append(path)
                raise ConnectionResetError("halfway")
            if method == "DELETE" and path == uploads[-1]:
                # This server has no way to call an upload off; the real one has.
                aborted.append(path)
                return None
            return await inner(method, path, *args, **kwargs)

        store._fs._call = fail
        with pytest.raises(ConnectionResetError, match="halfway"):
            store.publish(staged.path, path, token)
        store._fs._call = inner

        assert len(uploads) == 1
        assert aborted == (uploads if data is LONG else [])
        assert self.server.names(gcs_bucket) == []
        assert store.size(path) is None
        store.publish(staged.path, path, token)
        assert self.read(path) == data

    def test_an_upload_that_was_given_up_before_its_end_leaves_nothing(
        self, store: FsspecObjectStore, path: str, gcs_bucket: str
    ) -> None:
        """Whoever gave up is told so, and nothing is sent any more."""
        staged = self.stage(store, path, LONG)

        with pytest.raises(CallTimeoutError):
            store.publish(staged.path, path, RecordingToken(cancelled=True))

        assert self.server.names(gcs_bucket) == []

    def test_content_that_was_damaged_on_the_way_is_noticed(
        self, store: FsspecObjectStore, path: str, token: RecordingToken
    ) -> None:
        """Its length is right; the storage's checksum tells."""
        staged = self.stage(store, path, DATA)
        inner = store._fs.put_file

        def damaged(staged_path: str, path: str, **options: Any) -> None:
            data = bytearray(Path(staged_path).read_bytes())
            data[len(data) // 2] ^= 1
            other = Path(f"{staged_path}.damaged")
            other.write_bytes(data)
            inner(str(other), path, **options)

        store._fs.put_file = damaged
        with pytest.raises(CheckpointError, match="CRC32C"):
            store.publish(staged.path, path, token)
        store._fs.put_file = inner
        assert store.size(path) == staged.size_bytes

        store.publish(staged.path, path, token)
        assert self.read(path) == DATA

    def test_a_missing_bucket_is_not_an_absent_object(
        self, store: FsspecObjectStore, token: RecordingToken
    ) -> None:
        """Whether the object exists cannot be told, and no bucket is made (C28, C63)."""
        path = "gs://no-such-bucket-here/runs/1/a.ckpt"
        staged = self.stage(store, path, b"x")

        for call in (
            lambda: store.size(path),
            lambda: store.remove(path),
            lambda: store.publish(staged.path, path, token),
        ):
            with pytest.raises(FileNotFoundError, match="no-such-bucket-here") as caught:
                call()
            outcome = classify(caught.value)
            assert (outcome.failure, outcome.code) == (FailureClass.PERMANENT, "NoSuchBucket")
        assert "no-such-bucket-here" not in self.server.buckets()

    def test_an_object_that_is_gone_while_its_bucket_is_there_is_no_missing_bucket(
        self,
        store: FsspecObjectStore,
        path: str,
        token: RecordingToken,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An upload that the storage has forgotten is told by the same status."""
        staged = self.stage(store, path, b"x")

        def gone(*_: Any, **__: Any) -> None:
            raise FileNotFoundError(path)

        monkeypatch.setattr(store._fs, "put_file", gone)

        with pytest.raises(FileNotFoundError) as caught:
            store.publish(staged.path, path, token)

        assert classify(caught.value).failure is FailureClass.UNKNOWN

    def test_a_bucket_that_may_not_be_asked_for_is_there(
        self, store: FsspecObjectStore, path: str, gcs_bucket: str
    ) -> None:
        """Rights on objects are often all that a job has."""
        inner: Any = store._fs._call

        async def call(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
            if (method, path) == ("GET", f"b/{gcs_bucket}"):
                raise OSError("Forbidden: storage.buckets.get")
            return await inner(method, path, *args, **kwargs)

        store._fs._call = call

        assert store.size(path) is None

    def test_what_another_process_writes_is_seen_at_once(
        self, store: FsspecObjectStore, path: str, gcs_bucket: str
    ) -> None:
        """A listing made before does not hide a later object (C29)."""
        store._fs.find(f"{gcs_bucket}/runs")
        assert store.size(path) is None

        self.server.write(path, b"four")

        assert store.size(path) == 4
