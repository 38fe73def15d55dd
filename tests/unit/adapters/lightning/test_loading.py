# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One load in Lightning's own format: what it reads, in which pieces, and what it raises."""

from __future__ import annotations

import contextlib
import errno
import io
import uuid
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters.lightning import loading
from lightning_resilience.adapters.lightning.discovery import inspect
from lightning_resilience.adapters.lightning.loading import TorchLoad, on_cpu
from lightning_resilience.adapters.lightning.mappings import Mappings
from lightning_resilience.adapters.marked_file import MarkedFile
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.trees import PIECE_BYTES
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import CallTimeoutError
from tests.http_server import Answer, serving
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.core.resolution import Inspection
    from tests.s3_server import S3Server


LARGE = torch.arange(3 * PIECE_BYTES // 4 + 1, dtype=torch.float32)


def load_of(storage: Storage, url: str, **options: Any) -> TorchLoad:
    """Make a load with what Lightning says by default."""
    numbers = count()
    said = {"map_location": on_cpu, "weights_only": None, **options}
    return TorchLoad(storage, url, nonce=lambda: f"n{next(numbers)}", options=said)


def run(work: TorchLoad, token: RecordingToken | None = None) -> Any:
    """Load as a rank does, in one attempt."""
    token = token or RecordingToken()
    work.prepare(token)
    path = work.attempt(token) if work.needs_storage else None
    return work.finish(path, token)


def storage_of(spool: Path, **options: Any) -> Storage:
    """Make clients whose spool directory this is."""
    return Storage(options, spool=lambda: str(spool))


class Reads(io.BytesIO):
    """A file that notes how much is asked of it, and may fail at one read."""

    def __init__(self, data: bytes, *, fails_at: int = 0) -> None:
        super().__init__(data)
        self.asked: list[int] = []
        self._fails_at = fails_at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read."""
        self.asked.append(-1 if size is None else size)
        if len(self.asked) == self._fails_at:
            raise ConnectionResetError(errno.ECONNRESET, "in the middle")
        return super().read(size)


def saved(value: Any, **options: Any) -> bytes:
    """Return the bytes of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Storage]:
    """Storage in memory, where a test decides how a file is opened."""
    storage = storage_of(tmp_path)
    yield storage
    storage.place("memory://").fs.store.clear()


def open_as(storage: Storage, url: str, file: Reads) -> None:
    """Put something there, and open it as ``file``."""
    place = storage.place(url)
    place.fs.pipe_file(place.path, file.getvalue())
    place.fs.open = lambda *_args: contextlib.closing(file)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_large_checkpoint_is_read_in_pieces_that_mark_progress(
    legacy: bool,  # noqa: FBT001 - a parameter
    memory: Storage,
) -> None:
    """No read is larger than a piece, so no more than that is in memory twice."""
    file = Reads(saved({"large": LARGE}, _use_new_zipfile_serialization=not legacy))
    open_as(memory, "memory://a.ckpt", file)
    token = RecordingToken()

    loaded = run(load_of(memory, "memory://a.ckpt"), token)

    assert torch.equal(loaded["large"], LARGE)
    assert PIECE_BYTES in file.asked
    assert 0 < min(file.asked) <= max(file.asked) == PIECE_BYTES
    assert token.marks >= len(file.asked) - 1


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("read", [1, 2, 4])
def test_what_the_storage_raised_is_what_is_raised(
    read: int,
    legacy: bool,  # noqa: FBT001 - a parameter
    memory: Storage,
) -> None:
    """Not what becomes of it in ``torch.load``, which says nothing about the storage."""
    data = saved({"large": LARGE}, _use_new_zipfile_serialization=not legacy)
    open_as(memory, "memory://a.ckpt", Reads(data, fails_at=read))

    with pytest.raises(ConnectionResetError, match="in the middle"):
        run(load_of(memory, "memory://a.ckpt"), RecordingToken())


def test_a_failed_read_fails_the_load_also_where_torch_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At times it reads on after a read that has failed, and returns as if nothing had been."""

    def read_on(file: Any, **_options: Any) -> str:
        with contextlib.suppress(ConnectionResetError):
            file.read(1)
        return "loaded"

    monkeypatch.setattr(torch, "load", read_on)

    with pytest.raises(ConnectionResetError, match="in the middle"):
        loading._load(Reads(b"something", fails_at=1), RecordingToken(), {})


def test_an_abandoned_load_reads_no_further(memory: Storage) -> None:
    """It may have come back late, and nobody looks at its result."""
    file = Reads(saved({"large": LARGE}))
    open_as(memory, "memory://a.ckpt", file)

    with pytest.raises(CallTimeoutError):
        # A piece is marked as it is read, and as it is written.
        run(load_of(memory, "memory://a.ckpt"), RecordingToken(cancel_after=5))

    assert len(file.asked) == 3


def test_what_is_not_there_is_said_without_credentials(memory: Storage) -> None:
    """A missing file is a mistake, which the text names."""
    url = f"memory://user:secret@bucket/{uuid.uuid4().hex}.ckpt"

    with pytest.raises(FileNotFoundError) as caught:
        run(load_of(memory, url), RecordingToken())

    assert "secret" not in str(caught.value)
    assert url.rpartition("/")[2] in str(caught.value)


class Plain:
    """What only a load of everything reads."""


def test_weights_only_is_handed_on(tmp_path: Path) -> None:
    """What the caller says holds, and what torch says otherwise."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(saved({"plain": Plain()}))
    storage = storage_of(tmp_path)

    loaded = run(load_of(storage, str(path), weights_only=False), RecordingToken())

    assert isinstance(loaded["plain"], Plain)
    with pytest.raises(Exception, match="weights_only"):
        run(load_of(storage, str(path)), RecordingToken())


def test_map_location_is_handed_on(tmp_path: Path) -> None:
    """Tensors go where the caller wants them."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(saved({"a": torch.ones(2)}))

    loaded = run(load_of(storage_of(tmp_path), str(path), map_location="meta"), RecordingToken())

    assert loaded["a"].device.type == "meta"


def test_an_object_in_s3_is_loaded(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    """By ranges, whatever a listing said before it was there."""
    storage = storage_of(tmp_path, **s3_server.storage_options)
    url = f"s3://{bucket}/a.ckpt"
    place = storage.place(url)
    assert place.fs.ls(bucket) == []
    s3_server.client().put_object(Bucket=bucket, Key="a.ckpt", Body=saved({"large": LARGE}))

    loaded = run(load_of(storage, url), RecordingToken())

    assert torch.equal(loaded["large"], LARGE)


@pytest.fixture
def web() -> Iterator[str]:
    """A web server that cannot seek, with one checkpoint that holds more than weights."""
    data = saved({"plain": Plain()})

    with serving(lambda _: Answer(body=data)) as server:
        yield f"{server.url}/a.ckpt"


def test_a_checkpoint_of_a_web_server_is_fetched_first(web: str, tmp_path: Path) -> None:
    """As Lightning does, and like there it is trusted where nobody says otherwise."""
    load = load_of(storage_of(tmp_path), web)

    loaded = run(load)
    fetched = [path for path in (tmp_path / "node-cache").iterdir() if path.suffix == ".ckpt"]
    load.close()

    assert isinstance(loaded["plain"], Plain)
    assert len(fetched) == 1
    assert [path.name for path in (tmp_path / "node-cache").iterdir()] == ["now"]


def test_a_marked_file_goes_where_it_is_sent() -> None:
    """It is a file like any other to whoever reads it."""
    marked = MarkedFile(io.BytesIO(b"0123456789"), RecordingToken())

    assert (marked.readable(), marked.seekable()) == (True, True)
    assert (marked.seek(-3, io.SEEK_END), marked.tell(), marked.read(2)) == (7, 7, b"78")
    with pytest.raises(io.UnsupportedOperation):
        marked.fileno()


# A checkpoint that rank 0 has looked at -----------------------------------------------------------


def chosen(tmp_path: Path, value: int = 1) -> Inspection:
    """Write a checkpoint, and return what rank 0 sees of it."""
    path = tmp_path / "a.ckpt"
    torch.save({"step": value}, path)
    return inspect(storage_of(tmp_path), RecordingToken(), url=str(path))


def load(seen: Inspection) -> Any:
    """Load it as a rank does."""
    options = {"map_location": on_cpu, "weights_only": True}
    work = TorchLoad(Storage({}, spool=str), seen.path, nonce=str, options=options, expected=seen)
    return run(work)


def test_the_checkpoint_that_rank_zero_has_chosen_is_loaded(tmp_path: Path) -> None:
    """It is compared, and read from its beginning."""
    assert load(chosen(tmp_path, 7)) == {"step": 7}


def test_another_content_under_the_same_name_is_not_loaded(tmp_path: Path) -> None:
    """As a rank sees it that is behind, or where the file has been written again."""
    seen = chosen(tmp_path, 1)
    assert chosen(tmp_path, 2).size_bytes == seen.size_bytes

    with pytest.raises(OSError, match="its content has digest") as caught:
        load(seen)

    assert classify(caught.value, reading=True).failure is FailureClass.TRANSIENT


@pytest.mark.parametrize("how", ["gone", "shorter", "damaged"])
def test_what_a_rank_does_not_see_as_rank_zero_did_is_asked_for_again(
    how: str, tmp_path: Path
) -> None:
    """A network filesystem may show this rank an older state for a while."""
    seen = chosen(tmp_path)
    path = tmp_path / "a.ckpt"
    data = path.read_bytes()
    said = {
        "gone": "it is not there on this rank",
        "shorter": "bytes here and",
        "damaged": "it is damaged on this rank",
    }[how]
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-100] + (b"" if how == "shorter" else bytes(100)))

    with pytest.raises(OSError, match=said) as caught:
        load(seen)

    assert classify(caught.value, reading=True).failure is FailureClass.TRANSIENT


# On a shared filesystem ---------------------------------------------------------------------------


def test_a_file_of_a_shared_filesystem_is_copied_to_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded is in the copy: that another node truncates the file is no harm."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(saved({"large": LARGE}))
    kinds = {str(path): "nfs4"}
    monkeypatch.setattr(loading, "filesystem_kind", lambda name: kinds.get(name, "ext4"))
    mappings = Mappings()
    work = TorchLoad(
        storage_of(tmp_path / "spool"),
        str(path),
        nonce=lambda: "n",
        options={"map_location": on_cpu, "weights_only": True},
        common="1",
        mappings=mappings,
    )

    loaded = run(work)
    path.write_bytes(b"")

    assert torch.equal(loaded["large"], LARGE)
    assert [item.stat().st_size for item in (tmp_path / "spool").rglob("*.ckpt")] == [
        len(saved({"large": LARGE}))
    ]
    mappings.let_go()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_the_older_format_is_loaded_without_a_map(
    legacy: bool,  # noqa: FBT001 - a parameter
    tmp_path: Path,
) -> None:
    """It cannot be mapped; both give the same."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(saved({"large": LARGE}, _use_new_zipfile_serialization=not legacy))
    mappings = Mappings()
    work = TorchLoad(
        storage_of(tmp_path / "spool"),
        str(path),
        nonce=lambda: "n",
        options={"map_location": on_cpu, "weights_only": True},
        mappings=mappings,
    )

    loaded = run(work)

    assert torch.equal(loaded["large"], LARGE)
    assert (str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")) is not legacy
    mappings.let_go()
