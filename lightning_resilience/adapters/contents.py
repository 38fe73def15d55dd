# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The table of contents of a checkpoint, by which two copies are known to be the same.

``torch.save`` writes a zip archive, whose table of contents, with a checksum of each part, is at
the end. To read it costs a few kilobytes. It shows that the file was written to its end, and it
differs where the contents of two files do.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any, Final

import xxhash


__all__ = ["DAMAGED", "TRAINING_STATE", "contents_digest", "holds_training_state"]

TRAINING_STATE: Final = "optimizer_states"
"""The key under which Lightning saves what it cannot go on without; not with weights only."""

DAMAGED: Final = (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError)
"""What reading the table raises where it is damaged, unless a read has failed."""

_BEGINS: Final = b"PK\x03\x04"
_HEAD_BYTES: Final = 64
_SMALLEST_BYTES: Final = 64
"""An archive with one part is larger. Below, ``zipfile`` seeks to before the beginning."""
_PICKLE: Final = "/data.pkl"
_PICKLE_BYTES_MAX: Final = 2**26
"""Tensors are not in it, so few are larger."""


def contents_digest(file: Any) -> str:
    """Return the digest of the table of contents.

    Args:
        file: An open binary file that can seek; it is read from anywhere. ``zipfile`` takes a read
            that fails for the end of an archive, so ask the file whether one has.

    Returns:
        Empty for a file of another format.

    Raises:
        zipfile.BadZipFile: It begins in that format and has no table of contents, or it begins as
            no checkpoint does: with zeros, as a filesystem leaves a file whose host has died, or
            with a tag, as a server begins its page about an error.
    """
    digest = xxhash.xxh3_128()
    try:
        if file.seek(0, io.SEEK_END) < _SMALLEST_BYTES:
            message = "File is too small to be a zip file"
            raise zipfile.BadZipFile(message)
        with zipfile.ZipFile(file) as archive:
            for part in archive.infolist():
                digest.update(f"{part.filename}\0{part.CRC:x}\0{part.file_size:x}\n".encode())
    except DAMAGED as error:
        file.seek(0)
        head = file.read(_HEAD_BYTES)
        if head.startswith(_BEGINS):
            raise zipfile.BadZipFile(str(error)) from error
        if head and not any(head):
            message = "it begins with zeros"
            raise zipfile.BadZipFile(message) from error
        if head.lstrip().startswith(b"<"):
            message = "it is a page of HTML or XML"
            raise zipfile.BadZipFile(message) from error
        return ""
    return digest.hexdigest()


def holds_training_state(file: Any) -> bool:
    """Tell whether a checkpoint says that it holds more than weights; nothing is made of it.

    Args:
        file: As for ``contents_digest``, which has found nothing wrong with it.

    Returns:
        False also where what would say so is damaged, which is for others to say.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [part for part in archive.infolist() if part.filename.endswith(_PICKLE)]
            return any(
                part.file_size <= _PICKLE_BYTES_MAX
                and TRAINING_STATE.encode() in archive.read(part)
                for part in pickles
            )
    except DAMAGED:
        return False
