# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What every rank tells of its portion of a checkpoint of ``torch.distributed.checkpoint``.

Its metadata says of each tensor in which file it is, and where there, and only the rank that wrote
it knows that. So each rank tells two things through the shared store: its files, which have to be
in storage before the metadata, and what is in them. Both travel as one compressed text. It is read
as data and never executed, unlike the pickles that ranks otherwise send to each other.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.muster import named
from lightning_resilience.core.records import VERSION
from lightning_resilience.errors import CheckpointError, CorruptRecordError


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["Entry", "Portion", "decode_portion", "encode_portion", "merge"]

# What a portion of a hundred thousand entries has, several times over; a text that was damaged must
# not fill the memory.
_DECODED_BYTES_MAX: Final = 2**30


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor, or one object, was written.

    Args:
        name: Its full name in the state.
        offset: Where in the whole tensor this piece begins; None for an object.
        index: Which piece it is, where that is known.
        size_bytes: Its length.
        file: The file.
        start: Where in the file it begins, in bytes.
        length: How many bytes it takes there.
        transforms: How its bytes were transformed, in torch's words; None where they were not.
    """

    name: str
    offset: tuple[int, ...] | None
    index: int | None
    size_bytes: int
    file: str
    start: int
    length: int
    transforms: tuple[str, ...] | None = None


class Portion(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written, published and seen in storage.

    Args:
        v: Version of the format.
        rank: The rank.
        files: Size in bytes and digest of each of its files, by name.
        entries: What is in them.
    """

    v: int = VERSION
    rank: int
    files: dict[str, tuple[int, str]]
    entries: tuple[Entry, ...]


def encode_portion(portion: Portion) -> str:
    """Return the text of a portion."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(portion))).decode()


def decode_portion(text: str) -> Portion:
    """Return the portion of a text.

    Raises:
        CorruptRecordError: It is none.
    """
    try:
        packed = base64.b64decode(text, validate=True)
        unpacking = zlib.decompressobj()
        raw = unpacking.decompress(packed, _DECODED_BYTES_MAX)
        portion = msgspec.json.decode(raw if unpacking.eof else b"", type=Portion)
    except (binascii.Error, ValueError, zlib.error, msgspec.MsgspecError) as error:
        message = f"what a rank told of its shards does not decode ({error}; {len(text)} letters)"
        raise CorruptRecordError(message) from error
    if portion.v != VERSION:
        message = f"what a rank told of its shards has version {portion.v}, this reads {VERSION}"
        raise CorruptRecordError(message, found_version=portion.v)
    return portion


def merge(portions: Sequence[Portion], *, world_size: int) -> Mapping[str, tuple[int, str]]:
    """Return size in bytes and digest of every file that all ranks have written, by name.

    Args:
        portions: What each rank has told.
        world_size: Number of ranks, ≥ 1.

    Raises:
        CheckpointError: A rank has told nothing, or two ranks have written a file of one name.
    """
    silent = sorted(set(range(world_size)) - {portion.rank for portion in portions})
    if silent:
        message = f"ranks {named(silent)} have not told which shards they have written"
        raise CheckpointError(message)
    files: dict[str, tuple[int, str]] = {}
    for portion in portions:
        twice = sorted(files.keys() & portion.files.keys())
        if twice:
            message = f"rank {portion.rank} has written {twice[0]!r}, and so has another rank"
            raise CheckpointError(message)
        files.update(portion.files)
    return files
