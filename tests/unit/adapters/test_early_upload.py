# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads that begin while their file is still being staged."""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters import object_store
from lightning_resilience.adapters.lightning import checkpoint_io
from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.staging import stage
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core import parts
from lightning_resilience.core.parts import CONNECTIONS, Lengths
from lightning_resilience.errors import CallTimeoutError
from tests.tokens import RecordingToken
from tests.uploads import ABORT, BEGIN, COMPLETE, PART, PART_BYTES, REMOVE, watch


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from lightning_resilience.adapters.staging import Staged, StagedWriter
    from tests.uploads import Asked, Side


HANG_S = 30.0
CHECKPOINT = {"a": torch.arange(2_000_000), "b": torch.arange(2_000_000)}
"""Two tensors of three parts each, so that its file has seven."""


class Requests:
    """Records the requests of a client, and may let those of one kind fail.

    Args:
        fs: The client.
        failing: What fails; empty for nothing.
    """

    def __init__(self, fs: Any, *, failing: str = "") -> None:
        self.words: list[str] = []
        self.failing = failing
        self.part_sent, self.under_way = threading.Event(), 0
        self.under_way_at_abort: int | None = None
        watch(fs, self.call)

    async def call(self, asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        """Pass a request on, or fail."""
        self.words.append(asked.what)
        if asked.what == ABORT:
            self.under_way_at_abort = self.under_way
        if self.failing and asked.what == self.failing:
            self.part_sent.set()
            raise ConnectionResetError("not this one")
        self.under_way += asked.what == PART
        try:
            return await go()
        finally:
            self.under_way -= asked.what == PART
            if asked.what == PART:
                self.part_sent.set()


class Saving:
    """A save to a bucket, whose file is written in two steps.

    Args:
        side: Where the bucket is.
        spool: Where the file is staged.
    """

    def __init__(self, side: Side, spool: Path) -> None:
        self.storage = Storage(side.options, spool=lambda: str(spool))
        self.url = side.url("run/a.ckpt")
        self.spool, self._side = spool, side
        self.fs: Any = self.storage.place(self.url).fs
        self.save = StagedSave(
            self.storage, self.url, CHECKPOINT, nonce=lambda: os.urandom(4).hex()
        )

    def uploads(self) -> list[str]:
        """Return the uploads in parts that are neither complete nor aborted."""
        return self._side.uploads()

    def size_bytes(self) -> int:
        """Return how long what is stored is."""
        return len(self._side.read("run/a.ckpt") or b"")

    def loaded(self) -> Any:
        """Return what is stored, read by another client; None where nothing is."""
        found = self._side.read("run/a.ckpt")
        return None if found is None else torch.load(io.BytesIO(found), weights_only=True)


@pytest.fixture
def saving(side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saving:
    """A save in parts of 5 MiB."""
    lengths = Lengths(single_bytes=PART_BYTES, shortest_bytes=PART_BYTES, longest_bytes=PART_BYTES)
    monkeypatch.setattr(object_store, "_LENGTHS", lengths)
    return Saving(side, tmp_path)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something done when half of the file is written, or more."""

    def call(step: Callable[[], object]) -> None:
        def save(checkpoint: Any, file: StagedWriter) -> None:
            half: Any = Half(file, step)
            saves(checkpoint, half)

        saves = torch.save
        monkeypatch.setattr(torch, "save", save)

    return call


class Half:
    """A file that tells once when it has three parts."""

    def __init__(self, file: StagedWriter, step: Callable[[], object]) -> None:
        self._file, self._step, self._told = file, step, False

    def write(self, data: Any) -> int:
        """Write, and tell."""
        written = self._file.write(data)
        if self._file.size_bytes > 3 * PART_BYTES and not self._told:
            self._told = True
            self._step()
        return written

    def flush(self) -> None:
        """Do nothing: nothing is kept back."""


def first(error: BaseException) -> BaseException:
    """Return what came first: torch ends its archive all the same, and fails with that."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def test_parts_are_sent_while_the_file_is_being_written_and_completed_after_its_end(
    saving: Saving, between: Callable[[Callable[[], object]], None]
) -> None:
    """The manifest of an older checkpoint goes first, the object comes with the digest known."""
    requests = Requests(saving.fs)
    seen: list[bool] = []
    between(lambda: seen.append(requests.part_sent.wait(HANG_S)))

    staged = saving.save.attempt(RecordingToken())
    saving.save.close()

    stored = saving.loaded()
    order = [word for word in requests.words if word not in {PART, ""}]
    assert seen == [True]
    assert order[0] == BEGIN
    assert order.index(REMOVE) < order.index(COMPLETE)
    assert torch.equal(stored["b"], CHECKPOINT["b"])
    assert staged.size_bytes == saving.size_bytes()
    assert saving.uploads() == []


def test_a_file_that_cannot_be_written_leaves_no_parts(
    saving: Saving, between: Callable[[Callable[[], object]], None]
) -> None:
    """What was sent is thrown away once nothing is under way, and the object never appears."""
    requests = Requests(saving.fs)

    def fail() -> None:
        assert requests.part_sent.wait(HANG_S)
        raise OSError("the disk is gone")

    between(fail)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's own
        saving.save.attempt(RecordingToken())

    assert str(first(caught.value)) == "the disk is gone"
    assert requests.under_way_at_abort == 0
    assert COMPLETE not in requests.words
    assert saving.uploads() == []
    assert saving.loaded() is None
    assert list(saving.spool.iterdir()) == []


def test_a_save_that_is_given_up_while_its_file_is_written_leaves_no_parts(
    saving: Saving, between: Callable[[Callable[[], object]], None]
) -> None:
    """Neither does one whose caller has given up."""
    requests, token = Requests(saving.fs), RecordingToken()

    def give_up() -> None:
        assert requests.part_sent.wait(HANG_S)
        token.cancelled = True

    between(give_up)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's own
        saving.save.attempt(token)

    assert isinstance(first(caught.value), CallTimeoutError)
    assert requests.under_way_at_abort == 0
    assert saving.uploads() == []
    assert saving.loaded() is None


@pytest.mark.parametrize("method", [BEGIN, PART])
def test_a_storage_that_fails_does_not_disturb_the_writing(
    saving: Saving, between: Callable[[Callable[[], object]], None], method: str
) -> None:
    """The file is whole when the attempt fails, and the next one only has to send it."""
    requests = Requests(saving.fs, failing=method)
    between(lambda: requests.part_sent.wait(HANG_S))

    with pytest.raises(ConnectionResetError, match="not this one"):
        saving.save.attempt(RecordingToken())
    kept = [path.stat().st_size for path in saving.spool.iterdir()]
    left = saving.uploads()
    requests.failing = ""
    staged = saving.save.attempt(RecordingToken())
    saving.save.close()

    assert kept == [staged.size_bytes]
    assert left == []
    assert torch.equal(saving.loaded()["b"], CHECKPOINT["b"])
    assert saving.uploads() == []


def test_a_file_that_outgrows_its_parts_is_sent_anew(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it becomes longer than the parts that were planned can hold, they are thrown away."""
    monkeypatch.setattr(parts, "_PARTS_MAX", 2)
    monkeypatch.setattr(checkpoint_io, "_tensor_bytes", lambda _checkpoint: PART_BYTES)
    requests = Requests(saving.fs)

    saving.save.attempt(RecordingToken())
    saving.save.close()

    assert requests.words.count(BEGIN) == 2
    assert requests.words.count(ABORT) == 1
    assert torch.equal(saving.loaded()["b"], CHECKPOINT["b"])
    assert saving.uploads() == []


def test_a_short_checkpoint_is_one_request(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    """No upload is begun for what one PutObject carries."""
    whole = Lengths(single_bytes=2**25, shortest_bytes=PART_BYTES, longest_bytes=PART_BYTES)
    monkeypatch.setattr(object_store, "_LENGTHS", whole)
    requests = Requests(saving.fs)

    saving.save.attempt(RecordingToken())
    saving.save.close()

    assert BEGIN not in requests.words
    assert torch.equal(saving.loaded()["b"], CHECKPOINT["b"])


def test_a_file_that_lies_only_in_the_spool_is_not_synchronised(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes with this process; what a rename publishes must outlast the node."""
    synchronised: list[int] = []
    monkeypatch.setattr(os, "fsync", synchronised.append)

    saving.save.attempt(RecordingToken())
    remote = len(synchronised)
    local = StagedSave(saving.storage, str(saving.spool / "b.ckpt"), {}, nonce=lambda: "1")
    local.attempt(RecordingToken())

    # The manifest is staged as well, and is always synchronised.
    assert remote == 1
    assert len(synchronised) > remote + 1


def test_growth_is_told_with_each_piece(tmp_path: Path) -> None:
    """Also within one write: a tensor may be as long as the file."""
    told: list[int] = []
    data = b"x" * (40 * 2**20)

    staged: Staged = stage(
        lambda file: file.write(data),
        str(tmp_path / "staged"),
        RecordingToken(),
        on_growth=told.append,
    )

    assert told == [16 * 2**20, 32 * 2**20, staged.size_bytes]


def test_the_tensors_of_a_checkpoint_tell_how_long_its_file_will_be() -> None:
    """However deep they lie, and though a container holds itself."""
    tensor = torch.zeros(10, dtype=torch.float64)
    checkpoint: dict[str, Any] = {"a": [tensor, (tensor, {"b": tensor})], "epoch": 3}
    checkpoint["itself"] = checkpoint

    assert checkpoint_io._tensor_bytes(checkpoint) == 240


def test_a_client_has_connections_left_while_parts_are_under_way(
    saving: Saving, side: Side
) -> None:
    """What is asked meanwhile must not wait for a part to end; the user's own number counts."""
    if side.scheme == "gs":
        saving.save.attempt(RecordingToken())
        saving.save.close()
        assert saving.fs.session.connector.limit >= CONNECTIONS
        return
    users = {"config_kwargs": {"max_pool_connections": 3}, "key": "k", "secret": "s"}
    theirs: Any = Storage(users, spool=lambda: str(saving.spool)).place(saving.url).fs

    assert saving.fs.config_kwargs["max_pool_connections"] == CONNECTIONS
    assert theirs.config_kwargs["max_pool_connections"] == 3
