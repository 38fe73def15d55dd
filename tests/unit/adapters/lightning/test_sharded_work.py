# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks ask of storage for a checkpoint of many files, step by step, on every kind of it."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from lightning_resilience.adapters.lightning import sharded_work
from lightning_resilience.adapters.lightning.sharded_work import (
    Clearing,
    Commit,
    Fetched,
    Leftover,
    Look,
    Publishing,
    Removal,
)
from lightning_resilience.adapters.manifests import read_manifest
from lightning_resilience.adapters.storage import Storage, parent_of
from lightning_resilience.core.manifest import Origin, manifest_of
from lightning_resilience.core.shards import Form, metadata_of, shards_of
from lightning_resilience.errors import (
    CallTimeoutError,
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
)
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.s3_server import S3Server


CONTENT = {
    "__0_0.distcp": b"zero" * 100,
    "__1_0.distcp": b"one",
    ".metadata": b"which",
    "meta.pt": b"what",
}
SIZES = {name: len(data) for name, data in CONTENT.items()}
CONTENTS = {
    name: (len(data), f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}")
    for name, data in CONTENT.items()
}
COMPLETE = {*(f"a.ckpt/{name}" for name in CONTENT), ".resilience/a.ckpt.json"}
DONE = manifest_of("run/a.ckpt", CONTENTS, Origin(step=4))


@pytest.fixture(params=["local", "memory", "s3"])
def url(request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path) -> str:
    """A checkpoint that is not there yet."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run/a.ckpt"
    if request.param == "s3":
        return f"s3://{s3_server.new_bucket()}/run/a.ckpt"
    return f"{tmp_path}/run/a.ckpt"


@pytest.fixture
def storage(s3_server: S3Server, tmp_path: Path, url: str) -> Storage:
    """Clients of it."""
    spool = tmp_path / "spool"
    spool.mkdir()
    options = s3_server.storage_options if url.startswith("s3") else {}
    return Storage(options, spool=lambda: str(spool))


class Steps:
    """The steps of one save, of which a test leaves out what it likes.

    Args:
        storage: Clients of storage.
        url: Where the checkpoint goes.
        folder: What all ranks have written, in one place.
    """

    def __init__(self, storage: Storage, url: str, folder: Path) -> None:
        self.storage = storage
        self.url = url
        self.folder = folder
        self.destination = ""
        self._nonces = map(str, itertools.count())
        folder.mkdir()
        for name, data in CONTENT.items():
            (folder / name).write_bytes(data)

    def clear(self, check: Callable[[], object] = lambda: None) -> None:
        """Make room."""
        work = Clearing(self.storage, self.url, nonce=uuid.uuid4().hex, check=check)
        name = work.attempt(RecordingToken())
        self.destination = f"{parent_of(self.url)}/{name}" if name else self.url

    def publish(self, sizes: dict[str, int] | None = None) -> None:
        """Publish shards."""
        self.publishing(shards_of(SIZES) if sizes is None else sizes).attempt(RecordingToken())

    def publishing(self, sizes: dict[str, int]) -> Publishing:
        """Make what publishes files."""
        return Publishing(
            self.storage,
            self.destination,
            folder=self.folder,
            sizes=sizes,
            nonce=lambda: uuid.uuid4().hex,
        )

    def commit(self) -> Commit:
        """Make what publishes the metadata."""
        return Commit(
            self.storage,
            self.url,
            destination=self.destination,
            expected=shards_of(SIZES),
            metadata=self.publishing(metadata_of(SIZES)),
            done=DONE,
        )

    def all(self) -> None:
        """Save."""
        self.clear()
        self.publish()
        self.commit().attempt(RecordingToken())


@pytest.fixture
def steps(storage: Storage, url: str, tmp_path: Path) -> Steps:
    """The steps of a save."""
    return Steps(storage, url, tmp_path / "written")


def found(storage: Storage, url: str) -> set[str]:
    """Return the names of all files below a URL."""
    place = storage.place(url)
    place.fs.invalidate_cache()
    names = place.fs.find(place.path)
    return {name.removeprefix(f"{place.path}/") for name in names}


def form(storage: Storage, url: str) -> Form:
    """Return what is there."""
    return sharded_work.look(storage.place(url))


def test_a_save_is_complete_with_its_last_step(steps: Steps, storage: Storage, url: str) -> None:
    """Before it nobody finds a checkpoint, after it everything that was written."""
    forms = [form(storage, url)]
    steps.clear()
    steps.publish()
    forms.append(form(storage, url))

    assert steps.commit().attempt(RecordingToken()) == DONE

    assert Form.SHARDS not in forms
    assert form(storage, url) is Form.SHARDS
    assert found(storage, url) == set(CONTENT)
    assert found(storage, parent_of(url)) == COMPLETE


def test_it_is_known_which_step_is_saved(steps: Steps) -> None:
    """Whoever reports progress reads it there."""
    assert steps.commit().step == DONE.step == 4


def test_the_manifest_comes_last_and_lists_every_file(
    steps: Steps, storage: Storage, url: str
) -> None:
    """Each has a digest of its own, because no rank has read all of them."""
    steps.clear()
    steps.publish()
    before = read_manifest(storage.place(url), RecordingToken())
    steps.commit().attempt(RecordingToken())

    assert before is None
    assert read_manifest(storage.place(url), RecordingToken()) == DONE
    assert [file.name for file in DONE.files] == sorted(CONTENT)


def test_a_damaged_shard_is_not_loaded(steps: Steps, storage: Storage, url: str) -> None:
    """What is fetched is compared; on a filesystem each rank reads its part where it is."""
    steps.all()
    place = storage.place(f"{url}/__0_0.distcp")
    place.fs.pipe_file(place.path, b"zerO" * 100)
    work = Fetched(storage, url, nonce=lambda: uuid.uuid4().hex)

    refused: Any = contextlib.nullcontext()
    if not place.store.is_local:
        refused = pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp has the digest")
    with refused:
        work.attempt(RecordingToken())
    work.discard()


def test_the_node_keeps_what_was_written_until_all_is_over(steps: Steps) -> None:
    """An attempt that is made again needs it."""
    steps.all()

    assert {path.name for path in steps.folder.iterdir()} == set(CONTENT)


def test_of_an_older_checkpoint_nothing_is_left(steps: Steps, storage: Storage, url: str) -> None:
    """A mixture of two would look complete."""
    steps.all()
    place = storage.place(f"{url}/__2_0.distcp")
    place.fs.pipe_file(place.path, b"of a larger world")

    steps.all()

    assert found(storage, parent_of(url)) == COMPLETE


def test_a_local_checkpoint_stays_until_the_newer_one_takes_its_place(tmp_path: Path) -> None:
    """Where a directory can be renamed, there is one of them at any time."""
    url = f"{tmp_path}/run/a.ckpt"
    storage = Storage({}, spool=lambda: str(tmp_path))
    steps = Steps(storage, url, tmp_path / "written")
    steps.all()

    steps.clear()
    steps.publish()

    assert found(storage, url) == set(CONTENT)


def test_one_file_of_the_same_name_makes_room(steps: Steps, storage: Storage, url: str) -> None:
    """It may be an older checkpoint that was gathered."""
    place = storage.place(url)
    if place.store.is_local:
        Path(place.path).parent.mkdir()
    place.fs.pipe_file(place.path, b"gathered")

    steps.all()

    assert form(storage, url) is Form.SHARDS
    assert found(storage, parent_of(url)) == COMPLETE


def test_without_every_shard_nothing_is_committed(steps: Steps, storage: Storage) -> None:
    """The metadata is not even sent, and the error names the shard."""
    steps.clear()
    steps.publish({"__0_0.distcp": SIZES["__0_0.distcp"]})

    with pytest.raises(CheckpointError, match=r"1 of 2 shards are not there \(__1_0.distcp"):
        steps.commit().attempt(RecordingToken())

    assert found(storage, steps.destination) == {"__0_0.distcp"}


def test_a_shard_of_another_size_is_noticed(steps: Steps, storage: Storage) -> None:
    """Also where it was there when its own rank looked."""
    steps.clear()
    steps.publish()
    place = storage.place(f"{steps.destination}/__1_0.distcp")
    place.fs.pipe_file(place.path, b"cut off")

    with pytest.raises(CheckpointError, match="another size"):
        steps.commit().attempt(RecordingToken())


def test_a_file_that_changed_on_the_node_is_not_verified(steps: Steps) -> None:
    """What is in storage must be as long as it was when all ranks were told."""
    steps.clear()
    (steps.folder / "__1_0.distcp").write_bytes(b"longer than before")

    with pytest.raises(CheckpointError, match="3 bytes were written"):
        steps.publish()


def test_an_attempt_goes_on_where_the_last_has_ended(steps: Steps, storage: Storage) -> None:
    """A shard that is verified is not sent again."""
    steps.clear()
    publishing = steps.publishing(shards_of(SIZES))
    (steps.folder / "__1_0.distcp").rename(steps.folder / "away")
    with pytest.raises(FileNotFoundError):
        publishing.attempt(RecordingToken())
    (steps.folder / "away").rename(steps.folder / "__1_0.distcp")
    (steps.folder / "__0_0.distcp").unlink()

    publishing.attempt(RecordingToken())

    assert found(storage, steps.destination) == set(shards_of(SIZES))


@pytest.mark.parametrize("step", ["clear", "publish", "commit"])
def test_an_attempt_that_was_given_up_does_nothing(
    step: str, steps: Steps, storage: Storage, url: str
) -> None:
    """Whatever it would have published is not there."""
    given_up = RecordingToken(cancelled=True)
    steps.clear()
    works: dict[str, Any] = {
        "clear": Clearing(storage, f"{url}.next", nonce="n", check=lambda: None),
        "publish": steps.publishing(SIZES),
        "commit": steps.commit(),
    }

    with pytest.raises(CallTimeoutError):
        works[step].attempt(given_up)

    assert form(storage, url) is Form.ABSENT


def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    steps: Steps, storage: Storage, url: str
) -> None:
    """The attempt after it finds the checkpoint in its place, and leaves it there."""
    steps.clear()
    steps.publish()
    commit = steps.commit()
    commit.attempt(RecordingToken())

    assert commit.attempt(RecordingToken()) == DONE

    assert found(storage, url) == set(CONTENT)


def test_what_makes_no_checkpoint_removes_none(steps: Steps, storage: Storage, url: str) -> None:
    """The check comes before anything that cannot be taken back."""
    steps.all()

    def refuse() -> None:
        message = "no rank has written a shard"
        raise ConfigError(message)

    with pytest.raises(ConfigError):
        steps.clear(refuse)

    assert found(storage, parent_of(url)) == COMPLETE


def test_a_removal_that_breaks_off_leaves_no_checkpoint(
    steps: Steps, storage: Storage, url: str
) -> None:
    """What makes a directory a checkpoint goes first, so half of one is none."""
    steps.all()

    with pytest.raises(CallTimeoutError):
        Removal(storage, url).attempt(RecordingToken(cancel_after=1))

    assert "meta.pt" not in found(storage, url)
    assert "__0_0.distcp" in found(storage, url)


def test_a_removal_takes_everything_and_absent_is_success(
    steps: Steps, storage: Storage, url: str
) -> None:
    """Twice is as good as once."""
    steps.all()

    for _ in range(2):
        Removal(storage, url).attempt(RecordingToken())

    assert form(storage, url) is Form.ABSENT


def test_leftovers_are_removed_and_checkpoints_are_not(
    steps: Steps, storage: Storage, url: str
) -> None:
    """A save that came late may have made them complete."""
    steps.clear()
    steps.publish()
    Leftover(storage, steps.destination).attempt(RecordingToken())
    left = form(storage, steps.destination)

    steps.all()
    Leftover(storage, url).attempt(RecordingToken())

    assert left is Form.ABSENT
    assert form(storage, url) is Form.SHARDS


def test_what_is_found_is_told(steps: Steps, storage: Storage, url: str) -> None:
    """One file, or a directory that is complete."""
    steps.all()
    place = storage.place(f"{url}.file")
    place.fs.pipe_file(place.path, b"one file")

    told = [Look(storage, name).attempt(RecordingToken()) for name in (url, f"{url}.file")]

    assert told == ["shards", "file"]


def test_what_is_not_there_is_not_found(steps: Steps, storage: Storage, url: str) -> None:
    """Neither nothing nor a part is a checkpoint."""
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
        Look(storage, url).attempt(RecordingToken())
    steps.all()
    place = storage.place(f"{url}/meta.pt")
    place.store.remove(place.path)

    with pytest.raises(FileNotFoundError, match="without the metadata of a checkpoint"):
        Look(storage, url).attempt(RecordingToken())


def test_what_was_saved_is_fetched_to_this_node(steps: Steps, storage: Storage, url: str) -> None:
    """A local checkpoint is read where it is; another is removed from the node afterwards."""
    steps.all()
    fetched = Fetched(storage, url, nonce=lambda: uuid.uuid4().hex)

    path = Path(fetched.attempt(RecordingToken()))

    assert {item.name: item.read_bytes() for item in path.iterdir()} == CONTENT
    fetched.discard()
    assert path.exists() is ("://" not in url)


def test_a_fetch_that_breaks_off_leaves_nothing_on_the_node(tmp_path: Path) -> None:
    """One part of a large checkpoint for each attempt would fill the disk."""
    spool = tmp_path / "spool"
    spool.mkdir()
    storage = Storage({}, spool=lambda: str(spool))
    url = f"memory://{uuid.uuid4().hex}/run/a.ckpt"
    Steps(storage, url, tmp_path / "written").all()
    fetched = Fetched(storage, url, nonce=lambda: uuid.uuid4().hex)

    with pytest.raises(CallTimeoutError):
        fetched.attempt(RecordingToken(cancel_after=2))

    assert list(spool.iterdir()) == []


def test_a_rank_that_does_not_see_what_rank_zero_sees_says_so(
    storage: Storage, tmp_path: Path
) -> None:
    """A local directory that is not shared is no place for a checkpoint of many ranks."""
    fetched = Fetched(storage, f"{tmp_path}/not-here.ckpt", nonce=lambda: uuid.uuid4().hex)

    with pytest.raises(FileNotFoundError, match="is it shared"):
        fetched.attempt(RecordingToken())
