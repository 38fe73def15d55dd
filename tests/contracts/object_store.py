# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What every object store promises; each kind of storage inherits these tests."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from lightning_resilience.adapters.staging import Staged, discard, stage
from lightning_resilience.errors import CallTimeoutError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from lightning_resilience.adapters.staging import StagedWriter
    from lightning_resilience.ports import ObjectStore


# More than one read of any layer on the way, and no round number.
DATA = bytes(range(256)) * 12_289


class ObjectStoreContract:
    """Inherit, and give the fixtures ``store``, ``folder`` and the method ``read``."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """The store under test."""
        raise NotImplementedError

    @pytest.fixture
    def folder(self) -> str:
        """An empty place that may not exist yet."""
        raise NotImplementedError

    def read(self, path: str) -> bytes | None:
        """What another process finds under ``path``, past the store."""
        raise NotImplementedError

    @pytest.fixture
    def token(self) -> RecordingToken:
        """A token that counts."""
        return RecordingToken()

    @pytest.fixture
    def path(self, folder: str) -> str:
        """The object's name."""
        return f"{folder}/epoch=1-step=10.ckpt"

    @staticmethod
    def stage(store: ObjectStore, path: str, data: bytes = DATA) -> Staged:
        """Stage ``data`` for ``path``."""

        def write(file: StagedWriter) -> None:
            file.write(data)

        return stage(write, store.staging_path(path, uuid.uuid4().hex), RecordingToken())

    def test_a_published_object_is_what_was_staged(
        self, store: ObjectStore, path: str, token: RecordingToken
    ) -> None:
        """Bytes, size and digest agree, and progress was reported."""
        staged = self.stage(store, path)

        store.publish(staged.path, path, token)

        assert self.read(path) == DATA
        assert store.size(path) == staged.size_bytes == len(DATA)
        assert staged.digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(DATA)}"
        assert token.marks > 0

    def test_nothing_is_visible_before_it_is_published(self, store: ObjectStore, path: str) -> None:
        """Staging alone shows nothing under the name."""
        staged = self.stage(store, path)

        assert store.size(path) is None
        assert self.read(path) is None
        discard(staged.path)

    def test_publishing_replaces(
        self, store: ObjectStore, path: str, token: RecordingToken
    ) -> None:
        """A second object under the name takes the place of the first."""
        store.publish(self.stage(store, path, b"old").path, path, token)

        store.publish(self.stage(store, path, b"newer").path, path, token)

        assert self.read(path) == b"newer"
        assert store.size(path) == len(b"newer")

    def test_an_empty_object_is_an_object(
        self, store: ObjectStore, path: str, token: RecordingToken
    ) -> None:
        """Size 0 is not absence."""
        store.publish(self.stage(store, path, b"").path, path, token)

        assert store.size(path) == 0
        assert self.read(path) == b""

    def test_a_cancelled_publication_publishes_nothing(self, store: ObjectStore, path: str) -> None:
        """Who was abandoned before it published leaves no object behind."""
        staged = self.stage(store, path)

        with pytest.raises(CallTimeoutError):
            store.publish(staged.path, path, RecordingToken(cancelled=True))

        assert self.read(path) is None
        assert Path(staged.path).exists()
        discard(staged.path)

    def test_a_size_is_never_from_a_cache(
        self, store: ObjectStore, path: str, token: RecordingToken
    ) -> None:
        """What changes between two questions is seen by the second."""
        assert store.size(path) is None
        store.publish(self.stage(store, path, b"1").path, path, token)
        assert store.size(path) == 1
        store.publish(self.stage(store, path, b"22").path, path, token)
        assert store.size(path) == 2
        store.remove(path)
        assert store.size(path) is None

    def test_a_removed_object_is_gone(
        self, store: ObjectStore, path: str, token: RecordingToken
    ) -> None:
        """Removal removes this object and no other."""
        other = path + ".other"
        store.publish(self.stage(store, path).path, path, token)
        store.publish(self.stage(store, other, b"x").path, other, token)

        store.remove(path)

        assert self.read(path) is None
        assert self.read(other) == b"x"

    def test_removing_what_is_absent_succeeds(self, store: ObjectStore, path: str) -> None:
        """Removal may be repeated, and may come too late."""
        store.remove(path)
        store.remove(path)

    def test_a_folder_is_removed_with_what_is_in_it(
        self, store: ObjectStore, path: str, token: RecordingToken
    ) -> None:
        """A sharded checkpoint is a folder."""
        shards = [f"{path}/shard-{n}.pt" for n in range(3)]
        for shard in shards:
            store.publish(self.stage(store, shard, b"x").path, shard, token)

        store.remove(path)

        assert [self.read(shard) for shard in shards] == [None, None, None]

    def test_staging_names_are_unique_and_say_nothing_of_the_target(
        self, store: ObjectStore, path: str
    ) -> None:
        """Lightning finds checkpoints by parts of their names."""
        names = {store.staging_path(path, nonce) for nonce in ("1", "2")}

        assert len(names) == 2
        assert not any("epoch" in Path(name).name for name in names)
