# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A file of a node's cache: one rank makes it, the others wait for it, and the limits hold."""

from __future__ import annotations

import errno
import os
import threading
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import Self

from lightning_resilience.adapters.node_cache import NodeFile, beside_runs, make_room
from lightning_resilience.adapters.staging import spool_directory
from lightning_resilience.core.node_cache import Limits
from lightning_resilience.core.resolution import Inspection
from lightning_resilience.errors import CallTimeoutError, CorruptCheckpointError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken

    Make = Callable[[str, CancelToken], None]


HANG_S = 30.0
SEEN = Inspection(path="s3://b/a.ckpt", size_bytes=4, digest="00")
_numbers = count()


def rank_of(directory: Path, *, load: str = "1", patience_s: float = HANG_S) -> NodeFile:
    """Return the file as one more rank of the node sees it."""
    return NodeFile(
        str(directory),
        "key",
        expected=SEEN,
        load=load,
        patience_s=patience_s,
        nonce=lambda: f"n{next(_numbers)}",
        shown="s3://b/a.ckpt",
    )


def write(path: str, token: CancelToken, data: bytes = b"data") -> None:
    """Make the file."""
    Path(path).write_bytes(data)
    token.progress()


def never(path: str, _token: CancelToken) -> None:
    """Be called by nobody."""
    pytest.fail(f"{path} was made twice")


class Stuck:
    """A reader in another thread that goes on when it is told to."""

    def __init__(self, file: NodeFile) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.token = RecordingToken()
        self.error: BaseException | None = None
        self._file = file
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.begun.wait(HANG_S)
        return self

    def __exit__(self, *_error: object) -> None:
        self.go.set()
        self._thread.join(HANG_S)

    def _run(self) -> None:
        try:
            self._file.settle(self.token)
            self._file.obtain(self._make, self.token)
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            self.error = error

    def _make(self, path: str, token: CancelToken) -> None:
        Path(path).write_bytes(b"late")
        self.begun.set()
        assert self.go.wait(HANG_S)
        token.raise_if_cancelled()


class GivesUp(RecordingToken):
    """A token that is set after it has been asked a few times."""

    def raise_if_cancelled(self) -> None:
        """Raise at the fifth question."""
        self.marks += 1
        self.cancelled = self.marks >= 5
        super().raise_if_cancelled()


def good(path: str, _token: CancelToken) -> None:
    """Find in the cache what was fetched."""
    if Path(path).read_bytes() != b"data":
        message = "a bit has flipped"
        raise CorruptCheckpointError(message)


def test_what_one_rank_has_made_the_others_use(tmp_path: Path) -> None:
    """They do not even ask for their turn."""
    first, second = rank_of(tmp_path), rank_of(tmp_path)

    assert not first.settle(RecordingToken())
    first.obtain(write, RecordingToken())

    assert second.settle(RecordingToken())
    second.obtain(never, RecordingToken())
    assert Path(second.path).read_bytes() == b"data"


@pytest.mark.parametrize("waits_first", [True, False])
def test_what_an_earlier_start_has_left_is_checked_once_and_used(
    tmp_path: Path, waits_first: Any
) -> None:
    """By one rank of the node, inside a slot or outside of one; nobody asks the storage for it."""
    rank_of(tmp_path).obtain(write, RecordingToken())
    first, second = rank_of(tmp_path, load="2"), rank_of(tmp_path, load="2")
    checked: list[str] = []

    def check(path: str, token: CancelToken) -> None:
        checked.append(path)
        good(path, token)

    assert not waits_first or first.settle(RecordingToken(), check=check)
    first.obtain(never, RecordingToken(), check=check)

    assert second.settle(RecordingToken(), check=check)
    assert checked == [first.path]


@pytest.mark.parametrize("waits_first", [True, False])
def test_what_a_disk_has_changed_since_an_earlier_start_is_fetched_again(
    tmp_path: Path, waits_first: Any
) -> None:
    """Its length is right, and one bit is not: nobody loads it."""
    rank_of(tmp_path).obtain(write, RecordingToken())
    file = rank_of(tmp_path, load="2")
    Path(file.path).write_bytes(b"dat\0")

    assert not (waits_first and file.settle(RecordingToken(), check=good))
    file.obtain(write, RecordingToken(), check=good)

    assert Path(file.path).read_bytes() == b"data"


def test_a_check_that_was_given_up_says_nothing_of_the_file(tmp_path: Path) -> None:
    """It stays, and another rank has its turn to check it."""
    rank_of(tmp_path).obtain(write, RecordingToken())
    first, second = rank_of(tmp_path, load="2"), rank_of(tmp_path, load="2")
    token = RecordingToken()

    def give_up(_path: str, given: CancelToken) -> None:
        token.cancelled = True
        given.raise_if_cancelled()

    with pytest.raises(CallTimeoutError):
        first.settle(token, check=give_up)

    assert second.settle(RecordingToken(), check=good)


def test_it_appears_when_it_is_complete(tmp_path: Path) -> None:
    """Until then there is nothing under its name, and after a failure nothing at all."""
    file = rank_of(tmp_path)

    def fail(path: str, _token: CancelToken) -> None:
        Path(path).write_bytes(b"data")
        assert not Path(file.path).exists()
        raise ConnectionResetError(errno.ECONNRESET, "in the middle")

    with pytest.raises(ConnectionResetError):
        file.obtain(fail, RecordingToken())

    assert [item.name for item in tmp_path.iterdir()] == ["key.reading"]


def test_a_file_of_another_length_is_made_again(tmp_path: Path) -> None:
    """By a rename: whoever has mapped the older one keeps it."""
    file = rank_of(tmp_path)
    path = Path(file.path)
    path.write_bytes(b"short"[:2])
    with path.open("rb") as older:
        assert not file.settle(RecordingToken())
        file.obtain(write, RecordingToken())

        assert older.read() == b"sh"
    assert path.read_bytes() == b"data"


def test_the_others_wait_while_a_reader_reads(tmp_path: Path) -> None:
    """It is told that it goes on, which is progress of the wait as well; then the file is there."""
    waiting = RecordingToken()
    found: list[bool] = []
    with Stuck(rank_of(tmp_path)) as reader:
        thread = threading.Thread(target=lambda: found.append(rank_of(tmp_path).settle(waiting)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        reader.go.set()
        thread.join(HANG_S)

    assert found == [True]
    assert reader.error is None
    assert waiting.marks >= 1


def test_who_waits_can_be_told_to_stop(tmp_path: Path) -> None:
    """Another rank has failed, and nobody wants the file any more."""
    token = RecordingToken(cancelled=True)
    with Stuck(rank_of(tmp_path)), pytest.raises(CallTimeoutError):
        rank_of(tmp_path).settle(token)


def test_a_reader_that_is_stuck_is_taken_over(tmp_path: Path) -> None:
    """Another rank reads beside it; when it comes back, what it has made is nobody's problem."""
    other = rank_of(tmp_path, patience_s=0.2)
    with Stuck(rank_of(tmp_path)) as reader:
        assert not other.settle(RecordingToken())
        other.obtain(write, RecordingToken())
        assert Path(other.path).read_bytes() == b"data"

    assert reader.error is None
    assert Path(other.path).read_bytes() == b"late"
    assert [item for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_an_attempt_that_was_abandoned_gives_way_to_the_next(tmp_path: Path) -> None:
    """It hangs in the same process; its lock is let go of, and what it makes does not appear."""
    file = rank_of(tmp_path)
    with Stuck(file) as reader:
        reader.token.cancelled = True
        file.obtain(write, RecordingToken())

    assert isinstance(reader.error, CallTimeoutError)
    assert Path(file.path).read_bytes() == b"data"


def test_what_a_reader_has_refused_nobody_reads_again(tmp_path: Path) -> None:
    """The others of the same load raise the same; another load looks for itself."""
    first, second, later = rank_of(tmp_path), rank_of(tmp_path), rank_of(tmp_path, load="2")

    def refuse(_path: str, _token: CancelToken) -> None:
        message = "a bit has flipped"
        raise CorruptCheckpointError(message)

    with pytest.raises(CorruptCheckpointError):
        first.obtain(refuse, RecordingToken())
    with pytest.raises(CorruptCheckpointError, match="a bit has flipped"):
        second.settle(RecordingToken())
    assert not later.settle(RecordingToken())


def test_a_wait_that_was_given_up_leaves_no_turn_behind(tmp_path: Path) -> None:
    """Its thread may get the turn after whoever waited for it has gone."""
    first, second = rank_of(tmp_path), rank_of(tmp_path)
    token = RecordingToken()
    take = first._turn.take

    def give_up_meanwhile() -> bool:
        token.cancelled = True
        first.release()
        return take()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first._turn, "take", give_up_meanwhile)
        with pytest.raises(CallTimeoutError):
            first.settle(token)

    assert not second.settle(RecordingToken())


def test_who_waits_says_for_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, however long it waits."""
    caplog.set_level("INFO")
    with Stuck(rank_of(tmp_path)), pytest.raises(CallTimeoutError):
        rank_of(tmp_path).settle(GivesUp())

    assert caplog.text.count("load waits for another rank of this node: it reads s3://b/a.") == 1


def test_a_turn_is_let_go_of_without_an_attempt(tmp_path: Path) -> None:
    """Its holder has given up, and another rank may do better."""
    first, second = rank_of(tmp_path), rank_of(tmp_path)
    first.settle(RecordingToken())

    first.release()
    first.release()

    assert not second.settle(RecordingToken())


def test_without_locks_every_rank_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network filesystems have none."""

    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    first, second = rank_of(tmp_path), rank_of(tmp_path)

    assert [file.settle(RecordingToken()) for file in (first, second)] == [False, False]


def test_what_a_dead_reader_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """A killed process cannot; what is of another checkpoint stays."""
    left = tmp_path / ".resilience-key-n.staged"
    other = tmp_path / ".resilience-other-n.staged"
    for path in (left, other):
        path.write_bytes(b"half")

    rank_of(tmp_path).obtain(write, RecordingToken())

    assert (left.exists(), other.exists()) == (False, True)


def test_a_reader_whose_file_was_removed_tries_again(tmp_path: Path) -> None:
    """It was taken over; the failure is one that is repeated."""

    def lose(path: str, _token: CancelToken) -> None:
        Path(path).write_bytes(b"data")
        Path(path).unlink()

    with pytest.raises(OSError, match="taken over") as caught:
        rank_of(tmp_path).obtain(lose, RecordingToken())

    assert caught.value.errno == errno.ESTALE


def test_the_cache_of_a_user_is_beside_the_runs(tmp_path: Path) -> None:
    """No run has that name, and only its user may look into it."""
    spool = spool_directory(str(tmp_path), environ={}, run_id=".node-cache")

    directory = beside_runs(spool)
    file = rank_of(Path(directory))

    assert directory != spool
    assert Path(directory).parent == Path(spool).parent
    assert Path(file.path).parent.stat().st_mode & 0o777 == 0o700


def test_room_is_made_by_age_and_by_use(tmp_path: Path) -> None:
    """What is old goes, what was used least lately for what comes in, and what is in use stays."""
    now_s = tmp_path.stat().st_mtime
    for name, unused_s in {"old": 5000, "b": 200, "a": 300, "new": 0}.items():
        path = tmp_path / f"{name}.ckpt"
        path.write_bytes(bytes(40))
        os.utime(path, (now_s - unused_s, now_s - unused_s))

    make_room(
        str(tmp_path),
        incoming_bytes=40,
        limits=Limits(max_bytes=120, max_age_s=1000, in_use_s=10),
    )

    assert sorted(item.name for item in tmp_path.iterdir()) == ["b.ckpt", "new.ckpt", "now"]


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    """The kernel takes it: a child that leaves without a word."""
    file = rank_of(tmp_path)
    pid = os.fork()
    if pid == 0:
        rank_of(tmp_path).settle(RecordingToken())
        os._exit(0)
    os.waitpid(pid, 0)

    assert not file.settle(RecordingToken())
