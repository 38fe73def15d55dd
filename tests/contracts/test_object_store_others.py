# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store on a filesystem that nobody here knows: all that it has is fsspec's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.core.receipts import TAIL_BYTES
from lightning_resilience.errors import CheckpointError
from tests.contracts.object_store import DATA, ObjectStoreContract
from tests.faulty_filesystem import VARIABLE, FaultPlan, FaultyFileSystem, Rule


if TYPE_CHECKING:
    from tests.tokens import RecordingToken


class TestOtherObjectStore(ObjectStoreContract):
    """Published by one ``put_file`` of their own, and told from others by their ends."""

    @pytest.fixture
    def plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder of the plan of faults, which has none yet."""
        folder = tmp_path / "plan"
        monkeypatch.setenv(VARIABLE, str(folder))
        FaultPlan.write(folder)
        return folder

    @pytest.fixture
    def store(self, plan: Path, tmp_path: Path) -> FsspecObjectStore:
        """A store on files that are somewhere else."""
        del plan
        (tmp_path / "spool").mkdir()
        return FsspecObjectStore(FaultyFileSystem(), spool_directory=str(tmp_path / "spool"))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        """A folder."""
        return f"faulty://{tmp_path}/checkpoints"

    def read(self, path: str) -> bytes | None:
        """Read the file itself."""
        file = Path(path.removeprefix("faulty://"))
        return file.read_bytes() if file.exists() else None

    @pytest.mark.parametrize(
        "data", [b"", b"x", DATA[:TAIL_BYTES], DATA], ids=["empty", "short", "the end", "long"]
    )
    def test_what_was_sent_is_taken_for_what_it_is(
        self, store: FsspecObjectStore, path: str, token: RecordingToken, data: bytes
    ) -> None:
        """Over an older one of the same length, which is another, and over itself."""
        for content in (data[::-1], data, data):
            store.publish(self.stage(store, path, content).path, path, token)

            assert store.size(path) == len(data)

    @pytest.mark.parametrize("length", [5, TAIL_BYTES, len(DATA)], ids=["short", "the end", "long"])
    def test_a_write_that_was_dropped_over_one_of_the_same_length_is_noticed(
        self, store: FsspecObjectStore, path: str, plan: Path, token: RecordingToken, length: int
    ) -> None:
        """The storage says that it is done, and the older one is there."""
        older, newer = DATA[:length], DATA[: length - 1] + b"\xaa"
        store.publish(self.stage(store, path, older).path, path, token)
        assert store.size(path) == length
        FaultPlan.write(plan, Rule(operations=("put_file",), swallow=True))
        store.publish(self.stage(store, path, newer).path, path, token)

        with pytest.raises(CheckpointError, match=f"right length, {length} bytes") as caught:
            store.size(path)

        assert classify(caught.value).failure is FailureClass.TRANSIENT
        assert self.read(path) == older
        # One that was asked for since is whatever the storage says.
        assert store.size(path) == length

    def test_another_length_says_so_by_itself(
        self, store: FsspecObjectStore, path: str, plan: Path, token: RecordingToken
    ) -> None:
        """Nothing is read for it."""
        store.publish(self.stage(store, path, b"older").path, path, token)
        FaultPlan.write(plan, Rule(operations=("put_file",), swallow=True))
        store.publish(self.stage(store, path, b"longer").path, path, token)

        assert store.size(path) == len(b"older")
        assert FaultPlan(plan).calls("cat_file") == []

    def test_only_the_end_is_read(
        self, store: FsspecObjectStore, path: str, plan: Path, token: RecordingToken
    ) -> None:
        """Once for each publication, by one request."""
        store.publish(self.stage(store, path).path, path, token)
        for _ in range(3):
            store.size(path)

        assert len(FaultPlan(plan).calls("cat_file")) == 1

    def test_who_may_write_and_not_read_is_told_nothing(
        self, store: FsspecObjectStore, path: str, plan: Path, token: RecordingToken
    ) -> None:
        """A size that is right is all that there is then, and fails no save."""
        FaultPlan.write(plan, Rule(operations=("cat_file",), error="denied"))
        store.publish(self.stage(store, path).path, path, token)

        assert store.size(path) == len(DATA)

    def test_an_end_that_cannot_be_read_now_is_asked_for_again(
        self, store: FsspecObjectStore, path: str, plan: Path, token: RecordingToken
    ) -> None:
        """Whether it is the new one is known by another attempt."""
        FaultPlan.write(plan, Rule(operations=("cat_file",), error="reset", last=1))
        store.publish(self.stage(store, path).path, path, token)

        with pytest.raises(ConnectionResetError):
            store.size(path)
        assert store.size(path) == len(DATA)
        assert len(FaultPlan(plan).calls("cat_file")) == 2
