# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every damage of a checkpoint is found, on every kind of storage, with and without a manifest."""

from __future__ import annotations

import io
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash

from lightning_resilience.adapters import verifying
from lightning_resilience.adapters.manifests import write_manifest
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.trees import digest_of_open
from lightning_resilience.adapters.verifying import Verification
from lightning_resilience.core.manifest import Origin, manifest_of, manifest_path
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.verification import Finding
    from tests.s3_server import S3Server


def archive(value: int = 1) -> bytes:
    """Return a checkpoint as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save({"weights": torch.full((2000,), value), "global_step": value}, buffer)
    return buffer.getvalue()


class Directory:
    """A directory of checkpoints somewhere.

    Args:
        storage: Clients of its storage.
        url: Where it is.
    """

    def __init__(self, storage: Storage, url: str) -> None:
        self.storage, self.url = storage, url
        self.place = storage.place(url)

    def put(self, name: str, data: bytes) -> None:
        """Write one file."""
        path = f"{self.place.path}/{name}"
        if self.place.store.is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.place.fs.pipe_file(path, data)

    def save(self, name: str, *, step: int = 1, data: bytes | None = None) -> None:
        """Write a checkpoint of one file, and its manifest."""
        self.save_all(name, {"": archive(step) if data is None else data}, step=step)

    def save_all(self, name: str, files: dict[str, bytes], *, step: int | None = None) -> None:
        """Write a checkpoint of several files, and its manifest."""
        contents = {}
        for below, data in files.items():
            self.put(f"{name}/{below}" if below else name, data)
            contents[below] = (len(data), f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}")
        place = self.storage.place(f"{self.url}/{name}")
        manifest = manifest_of(place.path, contents, Origin(step=step))
        write_manifest(place, manifest, nonce=uuid.uuid4().hex, token=RecordingToken())

    def remove(self, name: str) -> None:
        """Remove one file."""
        self.place.fs.rm_file(f"{self.place.path}/{name}")

    def verify(self, *, is_quick: bool = False, token: Any = None) -> list[Finding]:
        """Look at all of it."""
        return Verification(
            self.storage,
            self.url,
            token or RecordingToken(),
            is_quick=is_quick,
            run=lambda function: function(),
        ).findings()

    def states(self, *, is_quick: bool = False) -> dict[str, str]:
        """Return the state of each checkpoint by its name, the newest first."""
        return {item.name: item.state.value for item in self.verify(is_quick=is_quick)}


@pytest.fixture
def spool(tmp_path: Path) -> Callable[[], str]:
    """The node's directory for staged files."""
    (tmp_path / "spool").mkdir()
    return lambda: str(tmp_path / "spool")


@pytest.fixture
def local(tmp_path: Path, spool: Callable[[], str]) -> Directory:
    """A directory on a filesystem that nothing is in."""
    return Directory(Storage({}, spool=spool), f"{tmp_path}/run")


@pytest.fixture
def memory(spool: Callable[[], str]) -> Directory:
    """One in storage that is no filesystem, and near."""
    return Directory(Storage({}, spool=spool), f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def far(s3_server: S3Server, spool: Callable[[], str]) -> Directory:
    """One in object storage."""
    storage = Storage(s3_server.storage_options, spool=spool)
    return Directory(storage, f"s3://{s3_server.new_bucket()}/run")


@pytest.fixture(params=["local", "memory"])
def near(request: pytest.FixtureRequest) -> Directory:
    """A directory without a network."""
    found: Directory = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["local", "memory", "far"])
def directory(request: pytest.FixtureRequest, s3_server: S3Server) -> Directory:
    """A directory on each kind of storage."""
    # Named above, so that the session's server starts before the test's threads are counted.
    del s3_server
    found: Directory = request.getfixturevalue(request.param)
    return found


def flip(data: bytes, position: int) -> bytes:
    """Return ``data`` with one bit changed."""
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated by a byte": lambda data: data[:-1],
    "truncated to a half": lambda data: data[: len(data) // 2],
    "truncated to two bytes": lambda data: data[:2],
    "empty": lambda _data: b"",
    "zero-filled": lambda data: bytes(len(data)),
    "zero-filled at its end": lambda data: data[:-500] + bytes(500),
    "a bit in the first byte": lambda data: flip(data, 0),
    "a bit in the pickle": lambda data: flip(data, data.index(b"global_step")),
    "a bit in a tensor": lambda data: flip(data, data.index(archive()[5000:5100]) + 50),
    "a bit in the table": lambda data: flip(data, data.index(b"PK\x01\x02") + 20),
    "a bit in the last byte": lambda data: flip(data, len(data) - 1),
    "a page of HTML": lambda _data: b"<html><body>503 Service Unavailable</body></html>",
    "HTML of the same size": lambda data: b"<html>".ljust(len(data)),
    "appended bytes": lambda data: data + b"\0",
    "written twice": lambda data: data + data,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("described", [True, False], ids=["manifest", "no manifest"])
def test_damage_is_found(
    damage: Callable[[bytes], bytes], near: Directory, *, described: bool
) -> None:
    """Each kind, whether or not a manifest says what was saved; the others stay what they are."""
    check_damage(damage, near, described=described)


@pytest.mark.parametrize("name", ["truncated to a half", "a bit in a tensor", "a page of HTML"])
@pytest.mark.parametrize("described", [True, False], ids=["manifest", "no manifest"])
def test_damage_is_found_in_object_storage(name: str, far: Directory, *, described: bool) -> None:
    """Where every read is a request."""
    check_damage(DAMAGES[name], far, described=described)


def check_damage(
    damage: Callable[[bytes], bytes], directory: Directory, *, described: bool
) -> None:
    """Damage the newer of two checkpoints."""
    for step, name in ((1, "a.ckpt"), (2, "b.ckpt")):
        directory.save(name, step=step, data=archive())
        if not described:
            directory.remove(f".resilience/{name}.json")
    before = directory.states()

    directory.put("b.ckpt", damage(archive()))

    good = "verified" if described else "unverified"
    assert before == {"b.ckpt": good, "a.ckpt": good}
    assert directory.states() == {"b.ckpt": "corrupt", "a.ckpt": good}


def test_the_table_of_a_directory(directory: Directory) -> None:
    """Every state, the newest first; what is no checkpoint is not in it."""
    directory.save("step=1.ckpt", step=1)
    directory.save("step=2.ckpt", step=2)
    directory.put("step=2.ckpt", b"something else")
    directory.put("step=3.ckpt", archive(3))
    directory.save("step=4.ckpt", step=4)
    directory.remove("step=4.ckpt")
    directory.put(".resilience-77.staged", b"half")
    directory.put("hparams.yaml", b"lr: 1")
    directory.put("logs/events", b"")
    directory.save("weights.bin", step=0)

    found = directory.verify()

    assert [(item.name, item.state.value, item.step) for item in found] == [
        ("step=3.ckpt", "unverified", 3),
        ("step=2.ckpt", "corrupt", 2),
        ("step=1.ckpt", "verified", 1),
        ("weights.bin", "verified", 0),
        ("step=4.ckpt", "orphan", 4),
        (".resilience-77.staged", "orphan", None),
    ]
    assert found[2].size_bytes == len(archive())
    assert found[2].modified_s is not None
    assert "14 bytes" in found[1].reason


SHARDED = {
    ".metadata": b"which shard holds what",
    "__0_0.distcp": archive() + archive(2),
    "__1_0.distcp": archive(3),
    "meta.pt": archive(4),
}


def test_a_sharded_checkpoint_is_verified_file_by_file(directory: Directory) -> None:
    """Its manifest has a digest for each."""
    directory.save_all("a.ckpt", SHARDED, step=7)

    (found,) = directory.verify()

    assert (found.state.value, found.step) == ("verified", 7)
    assert found.size_bytes == sum(map(len, SHARDED.values()))


@pytest.mark.parametrize("name", ["__1_0.distcp", "meta.pt"])
def test_a_shard_that_is_missing_or_changed_is_named(name: str, directory: Directory) -> None:
    """Its checkpoint is corrupt; one that grew a file is too."""
    directory.save_all("a.ckpt", SHARDED)
    directory.put(f"a.ckpt/{name}", flip(SHARDED[name], 1000))
    (changed,) = directory.verify()
    directory.remove(f"a.ckpt/{name}")
    (missing,) = directory.verify()
    directory.put(f"a.ckpt/{name}", SHARDED[name])
    directory.put("a.ckpt/__9_0.distcp", b"of another job")
    (grown,) = directory.verify()

    assert {item.state.value for item in (changed, missing, grown)} == {"corrupt"}
    assert f"{name} has the digest" in changed.reason
    assert f"{name} is missing" in missing.reason
    assert "__9_0.distcp was not there" in grown.reason


def test_a_sharded_checkpoint_without_a_manifest_is_looked_at(directory: Directory) -> None:
    """As far as its files are archives; shards without metadata are no checkpoint."""
    for name, data in SHARDED.items():
        directory.put(f"a.ckpt/{name}", data)
    (good,) = directory.verify()
    directory.put("a.ckpt/__1_0.distcp", flip(SHARDED["__1_0.distcp"], 1000))
    (damaged,) = directory.verify()
    directory.remove("a.ckpt/meta.pt")
    (unfinished,) = directory.verify()

    assert good.state.value == "unverified"
    assert damaged.state.value == "corrupt"
    assert damaged.reason.startswith("__1_0.distcp is damaged")
    assert unfinished.state.value == "corrupt"
    assert "its save has not ended" in unfinished.reason


def test_a_quick_look_compares_sizes_only(directory: Directory) -> None:
    """It reads nothing through, so it calls nothing verified."""
    directory.save("step=1.ckpt", step=1)
    directory.put("step=1.ckpt", flip(archive(1), 5000))
    directory.save("step=2.ckpt", step=2)
    directory.put("step=2.ckpt", archive(2)[:-1])
    directory.put("step=3.ckpt", flip(archive(3), 5000))
    directory.put("step=4.ckpt", archive(4)[:-1])

    assert directory.states(is_quick=True) == {
        "step=4.ckpt": "corrupt",
        "step=3.ckpt": "unverified",
        "step=2.ckpt": "corrupt",
        "step=1.ckpt": "unverified",
    }
    assert set(directory.states().values()) == {"corrupt"}


def test_a_format_that_nobody_knows_stays_loadable(directory: Directory) -> None:
    """It is not corrupt for being another's; with a manifest it is verified as any."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(9)}, buffer, _use_new_zipfile_serialization=False)
    directory.put("legacy.ckpt", buffer.getvalue())
    directory.put("foreign.ckpt", 900 * b"weights")
    directory.save("known.ckpt", data=900 * b"weights")

    assert directory.states() == {
        "known.ckpt": "verified",
        "legacy.ckpt": "unverified",
        "foreign.ckpt": "unverified",
    }


def test_a_manifest_that_cannot_be_read_is_said(directory: Directory) -> None:
    """It cannot be told what was saved, and a load refuses it."""
    directory.save("a.ckpt")
    directory.put(".resilience/a.ckpt.json", b"{}")

    (found,) = directory.verify()

    assert found.state.value == "corrupt"
    assert "does not decode" in found.reason


def test_kept_listings_and_sizes_are_not_believed(
    s3_server: S3Server, spool: Callable[[], str]
) -> None:
    """A user may have switched them on: what another process has changed since is seen."""
    bucket = s3_server.new_bucket()
    options = {**s3_server.storage_options, "use_listings_cache": True}
    directory = Directory(Storage(options, spool=spool), f"s3://{bucket}/run")
    directory.put("step=1.ckpt", archive(1))
    directory.put("step=2.ckpt", archive(2))
    assert directory.states() == {"step=2.ckpt": "unverified", "step=1.ckpt": "unverified"}
    directory.place.fs.ls(directory.place.path)

    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="run/step=1.ckpt", Body=archive(1)[:-9])
    client.delete_object(Bucket=bucket, Key="run/step=2.ckpt")
    client.put_object(Bucket=bucket, Key="run/step=3.ckpt", Body=archive(3))

    assert directory.states() == {"step=3.ckpt": "unverified", "step=1.ckpt": "corrupt"}


def test_a_kept_listing_of_shards_is_not_believed(
    s3_server: S3Server, spool: Callable[[], str]
) -> None:
    """Nor is the mark of a folder, which some programs make, a checkpoint in that folder."""
    bucket = s3_server.new_bucket()
    options = {**s3_server.storage_options, "use_listings_cache": True}
    directory = Directory(Storage(options, spool=spool), f"s3://{bucket}/run.ckpt")
    directory.save_all("a.ckpt", {**SHARDED, "more/0.pt": archive(), "more/1.pt": archive()})
    assert directory.states(is_quick=True) == {"a.ckpt": "unverified"}

    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="run.ckpt/")
    client.delete_object(Bucket=bucket, Key="run.ckpt/a.ckpt/more/1.pt")
    (found,) = directory.verify(is_quick=True)

    assert found.name == "a.ckpt"
    assert "more/1.pt is missing" in found.reason


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_storage_that_cannot_tell_is_an_error(directory: Directory, *, is_quick: bool) -> None:
    """Nothing is called corrupt because it could not be read."""
    directory.put("a.ckpt", archive())
    fs = directory.place.fs

    def reset(*_args: Any, **_kwargs: Any) -> Any:
        raise ConnectionResetError("in the middle")

    for name in ("ls", "info", "cat_file", "open"):
        with pytest.MonkeyPatch.context() as failing:
            failing.setattr(fs, name, reset)
            with pytest.raises(ConnectionResetError):
                directory.verify(is_quick=is_quick)

    assert directory.states() == {"a.ckpt": "unverified"}


def test_shards_that_cannot_be_listed_are_not_missing(
    near: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a checkpoint corrupt for it."""
    near.save_all("a.ckpt", {**SHARDED, "more/0.pt": archive()})
    list_one = near.place.fs.ls

    def refuse(path: str, **options: Any) -> Any:
        if path.endswith("more"):
            raise PermissionError("Access Denied")
        return list_one(path, **options)

    monkeypatch.setattr(near.place.fs, "ls", refuse)

    with pytest.raises(PermissionError):
        near.verify()


def test_a_directory_that_is_not_there_is_an_error(directory: Directory, local: Directory) -> None:
    """Whoever misspelt it does not learn that there are no checkpoints."""
    with pytest.raises(FileNotFoundError, match="no such directory"):
        directory.verify()

    local.put("a.ckpt", archive())
    with pytest.raises(NotADirectoryError, match="directory that it is in"):
        Directory(local.storage, f"{local.url}/a.ckpt").verify()


def test_a_link_to_nothing_is_corrupt(local: Directory) -> None:
    """A link to a checkpoint is one."""
    local.put("a.ckpt", archive())
    Path(local.url, "last.ckpt").symlink_to("a.ckpt")
    Path(local.url, "z.ckpt").symlink_to("gone.ckpt")

    found = {item.name: item for item in local.verify()}

    assert found["last.ckpt"].state.value == "unverified"
    assert found["z.ckpt"].state.value == "corrupt"
    assert "link to gone.ckpt" in found["z.ckpt"].reason


@pytest.mark.parametrize("kind", ["pipe", "links in a circle"])
def test_what_is_no_file_is_corrupt_and_the_others_are_looked_at(
    kind: str, local: Directory
) -> None:
    """To open a pipe would wait for ever for whoever writes."""
    local.save("a.ckpt")
    odd = Path(f"{local.place.path}/odd.ckpt")
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(odd.name)

    found = {each.name: each for each in local.verify()}

    assert found["a.ckpt"].state == "verified"
    assert found["odd.ckpt"].state == "corrupt"
    assert "no file that can be read" in found["odd.ckpt"].reason


def test_what_is_removed_meanwhile_is_not_there(
    local: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may keep its newest only, while somebody looks."""
    local.save("a.ckpt", step=1)
    local.save("b.ckpt", step=2)
    read = digest_of_open

    def removing(file: Any, token: Any) -> tuple[int, str]:
        local.storage.remove(f"{local.url}/a.ckpt", RecordingToken())
        return read(file, token)

    local.put("a.ckpt", b"half of it")
    monkeypatch.setattr(verifying, "digest_of_open", removing)

    assert local.states() == {"b.ckpt": "verified"}


@pytest.mark.parametrize("described", [True, False], ids=["manifest", "no manifest"])
def test_what_is_written_meanwhile_is_looked_at_again(
    local: Directory, monkeypatch: pytest.MonkeyPatch, *, described: bool
) -> None:
    """A half that was seen of it is no damage."""
    name = "digest_of_open" if described else "examine"
    read = getattr(verifying, name)
    local.save("a.ckpt", step=1)
    if not described:
        local.remove(".resilience/a.ckpt.json")

    def saving(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(verifying, name, read)
        seen = read(*args, **options)
        if described:
            local.save("a.ckpt", step=2)
        else:
            local.put("a.ckpt", archive(2))
        return seen

    local.put("a.ckpt", b"PK\x03\x04 half of it")
    monkeypatch.setattr(verifying, name, saving)

    assert local.states() == {"a.ckpt": "verified" if described else "unverified"}


def test_what_never_settles_is_called_neither(
    local: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at three times, and the reason says why no more is known."""
    local.save("a.ckpt", step=1)
    read, steps = digest_of_open, iter(range(2, 99))

    def saving(file: Any, token: Any) -> tuple[int, str]:
        size, _ = read(file, token)
        local.save("a.ckpt", step=next(steps))
        return size, f"xxh3-128:{'0' * 32}"

    monkeypatch.setattr(verifying, "digest_of_open", saving)

    (found,) = local.verify()

    assert found.state.value == "unverified"
    assert "all 3 times" in found.reason
    assert next(steps) == 5


def test_nothing_is_changed(local: Directory, tmp_path: Path) -> None:
    """Neither a checkpoint nor a manifest nor what a save has left."""
    local.save("a.ckpt")
    local.put("b.ckpt", b"")
    local.put(".resilience-1.staged", b"half")
    local.save("c.ckpt")
    local.remove("c.ckpt")
    shutil.copytree(local.url, tmp_path / "copy")

    local.verify()

    def content(root: Path) -> dict[str, bytes]:
        files = (item for item in root.rglob("*") if item.is_file())
        return {item.relative_to(root).as_posix(): item.read_bytes() for item in files}

    assert content(Path(local.url)) == content(tmp_path / "copy")
    assert manifest_path("a.ckpt") in content(Path(local.url))


def test_a_long_look_marks_its_progress(directory: Directory) -> None:
    """Whether it reads a checkpoint with or without a manifest."""
    directory.save("a.ckpt", step=1)
    one, both = RecordingToken(), RecordingToken()
    directory.verify(token=one)
    directory.put("b.ckpt", archive())
    directory.verify(token=both)

    assert both.marks > one.marks > 2
