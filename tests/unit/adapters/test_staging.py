# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Staged files: complete, measured, private, and gone when something went wrong."""

from __future__ import annotations

import errno
import io
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from lightning_resilience.adapters import staging
from lightning_resilience.adapters.mounts import filesystem_kind, mount_point
from lightning_resilience.adapters.staging import (
    SPOOL_VARIABLE,
    StagedWriter,
    discard,
    is_staging_name,
    spool_directory,
    stage,
    staging_name,
)
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import CallTimeoutError, ConfigError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken


def writes(data: bytes) -> Callable[[StagedWriter], object]:
    """A function that writes ``data``."""
    return lambda file: file.write(data)


def test_what_torch_saves_is_read_by_torch(tmp_path: Path) -> None:
    """The staged file is what ``torch.save`` writes, and length and digest are its own."""
    torch = pytest.importorskip("torch")
    checkpoint: dict[str, Any] = {
        "state_dict": {"w": torch.arange(100_000)},
        "epoch": 3,
        "name": "grün",
    }
    path = tmp_path / "new" / "staged"

    staged = stage(lambda file: torch.save(checkpoint, file), str(path), RecordingToken())

    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["state_dict"]["w"], checkpoint["state_dict"]["w"])
    assert loaded["epoch"] == 3
    assert staged.size_bytes == path.stat().st_size
    assert staged.digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(path.read_bytes())}"


def test_pieces_of_any_kind_and_size_are_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of every type are written whole, in pieces, with a mark of progress for each."""
    monkeypatch.setattr(staging, "_WRITE_BYTES", 3)
    token = RecordingToken()

    def write(file: StagedWriter) -> None:
        assert file.write(b"0123456789") == 10
        assert file.write(memoryview(bytearray(b"abcd"))) == 4
        assert file.write(b"") == 0
        assert file.tell() == 14

    staged = stage(write, str(tmp_path / "staged"), token)

    assert (tmp_path / "staged").read_bytes() == b"0123456789abcd"
    assert staged.size_bytes == 14
    assert token.marks == 4 + 2 + 1


@pytest.mark.parametrize("error", [ValueError("its own"), KeyboardInterrupt()])
def test_a_failure_while_writing_leaves_no_file(tmp_path: Path, error: BaseException) -> None:
    """Whatever ended the writing is raised unchanged."""

    def write(file: StagedWriter) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)) as caught:
        stage(write, str(tmp_path / "staged"), RecordingToken())

    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_failed_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on writing, or hides the failure, gets it again, and no file is published."""
    inner = os.write
    calls: list[int] = []

    def write_once(fd: int, data: bytes) -> int:
        if fd != file._fd:
            return inner(fd, data)
        calls.append(fd)
        raise OSError(errno.ESTALE, "Stale file handle")

    file = StagedWriter(str(tmp_path / "staged"))
    monkeypatch.setattr(os, "write", write_once)
    for call in (lambda: file.write(b"1"), lambda: file.write(b"2"), file.finish):
        with pytest.raises(OSError, match="Stale file handle"):
            call()
    file.abandon()

    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_writer_stops_and_leaves_no_file(tmp_path: Path) -> None:
    """Once its caller has given up, the next piece is not written."""

    def write(file: StagedWriter) -> None:
        file.write(b"1")
        file.write(b"2")

    with pytest.raises(CallTimeoutError):
        stage(write, str(tmp_path / "staged"), RecordingToken(cancel_after=1))

    assert list(tmp_path.iterdir()) == []


def test_a_staged_file_is_never_written_over(tmp_path: Path) -> None:
    """Another process's file under the same name is an error, and stays."""
    (tmp_path / "staged").write_bytes(b"theirs")

    with pytest.raises(FileExistsError):
        stage(writes(b"ours"), str(tmp_path / "staged"), RecordingToken())

    assert (tmp_path / "staged").read_bytes() == b"theirs"


def test_nobody_writes_past_the_digest(tmp_path: Path) -> None:
    """The file's descriptor is not given away, and a finished file takes no more."""
    writer = StagedWriter(str(tmp_path / "staged"))

    with pytest.raises(io.UnsupportedOperation):
        writer.fileno()
    writer.finish()
    with pytest.raises(ValueError, match="finished"):
        writer.write(b"more")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_filesystem_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The text says which filesystem was full, since it may not be the target's (C22)."""

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", full)

    with pytest.raises(OSError, match="is full or its quota used up") as caught:
        stage(writes(b"x"), str(tmp_path / "staged"), RecordingToken())

    assert caught.value.errno == number
    assert f"the filesystem at {mount_point(str(tmp_path))} " in str(caught.value)
    assert "bytes free" in str(caught.value)
    assert classify(caught.value).failure is FailureClass.CAPACITY
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_device_is_capacity() -> None:
    """The kernel's own answer is classified like the one above."""
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left") as caught,
    ):
        full.write(b"x")

    assert classify(caught.value).failure is FailureClass.CAPACITY


def test_discarding_twice_is_fine(tmp_path: Path) -> None:
    """Absent is success."""
    (tmp_path / "staged").touch()

    discard(str(tmp_path / "staged"))
    discard(str(tmp_path / "staged"))

    assert list(tmp_path.iterdir()) == []


def test_staging_names_are_recognised() -> None:
    """And are hidden, short, and no checkpoint's name."""
    assert is_staging_name(staging_name("abc"))
    assert staging_name("abc").startswith(".")
    assert not is_staging_name("last.ckpt")


def test_a_link_belongs_to_the_filesystem_that_it_points_into(tmp_path: Path) -> None:
    """A folder on another disk, linked from here, is on the other disk."""
    (tmp_path / "proc").symlink_to("/proc")

    assert mount_point(str(tmp_path / "proc" / "self")) == "/proc"
    assert filesystem_kind(str(tmp_path / "proc")) == "proc"


def test_the_spool_directory_is_private(tmp_path: Path) -> None:
    """Only its owner may enter, whatever the umask; each run has its own."""
    umask = os.umask(0)
    try:
        place = Path(spool_directory(str(tmp_path), environ={}, run_id="run/../1"))
    finally:
        os.umask(umask)

    assert place == tmp_path / f"lightning-resilience-{os.getuid()}" / "run____1"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert spool_directory(str(tmp_path), environ={}, run_id="run/../1") == str(place)


def test_the_spool_directory_is_where_it_was_asked_for(tmp_path: Path) -> None:
    """First the option, then our variable, then TMPDIR."""
    variables = {SPOOL_VARIABLE: str(tmp_path / "ours"), "TMPDIR": str(tmp_path / "tmp")}
    bases = [
        spool_directory(str(tmp_path / "option"), environ=variables, run_id="1"),
        spool_directory(None, environ=variables, run_id="1"),
        spool_directory(None, environ={"TMPDIR": variables["TMPDIR"]}, run_id="1"),
        spool_directory(None, environ={**variables, SPOOL_VARIABLE: ""}, run_id="1"),
    ]

    names = [Path(base).relative_to(tmp_path).parts[0] for base in bases]

    assert names == ["option", "ours", "tmp", "tmp"]


def test_a_spool_directory_that_cannot_be_made_now_is_no_wrong_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that is expected to pass is raised as it is, so that it is repeated."""

    def stale(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(Path, "mkdir", stale)

    with pytest.raises(OSError, match="stale") as caught:
        spool_directory(str(tmp_path / "option"), environ={}, run_id="1")

    assert not isinstance(caught.value, ConfigError)


def test_a_spool_directory_that_is_too_open_is_closed(tmp_path: Path) -> None:
    """An earlier mistake is put right."""
    owned = tmp_path / f"lightning-resilience-{os.getuid()}"
    owned.mkdir(mode=0o777)
    owned.chmod(0o777)

    spool_directory(str(tmp_path), environ={}, run_id="1")

    assert stat.S_IMODE(owned.stat().st_mode) == 0o700


def test_a_link_in_place_of_the_spool_directory_is_refused(tmp_path: Path) -> None:
    """Somebody else could have put it there to read our checkpoints."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"lightning-resilience-{os.getuid()}").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="it is a link or a file"):
        spool_directory(str(tmp_path), environ={}, run_id="1")


def test_a_spool_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the owner and the variable to set."""
    spool_directory(str(tmp_path), environ={}, run_id="1")
    (tmp_path / f"lightning-resilience-{os.getuid()}").rename(tmp_path / "lightning-resilience-77")
    monkeypatch.setattr(os, "getuid", lambda: 77)

    with pytest.raises(ConfigError, match=rf"belongs to user id \d+, not to 77.*{SPOOL_VARIABLE}"):
        spool_directory(str(tmp_path), environ={}, run_id="1")


@pytest.mark.skipif(filesystem_kind("/dev/shm") != "tmpfs", reason="needs a tmpfs at /dev/shm")
def test_a_spool_directory_in_memory_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is staged there competes with training for memory."""
    base = Path("/dev/shm") / tmp_path.name
    base.mkdir()
    try:
        with caplog.at_level(logging.WARNING):
            place = Path(spool_directory(str(base), environ={}, run_id="1"))
    finally:
        place.rmdir()
        place.parent.rmdir()
        base.rmdir()

    assert "is held in memory (tmpfs)" in caplog.text


def test_a_token_is_any_object_with_its_methods() -> None:
    """The recording token is a cancel token as the port wants it."""
    token: CancelToken = RecordingToken()

    token.progress()
    token.raise_if_cancelled()

    assert token.cancelled is False
