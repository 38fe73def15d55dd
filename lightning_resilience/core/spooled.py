# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The record of a checkpoint that waits on a node, and which checkpoints never wait there.

==============================  ====================================================================
what is not spooled             why
==============================  ====================================================================
a tuner's temporary file        it goes back to it at once, and removes it
what a ``CheckpointIO`` of the  nobody but that knows what it has written, and where: there is
user's writes by itself         nothing that could be kept, and published later
(``staging=False``)
shards                          each node has its own, and the metadata may only appear once all of
                                them are up. That takes a step of all ranks, and nobody makes one
                                while training goes on
==============================  ====================================================================

A save of one of these waits for storage, and all ranks with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

# Not for the type checker alone: msgspec reads the fields' types.
from lightning_resilience.core.manifest import FileRecord
from lightning_resilience.core.outcome import FailureClass


if TYPE_CHECKING:
    from lightning_resilience.core.manifest import Contents, Origin


__all__ = [
    "SHARDS_WAIT",
    "WHOLE_WAITS",
    "SpoolEntry",
    "entry_of",
    "may_be_spooled",
    "shards_note",
    "shards_wait",
    "why_saves_wait",
]

_VERSION: Final = 1

WHOLE_WAITS: Final = (
    "waits: what a CheckpointIO with staging=False writes is not spooled, because it is called as "
    "a whole, with the checkpoint's own URL"
)
"""Said where such a save meets an outage."""

SHARDS_WAIT: Final = "waits: sharded checkpoints are not spooled"
"""Said where such a save meets an outage."""

_OUTAGES: Final = frozenset({FailureClass.TRANSIENT.value, FailureClass.THROTTLE.value})

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SpoolEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The record beside a spooled file or directory: where it belongs, and what it is.

    Args:
        v: Version of the format.
        path: URL of the checkpoint.
        size_bytes: Length of the file, or of all files.
        digest: Of its bytes, or of the list of its files, as in a manifest.
        files: Where it is a directory, its files in the order in which they were finished, which is
            the order in which they are published; empty where it is one file.
        number: The how manieth save of its run it is; later ones of a path replace earlier ones.
        step: Optimizer steps that it has been trained for, where it says so.
        epoch: Its epoch, where it says so.
        run: Name of the run that saved it.
        training: The training that can go on from it; empty for none.
        versions: Versions of what wrote it.
    """

    v: int = _VERSION
    path: str
    size_bytes: _Count
    digest: str
    files: tuple[FileRecord, ...] = ()
    number: _Count = 0
    step: _Count | None = None
    epoch: _Count | None = None
    run: str = ""
    training: str = ""
    versions: dict[str, str] = {}

    @property
    def contents(self) -> Contents:
        """Size and digest of each file, in the order in which they are published."""
        if not self.files:
            return {"": (self.size_bytes, self.digest)}
        return {file.name: (file.size_bytes, file.digest) for file in self.files}


def entry_of(
    path: str, contents: Contents, origin: Origin, *, digest: str, number: int
) -> SpoolEntry:
    """Return the record of a checkpoint that is spooled.

    Args:
        path: URL of the checkpoint.
        contents: What was written, in the order in which it was finished.
        origin: Where it comes from.
        digest: Of all of it.
        number: The how manieth save of its run it is.
    """
    files = tuple(
        FileRecord(name=name, size_bytes=size_bytes, digest=file_digest)
        for name, (size_bytes, file_digest) in contents.items()
        if name
    )
    return SpoolEntry(
        path=path,
        size_bytes=sum(size_bytes for size_bytes, _ in contents.values()),
        digest=digest,
        files=files,
        number=number,
        step=origin.step,
        epoch=origin.epoch,
        run=origin.run,
        training=origin.training,
        versions=dict(origin.versions),
    )


def may_be_spooled(path: str) -> bool:
    """Tell whether a checkpoint may wait on the node by its name: not a tuner's temporary one.

    Args:
        path: Its path or URL.
    """
    return not path.rpartition("/")[2].startswith(".")


def why_saves_wait(*, is_sharded: bool, is_staged: bool) -> str:
    """Return why no save of a Trainer is spooled; empty where its saves are.

    Args:
        is_sharded: Whether all ranks write.
        is_staged: Whether what is saved is written on this node first.
    """
    if is_sharded:
        return SHARDS_WAIT
    return "" if is_staged else WHOLE_WAITS


def shards_wait(on_outage: str) -> str:
    """Return what is said where a sharded save meets an outage; empty where it is to wait anyway.

    Args:
        on_outage: What the user wants a save to do.
    """
    return SHARDS_WAIT if on_outage == "spool" else ""


def shards_note(on_outage: str, *, outcome: str) -> str:
    """Return what is said of a sharded save that was given up; empty where it was no outage.

    Args:
        on_outage: What the user wants a save to do.
        outcome: Failure class on which all ranks have agreed.
    """
    if not shards_wait(on_outage) or outcome not in _OUTAGES:
        return ""
    return f'Under on_outage="spool" this save {SHARDS_WAIT}, so it was waited for until its end.'
