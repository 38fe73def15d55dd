# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Names in storage about which something was sent that has not ended."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from lightning_resilience.adapters.landings import landing, removing
from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.staging import stage
from lightning_resilience.errors import CallTimeoutError, CheckpointError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


KEY = "file:///run/a.ckpt"
HANG_S = 30.0


class Stuck:
    """A call in a thread of its own that stands still in the middle until it is released.

    Args:
        work: Gets the token, and a function that stands still.
    """

    def __init__(self, work: Callable[[RecordingToken, Callable[[], None]], Any]) -> None:
        self.token = RecordingToken()
        self.error: BaseException | None = None
        self._work = work
        self._stands, self._released = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._stands.wait(HANG_S)

    def _run(self) -> None:
        try:
            self._work(self.token, self._stand)
        except CallTimeoutError as error:
            self.error = error

    def _stand(self) -> None:
        self._stands.set()
        assert self._released.wait(HANG_S)

    def abandon(self) -> None:
        """Give up on it, as its caller does at the timeout."""
        self.token.cancelled = True

    def release(self) -> None:
        """Let it go on, and wait for its end."""
        self._released.set()
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()


def sent(token: RecordingToken, stand: Callable[[], None]) -> None:
    """Stand still after sending."""
    with landing(KEY, token, patience_s=0.0) as mine:
        mine.send()
        stand()


def not_sent(token: RecordingToken, stand: Callable[[], None]) -> None:
    """Stand still before sending."""
    with landing(KEY, token, patience_s=0.0) as mine:
        stand()
        mine.send()


@pytest.fixture
def stuck() -> Iterator[Callable[..., Stuck]]:
    """Start calls; all are released at the end."""
    calls: list[Stuck] = []

    def start(work: Callable[[RecordingToken, Callable[[], None]], Any]) -> Stuck:
        calls.append(Stuck(work))
        return calls[-1]

    yield start
    for call in calls:
        call.release()


def write(patience_s: float = 0.0, token: RecordingToken | None = None) -> None:
    """Write that name."""
    with landing(KEY, token or RecordingToken(), patience_s=patience_s) as mine:
        mine.send()


def test_a_name_is_not_used_while_what_was_sent_may_land(stuck: Callable[..., Stuck]) -> None:
    """The error names it, and it is free once the call has ended."""
    call = stuck(sent)
    call.abandon()

    with pytest.raises(CheckpointError, match=KEY) as caught:
        write(patience_s=0.1)
    call.release()
    write()

    assert "given up after it was sent" in str(caught.value)


def test_a_name_is_waited_for(stuck: Callable[..., Stuck]) -> None:
    """Whoever needs it goes on when it is free, within its patience."""
    call = stuck(sent)
    call.abandon()
    done = threading.Event()

    def wait() -> None:
        write(patience_s=HANG_S)
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not done.wait(0.3)
    call.release()
    waiting.join(HANG_S)

    assert done.is_set()


def test_what_was_abandoned_before_it_was_sent_is_never_sent(stuck: Callable[..., Stuck]) -> None:
    """So nobody waits for it."""
    call = stuck(not_sent)
    call.abandon()

    write()
    call.release()

    assert isinstance(call.error, CallTimeoutError)


def test_two_who_write_a_name_do_so_one_after_the_other(stuck: Callable[..., Stuck]) -> None:
    """Until the first is abandoned, it may yet send."""
    call = stuck(not_sent)

    with pytest.raises(CheckpointError, match="is under way"):
        write()
    call.abandon()
    write()


def test_a_removal_that_is_late_removes_nothing_new(stuck: Callable[..., Stuck]) -> None:
    """A name is not written before its removal has ended; it may be removed again."""

    def remove(_token: RecordingToken, stand: Callable[[], None]) -> None:
        with removing(KEY, patience_s=0.0):
            stand()

    stuck(remove)

    with removing(KEY, patience_s=0.0):
        pass
    with pytest.raises(CheckpointError, match="a removal of it"):
        write()


def test_a_removal_of_a_caller_that_has_given_up_removes_nothing(
    store: FsspecObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has the name by then may be its successor's."""
    staged = store.staging_path("/run/a.ckpt", "n")
    removed: list[str] = []
    monkeypatch.setattr(store, "_remove", removed.append)
    monkeypatch.setattr(store, "_unlink", removed.append)

    for remove in (store.remove, store.unlink):
        with pytest.raises(CallTimeoutError):
            remove(staged, RecordingToken(cancelled=True))

    assert removed == []


def test_whoever_is_abandoned_waits_no_longer(stuck: Callable[..., Stuck]) -> None:
    """It has nothing to do any more."""
    stuck(sent)

    with pytest.raises(CallTimeoutError):
        write(patience_s=HANG_S, token=RecordingToken(cancelled=True))


def test_a_forked_child_waits_for_nothing_of_its_parent(stuck: Callable[..., Stuck]) -> None:
    """None of the parent's threads goes on in it."""
    stuck(sent)

    child = os.fork()
    if child == 0:
        try:
            write()
            os._exit(0)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# On storage ---------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FsspecObjectStore]:
    """A store in which nobody waits long."""
    fs = fsspec.filesystem(request.param, skip_instance_cache=True)
    yield FsspecObjectStore(fs, spool_directory=str(tmp_path), patience_s=0.1)
    if request.param == "memory":
        fs.store.clear()


class LateRename:
    """Lets the first publication stand still at the instant at which it is carried out."""

    def __init__(self, store: FsspecObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stand: Callable[[], None] | None = None
        replace, pipe_file = Path.replace, store._fs.pipe_file

        def late_replace(path: Path, target: Any) -> Any:
            self._stand_once()
            return replace(path, target)

        def late_pipe(*args: Any) -> Any:
            self._stand_once()
            return pipe_file(*args)

        monkeypatch.setattr(Path, "replace", late_replace)
        monkeypatch.setattr(store._fs, "pipe_file", late_pipe, raising=False)

    def _stand_once(self) -> None:
        stand, self.stand = self.stand, None
        if stand is not None:
            stand()


def test_a_rename_that_lands_late_never_covers_a_newer_checkpoint(
    store: FsspecObjectStore,
    stuck: Callable[..., Stuck],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newer one is refused until the older has landed, whole, and then replaces it."""
    path, late = f"{tmp_path}/run/last.ckpt", LateRename(store, monkeypatch)

    def publish(data: bytes, token: RecordingToken) -> None:
        name = store.staging_path(path, data.decode())
        staged = stage(lambda file: file.write(data), name, token)
        store.publish(staged.path, path, token)

    def publish_late(token: RecordingToken, stand: Callable[[], None]) -> None:
        late.stand = stand
        publish(b"older", token)

    call = stuck(publish_late)
    call.abandon()
    with pytest.raises(CheckpointError, match=r"last\.ckpt"):
        publish(b"newer", RecordingToken())
    with pytest.raises(CheckpointError, match=r"last\.ckpt"):
        store.remove(path)
    assert store.size(path) is None
    call.release()
    landed = store.size(path)
    publish(b"the newest", RecordingToken())

    assert (landed, store.size(path)) == (5, 10)


def test_another_name_is_not_held_up(
    store: FsspecObjectStore,
    stuck: Callable[..., Stuck],
    tmp_path: Path,
) -> None:
    """Only the name in question is not used."""

    def stand_still(token: RecordingToken, stand: Callable[[], None]) -> None:
        with store.landing(f"{tmp_path}/run/a.ckpt", token) as mine:
            mine.send()
            stand()

    stuck(stand_still)
    other = f"{tmp_path}/run/b.ckpt"
    token = RecordingToken()
    staged = stage(lambda file: file.write(b"b"), store.staging_path(other, "b"), token)

    store.publish(staged.path, other, token)

    assert store.size(other) == 1
