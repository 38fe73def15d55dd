# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints are moved on real filesystems, and nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_resilience.adapters.object_store import list_files
from lightning_resilience.adapters.set_aside import identify, set_aside
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.resolution import Inspection
from lightning_resilience.core.set_aside import Moved, aside_path, note_path
from lightning_resilience.errors import CheckpointError
from tests import faulty_filesystem
from tests.faulty_filesystem import VARIABLE, FaultPlan, Rule
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.s3_server import S3Server


DATA = b"torn checkpoint"
MANIFEST = b'{"v": 1, "of": "what was saved"}'


class Bench:
    """A directory on some storage.

    Args:
        directory: Its URL.
        spool: Where files are staged.
        options: Of the filesystem.
    """

    def __init__(self, directory: str, spool: Path, **options: Any) -> None:
        self.url = f"{directory}/last.ckpt"
        self.storage = Storage(options, spool=lambda: str(spool))
        self._numbers = iter(range(1000))

    def write(self, url: str, data: bytes) -> None:
        """Write as another program."""
        place = self.storage.place(url)
        if place.store.is_local or url.startswith("faulty"):
            Path(place.path).parent.mkdir(parents=True, exist_ok=True)
            Path(place.path).write_bytes(data)
        else:
            place.fs.pipe_file(place.path, data)

    def fill(self, *names: str) -> None:
        """Write a checkpoint of these files, or of one, and its manifest."""
        for name in names or ("",):
            self.write(f"{self.url}/{name}".rstrip("/"), DATA + name.encode())
        self.write(self.manifest, MANIFEST)

    @property
    def manifest(self) -> str:
        """Where its manifest is."""
        return self.url.replace("last.ckpt", ".resilience/last.ckpt.json")

    def inspected(self) -> Inspection:
        """Return what rank 0 has seen."""
        mark = identify(self.storage, self.url, RecordingToken())
        return Inspection(path=self.url, rejected="it is torn", mark=mark)

    def set_aside(self, damaged: Inspection) -> Moved:
        """Set it aside in one attempt."""
        nonce = f"n{next(self._numbers)}"
        return set_aside(self.storage, RecordingToken(), damaged=damaged, nonce=nonce)

    def files(self) -> dict[str, bytes]:
        """Return everything below the directory, by its path there."""
        place = self.storage.place(self.url.rpartition("/")[0])
        names = list_files(place.fs, place.path)
        return {name: place.fs.cat_file(f"{place.path}/{name}") for name in names}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """The node's own directory."""
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


@pytest.fixture
def memory() -> Iterator[None]:
    """Leave nothing in fsspec's memory."""
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["local", "memory", "s3"])
def bench(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    spool: Path,
    memory: None,
    s3_server: S3Server,
    bucket: str,
) -> Bench:
    """A directory that holds nothing yet."""
    del memory
    if request.param == "s3":
        return Bench(f"s3://{bucket}/run", spool, **s3_server.storage_options)
    directory = f"{tmp_path}/run" if request.param == "local" else "memory://bench/run"
    return Bench(directory, spool)


@pytest.fixture
def faulty(tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """Make a directory on object storage with these faults; called again, the plan is another."""
    faulty_filesystem.register()
    plans = iter(range(1000))

    def make(*rules: Rule) -> Bench:
        plan = FaultPlan.write(tmp_path / f"plan-{next(plans)}", *rules)
        monkeypatch.setenv(VARIABLE, str(plan.folder))
        return Bench(f"faulty://{tmp_path}/run", spool)

    return make


def below(damaged: Inspection) -> str:
    """Return where a checkpoint is set aside, below its directory."""
    return aside_path("last.ckpt", damaged.mark)


def test_a_file_is_moved_with_a_note_that_says_why(bench: Bench) -> None:
    """Its bytes are the same, the note has its manifest, and nothing is left under its name."""
    bench.fill()
    damaged = bench.inspected()

    moved = bench.set_aside(damaged)

    assert moved == Moved(path=bench.url, to=aside_path(bench.url, damaged.mark))
    files = bench.files()
    assert sorted(files) == sorted([below(damaged), note_path(below(damaged))])
    assert files[below(damaged)] == DATA
    assert json.loads(files[note_path(below(damaged))]) == {
        "v": 1,
        "path": "last.ckpt",
        "reason": "it is torn",
        "manifest": MANIFEST.decode(),
    }


def test_a_directory_is_moved_with_all_that_is_in_it(bench: Bench) -> None:
    """What a strategy's ranks have written, and what a user has put there."""
    bench.fill(".metadata", "__0_0.distcp", "notes/today.txt")
    damaged = bench.inspected()

    moved = bench.set_aside(damaged)

    assert moved.to
    files = bench.files()
    assert files.pop(note_path(below(damaged)))
    assert files == {
        f"{below(damaged)}/{name}": DATA + name.encode()
        for name in (".metadata", "__0_0.distcp", "notes/today.txt")
    }


def test_to_do_it_again_changes_nothing(bench: Bench) -> None:
    """An attempt whose answer was lost is repeated."""
    bench.fill()
    damaged = bench.inspected()
    first = bench.set_aside(damaged)
    files = bench.files()

    second = bench.set_aside(damaged)

    assert second == first
    assert bench.files() == files


def test_a_manifest_that_was_left_behind_is_removed(bench: Bench) -> None:
    """The move had ended, and then the process was interrupted."""
    bench.fill()
    damaged = bench.inspected()
    bench.set_aside(damaged)
    bench.write(bench.manifest, MANIFEST)

    moved = bench.set_aside(damaged)

    assert moved.to
    assert ".resilience/last.ckpt.json" not in bench.files()


def test_a_second_one_of_that_name_does_not_replace_the_first(bench: Bench) -> None:
    """Each has a name of its own."""
    for data in (b"one", b"another"):
        bench.write(bench.url, data)
        bench.set_aside(bench.inspected())

    moved = [data for name, data in bench.files().items() if not name.endswith(".json")]
    assert sorted(moved) == [b"another", b"one"]


def test_what_was_written_again_stays(bench: Bench) -> None:
    """It is not what was inspected, and may be good."""
    bench.fill()
    damaged = bench.inspected()
    bench.write(bench.url, b"whole checkpoint")

    moved = bench.set_aside(damaged)

    assert (moved.to, moved.problem) == ("", "it was written again meanwhile")
    assert bench.files()["last.ckpt"] == b"whole checkpoint"
    assert bench.files()[".resilience/last.ckpt.json"] == MANIFEST


def test_what_another_process_has_removed_is_no_error(bench: Bench) -> None:
    """There is nothing to start from and nothing to move."""
    bench.fill()
    damaged = bench.inspected()
    place = bench.storage.place(bench.url)
    place.store.remove(place.path)

    moved = bench.set_aside(damaged)

    assert (moved.to, moved.problem) == ("", "it is no longer there")


@pytest.mark.parametrize("names", [(), (".metadata", "__0_0.distcp", "__1_0.distcp")])
@pytest.mark.parametrize("number", range(1, 27))
def test_no_byte_is_lost_wherever_it_is_interrupted(
    names: tuple[str, ...], number: int, faulty: Callable[..., Bench], tmp_path: Path
) -> None:
    """Each request in turn fails; everything is still somewhere, and the next attempt ends it."""
    faulty().fill(*names)
    damaged = faulty().inspected()
    before = sorted(DATA + name.encode() for name in names or ("",))
    interrupted = faulty(Rule(error="reset", first=number, last=number))

    try:
        interrupted.set_aside(damaged)
    except ConnectionResetError:
        between = {path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        assert set(before) <= between
    moved = faulty().set_aside(damaged)

    assert moved.to
    files = faulty().files()
    assert files.pop(note_path(below(damaged)))
    assert sorted(files.values()) == before
    assert all(name.startswith(below(damaged)) for name in files)


@pytest.mark.parametrize("operation", ["manifest_put_file", "cp_file", "rm_file"])
def test_what_may_not_be_moved_stays(
    operation: str, faulty: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role without the right to write or to remove does not keep a run from starting."""
    faulty().fill()
    damaged = faulty().inspected()
    bench = faulty(Rule(operations=(operation,), error="denied"))
    if operation == "cp_file":
        fs = bench.storage.place(bench.url).fs
        monkeypatch.setattr(type(fs), "cp_file", _not_implemented)

    moved = bench.set_aside(damaged)

    assert moved.to == ""
    assert moved.problem
    files = faulty().files()
    assert (files["last.ckpt"], files[".resilience/last.ckpt.json"]) == (DATA, MANIFEST)


def _not_implemented(*_args: Any, **_kwargs: Any) -> None:
    raise NotImplementedError("this filesystem cannot copy")


def test_a_read_only_filesystem_is_left_alone(tmp_path: Path, spool: Path) -> None:
    """Where no directory for it can be made: here, because a file has its name."""
    bench = Bench(f"{tmp_path}/run", spool)
    bench.write(bench.url, DATA)
    Path(tmp_path, "run", ".resilience").write_text("a file")

    moved = bench.set_aside(bench.inspected())

    assert moved.to == ""
    assert "Error" in moved.problem
    assert Path(bench.url).read_bytes() == DATA


def test_an_original_is_not_removed_before_its_copy_is_verified(
    faulty: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of another length is an error, and the original is there."""
    bench = faulty()
    bench.fill()
    fs = bench.storage.place(bench.url).fs
    monkeypatch.setattr(type(fs), "cp_file", _copy_in_part)

    with pytest.raises(CheckpointError, match="bytes are there"):
        bench.set_aside(bench.inspected())

    assert bench.files()["last.ckpt"] == DATA


def _copy_in_part(_fs: Any, _source: str, target: str, **_kwargs: Any) -> None:
    Path(target).write_bytes(DATA[:3])


def test_links_and_directories_without_a_manifest_have_no_mark(tmp_path: Path, spool: Path) -> None:
    """The one is no data, and the other may still be written."""
    bench = Bench(f"{tmp_path}/run", spool)
    (tmp_path / "run" / "last.ckpt").mkdir(parents=True)
    (tmp_path / "run" / "link.ckpt").symlink_to("last.ckpt")
    (tmp_path / "run" / "lost.ckpt").symlink_to("nowhere")

    marks = [
        identify(bench.storage, f"{tmp_path}/run/{name}", RecordingToken())
        for name in ("last.ckpt", "link.ckpt", "lost.ckpt", "absent.ckpt")
    ]

    assert marks == ["", "", "", ""]


def test_a_local_one_can_be_moved_back(tmp_path: Path, spool: Path) -> None:
    """Nothing but its name has changed, and then it is found as before."""
    bench = Bench(f"{tmp_path}/run", spool)
    bench.fill()
    inode = Path(bench.url).stat().st_ino
    moved = bench.set_aside(bench.inspected())

    Path(moved.to).rename(bench.url)

    assert Path(bench.url).stat().st_ino == inode
    with fsspec.open(bench.url) as file:
        assert file.read() == DATA
