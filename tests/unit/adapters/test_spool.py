# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The files of a spool: whole or not there, and one owner at a time."""

from __future__ import annotations

import fcntl
import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.spool import SpoolDirectory, left_behind
from lightning_resilience.adapters.staging import Staged, stage
from lightning_resilience.adapters.trees import Tree, measure
from lightning_resilience.core.manifest import Origin
from lightning_resilience.core.spooled import SpoolEntry, entry_of as entry_for
from lightning_resilience.runtime.calls import Token


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[SpoolDirectory]:
    """A spool that this process owns."""
    mine = SpoolDirectory(str(tmp_path / "run"))
    assert mine.claim()
    yield mine
    mine.release()


def write(path: str, *, data: bytes = b"checkpoint") -> Staged:
    """Write a file as a save does."""
    return stage(lambda file: file.write(data), path, Token())


def entry_of(staged: Staged, *, path: str = "s3://b/step=4.ckpt", number: int = 1) -> SpoolEntry:
    """Make its record."""
    return SpoolEntry(path=path, size_bytes=staged.size_bytes, digest=staged.digest, number=number)


def test_what_is_kept_is_found_again(spool: SpoolDirectory, tmp_path: Path) -> None:
    """With its file and its record, also by another object."""
    kept = spool.keep("a", write, entry_of)

    assert Path(kept.file).read_bytes() == b"checkpoint"
    assert spool.kept() == [kept]
    assert SpoolDirectory(str(tmp_path / "run")).kept() == [kept]


def test_they_are_found_in_the_order_of_their_saves(spool: SpoolDirectory) -> None:
    """Whatever their names are."""
    for name, number in (("a", 3), ("b", 1), ("c", 2)):
        spool.keep(name, write, partial(entry_of, number=number))

    assert [kept.name for kept in spool.kept()] == ["b", "c", "a"]


def test_what_is_dropped_is_gone(spool: SpoolDirectory, tmp_path: Path) -> None:
    """File and record; twice is as good as once."""
    spool.keep("a", write, entry_of)

    spool.drop("a")
    spool.drop("a")

    assert spool.kept() == []
    assert [path.name for path in (tmp_path / "run" / "unpublished").iterdir()] == ["owner"]


def test_a_disk_that_is_full_leaves_nothing(spool: SpoolDirectory, tmp_path: Path) -> None:
    """Neither file nor record."""

    def full(path: str) -> Staged:
        write(path)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        spool.keep("a", full, entry_of)

    assert [path.name for path in (tmp_path / "run" / "unpublished").iterdir()] == ["owner"]


def test_a_record_that_cannot_be_written_leaves_nothing(
    spool: SpoolDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a record would never be found."""

    def fails(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    def then_fails(staged: Staged) -> SpoolEntry:
        monkeypatch.setattr(os, "fsync", fails)
        return entry_of(staged)

    with pytest.raises(OSError, match="Input/output"):
        spool.keep("a", write, then_fails)

    assert [path.name for path in (tmp_path / "run" / "unpublished").iterdir()] == ["owner"]


def test_a_file_without_a_record_is_removed_by_the_owner(
    spool: SpoolDirectory, tmp_path: Path
) -> None:
    """Its writer was killed before it was complete."""
    kept = spool.keep("a", write, entry_of)
    torn = tmp_path / "run" / "unpublished" / "b.checkpoint"
    torn.write_bytes(b"half")

    spool.remove_unfinished()

    assert not torn.exists()
    assert spool.kept() == [kept]


def test_a_record_that_cannot_be_read_is_left_alone(
    spool: SpoolDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, and neither guessed at nor removed."""
    spool.keep("a", write, entry_of)
    record = tmp_path / "run" / "unpublished" / "a.json"
    record.write_text('{"v": 99}')

    assert spool.kept() == []
    spool.remove_unfinished()
    assert (tmp_path / "run" / "unpublished" / "a.checkpoint").exists()
    assert "a spooled checkpoint is left as it is" in caplog.text


def test_one_process_owns_it(spool: SpoolDirectory, tmp_path: Path) -> None:
    """Another one has it once that has let it go."""
    spool.keep("a", write, entry_of)
    other = SpoolDirectory(str(tmp_path / "run"))

    assert not other.claim()
    spool.release()
    assert other.claim()
    assert other.claim()
    other.release()


def test_the_kernel_lets_go_for_who_was_killed(tmp_path: Path) -> None:
    """No lease, no clock: a dead process holds nothing."""
    pid = os.fork()
    if not pid:
        mine = SpoolDirectory(str(tmp_path / "run"))
        mine.claim()
        mine.keep("a", write, entry_of)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)

    found = list(left_behind(str(tmp_path / "other"), lambda _entry: True))

    assert [kept.entry.path for _, kept in found] == ["s3://b/step=4.ckpt"]
    for spool, _ in found:
        spool.release()


def test_only_what_is_wanted_is_taken_over(spool: SpoolDirectory, tmp_path: Path) -> None:
    """Another training's checkpoints stay where they are, and nobody locks them."""
    spool.keep("a", write, entry_of)
    spool.release()

    assert list(left_behind(str(tmp_path / "mine"), lambda _entry: False)) == []

    again = SpoolDirectory(str(tmp_path / "run"))
    assert again.claim()
    again.release()


def test_an_empty_spool_is_removed(spool: SpoolDirectory, tmp_path: Path) -> None:
    """By whoever lets it go."""
    spool.release()

    assert not (tmp_path / "run" / "unpublished").exists()


def test_whoever_waited_for_a_lock_that_was_removed_makes_a_new_one(
    spool: SpoolDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would each hold a lock, one of them on a file without a name."""
    other = SpoolDirectory(str(tmp_path / "run"))
    flock = fcntl.flock
    locked = threading.Event()

    def flock_late(descriptor: int, how: int) -> None:
        if not locked.is_set():
            # Opened before it is removed, and locked after.
            locked.set()
            spool.release()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)

    assert other.claim()
    third = SpoolDirectory(str(tmp_path / "run"))
    assert not third.claim()
    other.release()


# Directories --------------------------------------------------------------------------------------


def write_tree(path: str) -> Tree:
    """Write a directory as a CheckpointIO does that has its own format."""
    folder = Path(path, "weights")
    folder.mkdir(parents=True)
    (folder / "0.pt").write_bytes(b"weights")
    Path(path, "index.json").write_bytes(b"{}")
    return measure(path, Token())


def tree_entry_of(tree: Tree, *, path: str = "s3://b/step=4.ckpt") -> SpoolEntry:
    """Make its record."""
    return entry_for(path, tree.contents, Origin(step=4), digest=tree.digest, number=1)


def test_a_directory_is_kept_with_the_order_of_its_files(
    spool: SpoolDirectory, tmp_path: Path
) -> None:
    """That is the order in which they are published; a manifest's is another."""
    kept = spool.keep("a", write_tree, tree_entry_of)

    assert list(kept.entry.contents) == ["weights/0.pt", "index.json"]
    assert kept.entry.size_bytes == 9
    assert SpoolDirectory(str(tmp_path / "run")).kept() == [kept]
    assert Path(kept.file, "weights", "0.pt").read_bytes() == b"weights"


def test_a_directory_that_is_dropped_is_gone(spool: SpoolDirectory, tmp_path: Path) -> None:
    """With all that is in it."""
    spool.keep("a", write_tree, tree_entry_of)

    spool.drop("a")
    spool.drop("a")

    assert [path.name for path in (tmp_path / "run" / "unpublished").iterdir()] == ["owner"]


@pytest.mark.parametrize("make", [write, write_tree], ids=["file", "directory"])
def test_what_has_no_record_is_removed_by_a_later_start(
    make: Callable[[str], object], spool: SpoolDirectory, tmp_path: Path
) -> None:
    """Also where nothing else of that run is left, which nobody would take over."""
    make(spool.file_of("a"))
    os.close(spool._lock or 0)
    spool._lock = None

    assert list(left_behind(str(tmp_path / "mine"), lambda _entry: True)) == []

    assert not (tmp_path / "run" / "unpublished").exists()


def test_what_a_living_process_is_writing_is_not_removed(
    spool: SpoolDirectory, tmp_path: Path
) -> None:
    """It has no record yet."""
    write(spool.file_of("a"))

    assert list(left_behind(str(tmp_path / "mine"), lambda _entry: True)) == []

    assert Path(spool.file_of("a")).exists()


@pytest.mark.parametrize("make", ["file", "directory"])
def test_what_is_set_aside_is_neither_found_nor_removed(
    make: str, spool: SpoolDirectory, tmp_path: Path
) -> None:
    """With its record, which says what it was to be."""
    if make == "file":
        spool.keep("a", write, entry_of)
    else:
        spool.keep("a", write_tree, tree_entry_of)

    aside = spool.set_aside("a")

    assert spool.kept() == []
    spool.remove_unfinished()
    spool.release()
    assert Path(aside).exists()
    assert Path(aside).with_suffix(".json").exists()
    assert not (tmp_path / "run" / "unpublished").exists()


def test_a_record_whose_file_was_set_aside_is_removed(
    spool: SpoolDirectory, tmp_path: Path
) -> None:
    """Whoever set it aside was killed in between."""
    kept = spool.keep("a", write, entry_of)
    Path(kept.file).unlink()

    spool.remove_unfinished()

    assert [path.name for path in (tmp_path / "run" / "unpublished").iterdir()] == ["owner"]
