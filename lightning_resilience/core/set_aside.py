# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints are set aside: moved where no search finds them, with a note, never deleted.

``<directory>/last.ckpt`` becomes ``<directory>/.resilience/set-aside/last.ckpt.<mark>``, and
``last.ckpt.<mark>.json`` beside it says why. Neither Lightning nor a search of ours looks below the
directory of the checkpoints, so the next start does not come upon it again.

The *mark* stands for the very file that was found damaged: for when it was written, as its storage
tells, and for its manifest. So a move that was interrupted goes on under the same name, a second
damaged ``last.ckpt`` does not take the place of the first, and what was written again since it was
inspected has another mark, and stays.

==================================================  ================================================
what was found                                      what becomes of it
==================================================  ================================================
damaged, and a good one to start from               set aside, once all ranks know the good one
damaged, and no good one, ``allow_fresh_start``     set aside: the fresh start would overwrite it
damaged, and no good one                            stays: all ranks raise, at the next start too
a link; a directory without metadata or manifest    stays, and is passed over: the one is no data,
                                                    the other may still be written by another job
what may not be moved (read-only, denied, full)     stays, and is passed over, with a warning
==================================================  ================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from lightning_resilience.core.manifest import DIRECTORY
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.records import VERSION


if TYPE_CHECKING:
    from lightning_resilience.core.resolution import Inspection


__all__ = ["Moved", "Note", "aside_path", "encode_note", "is_final", "mark_of", "note_path", "told"]

_FOLDER: Final = f"{DIRECTORY}/set-aside"
_MARK_DIGITS: Final = 8
_FINAL: Final = frozenset({FailureClass.PERMANENT, FailureClass.CAPACITY})


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Why a checkpoint was set aside; a JSON file beside it.

    Args:
        v: Version of the format.
        path: Name that the checkpoint had.
        reason: Why it was set aside.
        manifest: The text of its manifest, which is removed; empty where it had none.
    """

    v: int = VERSION
    path: str
    reason: str
    manifest: str = ""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a damaged checkpoint.

    Args:
        v: Version of the format.
        path: Where it was.
        to: Where it is now; empty where it was not moved.
        problem: Why it was not moved.
    """

    v: int = VERSION
    path: str
    to: str = ""
    problem: str = ""


def mark_of(written: str, manifest: str) -> str:
    """Return what stands for one damaged checkpoint, in a few hexadecimal digits.

    Args:
        written: What its storage tells of it that changes when it is written again.
        manifest: The text of its manifest; empty where it has none.

    Returns:
        Empty where nothing tells it from another one.
    """
    if not written and not manifest:
        return ""
    digest = xxhash.xxh3_128_hexdigest(f"{written}\n{manifest}".encode())
    return digest[:_MARK_DIGITS]


def aside_path(path: str, mark: str) -> str:
    """Return where the checkpoint at ``path`` is set aside; a path or a URL, as ``path`` is."""
    directory, separator, name = path.rstrip("/").rpartition("/")
    return f"{directory}{separator}{_FOLDER}/{name}.{mark}"


def note_path(aside: str) -> str:
    """Return where the note on a checkpoint is that was set aside as ``aside``."""
    return f"{aside}.json"


def encode_note(note: Note) -> bytes:
    """Return the bytes of a note: JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(note)) + b"\n"


def is_final(failure: FailureClass | None) -> bool:
    """Tell whether a move that has failed so is not worth another attempt: it stays where it is."""
    return failure in _FINAL


def told(inspection: Inspection, moved: Moved | None) -> str:
    """Return in one line why a checkpoint was not loaded, and what has become of it.

    Args:
        inspection: What was seen of it.
        moved: What was done about it; None for nothing.
    """
    line = f"not loaded, {inspection.rejected}: {inspection.path}"
    if moved is None:
        return f"{line}. It stays there, and is passed over."
    if not moved.to:
        return f"{line}. It could not be set aside ({moved.problem}), so it stays there."
    return (
        f"{line}. It is set aside as {moved.to}; the file beside it, {note_path(moved.to)}, says "
        "why. Move it back if it is good after all, or remove it."
    )
