# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that a node keeps for its ranks: what is copied, mapped and kept, and who reads.

One rank of a node, the *reader*, asks the storage; the others wait for the file that it publishes.

===================  ===========================================================================
a checkpoint on      what the ranks of a node do with it
===================  ===========================================================================
a local disk         one checks it; all read it where it is
a shared filesystem  one copies it to the node's cache, and checks it; all read the copy. A file
                     under a map must not change, and on a shared one anybody may change it
any other storage    the same
===================  ===========================================================================

A file of the cache never changes: it appears by a rename when it is complete and checked, and goes
by an unlink, which takes it from nobody who has mapped it. So two readers at once do no harm, and
all that the rules below have to see to is that there are seldom two, and always one.

**Who reads** is told by two locks that the kernel takes from a process that dies. Who holds the
*turn* asks for a slot of the storage; who holds the *reading*, which is taken inside a slot only,
reads. So nobody with a slot ever waits for somebody without one. A reader marks each piece; where a
held reading shows no mark for a while, its reader is stopped or stuck, and another one reads beside
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import xxhash


if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_resilience.core.resolution import Inspection


__all__ = [
    "Kept",
    "Limits",
    "Step",
    "Watch",
    "cache_key",
    "is_copied",
    "is_usable",
    "may_map",
    "next_step",
    "pages_of",
    "to_remove",
    "watched",
]

_LOCAL_KINDS: Final = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs"),
        *("tmpfs", "ramfs", "overlay"),
    }
)
"""Filesystems that no other node can write to. A kind that is not known here is taken for shared:
to copy what need not be copied costs time, and to map what another node truncates, the process."""


def is_copied(kind: str | None) -> bool:
    """Tell whether a checkpoint is copied to the node before it is read.

    Args:
        kind: Type of the filesystem that it is on, empty where that is unknown; None for storage
            that is no filesystem.
    """
    return kind not in _LOCAL_KINDS


def may_map(*, kind: str, is_plain: bool, is_let_go: bool) -> bool:
    """Tell whether a file is mapped; it is read otherwise.

    Args:
        kind: Type of the filesystem that it is on.
        is_plain: Whether it is an archive whose records are as they are in memory: neither in the
            older format of ``torch.save``, nor compressed.
        is_let_go: Whether what is mapped is copied before training goes on.
    """
    return is_let_go and is_plain and not is_copied(kind)


def pages_of(
    place: tuple[int, int], *, used: Iterable[tuple[int, int]], page_bytes: int
) -> list[tuple[int, int]]:
    """Return the pages of a map of which something is in use, as few runs of them as there are.

    Args:
        place: Where the map begins and ends, on boundaries of pages.
        used: Where what is in use begins and ends; some of it elsewhere, and some of it empty.
        page_bytes: Length of a page.

    Returns:
        Where each run begins and ends, in their order.
    """
    runs: list[tuple[int, int]] = []
    for first, last in sorted(used):
        start = max(place[0], first - first % page_bytes)
        end = min(place[1], last + -last % page_bytes)
        if first >= last or start >= end:
            continue
        if runs and start <= runs[-1][1]:
            start, end = runs[-1][0], max(end, runs.pop()[1])
        runs.append((start, end))
    return runs


def cache_key(url: str, *, expected: Inspection | None, common: str) -> str:
    """Return the name under which all ranks of a node find what they load.

    Args:
        url: The checkpoint.
        expected: What rank 0 has seen of it, the same on every rank.
        common: A text that all ranks have in common, and no other load has.

    Returns:
        Where rank 0 knows a digest of all bytes, or of the checksums of all records, the same for
        the same content, so that what an earlier start has fetched is used again. Otherwise a new
        one for each load.
    """
    size_bytes = None if expected is None else expected.size_bytes
    content = "" if expected is None else expected.saved or expected.digest
    parts = (url, str(size_bytes), content or f"of {common}")
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def is_usable(size_bytes: int | None, *, expected: Inspection | None) -> bool:
    """Tell whether a file of the cache is what is loaded.

    Args:
        size_bytes: Its length; None where there is none.
        expected: What rank 0 has seen; its digest is in the name of the file.
    """
    if size_bytes is None:
        return False
    return expected is None or expected.size_bytes in {None, size_bytes}


# Who reads ----------------------------------------------------------------------------------------


class Step(str, Enum):
    """What a rank does next about a file that it needs."""

    USE = "use"
    """It is there."""
    REFUSE = "refuse"
    """It was read, and is damaged."""
    READ = "read"
    """This rank is the reader."""
    TAKE_OVER = "take over"
    """The reader is stopped or stuck: this rank reads as well."""
    WAIT = "wait"


def next_step(
    *, is_there: bool, is_refused: bool, has_lock: bool, silent_s: float, patience_s: float
) -> Step:
    """Return what a rank does next.

    Args:
        is_there: Whether the file is in the cache.
        is_refused: Whether a reader of this load has found it damaged.
        has_lock: Whether this rank has the lock that it needs to go on.
        silent_s: For how long another rank has held the reading without a mark, in seconds.
        patience_s: After how long a reader counts as stopped or stuck, in seconds.
    """
    if is_there:
        return Step.USE
    if is_refused:
        return Step.REFUSE
    if has_lock:
        return Step.READ
    return Step.TAKE_OVER if silent_s >= patience_s else Step.WAIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A reader as a waiting rank has seen it, by its own clock.

    Args:
        mark: Its latest mark; None while nobody holds the reading.
        since_s: When that was first seen, in seconds.
    """

    mark: int | None = None
    since_s: float

    def silent_s(self, now_s: float) -> float:
        """Return for how long a reader has shown no mark; 0 while there is no reader."""
        return 0.0 if self.mark is None else max(0.0, now_s - self.since_s)


def watched(before: Watch, mark: int | None, *, now_s: float) -> Watch:
    """Return what a waiting rank knows once it has looked again.

    Args:
        before: What it knew.
        mark: The mark that it sees; None where nobody holds the reading.
        now_s: Its clock.
    """
    return before if mark == before.mark else Watch(mark=mark, since_s=now_s)


# What is kept -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of a node's disk the cache may have.

    Args:
        max_bytes: Length of all files, in bytes. 256 GiB by default: room for two checkpoints of a
            large model on the disk of a node that trains one.
        max_age_s: For how long a file that nobody uses is kept, in seconds. A day by default: a job
            that is restarted is so within minutes, or somebody looks into it first.
        in_use_s: For how long after its last use a file is not removed for want of room, in
            seconds: between being found and being opened it is a name only. 10 minutes by default.
    """

    max_bytes: int = 256 * 2**30
    max_age_s: float = 24 * 3600.0
    in_use_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A file of the cache.

    Args:
        name: Its name.
        size_bytes: Its length.
        used_s: When it was last used, by the clock of its filesystem, in seconds.
    """

    name: str
    size_bytes: int
    used_s: float


def to_remove(
    files: Iterable[Kept], *, now_s: float, incoming_bytes: int, free_bytes: int, limits: Limits
) -> list[str]:
    """Return what is removed before another file comes in: first what was used least lately.

    Args:
        files: All files of the cache.
        now_s: The time of its filesystem, in seconds.
        incoming_bytes: Length of the file that comes in.
        free_bytes: What its filesystem has room for.
        limits: How much is kept.
    """
    by_use = sorted(files, key=lambda file: (file.used_s, file.name))
    kept_bytes = sum(file.size_bytes for file in by_use)
    removed = []
    for file in by_use:
        unused_s = now_s - file.used_s
        is_crowded = kept_bytes + incoming_bytes > limits.max_bytes or incoming_bytes > free_bytes
        if unused_s > limits.max_age_s or (is_crowded and unused_s > limits.in_use_s):
            removed.append(file.name)
            kept_bytes -= file.size_bytes
            free_bytes += file.size_bytes
    return removed
