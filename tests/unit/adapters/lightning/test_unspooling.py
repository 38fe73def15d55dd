# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A directory of a user's own ``CheckpointIO`` in the spool, and out of it again."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.lightning.foreign_io import LocalSave
from lightning_resilience.adapters.lightning.unspooling import Publishing
from lightning_resilience.adapters.manifests import check_in_place, read_manifest
from lightning_resilience.adapters.spool import SpoolDirectory, left_behind
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.manifest import Origin
from lightning_resilience.core.spooled import entry_of
from lightning_resilience.errors import CheckpointError, CorruptCheckpointError
from tests import faulty_filesystem
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.adapters.spool import Kept
    from lightning_resilience.core.spooled import SpoolEntry


faulty_filesystem.register()


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A checkpoint on a filesystem, or in storage that is not one."""
    return {"local": f"{tmp_path}/run/a.ckpt", "memory": "memory://run/a.ckpt"}[request.param]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """Clients whose spool directory is the test's."""
    clients = storage_in(tmp_path)
    yield clients
    clients.place("memory://").fs.store.clear()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[SpoolDirectory]:
    """The spool of this process."""
    mine = SpoolDirectory(str(tmp_path / "spool" / "run"))
    assert mine.claim()
    yield mine
    mine.release()


def storage_in(tmp_path: Path) -> Storage:
    """Make clients."""
    (tmp_path / "spool" / "run").mkdir(parents=True, exist_ok=True)
    return Storage({}, spool=lambda: str(tmp_path / "spool" / "run"))


def write(path: str, *, text: str = "new") -> None:
    """Write a directory: weights first, then an index."""
    folder = Path(path, "weights")
    folder.mkdir(parents=True)
    (folder / "0.pt").write_text(text, encoding="utf-8")
    (folder / "1.pt").write_text(f"more {text}", encoding="utf-8")
    Path(path, "index.json").write_text(json.dumps(text), encoding="utf-8")


def save_of(storage: Storage, url: str, call: Callable[[str], object] = write) -> LocalSave:
    """Make a save by a CheckpointIO."""
    numbers = count()
    return LocalSave(
        *(storage, url),
        nonce=lambda: f"n{os.getpid()}-{next(numbers)}",
        call=call,
        origin=Origin(step=4),
    )


def record_of(url: str, tree: Any) -> SpoolEntry:
    """Make the record of what was spooled."""
    return entry_of(url, tree.contents, Origin(step=4), digest=tree.digest, number=1)


def spooled(spool: SpoolDirectory, save: LocalSave) -> Kept:
    """Spool it as a save that has met an outage."""
    token = RecordingToken()
    save.prepare(token)
    try:
        return spool.keep("a", lambda path: save.spool(path, token), partial(record_of, save.url))
    finally:
        save.close()


def publishing(storage: Storage, kept: Kept) -> Publishing:
    """Make its publication by a later start."""
    numbers = count()
    return Publishing(
        storage, kept, nonce=lambda: f"p{os.getpid()}-{next(numbers)}", from_before=True
    )


def texts(storage: Storage, url: str) -> dict[str, str]:
    """Return what is in storage, by the name of the file."""
    place = storage.place(url)
    found = place.fs.find(place.path)
    return {Path(name).name: place.fs.cat_file(name).decode() for name in found}


NEW = {"0.pt": "new", "1.pt": "more new", "index.json": '"new"'}


def test_what_was_staged_is_moved_and_written_once(
    url: str, storage: Storage, spool: SpoolDirectory, tmp_path: Path
) -> None:
    """On storage that is no filesystem it is there already when the outage is met."""
    calls: list[str] = []

    def counted(path: str) -> None:
        calls.append(path)
        write(path)

    kept = spooled(spool, save_of(storage, url, counted))

    assert len(calls) == 1
    assert [
        file["name"]
        for file in json.loads(Path(kept.file).with_suffix(".json").read_text())["files"]
    ] == ["weights/0.pt", "weights/1.pt", "index.json"]
    assert list(tmp_path.rglob(".resilience-*")) == []


def test_it_is_published_whole_and_marked(
    url: str, storage: Storage, spool: SpoolDirectory, tmp_path: Path
) -> None:
    """In place of an older one, with a manifest that says the step that it was saved at."""
    older = save_of(storage, url, partial(write, text="older"))
    older.prepare(RecordingToken())
    older.attempt(RecordingToken())
    older.close()
    kept = spooled(spool, save_of(storage, url))

    done = publishing(storage, kept).attempt(RecordingToken())

    assert done is not None
    assert done.size_bytes == kept.entry.size_bytes
    assert texts(storage, url) == NEW
    place = storage.place(url)
    manifest = read_manifest(place, RecordingToken())
    assert manifest is not None
    assert (manifest.step, manifest.digest) == (4, kept.entry.digest)
    assert check_in_place(place, RecordingToken(), digests=place.store.is_local) is not None
    assert list((tmp_path / "run").rglob(".resilience-*")) == []


def test_an_attempt_goes_on_where_the_last_has_ended(
    storage: Storage, spool: SpoolDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the record, and no file that is there is sent again."""
    kept = spooled(spool, save_of(storage, "memory://run/a.ckpt"))
    work = publishing(storage, kept)
    sent: list[str] = []
    store = type(storage.place(work.url).store)
    publish = store.publish

    def fail_once(self: Any, staged: str, path: str, token: Any, **how: Any) -> None:
        sent.append(path.rpartition("/")[2])
        if sent == ["0.pt", "1.pt"]:
            raise ConnectionResetError
        publish(self, staged, path, token, **how)

    monkeypatch.setattr(store, "publish", fail_once)
    with pytest.raises(ConnectionResetError):
        work.attempt(RecordingToken())

    work.attempt(RecordingToken())

    assert [name for name in sent if not name.startswith("a.ckpt.json")][:4] == [
        *("0.pt", "1.pt", "1.pt", "index.json")
    ]
    assert texts(storage, work.url) == NEW


def change(folder: Path) -> None:
    """Change a byte of a file."""
    (folder / "weights" / "1.pt").write_text("mOre new", encoding="utf-8")


def lose(folder: Path) -> None:
    """Remove a file."""
    (folder / "weights" / "1.pt").unlink()


def add(folder: Path) -> None:
    """Add a file."""
    (folder / "weights" / "2.pt").write_text("x", encoding="utf-8")


@pytest.mark.parametrize("damage", [change, lose, add])
def test_what_is_not_what_was_spooled_is_not_published(
    damage: Callable[[Path], None], url: str, storage: Storage, spool: SpoolDirectory
) -> None:
    """No file of it."""
    kept = spooled(spool, save_of(storage, url))
    damage(Path(kept.file))

    with pytest.raises(CorruptCheckpointError, match="is not what was written"):
        publishing(storage, kept).attempt(RecordingToken())

    assert not storage.exists(url, RecordingToken())


def test_a_link_is_not_spooled(
    url: str, storage: Storage, spool: SpoolDirectory, tmp_path: Path
) -> None:
    """What it points to may be gone by then; so it is published now, or waited for."""
    (tmp_path / "elsewhere").write_text("weights", encoding="utf-8")

    def linking(path: str) -> None:
        write(path)
        Path(path, "weights", "2.pt").symlink_to(tmp_path / "elsewhere")

    save = save_of(storage, url, linking)

    with pytest.raises(CheckpointError, match=r"2.pt is a link"):
        spooled(spool, save)

    assert spool.kept() == []


# Killed at any moment ----------------------------------------------------------------------------

EFFECTS = frozenset(
    {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.truncate"}
)


def is_killed(act: Callable[[], object], *, before: int) -> bool:
    """Do something in a process that is killed just before one of the things it does to disk."""
    pid = os.fork()
    if not pid:
        left = iter(range(before))

        def kill(event: str, _arguments: object) -> None:
            if event in EFFECTS and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(kill)
            act()
        finally:
            os._exit(0)
    return bool(os.WIFSIGNALED(os.waitpid(pid, 0)[1]))


def taken_over(tmp_path: Path) -> list[tuple[SpoolDirectory, Kept]]:
    """Return what the next start finds."""
    return list(left_behind(str(tmp_path / "spool" / "next"), lambda _entry: True))


def test_one_that_is_killed_while_it_spools_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    """Whenever that is; what is left of nothing is removed by the next start."""
    outcomes = set()
    moment, was_killed = 0, True

    for moment in range(1000):
        home = tmp_path / str(moment)
        storage = storage_in(home)
        url = f"{home}/run/a.ckpt"

        def spool_it(home: Path = home, storage: Storage = storage, url: str = url) -> None:
            mine = SpoolDirectory(str(home / "spool" / "run"))
            mine.claim()
            spooled(mine, save_of(storage, url))

        was_killed = is_killed(spool_it, before=moment)
        found = taken_over(home)
        outcomes.add(len(found))
        for spool, kept in found:
            publishing(storage, kept).attempt(RecordingToken())
            spool.drop(kept.name)
            spool.release()
            assert texts(storage, url) == NEW
        assert not (home / "spool" / "run" / "unpublished").exists()
        if not was_killed:
            break

    assert not was_killed
    assert moment > 10
    assert outcomes == {0, 1}


# It forks a process for each effect.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", ["", "faulty://"], ids=["by rename", "file by file"])
def test_one_that_is_killed_while_it_publishes_is_published_by_the_next(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at no moment is there a manifest beside something else than what it describes."""
    plan = faulty_filesystem.FaultPlan.write(tmp_path / "plan")
    monkeypatch.setenv(faulty_filesystem.VARIABLE, str(plan.folder))
    moment, was_killed = 0, True

    for moment in range(1000):
        home = tmp_path / str(moment)
        storage = storage_in(home)
        url = f"{protocol}{home}/run/a.ckpt"
        older = save_of(storage, url, partial(write, text="older"))
        older.prepare(RecordingToken())
        older.attempt(RecordingToken())
        older.close()
        mine = SpoolDirectory(str(home / "spool" / "run"))
        mine.claim()
        kept = spooled(mine, save_of(storage, url))
        os.close(mine._lock or 0)

        def publish_it(storage: Storage = storage, kept: Kept = kept, home: Path = home) -> None:
            publishing(storage, kept).attempt(RecordingToken())
            SpoolDirectory(str(home / "spool" / "run")).drop(kept.name)

        was_killed = is_killed(publish_it, before=moment)
        check_in_place(storage.place(url), RecordingToken(), digests=not protocol)
        for spool, again in taken_over(home):
            publishing(storage, again).attempt(RecordingToken())
            spool.drop(again.name)
            spool.release()
        assert texts(storage, url) == NEW
        assert (
            check_in_place(storage.place(url), RecordingToken(), digests=not protocol) is not None
        )
        assert not (home / "spool" / "run" / "unpublished").exists()
        if not was_killed:
            break

    assert not was_killed
    assert moment > 10
