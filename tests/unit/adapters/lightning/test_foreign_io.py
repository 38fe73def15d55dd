# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A user's own ``CheckpointIO`` and the path that it is given."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.lightning.foreign_io import FetchedLoad, LocalSave, WholeSave
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.errors import CallTimeoutError, CheckpointError, ConfigError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A checkpoint on a filesystem, or in storage that is not one."""
    return {"local": f"{tmp_path}/run/a.ckpt", "memory": "memory://run/a.ckpt"}[request.param]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """Clients whose spool directory is the test's."""
    (tmp_path / "spool").mkdir()
    clients = Storage({}, spool=lambda: str(tmp_path / "spool"))
    yield clients
    clients.place("memory://").fs.store.clear()


def save_of(storage: Storage, url: str, write: Callable[[Path], object]) -> LocalSave:
    """Make a save by this function."""
    numbers = count()
    return LocalSave(
        storage, url, nonce=lambda: f"n{next(numbers)}", call=lambda path: write(Path(path))
    )


def perform(save: LocalSave, token: RecordingToken) -> Any:
    """Do all of it, as a guard with one attempt would."""
    try:
        save.prepare(token)
        return save.finish(save.attempt(token), token)
    finally:
        save.close()


def left(tmp_path: Path) -> list[str]:
    """Return the names of what is left of staging."""
    return [path.name for path in tmp_path.rglob(".resilience-*")]


def suffixed(path: Path) -> None:
    """Add an ending to the name."""
    path.with_name(f"{path.name}.bin").write_bytes(b"weights")


def besides(path: Path) -> None:
    """Write a second file beside the first."""
    path.write_bytes(b"weights")
    suffixed(path)


@pytest.mark.parametrize(
    ("write", "there"),
    [
        (lambda _path: None, "nothing is there"),
        (Path.mkdir, "nothing is there"),
        (suffixed, "a.ckpt.bin is there"),
        (besides, "a.ckpt, a.ckpt.bin is there"),
    ],
    ids=["nothing", "empty", "suffixed", "besides"],
)
def test_what_is_not_written_to_the_path_is_not_taken_for_a_checkpoint(
    write: Callable[[Path], object], there: str, url: str, storage: Storage, tmp_path: Path
) -> None:
    """The text says what was found, and which option calls such an IO in another way."""
    with pytest.raises(ConfigError, match=re.escape(there)) as caught:
        perform(save_of(storage, url, write), RecordingToken())

    assert "staging=False" in str(caught.value)
    assert left(tmp_path) == []
    assert storage.place(url).store.size(storage.place(url).path) is None


def test_the_path_has_the_checkpoints_own_name(url: str, storage: Storage, tmp_path: Path) -> None:
    """An IO that looks at the ending finds what it expects, and leaves nothing behind."""
    paths: list[Path] = []

    def write(path: Path) -> None:
        paths.append(path)
        path.write_bytes(b"weights")

    tree = perform(save_of(storage, url, write), RecordingToken())

    assert [path.name for path in paths] == ["a.ckpt"]
    assert tree.size_bytes == storage.place(url).store.size(storage.place(url).path) == 7
    assert left(tmp_path) == []


def test_an_abandoned_save_publishes_nothing(url: str, storage: Storage, tmp_path: Path) -> None:
    """Whoever is called as a whole cannot be stopped, but what it wrote can."""
    token = RecordingToken()

    def write(path: Path) -> None:
        path.write_bytes(b"weights")
        token.cancelled = True

    with pytest.raises(CallTimeoutError):
        perform(save_of(storage, url, write), token)

    assert storage.place(url).store.size(storage.place(url).path) is None
    assert left(tmp_path) == []


def test_a_filesystem_gets_a_new_copy_with_each_attempt(storage: Storage, tmp_path: Path) -> None:
    """Its own health is in question: what an earlier attempt wrote there may not be whole."""
    url = f"{tmp_path}/run/a.ckpt"
    wrote: list[Path] = []

    def write(path: Path) -> None:
        wrote.append(path)
        path.write_bytes(b"weights")
        if len(wrote) == 1:
            raise ConnectionResetError

    save = save_of(storage, url, write)
    with pytest.raises(ConnectionResetError):
        save.attempt(RecordingToken())
    between = left(tmp_path)
    save.attempt(RecordingToken())

    assert (len(set(wrote)), between, left(tmp_path)) == (2, [], [])
    assert Path(url).read_bytes() == b"weights"


def test_a_fetch_that_fails_leaves_no_part_behind(storage: Storage, tmp_path: Path) -> None:
    """One part of a large checkpoint for each attempt would fill the disk."""
    place = storage.place("memory://run/a.ckpt")
    place.fs.pipe_file(place.path, b"weights")
    load = FetchedLoad(storage, "memory://run/a.ckpt", nonce=lambda: "n", call=str)
    fetched = Path(load.attempt(RecordingToken()))
    there = fetched.read_bytes()
    load.close()
    info = place.fs.info
    place.fs.info = lambda path: {**info(path), "size": 9}

    with pytest.raises(CheckpointError):
        load.attempt(RecordingToken())

    assert (there, left(tmp_path)) == (b"weights", [])


@pytest.mark.parametrize("is_older", [False, True], ids=["nothing", "an older file"])
def test_what_was_not_written_is_named_without_credentials(
    storage: Storage, *, is_older: bool
) -> None:
    """An IO that is called as a whole and writes nothing is told of, and no password with it."""
    url = "memory://user:hunter2@run/a.ckpt"
    place = storage.place(url)
    if is_older:
        place.fs.pipe_file(place.path, b"older")

    with pytest.raises(OSError, match=r"memory://run/a\.ckpt") as caught:
        WholeSave(storage, url, lambda: None).attempt(RecordingToken())

    assert "hunter2" not in str(caught.value)
