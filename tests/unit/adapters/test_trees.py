# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a foreign program wrote gets into storage and back, on every kind of storage."""

from __future__ import annotations

import os
import uuid
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters import trees
from lightning_resilience.adapters.storage import Place, Storage
from lightning_resilience.adapters.trees import (
    Publication,
    fetch,
    identity,
    measure,
    put_in_place,
)
from lightning_resilience.errors import CallTimeoutError, CheckpointError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.s3_server import S3Server


CONTENT = {"weights/0.pt": b"zero" * 1000, "weights/1.pt": b"one", "index.json": b"[]"}


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path) -> Place:
    """A name in storage that nothing is under."""
    spool = tmp_path / "spool"
    spool.mkdir()
    options: dict[str, Any] = {}
    url = f"{tmp_path}/run/a.ckpt"
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/run/a.ckpt"
    elif request.param == "s3":
        url = f"s3://{s3_server.new_bucket()}/run/a.ckpt"
        options = s3_server.storage_options
    return Storage(options, spool=lambda: str(spool)).place(url)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Publication]:
    """Write files to a staged name beside the target, and measure them."""

    def made(content: dict[str, bytes] | bytes) -> Publication:
        staged = tmp_path / "run" / f".resilience-{uuid.uuid4().hex}.staged" / "a.ckpt"
        staged.parent.mkdir(parents=True)
        if isinstance(content, bytes):
            staged.write_bytes(content)
        else:
            for age, (name, data) in enumerate(content.items()):
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).write_bytes(data)
                os.utime(staged / name, ns=(age, age))
        tree = measure(str(staged), RecordingToken())
        return Publication(tree=tree, aside=f"{staged}.replaced")

    return made


def fetched(place: Place, tmp_path: Path) -> dict[str, bytes] | bytes:
    """Fetch what is there; return it by name."""
    tree = fetch(place, str(tmp_path / uuid.uuid4().hex / "a.ckpt"), RecordingToken())
    path = Path(tree.path)
    assert tree.contents == dict(measure(tree.path, RecordingToken()).contents)
    if path.is_file():
        return path.read_bytes()
    files = (item for item in path.rglob("*") if item.is_file())
    return {item.relative_to(path).as_posix(): item.read_bytes() for item in files}


@pytest.mark.parametrize("content", [CONTENT, b"one file"], ids=["directory", "file"])
def test_what_was_published_is_fetched(
    content: dict[str, bytes] | bytes,
    place: Place,
    make: Callable[..., Publication],
    tmp_path: Path,
) -> None:
    """Every byte under every name, and the size of all is known."""
    tree = make(content).attempt(place, RecordingToken())

    assert fetched(place, tmp_path) == content
    data = [content] if isinstance(content, bytes) else content.values()
    assert tree.size_bytes == sum(len(item) for item in data)


@pytest.mark.parametrize("old", [b"a file", {"weights/2.pt": b"two"}], ids=["file", "directory"])
def test_a_directory_is_no_mixture_with_what_was_there(
    old: Any, place: Place, make: Callable[..., Publication], tmp_path: Path
) -> None:
    """What was there under its name is gone, whichever it was."""
    make(old).attempt(place, RecordingToken())

    make(CONTENT).attempt(place, RecordingToken())

    assert fetched(place, tmp_path) == CONTENT


@pytest.mark.parametrize("old", [b"a file", CONTENT], ids=["file", "directory"])
@pytest.mark.parametrize("new", [b"new", {"0.pt": b"two"}], ids=["file", "directory"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_on_a_filesystem_each_takes_the_place_of_each(
    old: Any,
    new: Any,
    can_exchange: bool,  # noqa: FBT001 - a parameter
    make: Callable[..., Publication],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the kernel cannot let two names change places."""
    if not can_exchange:
        monkeypatch.setattr(trees, "_exchange", lambda *_names: False)
    place = Storage({}, spool=str).place(f"{tmp_path}/run/a.ckpt")
    make(old).attempt(place, RecordingToken())

    make(new).attempt(place, RecordingToken())

    assert fetched(place, tmp_path) == new


def test_two_directories_change_places_at_once(
    make: Callable[..., Publication], tmp_path: Path
) -> None:
    """Where the kernel can, there is no moment at which nothing is under the name."""
    place = Storage({}, spool=str).place(f"{tmp_path}/run/a.ckpt")
    make({"old": b""}).attempt(place, RecordingToken())
    publication = make({"new": b""})

    publication.attempt(place, RecordingToken())

    # The older one is where the new one was, to be removed with the staged directory.
    assert [item.name for item in Path(publication.tree.path).iterdir()] == ["old"]
    assert not Path(publication.aside).exists()


def test_a_rename_that_fails_leaves_the_older_one(
    make: Callable[..., Publication], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was moved aside is moved back."""
    place = Storage({}, spool=str).place(f"{tmp_path}/run/a.ckpt")
    make({"old": b""}).attempt(place, RecordingToken())
    publication = make({"new": b""})
    monkeypatch.setattr(trees, "_exchange", lambda *_names: False)
    rename = Path.replace

    def replace(source: Path, target: Any) -> Any:
        if source == Path(publication.tree.path) and not Path(place.path).exists():
            raise ConnectionResetError
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(ConnectionResetError):
        publication.attempt(place, RecordingToken())

    assert [item.name for item in Path(place.path).iterdir()] == ["old"]


def test_only_the_directory_that_was_meant_is_renamed(
    make: Callable[..., Publication], tmp_path: Path
) -> None:
    """An attempt that was given up may have renamed it, and its name is another one's since."""
    place = Storage({}, spool=str).place(f"{tmp_path}/run/a.ckpt")
    meant, other = make({"old": b""}).tree.path, make({"metadata": b""}).tree.path
    stamp = identity(meant)
    aside = f"{meant}.replaced"
    put_in_place(meant, place, aside=aside, token=RecordingToken(), stamp=stamp)
    Path(other).replace(meant)

    with pytest.raises(CheckpointError, match="given up"):
        put_in_place(meant, place, aside=aside, token=RecordingToken(), stamp=stamp)

    assert [item.name for item in Path(place.path).iterdir()] == ["old"]


def test_nothing_is_published_for_a_caller_that_has_given_up(
    place: Place, make: Callable[..., Publication]
) -> None:
    """Neither is anything removed to make room for it."""
    make({"old": b""}).attempt(place, RecordingToken())

    with pytest.raises(CallTimeoutError):
        make(CONTENT).attempt(place, RecordingToken(cancelled=True))

    assert place.store.size(f"{place.path}/old") == 0
    assert place.store.size(f"{place.path}/index.json") is None


@pytest.mark.parametrize("found", [None, 3])
def test_a_size_that_is_not_what_was_written_is_not_believed(
    found: int | None, make: Callable[..., Publication]
) -> None:
    """A storage that drops or cuts a file has not saved it."""
    store = SimpleNamespace(
        is_local=False,
        publish=lambda *_args: None,
        remove=lambda *_args: None,
        size=lambda _path: found,
    )
    place: Any = SimpleNamespace(store=store, path="a.ckpt")

    with pytest.raises(CheckpointError, match=r"were written to a\.ckpt/"):
        make(CONTENT).attempt(place, RecordingToken())


def test_what_is_not_there_is_said_to_be_missing(place: Place, tmp_path: Path) -> None:
    """It is a mistake and not an outage."""
    with pytest.raises(FileNotFoundError):
        fetched(place, tmp_path)


def test_a_name_that_leads_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write to the storage may not write anywhere on this node."""
    fs = SimpleNamespace(
        info=lambda _path: {"type": "directory"},
        invalidate_cache=lambda _path: None,
        ls=lambda path, **_options: [{"name": f"{path}/../../evil", "type": "file", "size": 1}],
    )
    place: Any = SimpleNamespace(fs=fs, path="bucket/a.ckpt")

    with pytest.raises(CheckpointError, match="outside the directory"):
        fetch(place, str(tmp_path / "a.ckpt"), RecordingToken())


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_that_cannot_be_listed_is_not_empty(number: int, tmp_path: Path) -> None:
    """Its files are not left out: what was fetched would be a part of the checkpoint."""
    place = Storage({}, spool=str).place(f"memory://{uuid.uuid4().hex}/a.ckpt")
    for name in ("index", "parts/0"):
        place.fs.pipe_file(f"{place.path}/{name}", b"data")
    inner, listings = place.fs.ls, count(1)

    def ls(path: str, **options: Any) -> Any:
        if next(listings) == number:
            raise ConnectionResetError(path)
        return inner(path, **options)

    place.fs.ls = ls

    with pytest.raises(ConnectionResetError):
        fetch(place, str(tmp_path / "a.ckpt"), RecordingToken())


def test_a_part_that_arrives_is_not_believed(tmp_path: Path) -> None:
    """A connection that ends early is not the end of the file."""
    place = Storage({}, spool=str).place("memory://cut/a.ckpt")
    place.fs.pipe_file(place.path, b"whole")
    info = place.fs.info
    place.fs.info = lambda path: {**info(path), "size": 9}

    with pytest.raises(CheckpointError, match=r"5 bytes of .* arrived, but it has 9"):
        fetch(place, str(tmp_path / "a.ckpt"), RecordingToken())


def test_measuring_marks_progress_and_stops(make: Callable[..., Publication]) -> None:
    """A large directory is no stall, and an abandoned one is not read to its end."""
    path = make(CONTENT).tree.path
    token = RecordingToken()

    measure(path, token)

    assert token.marks == len(CONTENT)
    with pytest.raises(CallTimeoutError):
        measure(path, RecordingToken(cancelled=True))


def test_the_digest_tells_trees_apart(make: Callable[..., Publication]) -> None:
    """It depends on names and bytes, and not on when they were written."""
    reordered = dict(reversed(CONTENT.items()))
    renamed = {**CONTENT, "index2.json": CONTENT["index.json"]}
    digests = [make(content).tree.digest for content in (CONTENT, reordered, renamed)]

    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
    contents = make(CONTENT).tree.contents
    assert {name: size for name, (size, _) in contents.items()} == {
        name: len(data) for name, data in CONTENT.items()
    }
    assert list(make(reordered).tree.contents) == list(reordered)


def test_a_file_that_was_sent_stays_where_it_was(place: Place, tmp_path: Path) -> None:
    """Its directory may be on another filesystem, and another attempt may need it."""
    source = tmp_path / "written"
    source.write_bytes(b"a shard")

    trees.send(str(source), place, size_bytes=7, nonce="n", token=RecordingToken())

    assert source.read_bytes() == b"a shard"
    assert place.fs.cat_file(place.path) == b"a shard"


def test_a_copy_that_is_not_published_is_removed(tmp_path: Path) -> None:
    """A shard for each attempt, under a name that nobody looks at, would fill the disk."""
    source = tmp_path / "written"
    source.write_bytes(b"a shard")
    target = tmp_path / "run" / "a.ckpt"
    (target / "in the way").mkdir(parents=True)
    place = Storage({}, spool=lambda: str(tmp_path)).place(str(target))

    with pytest.raises(OSError, match=r"a\.ckpt"):
        trees.send(str(source), place, size_bytes=7, nonce="n", token=RecordingToken())

    assert [path.name for path in target.parent.iterdir()] == ["a.ckpt"]
