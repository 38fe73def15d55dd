# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A damaged checkpoint is found out before any tensor is made of it: every damage, everywhere."""

from __future__ import annotations

import io
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters import staging
from lightning_resilience.adapters.lightning import loading
from lightning_resilience.adapters.lightning.discovery import inspect
from lightning_resilience.adapters.lightning.loading import TorchLoad, on_cpu
from lightning_resilience.adapters.manifests import write_manifest
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.trees import digest_of_open
from lightning_resilience.core.manifest import Origin, manifest_of, manifest_path
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import CheckpointError, CorruptCheckpointError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.adapters.storage import Place
    from lightning_resilience.core.resolution import Inspection


def _flipped(data: bytes) -> bytes:
    """Flip one bit of a tensor: no structure, no length and no checksum of the table differs."""
    place = data.index(MARK)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


VALUES = torch.full((1000,), 3.0)
MARK = VALUES.numpy().tobytes()[:64]
PAGE = b"<html><body>503 Service Unavailable</body></html>"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "empty": lambda _data: b"",
    "zero-filled": lambda data: bytes(len(data)),
    "a zero-filled end": lambda data: data[:-4096] + bytes(4096),
    "one flipped bit": _flipped,
    "a page of HTML": lambda _data: PAGE,
    "longer": lambda data: data + b"more",
}

PLACES = ("file", "memory://")


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """Clients, with a cache of their own."""
    storage = Storage({}, spool=lambda: str(tmp_path / "spool"))
    yield storage
    storage.place("memory://").fs.store.clear()


@pytest.fixture(autouse=True)
def _no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded."""

    def load(*_args: object, **_options: object) -> None:
        pytest.fail("torch.load was called")

    monkeypatch.setattr(torch, "load", load)


def saved(step: int = 4) -> bytes:
    """Return the bytes of a good checkpoint."""
    buffer = io.BytesIO()
    torch.save({"values": VALUES, "step": step}, buffer)
    return buffer.getvalue()


def put(storage: Storage, where: str, data: bytes, *, tmp_path: Path, described: bool) -> str:
    """Put a good checkpoint somewhere; return its URL."""
    url = str(tmp_path / "a.ckpt") if where == "file" else "memory://b/a.ckpt"
    place = storage.place(url)
    place.fs.pipe_file(place.path, data)
    if described:
        contents = {"": digest_of_open(io.BytesIO(data), RecordingToken())}
        manifest = manifest_of(place.path, contents, Origin(step=4))
        write_manifest(place, manifest, nonce="m", token=RecordingToken())
    return url


def damage(place: Place, how: str) -> None:
    """Damage it."""
    place.fs.pipe_file(place.path, DAMAGES[how](place.fs.cat_file(place.path)))


def load(storage: Storage, url: str, *, expected: Inspection | None = None) -> Any:
    """Load it as a rank of a job does."""
    numbers = count()
    work = TorchLoad(
        storage,
        url,
        nonce=lambda: f"n{next(numbers)}",
        options={"map_location": on_cpu, "weights_only": True},
        expected=expected,
        common="1",
    )
    try:
        work.prepare(RecordingToken())
        path = work.attempt(RecordingToken())
        return work.finish(path, RecordingToken())
    finally:
        work.close()


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("described", [True, False], ids=["manifest", "no manifest"])
def test_a_damaged_checkpoint_is_refused(
    described: bool,  # noqa: FBT001 - a parameter
    where: str,
    how: str,
    storage: Storage,
    tmp_path: Path,
) -> None:
    """By its manifest, or by the checksums that it has itself; nobody has looked before."""
    url = put(storage, where, saved(), tmp_path=tmp_path, described=described)
    damage(storage.place(url), how)

    with pytest.raises(CorruptCheckpointError):
        load(storage, url)

    cached = list((tmp_path / "spool").rglob("*.ckpt"))
    assert cached == []


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("described", [True, False], ids=["manifest", "no manifest"])
def test_what_has_suffered_since_rank_zero_looked_is_refused(
    described: bool,  # noqa: FBT001 - a parameter
    where: str,
    how: str,
    storage: Storage,
    tmp_path: Path,
) -> None:
    """On its way, or where it is: it is not what all ranks have agreed on."""
    url = put(storage, where, saved(), tmp_path=tmp_path, described=described)
    seen = inspect(storage, RecordingToken(), url=url)
    damage(storage.place(url), how)

    with pytest.raises((CorruptCheckpointError, OSError)) as caught:
        load(storage, url, expected=seen)

    # A bit of a tensor shows in no table of contents: that is its checksum's to find. A manifest
    # shows all.
    is_damage = described or how == "one flipped bit"
    assert isinstance(caught.value, CorruptCheckpointError) is is_damage


@pytest.mark.parametrize("manifest", ["of the newer one", "none"])
def test_one_that_was_saved_since_rank_zero_looked_is_not_taken(
    manifest: str, storage: Storage, tmp_path: Path
) -> None:
    """It is as long and as good, and another one; a later look may find the chosen one."""
    url = put(storage, "memory://", saved(), tmp_path=tmp_path, described=True)
    seen = inspect(storage, RecordingToken(), url=url)
    place = storage.place(url)
    newer = saved(5)
    assert (len(newer), seen.digest) == (seen.size_bytes, "")
    put(storage, "memory://", newer, tmp_path=tmp_path, described=True)
    if manifest == "none":
        place.fs.rm_file(manifest_path(place.path))

    with pytest.raises(OSError, match="not the checkpoint that rank 0 has chosen") as caught:
        fetched(storage, seen, common="1")

    assert classify(caught.value, reading=True).failure is FailureClass.TRANSIENT
    assert list((tmp_path / "spool").rglob("*.ckpt")) == []
    put(storage, "memory://", saved(), tmp_path=tmp_path, described=True)
    assert fetched(storage, seen, common="2").read_bytes() == saved()


def test_a_copy_of_an_older_one_of_that_name_and_length_is_not_taken(
    storage: Storage, tmp_path: Path
) -> None:
    """Each has a name of its own in the cache."""
    copies = {}
    for step in (4, 5):
        url = put(storage, "memory://", saved(step), tmp_path=tmp_path, described=True)
        seen = inspect(storage, RecordingToken(), url=url)
        copies[step] = fetched(storage, seen, common=str(step))

    assert {step: path.read_bytes() for step, path in copies.items()} == {
        4: saved(4),
        5: saved(5),
    }


def fetched(storage: Storage, seen: Inspection, *, common: str) -> Path:
    """Fetch it for one load, and return where it is on the node."""
    numbers = count()
    work = TorchLoad(
        storage,
        seen.path,
        nonce=lambda: f"n{common}-{next(numbers)}",
        options={"map_location": on_cpu, "weights_only": True},
        expected=seen,
        common=common,
    )
    try:
        work.prepare(RecordingToken())
        return Path(work.attempt(RecordingToken()))
    finally:
        work.close()


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("described", [True, False], ids=["manifest", "no manifest"])
def test_what_the_disk_of_a_node_has_changed_is_fetched_again(
    described: bool,  # noqa: FBT001 - a parameter
    how: str,
    storage: Storage,
    tmp_path: Path,
) -> None:
    """What an earlier start has left was good then, and is read through before it is used."""
    url = put(storage, "memory://", saved(), tmp_path=tmp_path, described=described)
    seen = inspect(storage, RecordingToken(), url=url)
    copy = fetched(storage, seen, common="1")
    copy.write_bytes(DAMAGES[how](copy.read_bytes()))

    again = fetched(storage, seen, common="2")

    assert again == copy
    assert again.read_bytes() == saved()


@pytest.mark.parametrize("described", [True, False], ids=["manifest", "no manifest"])
def test_what_an_earlier_start_has_left_is_not_fetched_again(
    described: bool,  # noqa: FBT001 - a parameter
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is what it was, the storage is asked for none of it."""
    url = put(storage, "memory://", saved(), tmp_path=tmp_path, described=described)
    seen = inspect(storage, RecordingToken(), url=url)
    copy = fetched(storage, seen, common="1")

    def refuse(*_args: object, **_options: object) -> None:
        pytest.fail("it was fetched again")

    monkeypatch.setattr(storage.place(url).fs, "open", refuse)

    assert fetched(storage, seen, common="2") == copy


def test_a_reader_that_was_taken_over_does_not_miss_the_checkpoint(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy was removed by another reader: that passes, and is not what storage has said."""
    url = put(storage, "memory://", saved(), tmp_path=tmp_path, described=False)
    seen = inspect(storage, RecordingToken(), url=url)

    def lose(write: Any, path: str, token: Any) -> Any:
        staged = staging.stage(write, path, token)
        Path(path).unlink()
        return staged

    monkeypatch.setattr(loading, "stage", lose)

    with pytest.raises(OSError, match="another reader has taken over") as caught:
        fetched(storage, seen, common="1")

    assert classify(caught.value, reading=True).failure is FailureClass.TRANSIENT


@pytest.mark.parametrize("common", ["1", ""])
def test_a_local_file_that_is_replaced_after_its_check_is_not_what_is_loaded(
    common: str, storage: Storage, tmp_path: Path
) -> None:
    """A process of an earlier start that still lives may save under the same name."""
    url = put(storage, "file", saved(), tmp_path=tmp_path, described=True)
    seen = inspect(storage, RecordingToken(), url=url)
    options = {"map_location": on_cpu, "weights_only": True}
    work = TorchLoad(storage, url, nonce=lambda: "n", options=options, expected=seen, common=common)
    work.attempt(RecordingToken())
    work.confirm()
    newer = tmp_path / "newer"
    newer.write_bytes(saved())
    newer.replace(url)

    with pytest.raises(OSError, match="replaced after it had been checked"):
        work.confirm()
    work.close()


@pytest.mark.parametrize("stale", [-10, 10])
def test_a_stale_size_is_found_out(
    stale: int, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing that was kept says another length than arrives; that is asked again."""
    data = saved()
    url = put(storage, "memory://", data, tmp_path=tmp_path, described=False)
    fs = storage.place(url).fs
    info = fs.info

    def remembered(path: str, **options: Any) -> Any:
        return {**info(path, **options), "size": len(data) + stale}

    monkeypatch.setattr(fs, "info", remembered)

    with pytest.raises(CheckpointError, match="arrived, but it has") as caught:
        load(storage, url)

    assert not isinstance(caught.value, CorruptCheckpointError)
