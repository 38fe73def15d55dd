# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated node: the files of its cache, and locks that its kernel takes from who dies.

A file that somebody has opened stays what it is for them, whatever becomes of its name. Names and
rules are shipped (``core.node_cache``); what is asked of the node here are single system calls.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.fetching import There
from lightning_resilience.core.node_cache import Kept, Limits, is_usable, to_remove
from lightning_resilience.drill.save_storage import DAMAGED, Blob


if TYPE_CHECKING:
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.core.spooled import SpoolEntry
    from lightning_resilience.drill.load_process import Actor, Owner


__all__ = ["WHOLE_BYTES", "Node", "NodeFile", "digest_inside", "is_whole"]

WHOLE_BYTES: Final = 1000
"""Length of a checkpoint, but for its number of training steps."""


def is_whole(blob: Blob) -> bool:
    """Tell whether a file has the length that it was written with."""
    return blob.size_bytes == WHOLE_BYTES + blob.number


def digest_inside(blob: Blob) -> str:
    """Return the digest of its table of contents: a flipped bit elsewhere does not change that."""
    return f"contents of step {blob.number}" if is_whole(blob) else ""


@dataclass(slots=True, kw_only=True)
class _Stored:
    blob: Blob
    used_s: float


@dataclass(slots=True, kw_only=True)
class _Held:
    owner: Owner
    who: Any


@dataclass(slots=True, kw_only=True)
class Node:
    """One node, whose disk outlives its processes.

    Args:
        number: Which one it is.
        room_bytes: How much its cache holds.
        files: What is in its cache, by name.
        parts: What readers have made so far.
        locks: Who holds which lock.
        marks: The latest mark at each lock, and when it was made.
        spool: What an earlier start has left, by its name.
    """

    number: int
    room_bytes: int
    files: dict[str, _Stored] = field(default_factory=dict)
    parts: dict[str, Blob] = field(default_factory=dict)
    locks: dict[str, _Held] = field(default_factory=dict)
    marks: dict[str, tuple[int, float]] = field(default_factory=dict)
    spool: dict[str, SpoolEntry] = field(default_factory=dict)

    def take(self, lock: str, owner: Owner, who: object) -> bool:
        """Take a lock where nobody has it; whether ``who`` has it now."""
        held = self.locks.setdefault(lock, _Held(owner=owner, who=who))
        return held.who is who

    def release(self, lock: str, who: object) -> None:
        """Let go of a lock, if ``who`` has it."""
        held = self.locks.get(lock)
        if held is not None and held.who is who:
            del self.locks[lock]

    def died(self, owner: Owner) -> None:
        """Take every lock from a process that is gone."""
        for lock in [lock for lock, held in self.locks.items() if held.owner is owner]:
            del self.locks[lock]

    def beat(self, lock: str, now_s: float) -> None:
        """Mark a lock."""
        self.marks[lock] = (self.marks.get(lock, (0, 0.0))[0] + 1, now_s)

    def put(self, name: str, blob: Blob, now_s: float) -> None:
        """Let a file appear in the cache."""
        self.files[name] = _Stored(blob=blob, used_s=now_s)

    def part(self, name: str) -> Blob:
        """Return what a reader has made.

        Raises:
            OSError: Another reader has removed it.
        """
        if name not in self.parts:
            message = "another reader has taken over"
            raise OSError(errno.ESTALE, message, name)
        return self.parts[name]

    def damage(self, name: str, *, cuts: bool) -> None:
        """Change a file of the cache; nobody has asked for that."""
        blob = self.files[name].blob
        size_bytes = blob.size_bytes // 2 if cuts else blob.size_bytes
        self.files[name].blob = replace(
            blob, digest=DAMAGED, size_bytes=size_bytes, is_damaged=True
        )

    def make_room(self, incoming_bytes: int, now_s: float) -> list[str]:
        """Remove what has to go for a file that comes in; what that was."""
        kept = [
            Kept(name=name, size_bytes=each.blob.size_bytes, used_s=each.used_s)
            for name, each in self.files.items()
        ]
        removed = to_remove(
            kept,
            now_s=now_s,
            incoming_bytes=incoming_bytes,
            free_bytes=10**9,
            limits=Limits(max_bytes=self.room_bytes),
        )
        for name in removed:
            del self.files[name]
        return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFile:
    """A file of a node's cache, as one rank needs it for one load.

    Args:
        node: The node.
        key: From ``core.node_cache.cache_key``.
        load: What all ranks of this load have in common.
        expected: What rank 0 has seen of what is copied; None for what only says that it was
            checked.
        refusals: Why readers have refused it, by name.
    """

    node: Node
    key: str
    load: str
    expected: Inspection | None
    refusals: dict[str, str]

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.key}.ckpt"

    @property
    def told(self) -> str:
        """Name of what says that it was made or checked in this load, or refused."""
        return f"{self.key}-{self.load}"

    def lock(self, which: str) -> str:
        """Return the name of one of its locks."""
        return f"{self.key}.{which}"

    def look(self, now_s: float, *, is_checked: bool) -> There:
        """Return what is there of it."""
        refusal = self.refusals.get(self.told)
        found = self.node.files.get(self.name)
        if found is None or not is_usable(found.blob.size_bytes, expected=self.expected):
            return There(refusal=refusal)
        found.used_s = now_s
        if f"{self.told}.checked" in self.node.files:
            return There(is_there=True)
        return There(is_left=is_checked, refusal=refusal)

    def mark(self, who: Actor) -> int | None:
        """Return the mark of another one that holds the reading; None where nobody does."""
        lock = self.lock("reading")
        held = self.node.locks.get(lock)
        if held is None or held.who is who:
            return None
        return self.node.marks.get(lock, (0, 0.0))[0]

    def vouch(self, now_s: float) -> None:
        """Say that it was made or checked."""
        self.node.put(f"{self.told}.checked", Blob(), now_s)

    def appear(self, part: str, now_s: float) -> None:
        """Give what was made its name.

        Raises:
            OSError: Another reader has removed it.
        """
        self.node.put(self.name, self.node.part(part), now_s)
        del self.node.parts[part]

    def sweep(self) -> None:
        """Remove what other readers have made so far."""
        for part in [each for each in self.node.parts if each.startswith(f"{self.key}-")]:
            del self.node.parts[part]
