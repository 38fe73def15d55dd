# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked of storage to find a checkpoint: yes, no, or an exception."""

from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_resilience.adapters.lightning.discovery import inspect, look_for, search
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.resolution import Inspection, best_first, last_name
from tests import faulty_filesystem
from tests.faulty_filesystem import VARIABLE, FaultPlan, Rule
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightning_resilience.core.resolution import Found
    from tests.s3_server import S3Server


LAST = last_name("last", ".ckpt")


def checkpoint() -> bytes:
    """Return a small checkpoint."""
    buffer = io.BytesIO()
    torch.save({"step": 2}, buffer)
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

    assert seen == Inspection(path=f"{tmp_path}/last.ckpt")


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
