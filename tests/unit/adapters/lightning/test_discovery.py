# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked of storage to find a checkpoint: yes, no, or an exception."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

from lightning_resilience.adapters.lightning import discovery
from lightning_resilience.adapters.lightning.discovery import inspect, look_for, search, verify
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.candidates import best_first
from lightning_resilience.core.manifest import (
    Origin,
    encode_manifest,
    manifest_of,
    manifest_path,
)
from lightning_resilience.core.resolution import Inspection, last_name
from tests import faulty_filesystem
from tests.faulty_filesystem import VARIABLE, FaultPlan, Rule
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.core.resolution import Found
    from tests.s3_server import S3Server


LAST = last_name("last", ".ckpt")


def checkpoint(note: str = "") -> bytes:
    """Return a small checkpoint."""
    buffer = io.BytesIO()
    torch.save({"step": 2, "note": note * 100}, buffer)
    return buffer.getvalue()


def storage(**options: Any) -> Storage:
    """Clients of storage."""
    return Storage(options, spool=lambda: "/nowhere")


def listing(clients: Storage, directory: str) -> Found:
    """Search a directory for last checkpoints."""
    return search(clients, RecordingToken(), directory=directory, pattern=LAST, extension=".ckpt")


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of fsspec's memory."""
    yield "memory://found"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Make a folder with a checkpoint on storage with these faults."""
    faulty_filesystem.register()

    def make(*rules: Rule) -> str:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "last.ckpt").write_bytes(checkpoint())
        monkeypatch.setenv(VARIABLE, str(FaultPlan.write(tmp_path / "plan", *rules).folder))
        return f"faulty://{folder}"

    return make


def test_a_remote_name_keeps_its_protocol(memory: str) -> None:
    """What is found can be opened by its name alone."""
    with fsspec.open(f"{memory}/last.ckpt", "wb") as file:
        file.write(checkpoint())

    found = listing(storage(), f"{memory}/")

    assert [candidate.url for candidate in found.candidates] == [f"{memory}/last.ckpt"]
    assert found.candidates[0].modified_s is not None
    assert abs(found.candidates[0].modified_s - time.time()) < 3600


def test_a_local_path_stays_a_path(tmp_path: Path) -> None:
    """Newest first, by the time at which each was written."""
    for age, name in enumerate(["last.ckpt", "last-v1.ckpt", "other.ckpt"]):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))

    found = listing(storage(), str(tmp_path))

    assert [candidate.url for candidate in best_first(found.candidates)] == [
        f"{tmp_path}/last.ckpt",
        f"{tmp_path}/last-v1.ckpt",
    ]
    assert found.others == ("other.ckpt",)


@pytest.mark.parametrize("where", ["memory://never/made", "{tmp_path}/never/made"])
def test_a_directory_that_is_not_there_is_empty(where: str, tmp_path: Path) -> None:
    """A first run is no error."""
    found = listing(storage(), where.format(tmp_path=tmp_path))

    assert (found.candidates, found.other_count) == ((), 0)


def test_objects_are_listed_past_the_clients_own_listing(s3_server: S3Server, bucket: str) -> None:
    """What another client has written since is found, with its time and the bucket's name."""
    clients = storage(**s3_server.storage_options)
    directory = f"s3://{bucket}/run"
    assert listing(clients, directory).candidates == ()
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="run/other.ckpt", Body=b"x")
    assert listing(clients, directory).other_count == 1

    client.put_object(Bucket=bucket, Key="run/last.ckpt", Body=checkpoint())
    found = listing(clients, directory)

    assert [candidate.url for candidate in found.candidates] == [f"{directory}/last.ckpt"]
    assert found.candidates[0].modified_s is not None
    seen = inspect(clients, RecordingToken(), url=found.candidates[0].url)
    assert (seen.rejected, seen.size_bytes) == ("", len(checkpoint()))
    assert seen.digest


@pytest.mark.parametrize("operation", ["info", "ls"])
@pytest.mark.parametrize("error", ["reset", "denied", "odd"])
def test_storage_that_cannot_tell_is_not_empty(
    operation: str, error: str, faulty: Callable[..., str]
) -> None:
    """Any error but the word that nothing is there is raised."""
    directory = faulty(Rule(operations=(operation,), error=error))

    with pytest.raises((OSError, RuntimeError)):
        listing(storage(), directory)


def test_one_file_is_asked_for(tmp_path: Path) -> None:
    """What an exception has saved has one name; there, or not there."""
    path = tmp_path / "on_exception.ckpt"
    absent = look_for(storage(), RecordingToken(), url=str(path))
    path.write_bytes(b"x")
    present = look_for(storage(), RecordingToken(), url=str(path))

    assert absent.candidates == ()
    assert [candidate.url for candidate in present.candidates] == [str(path)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (checkpoint()[:-100], "damaged or was not written to its end"),
        (checkpoint(), ""),
        (b"in a format of its own", ""),
    ],
    ids=["empty", "cut off", "whole", "another format"],
)
def test_a_look_inside_tells_what_is_damaged(data: bytes, why: str, tmp_path: Path) -> None:
    """Only what is known to be damaged is rejected, and it stays where it is."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(data)

    seen = inspect(storage(), RecordingToken(), url=str(path))

    assert why in seen.rejected
    assert bool(why) == bool(seen.rejected)
    assert (seen.path, seen.size_bytes) == (str(path), len(data))
    assert path.read_bytes() == data


@pytest.mark.parametrize("names", [(".metadata", "meta.pt"), ("latest",)])
def test_a_directory_with_its_metadata_is_a_checkpoint(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """Strategies whose ranks all write make such a directory, and its size is nobody's."""
    (tmp_path / "last.ckpt").mkdir()
    for name in names:
        (tmp_path / "last.ckpt" / name).touch()

    seen = inspect(storage(), RecordingToken(), url=f"{tmp_path}/last.ckpt")

    assert seen == Inspection(path=f"{tmp_path}/last.ckpt", is_resumable=True)


def test_a_directory_without_its_metadata_is_rejected(tmp_path: Path) -> None:
    """An older checkpoint is better than one whose save has not ended."""
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / ".metadata").touch()

    seen = inspect(storage(), RecordingToken(), url=f"{tmp_path}/last.ckpt")

    assert "without the metadata of a checkpoint" in seen.rejected


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The storage's word, with the name."""
    with pytest.raises(FileNotFoundError, match=r"step=2\.ckpt"):
        inspect(storage(), RecordingToken(), url=str(tmp_path / "step=2.ckpt"))


@pytest.mark.parametrize("number", range(1, 6))
def test_a_read_that_fails_does_not_make_a_file_damaged(
    number: int, faulty: Callable[..., str]
) -> None:
    """``zipfile`` takes a failed read for the end of an archive; it cannot be told."""
    directory = faulty(Rule(operations=("read",), error="reset", first=number, last=number))

    with pytest.raises(ConnectionResetError):
        inspect(storage(), RecordingToken(), url=f"{directory}/last.ckpt")


# With its manifest --------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    """Return the same with one bit flipped, in the middle."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def saved(directory: str, contents: dict[str, bytes], **options: Any) -> str:
    """Write a checkpoint of these files, and its manifest; return its URL."""
    url = f"{directory}/last.ckpt"
    place = storage(**options).place(url)
    manifest = manifest_of(
        place.path,
        {name: (len(data), digest(data)) for name, data in contents.items()},
        Origin(),
    )
    files = {f"{place.path}/{name}".rstrip("/"): data for name, data in contents.items()}
    files[manifest_path(place.path)] = encode_manifest(manifest)
    for path, data in files.items():
        if place.store.is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        place.fs.pipe_file(path, data)
    return url


def digest(data: bytes) -> str:
    """Return a digest as a manifest has it."""
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def verified(url: str, *, is_ours: bool = True, is_doubted: bool = False) -> Inspection:
    """Look at a candidate."""
    return verify(storage(), RecordingToken(), url=url, is_ours=is_ours, is_doubted=is_doubted)


ASKED = {
    "described": {"manifest_cat_file": 1, "info": 1, "open": 0, "ls": 2},
    "doubted": {"manifest_cat_file": 1, "info": 2, "open": 2, "ls": 2},
    "undescribed": {"manifest_cat_file": 2, "info": 1, "open": 1, "ls": 1},
}
"""How often each is asked about a good checkpoint; about a sharded one for the last."""
SHARDS = {".metadata": b"m", "meta.pt": b"p", "__0_0.distcp": b"zero", "__1_0.distcp": b"one"}


def test_what_matches_its_manifest_is_good(tmp_path: Path) -> None:
    """It has no mark, so nobody moves it."""
    seen = verified(saved(str(tmp_path), {"": checkpoint()}))

    assert (seen.rejected, seen.mark) == ("", "")
    assert seen.digest


@pytest.mark.parametrize("is_ours", [True, False])
def test_one_flipped_bit_of_a_local_file_is_found(
    is_ours: bool,  # noqa: FBT001 - a column of the table
    tmp_path: Path,
) -> None:
    """Its size and its table of contents are as before; in a format of the user's, too."""
    url = saved(str(tmp_path), {"": checkpoint()})
    Path(url).write_bytes(flipped(checkpoint()))

    seen = verified(url, is_ours=is_ours)

    assert "not what its manifest says was saved: it has the digest" in seen.rejected
    assert seen.mark
    assert Path(url).read_bytes() == flipped(checkpoint())


def test_a_remote_file_is_compared_by_its_size(memory: str) -> None:
    """To read it through would fetch it twice: its digest is checked while it is fetched."""
    url = saved(memory, {"": b"in a format of its own"})
    fs = storage().place(url).fs
    fs.pipe_file("/found/last.ckpt", b"IN a format of its own")
    same_size = verified(url)
    fs.pipe_file("/found/last.ckpt", b"in another format of its own")
    another_size = verified(url)

    assert same_size.rejected == ""
    assert "it has 28 bytes, 22 were saved" in another_size.rejected
    assert another_size.mark


def test_a_remote_file_is_not_opened_where_its_manifest_stands_for_it(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a look at a path that was given, and at a candidate: what is in it the nodes will see."""
    data = checkpoint()
    url = saved(memory, {"": data})
    fs = storage().place(url).fs

    def refuse(*_args: object, **_options: object) -> None:
        pytest.fail("it was opened")

    monkeypatch.setattr(fs, "open", refuse)

    expected = Inspection(path=url, size_bytes=len(data), saved=digest(data), is_committed=True)
    assert inspect(storage(), RecordingToken(), url=url) == expected
    assert verified(url) == expected


def no_manifest(fs: Any) -> None:
    """Remove it."""
    fs.rm_file(manifest_path("/found/last.ckpt"))


def torn_manifest(fs: Any) -> None:
    """Leave the beginning of one."""
    fs.pipe_file(manifest_path("/found/last.ckpt"), b'{"v": 1, ')


def later_manifest(fs: Any) -> None:
    """Leave one of a version that nobody knows."""
    path = manifest_path("/found/last.ckpt")
    fs.pipe_file(path, fs.cat_file(path).replace(b'"v":1', b'"v":2'))


def another_size(fs: Any) -> None:
    """Write another checkpoint, with the manifest of the first."""
    fs.pipe_file("/found/last.ckpt", checkpoint("another one"))


@pytest.mark.parametrize("change", [no_manifest, torn_manifest, later_manifest, another_size])
def test_a_remote_file_is_opened_where_no_manifest_stands_for_it(
    change: Callable[[Any], None], memory: str
) -> None:
    """Its table of contents is what the nodes compare with then."""
    url = saved(memory, {"": checkpoint()})
    change(storage().place(url).fs)

    seen = inspect(storage(), RecordingToken(), url=url, also_state=True)

    assert seen.digest
    assert (seen.saved, seen.is_committed, seen.rejected) == ("", False, "")


def test_what_is_local_or_has_failed_to_load_is_opened(memory: str, tmp_path: Path) -> None:
    """Whatever its manifest says of its size."""
    remote = verified(saved(memory, {"": checkpoint()}), is_doubted=True)
    local = verified(saved(str(tmp_path), {"": checkpoint()}))

    for seen in (remote, local):
        assert seen.digest
        assert (seen.saved, seen.is_committed) == ("", True)


@pytest.mark.parametrize("is_described", [True, False])
@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_remote_file_that_has_failed_to_load_is_read_through(
    is_described: bool,  # noqa: FBT001 - a column of the table
    is_damaged: bool,  # noqa: FBT001 - a column of the table
    memory: str,
) -> None:
    """By its manifest, or by the checksums of its archive; what is whole may be loaded again."""
    url = saved(memory, {"": checkpoint()})
    place = storage().place(url)
    data = flipped(checkpoint()) if is_damaged else checkpoint()
    place.fs.pipe_file(place.path, data)
    if not is_described:
        place.fs.rm_file(manifest_path(place.path))

    seen = verified(url, is_doubted=True)

    assert (bool(seen.rejected), bool(seen.mark)) == (is_damaged, is_damaged)
    assert verified(url).rejected == ""
    assert place.fs.cat_file(place.path) == data


@pytest.mark.parametrize(("data", "said"), [(b"on3", "__1_0.distcp has the digest"), (b"one", "")])
def test_the_shards_of_one_that_has_failed_to_load_are_read_through(
    data: bytes, said: str, memory: str
) -> None:
    """What a user has put there besides does not make it damaged."""
    url = saved(memory, SHARDS)
    fs = storage().place(url).fs
    fs.pipe_file("/found/last.ckpt/__1_0.distcp", data)
    fs.pipe_file("/found/last.ckpt/notes.txt", b"a user's")

    seen = verified(url, is_doubted=True)

    assert said in seen.rejected
    assert bool(seen.rejected) == bool(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"notes.txt": b"a user's"}, ""),
        ({"__1_0.distcp": None}, "__1_0.distcp is missing"),
        ({"__1_0.distcp": b"on"}, "__1_0.distcp has 2 bytes, 3 were saved"),
        ({".metadata": None}, "without the metadata"),
    ],
    ids=["whole", "more", "missing", "shorter", "no metadata"],
)
def test_every_file_of_a_sharded_checkpoint_has_to_be_there(
    change: dict[str, bytes | None], said: str, tmp_path: Path
) -> None:
    """With its size; what somebody has put there besides does not matter."""
    url = saved(str(tmp_path), SHARDS)
    for name, data in change.items():
        path = Path(url, name)
        path.unlink() if data is None else path.write_bytes(data)

    seen = verified(url)

    assert said in seen.rejected
    assert bool(seen.rejected) == bool(said)
    assert bool(seen.mark) == bool(said)


def test_a_manifest_that_cannot_be_read_makes_its_checkpoint_damaged(tmp_path: Path) -> None:
    """It cannot be told whether that is what was saved."""
    url = saved(str(tmp_path), {"": checkpoint()})
    Path(manifest_path(url)).write_bytes(b'{"v": 1, ')

    seen = verified(url)

    assert "does not decode" in seen.rejected
    assert seen.mark


def test_a_torn_file_without_a_manifest_may_be_set_aside(tmp_path: Path) -> None:
    """Its own format shows that it is damaged."""
    (tmp_path / "last.ckpt").write_bytes(checkpoint()[:-100])

    assert verified(f"{tmp_path}/last.ckpt").mark


def test_a_directory_whose_save_may_be_under_way_is_only_passed_over(tmp_path: Path) -> None:
    """Another job may be writing its shards."""
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "__0_0.distcp").touch()

    seen = verified(f"{tmp_path}/last.ckpt")

    assert "without the metadata" in seen.rejected
    assert seen.mark == ""


def test_a_link_to_a_damaged_file_is_only_passed_over(tmp_path: Path) -> None:
    """The file has another name, and the link is replaced by the next save."""
    (tmp_path / "step=2.ckpt").write_bytes(checkpoint()[:-100])
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")

    seen = verified(f"{tmp_path}/last.ckpt")

    assert "it is damaged" in seen.rejected
    assert seen.mark == ""


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_link_to_nothing_is_passed_over(
    is_ours: bool,  # noqa: FBT001 - a column of the table
    tmp_path: Path,
) -> None:
    """Its file was set aside, or removed by a person; an older one is there to start from."""
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")

    seen = verified(f"{tmp_path}/last.ckpt", is_ours=is_ours)

    assert seen.rejected == "it is a link to step=2.ckpt, and nothing is there"
    assert seen.mark == ""
    assert (tmp_path / "last.ckpt").is_symlink()


def test_what_changes_while_it_is_looked_at_has_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody is writing it; it is passed over now, and stays."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"PK\x03\x04")
    inner = discovery.inspect

    def inspect_while_it_grows(*args: Any, **kwargs: Any) -> Inspection:
        seen = inner(*args, **kwargs)
        path.write_bytes(path.read_bytes() + b"more")
        return seen

    monkeypatch.setattr(discovery, "inspect", inspect_while_it_grows)

    seen = verified(str(path))

    assert "it is damaged" in seen.rejected
    assert seen.mark == ""


def test_what_is_good_when_it_is_looked_at_again_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of a network filesystem was out of date, or its save has ended just now."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(checkpoint()[:-100])
    inner = discovery.inspect

    def inspect_before_it_ends(*args: Any, **kwargs: Any) -> Inspection:
        seen = inner(*args, **kwargs)
        path.write_bytes(checkpoint())
        return seen

    monkeypatch.setattr(discovery, "inspect", inspect_before_it_ends)

    assert verified(str(path)).rejected == ""


@pytest.mark.parametrize("operation", ["manifest_cat_file", "info", "open", "ls"])
@pytest.mark.parametrize("number", range(1, 4))
@pytest.mark.parametrize("kind", ASKED)
def test_no_error_of_the_storage_makes_a_checkpoint_damaged(
    kind: str,
    operation: str,
    number: int,
    faulty: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is raised, wherever it comes, and asked again by who asks."""
    contents = SHARDS if operation == "ls" else {"": checkpoint()}
    url = saved(f"{faulty()}/{operation}", contents)
    if kind == "undescribed":
        Path(manifest_path(url.removeprefix("faulty://"))).unlink()
    rule = Rule(operations=(operation,), error="reset", first=number, last=number)
    plan = FaultPlan.write(tmp_path / "another-plan", rule)
    monkeypatch.setenv(VARIABLE, str(plan.folder))

    is_asked = number <= ASKED[kind][operation]
    with pytest.raises(ConnectionResetError) if is_asked else contextlib.nullcontext():
        assert verified(url, is_doubted=kind == "doubted").rejected == ""

    struck = [call for call in plan.calls(operation) if call["struck"]]
    assert len(struck) == is_asked
