# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Is what storage has what it said that it had taken?

A write that is acknowledged and then dropped leaves what was there before: of an older checkpoint
of the same name, often of the same length. So what storage called the new one when it took it, its
*receipt*, is compared with what it calls the one that it has.

==============  ====================================================================================
storage         receipt
==============  ====================================================================================
S3              the ETag, in the answer to a PutObject or to the completion of an upload in parts
Google          the generation, in the same answers; its two protocols have different ETags
filesystems     inode and time of the staged file, which a rename takes along. Some give a file
                another inode when it is renamed or looked up again, and some keep times in whole
                seconds, so only both together say that it is another file
``memory://``   none: nothing is between this process and what it has
others          none. What is there is read at its end and compared with the end of what was sent:
                that has the checksum of each part of a checkpoint, and nothing else of a manifest
==============  ====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


__all__ = ["TAIL_BYTES", "Receipt", "contradiction", "tag_of"]

TAIL_BYTES: Final = 2**16
"""How much of the end is compared, in bytes. ``torch.save`` ends an archive with its table of
contents, and that with what it has made of the checksums of all parts."""
_SAME_TIME_S: Final = 2.0
"""The coarsest time of a filesystem that anybody trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What storage calls one version of a file; every field is empty where it does not say.

    Args:
        tag: The ETag, without quotes.
        generation: The number of the version.
        inode: The number of the file.
        modified_s: When it was written, in seconds of the filesystem's clock.
        tail: Digest of the last ``TAIL_BYTES`` of its content.
        size_bytes: Its length.
    """

    tag: str = ""
    generation: str = ""
    inode: int | None = None
    modified_s: float | None = None
    tail: str = ""
    size_bytes: int | None = None

    def is_told_by_its_tail(self, size_bytes: int | None) -> bool:
        """Tell whether what is there has to be read at its end to be told from this.

        Args:
            size_bytes: How long what is there is. Another length says all by itself.
        """
        return bool(self.tail) and self.size_bytes == size_bytes


def tag_of(said: object) -> str:
    """Return an ETag as it is compared: with neither quotes nor the mark of a weak one.

    Args:
        said: What an answer has for it; None where it has nothing.
    """
    return "" if said is None else str(said).removeprefix("W/").strip('"')


def contradiction(taken: Receipt, found: Receipt) -> str:
    """Say why what is there cannot be what was taken; empty where it may be.

    Args:
        taken: What storage said when it took it.
        found: What it says of what is there.
    """
    if taken.tag and found.tag and taken.tag != found.tag:
        return f"its ETag is {found.tag}, and storage has acknowledged {taken.tag}"
    if taken.generation and found.generation and taken.generation != found.generation:
        return (
            f"it is generation {found.generation}, and storage has acknowledged generation "
            f"{taken.generation}"
        )
    if taken.tail and found.tail and taken.tail != found.tail:
        return f"it has the right length, {taken.size_bytes} bytes, and ends in another way"
    if None in {taken.inode, found.inode, taken.modified_s, found.modified_s}:
        return ""
    apart_s = abs((taken.modified_s or 0.0) - (found.modified_s or 0.0))
    if taken.inode != found.inode and apart_s > _SAME_TIME_S:
        return (
            f"it is file {found.inode}, and file {taken.inode} was renamed; they were written "
            f"{apart_s:.0f} s apart"
        )
    return ""
