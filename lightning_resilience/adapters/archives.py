# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint that nobody has described, to the last byte, without making anything of it.

``torch.save`` writes a zip archive with a checksum (CRC-32) for each record, and ``torch.load``
compares none of them: a bit that has flipped on a disk becomes a weight. So they are compared here.
In an archive as torch itself writes it, nothing else may be anywhere either: record follows record
from the first byte to the table of contents, each behind a header that says the same as the table,
and the table ends the file. And every tensor that the pickle names has a record: a save that has
failed half way through still writes a table of contents, of what there is. What another program has
packed is held to its checksums only.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.marked_file import MarkedFile
from lightning_resilience.adapters.trees import PIECE_BYTES
from lightning_resilience.core.verification import Look, Seen


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.ports import CancelToken


__all__ = ["examine"]

_BUFFER_BYTES: Final = 2**20
_HEAD_BYTES: Final = 2**16
_PICKLE_BYTES_MAX: Final = 2**26
"""What is looked through in about ten seconds. Tensors are not in it, so few are larger."""
_LISTED: Final = 3
_SMALLEST_BYTES: Final = 64
"""An archive with one record is larger. Below, ``zipfile`` seeks to before the beginning."""

_BEGINS, _ENTRY_BEGINS = b"PK\x03\x04", b"PK\x01\x02"
_END_BEGINS, _END_64_BEGINS, _LOCATOR_BEGINS = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_HEADER_BYTES, _ENTRY_BYTES, _DESCRIPTOR_BYTES = 30, 46, 24
# The number that torch.save wrote first before it wrote archives, pickled.
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_PAGES: Final = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<body", b"<error")
# What zipfile raises where an archive is damaged; RuntimeError for a bit that means encryption.
_DAMAGED: Final = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError),
    *(NotImplementedError, RuntimeError, OverflowError, KeyError),
)

_STREAMED: Final = 0x08
"""The flag of a record whose checksum and sizes stand behind it, and not in its header."""
_PADDING, _SIZES_64 = b"FB", b"\x01\x00"
"""The extra field by which torch moves a tensor to an address that can be mapped, and zip's own."""
_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_SHORT_MAX, _LONG_MAX = 2**16 - 1, 2**32 - 1
_PICKLE: Final = "/data.pkl"
_TENSORS: Final = "data/"
# Opcodes of a pickle that matter here: which strings it holds, and which it uses again.
_STRINGS: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINUNICODE8"})
_GETS: Final = frozenset({"BINGET", "LONG_BINGET", "GET"})
_PUTS: Final = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})


class _Inside(MarkedFile):
    """A file in which nobody seeks to where it is not: a damaged table points anywhere."""

    def __init__(self, file: Any, token: CancelToken) -> None:
        super().__init__(file, token)
        self.size_bytes = self.seek(0, io.SEEK_END)
        super().seek(0)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go somewhere else in the file."""
        if whence == io.SEEK_SET and not 0 <= offset <= self.size_bytes:
            message = f"it points to byte {offset}, which is not in the file"
            raise zipfile.BadZipFile(message)
        return super().seek(offset, whence)


def examine(file: Any, token: CancelToken, *, is_quick: bool = False) -> Seen:
    """Look at one file.

    Args:
        file: An open binary file that can seek, at its beginning; whoever opened it closes it. It
            is read in pieces, from the first record to the last.
        token: Told of each piece, and asked before it whether the caller has given up.
        is_quick: Whether to read the table of contents and no records.

    Returns:
        What it looks like, with one line that says what is wrong.

    Raises:
        CallTimeoutError: The caller has given up.
        OSError: A read has failed: that shows nothing of the file.
    """
    marked = _Inside(file, token)
    seen = _examine(marked, io.BufferedReader(marked, _BUFFER_BYTES), is_quick=is_quick)
    if marked.error is not None:
        raise marked.error
    return seen


def _examine(marked: _Inside, file: io.BufferedReader, *, is_quick: bool) -> Seen:
    size_bytes = marked.size_bytes
    head = file.read(_HEAD_BYTES)
    try:
        if size_bytes < _SMALLEST_BYTES:
            message = "it is too short to be an archive"
            raise zipfile.BadZipFile(message)
        archive = zipfile.ZipFile(file)
    except _DAMAGED as error:
        is_begun = bool(head) and head.startswith(_BEGINS[: len(head)])
        look = Look.DAMAGED if is_begun else _other(file, head)
        detail = f"its end is no table of contents that can be read ({error})"
        return Seen(look=look, size_bytes=size_bytes, detail=detail)
    with archive:
        try:
            return _Archive(archive, file, size_bytes=size_bytes).seen(is_quick=is_quick)
        except _DAMAGED as error:
            return Seen(look=Look.DAMAGED, size_bytes=size_bytes, detail=str(error))


def _other(file: io.BufferedReader, head: bytes) -> Look:
    if not head:
        return Look.EMPTY
    if head.startswith(_LEGACY):
        return Look.LEGACY
    if head.lstrip().lower().startswith(_PAGES):
        return Look.PAGE
    file.seek(0)
    pieces = iter(lambda: file.read(PIECE_BYTES), b"")
    return Look.OTHER if any(piece.strip(b"\0") for piece in pieces) else Look.ZEROS


class _Archive:
    """An archive whose table of contents can be read.

    Its methods raise what ``_DAMAGED`` lists where something is wrong, and say what.
    """

    def __init__(
        self, archive: zipfile.ZipFile, file: io.BufferedReader, *, size_bytes: int
    ) -> None:
        self._archive, self._file, self._size_bytes = archive, file, size_bytes
        self._records = archive.infolist()
        self._is_pickled = any(name.endswith(_PICKLE) for name in archive.namelist())
        # Month 0: torch writes no time, and no other program writes such a month.
        is_timeless = any(not record.date_time[1] for record in self._records)
        self._is_torch = self._is_pickled and is_timeless

    def seen(self, *, is_quick: bool) -> Seen:
        """Look at it."""
        entries: list[bytes] = []
        if self._is_torch:
            entries, tail = _split(self._read(self._archive.start_dir, self._size_bytes))
            offset = _check_end(tail, count=len(self._records), size=sum(map(len, entries)))
            in_front = self._archive.start_dir - offset
            if in_front:
                detail = f"{in_front} bytes stand in front of its archive"
                return Seen(look=Look.PREFIXED, size_bytes=self._size_bytes, detail=detail)
            _check_alike(entries)
        look = Look.LISTED if is_quick else self._read_through(entries)
        return Seen(look=look, size_bytes=self._size_bytes)

    def _read_through(self, entries: list[bytes]) -> Look:
        if entries:
            self._check_frames(entries)
        if not any(record.CRC for record in self._records):
            # torch can be told to compute no checksums.
            return Look.UNSUMMED
        self._check_sums()
        if self._is_pickled:
            self._check_tensors()
        return Look.WHOLE

    def _read(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(max(0, end - start))

    def _check_sums(self) -> None:
        for record in sorted(self._records, key=_offset_of):
            with self._archive.open(record) as content:
                while content.read(PIECE_BYTES):
                    pass

    def _check_frames(self, entries: list[bytes]) -> None:
        """Compare what stands around each record with the table of contents."""
        pairs = sorted(
            zip(self._records, entries, strict=True), key=lambda pair: _offset_of(pair[0])
        )
        starts = [_offset_of(record) for record, _ in pairs]
        ends = [*starts[1:], self._archive.start_dir]
        for (record, entry), end in zip(pairs, ends, strict=True):
            if not self._is_framed(record, entry, end):
                name = record.filename
                message = f"its table of contents differs from what stands around {name!r}"
                raise zipfile.BadZipFile(message)

    def _is_framed(self, record: zipfile.ZipInfo, entry: bytes, end: int) -> bool:
        start = record.header_offset
        header = self._read(start, start + _HEADER_BYTES)
        name_bytes, extra_bytes = struct.unpack("<2H", header[26:])
        behind_header = start + len(header)
        named = self._read(behind_header, behind_header + name_bytes + extra_bytes)
        data_end = behind_header + len(named) + record.compress_size
        is_streamed = bool(record.flag_bits & _STREAMED)
        # One byte more than may be there, and not all up to an end that may be wrong.
        behind = self._read(data_end, min(end, data_end + _DESCRIPTOR_BYTES + 1))
        return (
            header.startswith(_BEGINS)
            # Version, flags, method, and time; then checksum and sizes.
            and header[4:14] == entry[6:16]
            and (header[14:26] == entry[16:28] or (is_streamed and not any(header[14:26])))
            and named[:name_bytes] == entry[_ENTRY_BYTES : _ENTRY_BYTES + name_bytes]
            and _is_padded(named[name_bytes:])
            and behind in (_descriptors(record) if is_streamed else (b"",))
        )

    def _check_tensors(self) -> None:
        """Find a record for each tensor that the pickle names."""
        names = set(self._archive.namelist())
        for record in self._records:
            if record.filename.endswith(_PICKLE) and record.file_size <= _PICKLE_BYTES_MAX:
                folder = record.filename.removesuffix(_PICKLE.lstrip("/"))
                with self._archive.open(record) as content:
                    named = {f"{folder}{_TENSORS}{key}" for key in _tensor_keys(content)}
                missing = sorted(named - names)
                if missing:
                    few = ", ".join(missing[:_LISTED])
                    message = f"{len(missing)} of {len(named)} tensors are missing ({few})"
                    raise zipfile.BadZipFile(message)


def _offset_of(record: zipfile.ZipInfo) -> int:
    return record.header_offset


def _split(table: bytes) -> tuple[list[bytes], bytes]:
    """Split a table of contents into its entries and what stands behind it."""
    entries, position = [], 0
    while table.startswith(_ENTRY_BEGINS, position):
        lengths = struct.unpack_from("<3H", table, position + 28)
        end = position + _ENTRY_BYTES + sum(lengths)
        entries.append(table[position:end])
        position = end
    return entries, table[position:]


def _check_end(tail: bytes, *, count: int, size: int) -> int:
    """Check what stands behind a table of contents; return where that says it begins."""
    is_long = tail.startswith(_END_64_BEGINS)
    fields = (_END_64 if is_long else _END).unpack_from(tail)
    offset = int(fields[9] if is_long else fields[6])
    sizes = (min(count, _SHORT_MAX), min(count, _SHORT_MAX), min(size, _LONG_MAX))
    end = _END.pack(_END_BEGINS, 0, 0, *sizes, min(offset, _LONG_MAX), 0)
    if is_long:
        long = (_END_64_BEGINS, _END_64.size - 12, *fields[2:4], 0, 0, count, count)
        locator = _LOCATOR.pack(_LOCATOR_BEGINS, 0, offset + size, 1)
        end = _END_64.pack(*long, size, offset) + locator + end
    if tail != end:
        message = f"the last {len(tail)} bytes are not the end of an archive of {count} records"
        raise zipfile.BadZipFile(message)
    return offset


def _check_alike(entries: list[bytes]) -> None:
    # One program has written all of them: version, disk and attributes are the same.
    if len({entry[4:6] + entry[32:42] for entry in entries}) > 1:
        message = "its table of contents has entries of different kinds"
        raise zipfile.BadZipFile(message)


def _is_padded(extra: bytes) -> bool:
    """Tell whether extra fields are what torch writes: padding, and sizes that need 64 bits."""
    while extra:
        kind, size = extra[:2], int.from_bytes(extra[2:4], "little")
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        is_known = kind == _SIZES_64 or (kind == _PADDING and not field.strip(b"Z"))
        if len(field) != size or not is_known:
            return False
    return True


def _descriptors(record: zipfile.ZipInfo) -> tuple[bytes, ...]:
    sums = (b"PK\x07\x08", record.CRC, record.compress_size, record.file_size)
    long = struct.pack("<4sL2Q", *sums)
    fits = max(record.compress_size, record.file_size) <= _LONG_MAX
    return (long, struct.pack("<4s3L", *sums)) if fits else (long,)


def _tensor_keys(content: Any) -> Iterator[str]:
    """Yield the names of the storages that a pickle refers to, without unpickling it.

    Each is the last string but one before the reference: the last says on which device it was.
    """
    texts: list[str] = []
    kept: dict[Any, str] = {}
    is_text = False
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _PUTS or opcode.name == "MEMOIZE":
            key = len(kept) if argument is None else argument
            kept[key] = texts[-1] if is_text else ""
            continue
        is_text = opcode.name in _STRINGS or (opcode.name in _GETS and bool(kept.get(argument)))
        if is_text:
            texts.append(str(argument) if opcode.name in _STRINGS else kept[argument])
        elif opcode.name == "MARK":
            texts = []
        elif opcode.name == "BINPERSID" and texts[1:]:
            yield texts[-2]
