# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an object store promises that sends a short file by one request, and a long one in parts."""

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
from tests.tokens import RecordingToken
from tests.uploads import PART_BYTES


if TYPE_CHECKING:
    from pathlib import Path

    from tests.uploads import Side


LONG = b"x" * (2 * PART_BYTES + 1)
"""Three parts where parts are as short as may be."""
NO_BUCKET = "no-such-bucket-here"


def is_write(method: str, path: str) -> bool:
    """Tell whether a request makes an object."""
    if method == "PUT":
        return "partNumber" not in path
    return method == "POST" and ("uploadId=" in path or "uploadType=media" in path)


class PartedObjectStoreContract(ObjectStoreContract):
    """Inherit, and give the fixture ``side``."""

    side_at_work: Side

    @pytest.fixture
    def side(self) -> Side:
        """The storage."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, side: Side, tmp_path: Path) -> FsspecObjectStore:
        """A store in a bucket."""
        self.side_at_work = side
        fs, _ = private_filesystem(f"{side.scheme}://", side.options)
        return FsspecObjectStore(fs, spool_directory=str(tmp_path))

    @pytest.fixture
    def folder(self, side: Side) -> str:
        """A prefix."""
        return side.url("runs/1")

    @pytest.fixture
    def short_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Send in parts what is longer than the shortest one."""
        lengths = Lengths(single_bytes=PART_BYTES, shortest_bytes=PART_BYTES, longest_bytes=2**24)
        monkeypatch.setattr(object_store, "_LENGTHS", lengths)

    def read(self, path: str) -> bytes | None:
        """Read past the store."""
        return self.side_at_work.read(path.split("/", 3)[3])

    def test_an_upload_abandoned_halfway_leaves_no_object(
        self, store: FsspecObjectStore, path: str
    ) -> None:
        """Once its caller has given up, the body breaks off and the server keeps nothing."""
        staged = self.stage(store, path, DATA * 4)
        counting = RecordingToken()
        store.publish(staged.path, path, counting)
        store.remove(path)

        with pytest.raises(Exception) as caught:  # noqa: PT011 - the network library's own
            store.publish(staged.path, path, RecordingToken(cancel_after=3))

        assert counting.marks > 3
        assert classify(caught.value).failure is FailureClass.TRANSIENT
        assert self.read(path) is None

    @pytest.mark.usefixtures("short_parts")
    def test_a_long_object_goes_in_parts(self, store: FsspecObjectStore, path: str) -> None:
        """What is longer than a few parts is sent in parts, and told part by part."""
        token = RecordingToken()

        store.publish(self.stage(store, path, LONG).path, path, token)

        assert self.read(path) == LONG
        assert token.marks >= 3

    @pytest.mark.usefixtures("short_parts")
    def test_an_upload_in_parts_abandoned_leaves_no_object_and_no_parts(
        self, store: FsspecObjectStore, path: str, side: Side
    ) -> None:
        """What was sent is thrown away by the storage too."""
        staged = self.stage(store, path, LONG)

        with pytest.raises(TimeoutError):
            store.publish(staged.path, path, RecordingToken(cancel_after=1))

        assert self.read(path) is None
        assert side.uploads() == []

    @pytest.mark.usefixtures("short_parts")
    def test_names_are_taken_as_they_are(self, store: FsspecObjectStore, side: Side) -> None:
        """Braces, spaces, signs of a query, dots, and letters that not all have."""
        key = "runs/1/{0} a+b%41/..e=1&s=2,ü~#?.ckpt"

        for data in (DATA, LONG):
            store.publish(
                self.stage(store, side.url(key), data).path, side.url(key), RecordingToken()
            )

            assert side.read(key) == data
            assert store.size(side.url(key)) == len(data)

    @pytest.mark.parametrize("data", [DATA, LONG], ids=["one request", "parts"])
    @pytest.mark.usefixtures("short_parts")
    def test_a_write_that_was_dropped_over_one_of_the_same_length_is_noticed(
        self, data: bytes, side: Side, tmp_path: Path
    ) -> None:
        """The storage says that it is done, and what it has called the new one is not there."""
        path, forgets = side.url("runs/1/a.ckpt"), False
        self.side_at_work = side
        with side.forgetful(lambda method, asked: forgets and is_write(method, asked)) as server:
            fs, _ = private_filesystem(f"{side.scheme}://", side.options_at(server.url))
            store = FsspecObjectStore(fs, spool_directory=str(tmp_path))
            store.publish(self.stage(store, path, data).path, path, RecordingToken())
            assert store.size(path) == len(data)
            forgets = True
            store.publish(self.stage(store, path, data).path, path, RecordingToken())

            with pytest.raises(CheckpointError, match="is not what was written") as caught:
                store.size(path)

        assert classify(caught.value).failure is FailureClass.TRANSIENT
        assert self.read(path) == data

    @pytest.mark.parametrize("data", [b"x", LONG], ids=["one request", "parts"])
    @pytest.mark.usefixtures("short_parts")
    def test_a_missing_bucket_is_not_an_absent_object(
        self,
        store: FsspecObjectStore,
        token: RecordingToken,
        data: bytes,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Whether the object exists cannot be told, and no bucket is made (C28, C63)."""
        side = self.side_at_work
        path = f"{side.scheme}://{NO_BUCKET}/runs/1/a.ckpt"
        staged = self.stage(store, path, data)

        for call in (
            lambda: store.size(path),
            lambda: store.remove(path),
            lambda: store.publish(staged.path, path, token),
        ):
            with pytest.raises(FileNotFoundError) as caught:
                call()
            assert classify(caught.value).failure is FailureClass.PERMANENT
        assert NO_BUCKET not in side.buckets()
        assert "takes no uploads in parts" not in caplog.text

    def test_what_another_process_writes_is_seen_at_once(
        self, store: FsspecObjectStore, path: str, side: Side
    ) -> None:
        """A listing made before does not hide a later object (C29)."""
        store._fs.find(f"{side.bucket}/runs")
        assert store.size(path) is None

        side.write(path.split("/", 3)[3], b"four")

        assert store.size(path) == 4
