# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Manifests beside real checkpoints: when they are written, removed, and believed."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters import manifests
from lightning_resilience.adapters.lightning.whose import Format
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.manifest import decode_manifest, difference, manifest_path
from lightning_resilience.errors import (
    CallTimeoutError,
    CheckpointError,
    CorruptCheckpointError,
)
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.adapters.storage import Place


CHECKPOINT: dict[str, Any] = {
    "global_step": 4,
    "epoch": 1,
    "pytorch-lightning_version": "2.6.6",
    "weights": torch.arange(1000),
}


class DirectoryIO:
    """A user's own format: one file for each entry."""

    def save_checkpoint(self, checkpoint: Any, path: str, storage_options: Any = None) -> None:
        """Write."""
        del storage_options
        Path(path).mkdir(parents=True)
        for name, value in checkpoint.items():
            torch.save(value, Path(path, name))

    def load_checkpoint(self, path: str, **_options: Any) -> Any:
        """Read."""
        return {item.name: torch.load(item) for item in Path(path).iterdir()}

    def remove_checkpoint(self, path: str) -> None:
        """Never needed."""


class Runs:
    """Saves, loads and removals of one checkpoint.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
        owner: Whose format it is; None for Lightning's.
        staging: Whether that is called with paths on this node.
    """

    def __init__(
        self, storage: Storage, url: str, *, owner: Any = None, staging: bool = True
    ) -> None:
        self.storage, self.url = storage, url
        self._format = Format(owner=owner, staging=staging)
        numbers = count()
        self._nonce = lambda: f"n{next(numbers)}"

    @property
    def place(self) -> Place:
        """Where the checkpoint is."""
        return self.storage.place(self.url)

    def save(self, checkpoint: Any = CHECKPOINT, token: Any = None) -> Any:
        """Save in one attempt."""
        token = token or RecordingToken()
        work = self._format.save(self.storage, self.url, checkpoint, nonce=self._nonce)
        try:
            work.prepare(token)
            return work.attempt(token)
        finally:
            work.close()

    def load(self) -> Any:
        """Load in one attempt."""
        work = self._format.load(
            self.storage, self.url, nonce=self._nonce, options={"weights_only": True}
        )
        try:
            return work.finish(work.attempt(RecordingToken()), RecordingToken())
        finally:
            work.close()

    def remove(self) -> None:
        """Remove in one attempt."""
        self._format.remove(self.storage, self.url).attempt(RecordingToken())

    def manifest(self) -> Any:
        """Return what the manifest says, None where there is none."""
        path = manifest_path(self.place.path)
        if not self.place.fs.exists(path):
            return None
        return decode_manifest(self.place.fs.cat_file(path), path=path)

    def damage(self, how: Callable[[bytes], bytes]) -> None:
        """Change the bytes of the checkpoint, or of one of its files."""
        fs, path = self.place.fs, self.place.path
        if fs.isdir(path):
            path = min(fs.find(path))
        fs.pipe_file(path, how(fs.cat_file(path)))


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A checkpoint on a filesystem, or in storage that is not one."""
    return {"local": f"{tmp_path}/run/a.ckpt", "memory": "memory://run/a.ckpt"}[request.param]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """Clients whose spool directory is the test's."""
    (tmp_path / "spool").mkdir()
    clients = Storage({}, spool=lambda: str(tmp_path / "spool"), run_id="run-7")
    yield clients
    clients.place("memory://").fs.store.clear()


@pytest.fixture(params=[None, DirectoryIO()], ids=["lightnings", "foreign"])
def runs(request: pytest.FixtureRequest, storage: Storage, url: str) -> Runs:
    """A checkpoint in each format on each storage."""
    return Runs(storage, url, owner=request.param)


def test_a_save_is_committed_by_what_it_wrote(runs: Runs) -> None:
    """The manifest says step, epoch, run, versions, size and digest."""
    done = runs.save()

    manifest = runs.manifest()
    assert (manifest.path, manifest.step, manifest.epoch) == ("a.ckpt", 4, 1)
    assert (manifest.run, manifest.versions["lightning"]) == ("run-7", "2.6.6")
    assert manifest.versions["torch"] == torch.__version__
    assert (manifest.size_bytes, manifest.digest) == (done.size_bytes, done.digest)


def test_what_matches_its_manifest_is_loaded(runs: Runs) -> None:
    """Verified, it is what was saved."""
    runs.save()

    assert torch.equal(runs.load()["weights"], CHECKPOINT["weights"])


def test_what_has_no_manifest_is_loaded_unverified(runs: Runs) -> None:
    """It may be older than manifests are, or written by another program."""
    runs.save()
    runs.place.store.unlink(manifest_path(runs.place.path))

    assert torch.equal(runs.load()["weights"], CHECKPOINT["weights"])


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (lambda data: data[:-1], "bytes"),
        (lambda _data: b"", "0 bytes"),
        (lambda data: bytes(len(data)), "digest"),
        (lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:], "digest"),
        (lambda _data: b"<html>busy</html>", "17 bytes"),
    ],
    ids=["truncated", "empty", "zeros", "one bit", "html"],
)
def test_damage_is_found_before_anything_is_loaded(
    how: Callable[[bytes], bytes], what: str, runs: Runs
) -> None:
    """Also where torch would not notice; the text says how to load it all the same."""
    runs.save()
    runs.damage(how)

    with pytest.raises(CorruptCheckpointError, match=what) as caught:
        runs.load()

    assert "remove" in str(caught.value)
    assert "a.ckpt.json" in str(caught.value)


def test_a_damaged_manifest_is_no_missing_one(runs: Runs) -> None:
    """It cannot be told what was saved."""
    runs.save()
    runs.place.fs.pipe_file(manifest_path(runs.place.path), b"{}")

    with pytest.raises(CorruptCheckpointError, match="does not decode"):
        runs.load()


def test_a_checkpoint_that_is_written_again_has_a_new_manifest(runs: Runs) -> None:
    """What is loaded matches it."""
    runs.save()
    before = runs.manifest()
    runs.save({**CHECKPOINT, "weights": torch.arange(1, 1001)})

    assert runs.manifest().digest != before.digest
    assert runs.load()["weights"][0] == 1


def test_the_old_manifest_goes_before_the_new_checkpoint_comes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the save ends in between, what is there has none, and is not taken for damaged."""
    runs.save()

    def die(*_args: Any, **_kwargs: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(manifests, "put", die)
    with pytest.raises(ConnectionResetError):
        runs.save({**CHECKPOINT, "weights": torch.arange(1, 1001)})

    assert runs.manifest() is None
    assert runs.load()["weights"][0] == 1


def test_a_manifest_that_failed_is_written_without_the_checkpoint(
    storage: Storage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published and verified is not sent once more."""
    runs = Runs(storage, url)
    work = Format().save(storage, url, CHECKPOINT, nonce=iter("abcdef").__next__)
    with monkeypatch.context() as failing:
        failing.setattr(manifests, "encode_manifest", lambda _manifest: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            work.attempt(RecordingToken())
    runs.place.fs.pipe_file(runs.place.path, b"not sent again")

    work.attempt(RecordingToken())
    work.close()

    assert runs.place.fs.cat_file(runs.place.path) == b"not sent again"
    assert runs.manifest() is not None


def test_an_abandoned_save_commits_nothing(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may have landed; only the manifest makes it count."""
    token, size = RecordingToken(), type(runs.place.store).size

    def sized(store: Any, path: str) -> int | None:
        found = size(store, path)
        token.cancelled = True
        return found

    monkeypatch.setattr(type(runs.place.store), "size", sized)
    with pytest.raises(CallTimeoutError):
        runs.save(token=token)

    assert runs.manifest() is None


def test_removal_takes_the_manifest_first(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest never outlives its checkpoint."""
    runs.save()
    left: list[Any] = []
    inner = type(runs.place.store).remove

    def removing(store: Any, *arguments: Any) -> None:
        left.append(runs.manifest())
        inner(store, *arguments)

    monkeypatch.setattr(type(runs.place.store), "remove", removing)
    monkeypatch.setattr(
        DirectoryIO, "remove_checkpoint", lambda _io, path: runs.place.store.remove(path)
    )
    runs.remove()
    runs.remove()

    assert left == [None, None]
    assert runs.manifest() is None
    assert not runs.place.fs.exists(runs.place.path)


def test_on_a_filesystem_the_last_manifest_takes_its_directory_along(
    storage: Storage, tmp_path: Path
) -> None:
    """Lightning removes directories that it has made for a while."""
    runs = Runs(storage, f"{tmp_path}/run/a.ckpt")
    runs.save()
    runs.remove()

    assert list((tmp_path / "run").iterdir()) == []


def test_what_is_written_as_a_whole_has_no_manifest(storage: Storage, url: str) -> None:
    """What such an IO has written is unknown, so the manifest of what was there before goes."""
    Runs(storage, url).save()

    class PlainIO(DirectoryIO):
        def save_checkpoint(self, checkpoint: Any, path: str, storage_options: Any = None) -> None:
            del checkpoint, storage_options
            storage.place(path).fs.pipe_file(storage.place(path).path, b"something else")

    runs = Runs(storage, url, owner=PlainIO(), staging=False)
    runs.save()

    assert runs.manifest() is None


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    """Do what storage does for a role that may not."""
    raise PermissionError("Access Denied")


def test_a_role_that_may_not_remove_may_save(storage: Storage) -> None:
    """The new manifest replaces the old one all the same."""
    runs = Runs(storage, "memory://run/a.ckpt")
    runs.save()
    runs.place.fs.rm_file = refuse

    runs.save({**CHECKPOINT, "weights": torch.arange(1, 1001)})

    assert runs.load()["weights"][0] == 1


def test_a_role_that_may_not_ask_loads_unverified(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """Object storage denies what is not there to a role that may not list."""
    runs = Runs(storage, "memory://run/a.ckpt")
    runs.save()
    runs.place.fs.cat_file = refuse

    loaded = runs.load()

    assert torch.equal(loaded["weights"], CHECKPOINT["weights"])
    assert "is not verified" in caplog.text


def test_an_outage_is_no_missing_manifest(storage: Storage) -> None:
    """Whether there is one cannot be told, and is asked again."""
    runs = Runs(storage, "memory://run/a.ckpt")
    runs.save()

    def reset(*_args: Any, **_kwargs: Any) -> Any:
        raise ConnectionResetError

    runs.place.fs.cat_file = reset

    with pytest.raises(ConnectionResetError):
        runs.load()


def test_what_is_written_again_while_it_is_read_is_read_again(
    storage: Storage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job's save is no damage: the failure is one that is repeated."""
    runs = Runs(storage, url)
    runs.save()

    def save_meanwhile(*args: Any) -> str:
        runs.save({**CHECKPOINT, "weights": torch.arange(1, 1001)})
        return difference(*args)

    runs.damage(lambda data: data[:-1])
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(manifests, "difference", save_meanwhile)
        with pytest.raises(CheckpointError, match="written again") as caught:
            runs.load()

    assert not isinstance(caught.value, CorruptCheckpointError)
    assert runs.load()["weights"][0] == 1


def test_loading_leaves_nothing_on_the_node(runs: Runs, tmp_path: Path) -> None:
    """Nor does saving. What was fetched once is in the node's cache, for the next to load it."""
    runs.save()
    runs.load()

    assert {path.name for path in (tmp_path / "spool").iterdir()} <= {"node-cache"}


def test_manifests_are_plain_files_of_json(storage: Storage, tmp_path: Path) -> None:
    """Any program can read them."""
    Runs(storage, f"{tmp_path}/run/a.ckpt").save()

    text = (tmp_path / "run" / ".resilience" / "a.ckpt.json").read_text(encoding="utf-8")

    assert json.loads(text)["v"] == 1
