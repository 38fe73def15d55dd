# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store on a real server of the S3 protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters import object_store
from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.core.parts import Lengths
from lightning_resilience.errors import CheckpointError
from tests.contracts.object_store import DATA, ObjectStoreContract
from tests.s3_server import denying_server, failing_server
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3_server import S3Server


pytest.importorskip("s3fs")


class TestS3ObjectStore(ObjectStoreContract):
    """Published by one PutObject, which is how a short object goes."""

    server: S3Server

    @pytest.fixture
    def store(self, s3_server: S3Server, tmp_path: Path) -> FsspecObjectStore:
        """A store in a bucket."""
        self.server = s3_server
        fs, _ = private_filesystem("s3://", s3_server.storage_options)
        return FsspecObjectStore(fs, spool_directory=str(tmp_path))

    @pytest.fixture
    def folder(self, bucket: str) -> str:
        """A prefix."""
        return f"s3://{bucket}/runs/1"

    def read(self, path: str) -> bytes | None:
        """Read with another library."""
        client = self.server.client()
        bucket, _, key = path.removeprefix("s3://").partition("/")
        try:
            return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())
        except client.exceptions.NoSuchKey:
            return None

    def test_an_upload_abandoned_halfway_leaves_no_object(
        self, store: FsspecObjectStore, path: str
    ) -> None:
        """Once its caller has given up, the body breaks off and the server keeps nothing."""
        staged = self.stage(store, path, DATA * 4)
        counting = RecordingToken()
        store.publish(staged.path, path, counting)
        store.remove(path)

        with pytest.raises(Exception) as caught:  # noqa: PT011 - the network library's own
            store.publish(staged.path, path, RecordingToken(cancel_after=counting.marks - 2))

        assert classify(caught.value).failure is FailureClass.TRANSIENT
        assert self.read(path) is None

    def test_a_long_object_goes_in_parts(
        self, store: FsspecObjectStore, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is longer than a few parts is sent in parts, and told part by part."""
        part = 5 * 2**20
        lengths = Lengths(single_bytes=part, shortest_bytes=part, longest_bytes=part)
        monkeypatch.setattr(object_store, "_LENGTHS", lengths)
        data = b"x" * (2 * part + 1)
        token = RecordingToken()

        store.publish(self.stage(store, path, data).path, path, token)

        assert self.read(path) == data
        assert token.marks >= 3

    def test_a_multipart_upload_abandoned_leaves_no_object_and_no_parts(
        self, store: FsspecObjectStore, path: str, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was sent is thrown away by the storage too."""
        part = 5 * 2**20
        lengths = Lengths(single_bytes=part, shortest_bytes=part, longest_bytes=part)
        monkeypatch.setattr(object_store, "_LENGTHS", lengths)
        staged = self.stage(store, path, b"x" * (2 * part + 1))

        with pytest.raises(TimeoutError):
            store.publish(staged.path, path, RecordingToken(cancel_after=1))

        assert self.read(path) is None
        assert "Uploads" not in self.server.client().list_multipart_uploads(Bucket=bucket)

    @pytest.mark.parametrize("method", ["PUT", "POST"], ids=["one request", "parts"])
    def test_a_write_that_was_dropped_over_one_of_the_same_length_is_noticed(
        self,
        method: str,
        folder: str,
        s3_server: S3Server,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The storage says that it is done, and what it has called the new one is not there."""
        if method == "POST":
            lengths = Lengths(single_bytes=1, shortest_bytes=5 * 2**20, longest_bytes=5 * 2**20)
            monkeypatch.setattr(object_store, "_LENGTHS", lengths)
        path, forgets = f"{folder}/a.ckpt", False
        ends = "uploadId=" if method == "POST" else "a.ckpt"

        def forgotten(asked: str, where: str) -> bool:
            return forgets and asked == method and ends in where and "partNumber" not in where

        with denying_server(s3_server, forgets=forgotten) as server:
            fs, _ = private_filesystem("s3://", server.storage_options)
            store = FsspecObjectStore(fs, spool_directory=str(tmp_path))
            store.publish(self.stage(store, path, DATA).path, path, RecordingToken())
            assert store.size(path) == len(DATA)
            forgets = True
            store.publish(self.stage(store, path, DATA[::-1]).path, path, RecordingToken())

            with pytest.raises(CheckpointError, match="is not what was written") as caught:
                store.size(path)

        assert classify(caught.value).failure is FailureClass.TRANSIENT
        self.server = s3_server
        assert self.read(path) == DATA

    def test_a_missing_bucket_is_not_an_absent_object(
        self, store: FsspecObjectStore, token: RecordingToken
    ) -> None:
        """Whether the object exists cannot be told, and no bucket is made (C28, C63)."""
        path = "s3://no-such-bucket-here/runs/1/a.ckpt"
        staged = self.stage(store, path, b"x")

        for call in (
            lambda: store.size(path),
            lambda: store.remove(path),
            lambda: store.publish(staged.path, path, token),
        ):
            with pytest.raises(FileNotFoundError) as caught:
                call()
            assert classify(caught.value).failure is FailureClass.PERMANENT
        names = [found["Name"] for found in self.server.client().list_buckets()["Buckets"]]
        assert "no-such-bucket-here" not in names

    def test_what_another_process_writes_is_seen_at_once(
        self, store: FsspecObjectStore, path: str, bucket: str
    ) -> None:
        """A listing made before does not hide a later object (C29)."""
        store._fs.find(f"{bucket}/runs")
        assert store.size(path) is None

        key = path.removeprefix(f"s3://{bucket}/")
        self.server.client().put_object(Bucket=bucket, Key=key, Body=b"four")

        assert store.size(path) == 4

    @pytest.mark.parametrize("mode", ["503", "500", "reset"])
    def test_a_size_that_cannot_be_told_raises(self, mode: str, tmp_path: Path) -> None:
        """An outage is never reported as an absent object (C28)."""
        with failing_server(mode) as failing:
            fs, _ = private_filesystem("s3://", failing.storage_options)
            store = FsspecObjectStore(fs, spool_directory=str(tmp_path))

            with pytest.raises(Exception) as caught:  # noqa: PT011 - one type for each mode
                store.size("s3://bucket/a.ckpt")

        assert classify(caught.value, reading=True).counts
