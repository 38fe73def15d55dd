# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that wait on this node until storage is well again, and when they are too many.

A save that meets an outage is *spooled*: a complete file on the node's own disk, with a record
beside it that says where it belongs. It is published once the circuit lets calls through, the
earliest first. It is *superseded* by a later save of the same path, or by the removal of that path;
never by one that is merely later, since the best checkpoints are often not the latest.

==========================  ========================================================================
bound                       why
==========================  ========================================================================
``spool_max_items``         an outage that outlasts them all is worth waiting for
``spool_max_bytes``         the node's disk is others' as well
``max_unpublished_s``       what lies on one node alone is lost with the node
==========================  ========================================================================

Where one is reached, a save waits for storage, and all ranks with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.validation import check_seconds, check_whole, option
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CircuitOpenError,
    RetriesExhaustedError,
)


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.core.spooled import SpoolEntry


__all__ = [
    "DEFERRABLE",
    "Item",
    "Plan",
    "Spool",
    "SpoolConfig",
    "diverts",
    "flush_s",
    "is_of_another_training",
    "is_outdated",
    "is_spooled",
    "outage_policy",
    "pause_s",
    "plan_for",
    "refusal",
    "spooled_detail",
    "statement",
]

_SPOOLED: Final = "spooled on the node: "
_OUTAGES: Final = frozenset({FailureClass.TRANSIENT.value, FailureClass.THROTTLE.value})

DEFERRABLE: Final = frozenset({"save", "make room", "exists", "remove", "link"})
"""Joint operations that have another way while storage is ill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolConfig:
    """How much may wait on a node until storage is well again.

    Args:
        spool_max_items: Checkpoints of different paths, ≥ 1. Another one waits for storage.
        spool_max_bytes: Bytes of all of them, ≥ 1. None takes half of what the disk has room for,
            with what is spooled.
        max_unpublished_s: Age of the oldest, in seconds, > 0, from which on saves wait.
        flush_timeout_s: How long the end of a run waits until all are published, in seconds, > 0.
        same_path_interval_s: Time between two writes of one name in object storage, in seconds,
            ≥ 0. A save that comes earlier is spooled, and of several only the newest is published.

    Raises:
        ConfigError: An option is out of range.
    """

    spool_max_items: int = option(4, why="the best three and the last, of most runs")
    spool_max_bytes: int | None = option(None, why="half of the free disk: others need it too")
    max_unpublished_s: float = option(3600.0, why="an hour of work may be lost with the node")
    flush_timeout_s: float = option(300.0, why="a bounded end; the next start publishes the rest")

    same_path_interval_s: float = option(
        1.0, why="Google's storage takes one write of a name in a second; 0 paces nothing"
    )

    def __post_init__(self) -> None:
        check_whole("spool_max_items", self.spool_max_items, minimum=1)
        if self.spool_max_bytes is not None:
            check_whole("spool_max_bytes", self.spool_max_bytes, minimum=1)
        check_seconds("max_unpublished_s", self.max_unpublished_s)
        check_seconds("flush_timeout_s", self.flush_timeout_s)
        check_seconds("same_path_interval_s", self.same_path_interval_s, zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One spooled checkpoint.

    Args:
        name: Name of its file in the spool.
        path: Where it belongs.
        number: The how manieth it is.
        size_bytes: Its length.
        since_s: When it was spooled, on this process's clock.
        is_sent: Whether it is being published now: then it is not taken away any more.
    """

    name: str
    path: str
    number: int
    size_bytes: int
    since_s: float
    is_sent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spool:
    """What waits on this node. Each change makes a new one.

    Args:
        items: The earliest first.
    """

    items: tuple[Item, ...] = ()

    def holds(self, path: str) -> bool:
        """Tell whether a checkpoint of that path waits, or is being published."""
        return any(item.path == path for item in self.items)

    def has(self, item: Item) -> bool:
        """Tell whether an item waits, or is being published."""
        return any(each.name == item.name for each in self.items)

    def superseded(self, path: str, *, before: int) -> tuple[Item, ...]:
        """Return what a save of that path with the number ``before``, or its removal, takes away.

        What is being published is left alone: it is over soon, and the later one comes after it.
        """
        return tuple(
            item
            for item in self.items
            if item.path == path and item.number < before and not item.is_sent
        )

    def first(self, *, but: Collection[str] = ()) -> Item | None:
        """Return what is to be published next; None where nothing waits.

        Args:
            but: Paths of which nothing may be published now.
        """
        return next((item for item in self.items if item.path not in but), None)

    def added(self, item: Item) -> Spool:
        """Return the spool with one item more."""
        return replace(self, items=(*self.items, item))

    def sending(self, item: Item, *, is_sent: bool) -> Spool:
        """Return the spool once the publication of an item has begun, or has not gone well."""
        changed = (
            replace(each, is_sent=is_sent) if each.name == item.name else each
            for each in self.items
        )
        return replace(self, items=tuple(changed))

    def without(self, item: Item) -> Spool:
        """Return the spool without an item."""
        return replace(self, items=tuple(each for each in self.items if each.name != item.name))


def refusal(
    spool: Spool,
    config: SpoolConfig,
    path: str,
    *,
    free_bytes: int,
    now_s: float,
    size_bytes: int = 0,
) -> str:
    """Tell why a checkpoint cannot be spooled now; empty where it can.

    Args:
        spool: What waits.
        config: The bounds.
        path: Where the checkpoint belongs; one that waits under that path makes room for it.
        free_bytes: What the disk of the spool has room for.
        now_s: Now, on the clock of the items.
        size_bytes: How long the checkpoint will be, as far as that is known; what waits may tell
            that it is longer.
    """
    others = [item for item in spool.items if item.path != path or item.is_sent]
    held_bytes = sum(item.size_bytes for item in spool.items)
    largest_bytes = max((item.size_bytes for item in spool.items), default=0)
    next_bytes = max(largest_bytes, size_bytes)
    most_bytes = config.spool_max_bytes
    if most_bytes is None:
        most_bytes = (free_bytes + held_bytes) // 2
    oldest_s = max((now_s - item.since_s for item in spool.items), default=0.0)
    if len(others) >= config.spool_max_items:
        return f"{len(others)} checkpoints wait already (spool_max_items={config.spool_max_items})"
    if held_bytes + next_bytes > most_bytes or not free_bytes:
        return (
            f"{held_bytes} bytes wait already, about {next_bytes} come to them, and {free_bytes} "
            f"are free (spool_max_bytes={most_bytes})"
        )
    if oldest_s >= config.max_unpublished_s:
        return (
            f"one has been waiting for {oldest_s:.0f} s "
            f"(max_unpublished_s={config.max_unpublished_s:g})"
        )
    return ""


def pause_s(written_at_s: float | None, config: SpoolConfig, *, now_s: float) -> float:
    """Return how long a name is to be left alone before it is written again, in seconds, ≥ 0.

    Args:
        written_at_s: When it was written last, on this process's clock; None for never.
        config: Has the interval.
        now_s: Now, on the same clock.
    """
    if written_at_s is None:
        return 0.0
    return max(0.0, written_at_s + config.same_path_interval_s - now_s)


def diverts(error: BaseException) -> bool:
    """Tell whether a save that was given up for ``error`` met an outage, and may be spooled.

    What repeating would not help either (a denial, a missing bucket, a full disk) is no outage, and
    a checkpoint that waits for it to pass would wait for ever.
    """
    if isinstance(error, (CircuitOpenError, BudgetExhaustedError)):
        return True
    return isinstance(error, RetriesExhaustedError) and error.failure in _OUTAGES


def spooled_detail(digest: str) -> str:
    """Return what all ranks are told of a save that was spooled."""
    return f"{_SPOOLED}{digest}"


def is_spooled(detail: str) -> bool:
    """Tell whether what all ranks were told of a save says that it was spooled."""
    return detail.startswith(_SPOOLED)


def outage_policy(on_outage: str, *, op: str, is_saving: bool) -> str:
    """Return what a joint operation does at its gate while storage is ill.

    Args:
        on_outage: The user's choice.
        op: Name of the operation.
        is_saving: Whether a checkpoint callback is at a save point.

    Returns:
        ``proceed``: there is another way. ``fail`` or ``wait``: there is none.
    """
    if on_outage == "spool":
        return "proceed" if op in DEFERRABLE else "wait"
    if on_outage == "skip":
        if op == "remove":
            return "proceed"
        return "fail" if is_saving or op == "save" else "wait"
    return on_outage


def flush_s(config: SpoolConfig, *, left_s: float | None) -> float:
    """Return how long the end of a run waits for the spool, in seconds.

    Args:
        config: The bounds.
        left_s: How long the process may still run, where it was told to stop; half of that.
    """
    if left_s is None:
        return config.flush_timeout_s
    return min(config.flush_timeout_s, max(0.0, left_s) / 2)


def statement(spooled: Sequence[tuple[str, str]]) -> str:
    """Return what is said of checkpoints that a run leaves unpublished.

    Args:
        spooled: Path, and file on this node, of each.
    """
    each = "; ".join(f"{path} lies at {file}" for path, file in spooled)
    number = len(spooled)
    return (
        f"{number} checkpoint{'s' if number > 1 else ''} could not be published before the end of "
        f"the run: {each}. The next start of this training on this node publishes "
        f"{'them' if number > 1 else 'it'}; to do it by hand, copy the file to its path."
    )


# The next start -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What becomes of what earlier starts have left on the nodes.

    Args:
        publish: Names of spooled files by rank: of each path the newest.
        drop: Names of those that a newer one replaces, by rank.
    """

    publish: Mapping[int, tuple[str, ...]]
    drop: Mapping[int, tuple[str, ...]]


def plan_for(found: Iterable[tuple[int, str, SpoolEntry]]) -> Plan:
    """Decide which spooled checkpoints are published: of each path the newest.

    By the step that they say they are of, not by when they were written: the nodes' clocks differ.
    Of what is older, that of another training is neither published nor dropped: steps of two
    trainings say nothing of each other.

    Args:
        found: Rank, name and record of each.
    """
    newest: dict[str, tuple[int, str, SpoolEntry]] = {}
    older: list[tuple[int, str, SpoolEntry]] = []
    for each in sorted(found, key=lambda one: (_age(one[2]), -one[0])):
        if each[2].path in newest:
            older.append(newest[each[2].path])
        newest[each[2].path] = each
    replaced = [one for one in older if not is_of_another_training(one[2], newest[one[2].path][2])]
    return Plan(publish=_by_rank(newest.values()), drop=_by_rank(replaced))


def is_of_another_training(entry: SpoolEntry, other: SpoolEntry | Manifest | None) -> bool:
    """Tell whether two checkpoints of one path are of trainings that their steps do not order.

    What names no training (weights only) is ordered by its step, as there is nothing else.

    Args:
        entry: A spooled checkpoint.
        other: Another one, or what the manifest in storage says; None where there is none.
    """
    if other is None or not entry.training or not other.training:
        return False
    return entry.training != other.training


def is_outdated(entry: SpoolEntry, there: Manifest | None) -> bool:
    """Tell whether storage has a newer checkpoint under that path.

    What it says to be the same is published once more: its manifest does not tell whether it was
    damaged since, and the copy on the node is good.

    Args:
        entry: The spooled checkpoint.
        there: The manifest in storage; without one, nothing says that what is there is any good.
    """
    return there is not None and there.step is not None and there.step > (entry.step or 0)


def _age(entry: SpoolEntry) -> tuple[int, int]:
    return (-1 if entry.step is None else entry.step, entry.number)


def _by_rank(found: Iterable[tuple[int, str, SpoolEntry]]) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for rank, name, entry in sorted(found, key=lambda one: (one[0], _age(one[2]))):
        del entry
        names[rank] = (*names.get(rank, ()), name)
    return names
