# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that nobody has described is read to the last byte, and damage is found."""

from __future__ import annotations

import errno
import io
import json
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters.archives import examine
from lightning_resilience.core.verification import Look
from lightning_resilience.errors import CallTimeoutError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.core.verification import Seen


WEIGHTS = torch.arange(300)
# "0" is also the name of a storage in the archive.
STATE: dict[str, Any] = {
    "weights": WEIGHTS,
    "0": WEIGHTS[3:],
    "steps": 4,
    "more": [torch.ones(3), torch.zeros(2)],
}


def saved(state: Any = None, **options: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(STATE if state is None else state, buffer, **options)
    return buffer.getvalue()


def seen_in(data: bytes, *, is_quick: bool = False) -> Seen:
    """Look at these bytes."""
    return examine(io.BytesIO(data), RecordingToken(), is_quick=is_quick)


def flipped(data: bytes, position: int, *, bit: int = 0) -> bytes:
    """Return ``data`` with one bit changed."""
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves_is_whole(protocol: int) -> None:
    """Whatever version of pickle it was told to use."""
    data = saved(pickle_protocol=protocol)

    assert seen_in(data).look is Look.WHOLE
    assert seen_in(data, is_quick=True).look is Look.LISTED


def test_a_checkpoint_without_tensors_is_whole() -> None:
    """It has a pickle and no data."""
    assert seen_in(saved({"step": 1})).look is Look.WHOLE


@pytest.mark.parametrize("bit", [0, 5, 7])
def test_one_flipped_bit_is_found_wherever_it_is(bit: int) -> None:
    """In every byte but four, which say what program wrote the archive's end, and nobody reads."""
    data = saved()
    end = data.rindex(b"PK\x06\x06")
    written_by = range(end + 12, end + 16)

    missed = [
        position
        for position in range(len(data))
        if seen_in(flipped(data, position, bit=bit)).look not in {Look.DAMAGED, Look.PREFIXED}
    ]

    assert missed == list(written_by)
    for position in written_by:
        changed = torch.load(io.BytesIO(flipped(data, position, bit=bit)))
        assert torch.equal(changed["weights"], WEIGHTS)


def test_torch_does_not_find_it() -> None:
    """That is why it is looked for here."""
    data = saved()
    position = data.index(WEIGHTS.numpy().tobytes()) + 800

    loaded = torch.load(io.BytesIO(flipped(data, position)))

    assert not torch.equal(loaded["weights"], WEIGHTS)
    assert "data/0" in seen_in(flipped(data, position)).detail


def test_a_file_that_was_cut_off_is_damaged_wherever_that_was() -> None:
    """Nothing of it left is an empty file."""
    data = saved()

    looks = [seen_in(data[:size]).look for size in range(len(data))]

    assert looks[0] is Look.EMPTY
    assert set(looks[1:]) == {Look.DAMAGED}


@pytest.mark.parametrize("size", [1, 30, 100, 100_000])
@pytest.mark.parametrize("filler", [b"\0", b"x"])
def test_bytes_behind_the_end_are_damage(size: int, filler: bytes) -> None:
    """The wrong length, and the archive in it is good."""
    assert seen_in(saved() + size * filler).look is Look.DAMAGED


def test_bytes_in_front_are_told_apart() -> None:
    """Some formats put several archives into one file."""
    seen = seen_in(saved() + saved())

    assert seen.look is Look.PREFIXED
    assert f"{len(saved())} bytes stand in front" in seen.detail


@pytest.mark.parametrize("start", [0.0, 0.1, 0.5, 0.9])
def test_a_hole_of_zeros_is_damage(start: float) -> None:
    """As a filesystem leaves one whose host has died: the size is right."""
    data = saved()
    begin = int(start * len(data))
    hole = bytes(len(data) // 20)

    assert seen_in(data[:begin] + hole + data[begin + len(hole) :]).look is Look.DAMAGED


def repacked(data: bytes, *, without: str = "", **options: Any) -> bytes:
    """Return the records of an archive as another program packs them."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as archive,
        zipfile.ZipFile(buffer, "w", **options) as packed,
    ):
        for name in archive.namelist():
            if name != without:
                packed.writestr(name, archive.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_tensor_without_a_record_is_damage(protocol: int) -> None:
    """A save that failed half way has written a table of contents of what there was."""
    data = repacked(saved(pickle_protocol=protocol), without="archive/data/1")

    seen = seen_in(data)

    assert seen.look is Look.DAMAGED
    assert "1 of 3 tensors are missing (archive/data/1)" in seen.detail


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_another_program_has_packed_is_held_to_its_checksums(compression: int) -> None:
    """It may have comments, times, and compressed records."""
    data = repacked(saved(), compression=compression)
    position = data.index(b"archive/data/0") + 40

    assert seen_in(data).look is Look.WHOLE
    assert seen_in(flipped(data, position)).look is Look.DAMAGED


def test_an_archive_of_something_else_is_held_to_its_checksums() -> None:
    """A format of a user's own may be one."""
    buffer = io.BytesIO(b"#!/bin/sh\n")
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("weights.json", json.dumps(list(range(100))))
    data = buffer.getvalue()

    assert seen_in(data).look is Look.WHOLE
    assert seen_in(flipped(data, data.index(b"42"))).look is Look.DAMAGED


@pytest.fixture
def _without_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("_without_checksums")
def test_an_archive_without_checksums_is_no_damage() -> None:
    """Torch can be told to compute none; then what is around the records is compared."""
    data = saved()
    header = data.index(b"PK\x03\x04", 10)

    assert seen_in(data).look is Look.UNSUMMED
    assert seen_in(flipped(data, header + 30)).look is Look.DAMAGED


@pytest.mark.parametrize(
    ("data", "look"),
    [
        (b"", Look.EMPTY),
        (bytes(70), Look.ZEROS),
        (bytes(200_000), Look.ZEROS),
        (bytes(200_000) + b"x", Look.OTHER),
        (b"<html><body>503 Slow down</body></html>", Look.PAGE),
        (b"\n <!DOCTYPE HTML><title>Sign in</title>" + 5000 * b" ", Look.PAGE),
        (b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>", Look.PAGE),
        (saved(_use_new_zipfile_serialization=False), Look.LEGACY),
        (pickle.dumps(STATE["steps"]), Look.OTHER),
        (b"no checkpoint at all", Look.OTHER),
        (5000 * b"x", Look.OTHER),
    ],
    ids=lambda value: value.value if isinstance(value, Look) else f"{len(value)} bytes",
)
def test_what_is_no_archive_is_told_by_its_beginning(data: bytes, look: Look) -> None:
    """Quick or not; a file is zero only if all of it is."""
    assert seen_in(data).look is look
    assert seen_in(data, is_quick=True).look is look


class FailingFile(io.BytesIO):
    """Fails at the n-th read."""

    def __init__(self, data: bytes, *, fails_at: int) -> None:
        super().__init__(data)
        self.reads = 0
        self._fails_at = fails_at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read, or fail."""
        self.reads += 1
        if self.reads == self._fails_at:
            raise ConnectionResetError("in the middle")
        return super().read(size)


def test_a_read_that_fails_is_no_damage() -> None:
    """Whichever it is: zipfile would take some for the end of an archive."""
    data = saved({"weights": torch.arange(500_000)})
    whole = FailingFile(data, fails_at=0)
    examine(whole, RecordingToken())
    assert whole.reads > 4

    for number in range(1, whole.reads + 1):
        with pytest.raises(ConnectionResetError):
            examine(FailingFile(data, fails_at=number), RecordingToken())


class StrictFile(io.BytesIO):
    """Can go nowhere but where it has bytes, as files of some storages."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go there, or fail."""
        if whence == io.SEEK_SET and not 0 <= offset <= len(self.getvalue()):
            raise OSError(errno.EINVAL, f"cannot seek to {offset}")
        return super().seek(offset, whence)


@pytest.mark.parametrize("data", [saved(), repacked(saved())], ids=["torch", "repacked"])
def test_a_table_that_points_outside_of_the_file_is_damage(data: bytes) -> None:
    """It is not the storage that has failed."""
    offset = data.rindex(b"PK\x01\x02") + 42

    for byte in range(4):
        damaged = StrictFile(flipped(data, offset + byte, bit=7))
        assert examine(damaged, RecordingToken()).look is Look.DAMAGED


def test_each_piece_is_a_mark_of_progress_and_may_be_the_last() -> None:
    """A large file is no stall, and whoever has given up is heard."""
    data = saved({"weights": torch.zeros(3 * 2**20)})
    token = RecordingToken()
    examine(io.BytesIO(data), token)

    assert token.marks > 3
    with pytest.raises(CallTimeoutError):
        examine(io.BytesIO(data), RecordingToken(cancel_after=2))
