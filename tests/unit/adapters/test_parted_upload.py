# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads in parts to a server that does not answer one of the requests, S3's or Google's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters import object_store
from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.adapters.staging import stage
from lightning_resilience.core.parts import Lengths
from lightning_resilience.errors import CallTimeoutError, CheckpointError
from tests.tokens import RecordingToken
from tests.uploads import ABORT, COMPLETE, PART, PART_BYTES, PUT, watch


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.uploads import Asked, Side


HANG_S = 30.0


class Silence:
    """Lets one request of a client have no answer.

    Args:
        fs: The client.
        what: Which request.
        is_sent: Whether the request reaches the server all the same.
    """

    def __init__(self, fs: Any, what: str, *, is_sent: bool) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self._released = threading.Event()
        self._what, self._is_sent = what, is_sent
        watch(fs, self.call)

    async def call(self, asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        """Pass a request on, or keep its answer back."""
        if asked.what != self._what:
            return await go()
        self._what = "nothing more"
        if self._is_sent:
            asked.take_body()
        self.begun.set()
        try:
            await asyncio.to_thread(self._released.wait, HANG_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            self.end()
            raise
        return await go()

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
def store(side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FsspecObjectStore:
    """A store that sends in parts what is longer than a part."""
    lengths = Lengths(single_bytes=PART_BYTES, shortest_bytes=PART_BYTES, longest_bytes=PART_BYTES)
    monkeypatch.setattr(object_store, "_LENGTHS", lengths)
    fs, _ = private_filesystem(f"{side.scheme}://", side.options)
    return FsspecObjectStore(fs, spool_directory=str(tmp_path), patience_s=0.2)


def publish(store: FsspecObjectStore, path: str, data: bytes, token: RecordingToken) -> None:
    """Stage and publish."""
    name = store.staging_path(path, uuid.uuid4().hex)
    staged = stage(lambda file: file.write(data), name, RecordingToken())
    store.publish(staged.path, path, token)


def test_a_part_that_is_never_answered_has_its_upload_aborted(
    store: FsspecObjectStore, side: Side
) -> None:
    """Nobody has to come again for that: the request is cancelled, and no part is left."""
    path, data = side.url("a.ckpt"), b"x" * (PART_BYTES + 1)
    silence = Silence(store._fs, PART, is_sent=False)

    call = Publishing(lambda token: publish(store, path, data, token), silence)

    assert call.ends()
    assert isinstance(call.error, CallTimeoutError)
    assert silence.cancelled.wait(HANG_S)
    assert side.uploads() == []
    publish(store, path, data, RecordingToken())
    assert store.size(path) == len(data)


def test_an_object_that_was_not_sent_is_called_off(store: FsspecObjectStore, side: Side) -> None:
    """Its body is not all gone, so it can never become an object."""
    path = side.url("a.ckpt")
    silence = Silence(store._fs, PUT, is_sent=False)

    call = Publishing(lambda token: publish(store, path, b"older", token), silence)

    assert call.ends()
    assert silence.cancelled.wait(HANG_S)
    assert store.size(path) is None


def test_an_object_that_was_sent_is_waited_for(store: FsspecObjectStore, side: Side) -> None:
    """It may still appear, so its name is not used until the server has answered."""
    path = side.url("last.ckpt")
    silence = Silence(store._fs, PUT, is_sent=True)
    call = Publishing(lambda token: publish(store, path, b"older", token), silence)

    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be used yet"):
        publish(store, path, b"newer", RecordingToken())
    silence.end()

    assert call.ends()
    assert not silence.cancelled.is_set()
    assert store.size(path) == len(b"older")
    publish(store, path, b"the newest", RecordingToken())
    assert store.size(path) == len(b"the newest")


def test_a_completion_that_was_sent_is_waited_for(store: FsspecObjectStore, side: Side) -> None:
    """It lands as a whole object or not at all, and leaves no parts."""
    path, data = side.url("last.ckpt"), b"x" * (PART_BYTES + 1)
    silence = Silence(store._fs, COMPLETE, is_sent=False)
    call = Publishing(lambda token: publish(store, path, data, token), silence)

    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be used yet"):
        publish(store, path, b"newer", RecordingToken())
    silence.end()

    assert call.ends()
    assert store.size(path) == len(data)
    assert side.uploads() == []


class Parts:
    """Watches how many parts are under way, each of which ends when the test lets it.

    Args:
        fs: The client.
        together: How many parts are waited for before any of them is passed on.
        failing: The part that fails as soon as so many are under way; 0 for none.
    """

    def __init__(self, fs: Any, *, together: int, failing: int = 0) -> None:
        self.under_way: set[int] = set()
        self.most = self.cancelled = 0
        self.at_abort: set[int] | None = None
        self._together, self._failing = together, failing
        self._all_there = asyncio.Event()
        watch(fs, self.call)

    async def call(self, asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        """Pass a request on; hold a part back until enough of them are there."""
        if asked.what == ABORT:
            self.at_abort = set(self.under_way)
        if asked.what != PART:
            return await go()
        number = asked.number
        self.under_way.add(number)
        self.most = max(self.most, len(self.under_way))
        if len(self.under_way) == self._together:
            self._all_there.set()
        try:
            await asyncio.wait_for(self._all_there.wait(), HANG_S)
            if self._failing == number:
                raise ConnectionResetError("this part")
            if self._failing:
                await asyncio.sleep(HANG_S)
            return await go()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way.discard(number)


def test_ten_parts_are_under_way_at_once_and_never_more(
    store: FsspecObjectStore, side: Side
) -> None:
    """They end in any order, and the object has them in theirs."""
    path = side.url("a.ckpt")
    data = b"".join(bytes([number]) * PART_BYTES for number in range(12)) + b"the end"
    parts = Parts(store._fs, together=10)

    publish(store, path, data, RecordingToken())

    assert parts.most == 10
    assert side.read("a.ckpt") == data


def test_where_a_part_fails_no_other_is_under_way_when_the_upload_is_aborted(
    store: FsspecObjectStore, side: Side
) -> None:
    """A part that arrived after the abort would stay there."""
    path = side.url("a.ckpt")
    parts = Parts(store._fs, together=4, failing=2)

    with pytest.raises(ConnectionResetError, match="this part"):
        publish(store, path, b"x" * (4 * PART_BYTES), RecordingToken())

    assert parts.cancelled == 3
    assert parts.at_abort == set()
    assert side.uploads() == []
    assert store.size(path) is None


def test_a_part_that_breaks_off_since_its_caller_has_given_up_is_no_error_of_the_network(
    store: FsspecObjectStore, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client wraps what reading the body has raised, and may tell of it first."""
    path = side.url("a.ckpt")
    token = RecordingToken()

    async def break_off(asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        if asked.what == PART:
            token.cancelled = True
            raise ConnectionResetError("the body broke off")
        return await go()

    def wait(futures: Any, timeout: float) -> Any:
        del timeout
        return waits(futures, timeout=HANG_S)

    waits = concurrent.futures.wait
    watch(store._fs, break_off)
    monkeypatch.setattr(concurrent.futures, "wait", wait)

    with pytest.raises(CallTimeoutError):
        publish(store, path, b"x" * (2 * PART_BYTES), token)

    assert side.uploads() == []


def test_an_interruption_ends_all_parts(
    store: FsspecObjectStore, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised while the thread waits, the parts are called off and the upload too."""
    path = side.url("a.ckpt")
    parts = Parts(store._fs, together=4, failing=99)
    wait = concurrent.futures.wait

    def interrupted(futures: Any, timeout: float) -> Any:
        if len(parts.under_way) == 4 and timeout < 1.0:
            raise KeyboardInterrupt
        return wait(futures, timeout=timeout)

    monkeypatch.setattr(concurrent.futures, "wait", interrupted)

    with pytest.raises(KeyboardInterrupt):
        publish(store, path, b"x" * (4 * PART_BYTES), RecordingToken())

    assert parts.cancelled == 4
    assert parts.at_abort == set()
    assert side.uploads() == []


def test_parts_are_left_behind_only_with_a_warning(
    store: FsspecObjectStore, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the abort fails as well, its upload is named, and the first error is raised."""
    path, data = side.url("a.ckpt"), b"x" * (PART_BYTES + 1)

    async def fail(asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        if asked.what == PART:
            raise ConnectionResetError("the first")
        if asked.what == ABORT:
            raise ConnectionResetError("the second")
        return await go()

    watch(store._fs, fail)

    with pytest.raises(ConnectionResetError, match="the first"):
        publish(store, path, data, RecordingToken())

    assert "were left behind" in caplog.text
    assert "the second" in caplog.text
