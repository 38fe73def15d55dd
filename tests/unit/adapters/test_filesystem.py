# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The guarded filesystem: what goes through the guard, how often, and what never does."""

from __future__ import annotations

import copy
import gc
import pickle
import uuid
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import fsspec
import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_resilience.adapters import guarded_call
from lightning_resilience.adapters.filesystem import (
    OPERATIONS,
    guarded,
    set_default_runner,
)
from lightning_resilience.core.outcome import operation_class
from lightning_resilience.errors import CheckpointError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightning_resilience.ports import CancelToken
    from tests.s3_server import S3Server


T = TypeVar("T")
World: TypeAlias = tuple[Any, str]


class RecordingRunner:
    """A guard without policy: records each operation, and repeats as often as it is told."""

    def __init__(self, *, attempts: int = 1) -> None:
        self.calls: list[tuple[str, str]] = []
        self.token = RecordingToken()
        self._attempts = attempts

    @property
    def operations(self) -> list[str]:
        """Names of the operations so far."""
        return [operation for operation, _ in self.calls]

    def __call__(
        self, _fs: Any, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        """Record the operation and run it."""
        self.calls.append((operation, path))
        return self._attempt(work, self._attempts)

    def _attempt(self, work: Callable[[CancelToken], T], left: int) -> T:
        try:
            return work(self.token)
        except OSError:
            if left <= 1:
                raise
        return self._attempt(work, left - 1)


@pytest.fixture
def runner() -> RecordingRunner:
    """One attempt for each operation."""
    return RecordingRunner()


@pytest.fixture(params=["file", "memory", "s3"])
def world(
    request: pytest.FixtureRequest, runner: RecordingRunner, tmp_path: Path, s3_server: S3Server
) -> World:
    """A guarded filesystem and a folder in it that exists, one of each kind."""
    if request.param == "file":
        folder = tmp_path / "data"
        folder.mkdir()
        return guarded(LocalFileSystem, run=runner), str(folder)
    spool = str(tmp_path)
    if request.param == "memory":
        folder_name = f"/{uuid.uuid4().hex}"
        fsspec.filesystem("memory").mkdir(folder_name)
        return guarded(MemoryFileSystem, run=runner, spool=spool), folder_name
    s3fs = pytest.importorskip("s3fs")
    fs = guarded(s3fs.S3FileSystem, (), s3_server.storage_options, run=runner, spool=spool)
    return fs, f"{s3_server.new_bucket()}/data"


ONE_CALL: dict[str, Callable[[Any, str], Any]] = {
    "cat": lambda fs, f: fs.cat(f"{f}/a"),
    "cat_file": lambda fs, f: fs.cat_file(f"{f}/a"),
    "cat_ranges": lambda fs, f: fs.cat_ranges([f"{f}/a", f"{f}/b"], [0, 0], [1, 1]),
    "checksum": lambda fs, f: fs.checksum(f"{f}/a"),
    "copy": lambda fs, f: fs.copy(f"{f}/a", f"{f}/copy"),
    "cp_file": lambda fs, f: fs.cp_file(f"{f}/a", f"{f}/copy"),
    "delete": lambda fs, f: fs.delete(f"{f}/a"),
    "du": lambda fs, f: fs.du(f),
    "exists": lambda fs, f: fs.exists(f"{f}/a"),
    "expand_path": lambda fs, f: fs.expand_path(f"{f}/*"),
    "find": lambda fs, f: fs.find(f),
    "glob": lambda fs, f: fs.glob(f"{f}/*"),
    "head": lambda fs, f: fs.head(f"{f}/a"),
    "info": lambda fs, f: fs.info(f"{f}/a"),
    "isdir": lambda fs, f: fs.isdir(f),
    "isfile": lambda fs, f: fs.isfile(f"{f}/a"),
    "listdir": lambda fs, f: fs.listdir(f),
    "ls": lambda fs, f: fs.ls(f),
    "modified": lambda fs, f: fs.modified(f"{f}/a"),
    "mv": lambda fs, f: fs.mv(f"{f}/a", f"{f}/moved"),
    "pipe": lambda fs, f: fs.pipe({f"{f}/c": b"c", f"{f}/d": b"d"}),
    "pipe_file": lambda fs, f: fs.pipe_file(f"{f}/c", b"c"),
    "read_bytes": lambda fs, f: fs.read_bytes(f"{f}/a"),
    "read_text": lambda fs, f: fs.read_text(f"{f}/a"),
    "rm": lambda fs, f: fs.rm([f"{f}/a", f"{f}/b"]),
    "rm_file": lambda fs, f: fs.rm_file(f"{f}/a"),
    "size": lambda fs, f: fs.size(f"{f}/a"),
    "sizes": lambda fs, f: fs.sizes([f"{f}/a", f"{f}/b"]),
    "tail": lambda fs, f: fs.tail(f"{f}/a"),
    "touch": lambda fs, f: fs.touch(f"{f}/new"),
    "write_bytes": lambda fs, f: fs.write_bytes(f"{f}/c", b"c"),
    "write_text": lambda fs, f: fs.write_text(f"{f}/c", "c"),
}


def fill(world: World, runner: RecordingRunner) -> None:
    """Put two small files into the folder, and forget how."""
    fs, folder = world
    fs.pipe({f"{folder}/a": b"aaaa", f"{folder}/b": b"bbbb"})
    runner.calls.clear()


@pytest.mark.parametrize("operation", ONE_CALL)
def test_an_operation_is_one_call_of_the_guard(
    world: World, runner: RecordingRunner, operation: str
) -> None:
    """What the operation does inside, for one file or for several, is not guarded again."""
    fs, folder = world
    fill(world, runner)

    ONE_CALL[operation](fs, folder)

    assert runner.operations == [operation]
    assert folder.strip("/") in runner.calls[0][1]


def test_put_and_get_are_one_call_each(
    world: World, runner: RecordingRunner, tmp_path: Path
) -> None:
    """Copies between this machine and the storage name the storage's path."""
    fs, folder = world
    here, back = tmp_path / "here", tmp_path / "back"
    here.write_bytes(b"local")

    fs.put_file(str(here), f"{folder}/x")
    fs.get_file(f"{folder}/x", str(back))

    assert back.read_bytes() == b"local"
    assert runner.operations == ["put_file", "get_file"]
    assert all(path.endswith(f"{folder}/x") for _, path in runner.calls)


def test_the_operations_of_every_filesystem_are_known() -> None:
    """Each wrapped name is a read or a write; nothing is wrapped that does not exist anywhere."""
    fs = fsspec.filesystem("file")
    missing = {name for name in OPERATIONS if not hasattr(fs, name)}

    assert missing <= {"upload", "download"}
    assert {operation_class(name) for name in OPERATIONS} == {"read", "write"}


def test_opening_and_fetching_are_guarded_reads(world: World, runner: RecordingRunner) -> None:
    """Reading remote data that was not fetched at once goes through the guard as well."""
    fs, folder = world
    fill(world, runner)

    with fs.open(f"{folder}/a", "rb") as file:
        data = file.read()

    assert data == b"aaaa"
    assert runner.operations[0] == "open"
    assert runner.operations[1:] in ([], ["read"])
    assert {operation_class(name) for name in runner.operations} == {"read"}


def test_a_file_opened_for_writing_is_published_when_closed(
    world: World, runner: RecordingRunner
) -> None:
    """Nothing is visible before, and the guard sees one write."""
    fs, folder = world

    file = fs.open(f"{folder}/new", "wb")
    file.write(b"one")
    file.write(memoryview(b" two"))
    before = fs.exists(f"{folder}/new")
    runner.calls.clear()
    file.close()
    file.close()

    assert before is False
    assert [operation for operation, _ in runner.calls] == ["put_file"]
    assert fs.cat_file(f"{folder}/new") == b"one two"


def test_text_is_published_when_closed(world: World) -> None:
    """Encoding and line ends are those that the user asked for."""
    fs, folder = world

    with fs.open(f"{folder}/new", "w", encoding="latin-1", newline="\r\n") as file:
        file.write("grün\n")

    assert fs.cat_file(f"{folder}/new") == "grün\r\n".encode("latin-1")


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_an_error_inside_the_block_publishes_nothing(
    world: World, runner: RecordingRunner, tmp_path: Path, mode: str
) -> None:
    """What was written up to the error stays invisible, and no staged file is left."""
    fs, folder = world
    fs.pipe_file(f"{folder}/x", b"old")
    runner.calls.clear()

    def fail_halfway() -> None:
        with fs.open(f"{folder}/x", mode) as file:
            file.write("half" if mode == "w" else b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()

    assert runner.calls == []
    assert fs.cat_file(f"{folder}/x") == b"old"
    assert not list(tmp_path.rglob("*.staged"))


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_file_that_is_lost_publishes_nothing(world: World, tmp_path: Path, mode: str) -> None:
    """A file that nobody closed is not complete."""
    fs, folder = world

    file = fs.open(f"{folder}/x", mode)
    file.write("half" if mode == "w" else b"half")
    del file
    gc.collect()

    assert not fs.exists(f"{folder}/x")
    assert not list(tmp_path.rglob("*.staged"))


def test_a_transaction_publishes_at_its_end(world: World) -> None:
    """Files closed inside a transaction appear together, or not at all if it fails."""
    fs, folder = world

    with fs.transaction:
        with fs.open(f"{folder}/x", "wb") as file:
            file.write(b"x")
        inside = fs.exists(f"{folder}/x")

    def fail() -> None:
        with fs.transaction:
            with fs.open(f"{folder}/y", "wb") as file:
                file.write(b"y")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside is False
    assert fs.cat_file(f"{folder}/x") == b"x"
    assert not fs.exists(f"{folder}/y")


def test_a_publication_that_fails_is_repeated_from_the_staged_file(tmp_path: Path) -> None:
    """The guard calls again, and what was written is still there."""
    failures = [OSError(5, "first"), OSError(5, "second")]

    class Flaky(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
        def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
            if failures:
                raise failures.pop()
            super().pipe_file(path, value, **kwargs)

    fs = guarded(Flaky, run=RecordingRunner(attempts=3), spool=str(tmp_path))
    path = f"/{uuid.uuid4().hex}"

    with fs.open(path, "wb") as file:
        file.write(b"data")

    assert fs.cat_file(path) == b"data"
    assert not list(tmp_path.rglob("*.staged"))


def test_a_publication_that_is_given_up_raises_and_leaves_nothing(tmp_path: Path) -> None:
    """``close`` raises what the guard raised."""

    class Broken(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
        def pipe_file(self, *_: Any, **__: Any) -> None:
            raise OSError(5, "always")

    fs = guarded(Broken, run=RecordingRunner(attempts=2), spool=str(tmp_path))
    file = fs.open("/never", "wb")
    file.write(b"data")

    with pytest.raises(OSError, match="always"):
        file.close()

    assert file.closed
    assert not fs.exists("/never")
    assert not list(tmp_path.rglob("*.staged"))


def test_a_publication_is_believed_only_with_the_right_length(tmp_path: Path) -> None:
    """Storage that loses bytes without an error is found out (C18)."""

    class Lossy(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
        def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
            super().pipe_file(path, value[:-1], **kwargs)

    fs = guarded(Lossy, run=RecordingRunner(), spool=str(tmp_path))
    file = fs.open(f"/{uuid.uuid4().hex}", "wb")
    file.write(b"data")

    with pytest.raises(CheckpointError, match="4 bytes were sent, but the storage reports 3 bytes"):
        file.close()


def test_appending_is_passed_on_as_a_write(tmp_path: Path, runner: RecordingRunner) -> None:
    """An append cannot be staged without reading the target first."""
    fs = guarded(LocalFileSystem, run=runner)
    (tmp_path / "log").write_bytes(b"1")

    with fs.open(str(tmp_path / "log"), "ab") as file:
        file.write(b"2")

    assert (tmp_path / "log").read_bytes() == b"12"
    assert runner.operations == ["write"]


def test_writing_with_compression_is_refused(world: World) -> None:
    """The text says why, and what to do."""
    fs, folder = world

    with pytest.raises(NotImplementedError, match="compress the data and write the result"):
        fs.open(f"{folder}/x.gz", "wb", compression="gzip")


def test_exists_raises_where_it_cannot_be_told() -> None:
    """Plain fsspec says False to any error, and training would start from scratch (C28)."""

    class Unreachable(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
        def info(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise ConnectionResetError(104, "reset")

    fs = guarded(Unreachable, run=RecordingRunner())

    for ask in (fs.exists, fs.isfile, fs.isdir):
        with pytest.raises(ConnectionResetError):
            ask("/x")
    assert MemoryFileSystem.exists(fs, "/x") is False


def test_making_a_directory_makes_no_bucket(s3_server: S3Server, runner: RecordingRunner) -> None:
    """Lightning makes the directory before each save; a typo must not make a bucket (C63)."""
    s3fs = pytest.importorskip("s3fs")
    fs = guarded(s3fs.S3FileSystem, (), s3_server.storage_options, run=runner)

    fs.makedirs("no-bucket-of-that-name/dir", exist_ok=True)
    fs.mkdir("no-bucket-of-that-name")

    with pytest.raises(FileNotFoundError, match="no such bucket"):
        fs.exists("no-bucket-of-that-name")
    assert runner.operations == ["exists"]


def test_walking_is_guarded(world: World, runner: RecordingRunner) -> None:
    """Where the filesystem is asynchronous the walk is one operation, else each listing is."""
    fs, folder = world
    fill(world, runner)

    found = [name for _, _, files in fs.walk(folder) for name in files]

    assert sorted(found) == ["a", "b"]
    assert set(runner.operations) <= {"walk", "ls"}
    assert len(runner.operations) == 1


def test_the_class_is_kept(world: World) -> None:
    """Lightning branches on the class, and on the protocol in the path."""
    fs, folder = world
    kind: Any = type(fs).__mro__[1]

    assert isinstance(fs, kind)
    assert fs.protocol == kind.protocol
    assert type(fs).__name__ == f"Guarded{kind.__name__}"
    assert fs.unstrip_protocol(folder).split("://")[0] in ("file", "memory", "s3")


def test_urls_and_paths_name_the_same_object(world: World) -> None:
    """The protocol may stay in the path (C25)."""
    fs, folder = world
    fs.pipe_file(f"{folder}/x", b"x")

    assert fs.exists(fs.unstrip_protocol(f"{folder}/x"))
    with fs.open(fs.unstrip_protocol(f"{folder}/y"), "wb") as file:
        file.write(b"y")
    assert fs.cat_file(f"{folder}/y") == b"y"


def test_copies_keep_the_guard(world: World, runner: RecordingRunner) -> None:
    """A deep copy of what holds the filesystem is guarded by the same guard."""
    fs, folder = world

    for twin in (copy.copy(fs), copy.deepcopy(fs)):
        runner.calls.clear()
        twin.exists(folder)
        assert type(twin) is type(fs)
        assert runner.operations == ["exists"]


@pytest.fixture
def _default_runner() -> Iterator[None]:
    yield
    set_default_runner(None)


@pytest.mark.usefixtures("_default_runner")
def test_unpickled_it_is_guarded_by_the_process_it_is_in(
    world: World, runner: RecordingRunner
) -> None:
    """The runner stays behind; the default one takes over, and without one nothing does."""
    fs, folder = world
    fill(world, runner)
    default = RecordingRunner()

    twin = pickle.loads(pickle.dumps(fs))
    direct = twin.cat_file(f"{folder}/a")
    set_default_runner(default)
    indirect = twin.cat_file(f"{folder}/a")

    assert type(twin) is type(fs)
    assert twin.storage_options == fs.storage_options
    assert direct == indirect == b"aaaa"
    assert runner.calls == []
    assert default.operations == ["cat_file"]


def test_a_guarded_filesystem_is_not_guarded_twice(world: World, runner: RecordingRunner) -> None:
    """Guarding it again gives the other guard one call, and the first none."""
    fs, folder = world
    other = RecordingRunner()

    again = guarded(fs, run=other)
    again.exists(folder)

    assert type(again) is type(fs)
    assert other.operations == ["exists"]
    assert runner.calls == []


def test_an_instance_is_guarded_with_its_own_arguments() -> None:
    """The user's options go along."""
    users = LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)

    fs = guarded(users, run=None)

    assert fs is not users
    assert fs.auto_mkdir is True


def test_what_fsspec_hands_to_others_is_not_guarded(world: World) -> None:
    """The guarded instance is in no cache, and the wrapped methods on no class."""
    fs, folder = world
    kind: Any = type(fs).__mro__[1]

    plain, _ = url_to_fs(fs.unstrip_protocol(folder), **fs.storage_options)

    assert type(plain) is kind
    assert plain is not fs


def test_the_mark_of_a_guarded_operation_belongs_to_its_thread(
    world: World, runner: RecordingRunner
) -> None:
    """The mark is gone after an operation, also after one that failed."""
    fs, folder = world

    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{folder}/missing")

    assert guarded_call._inside.token is None
    assert runner.operations == ["cat_file"]
