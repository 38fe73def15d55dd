# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When a checkpoint of many files is complete, and in which order its files may appear.

A checkpoint that every rank writes a part of is a directory of *shards* and of a few *metadata*
files, which rank 0 writes and a reader looks for first:

=============  ===========================================  ========================================
file           written by                                   what it says
=============  ===========================================  ========================================
``.metadata``  torch's distributed checkpoint               which shard holds which tensor
``latest``     DeepSpeed                                    which directory is the checkpoint
``meta.pt``    Lightning, for FSDP and ``ModelParallel``    that this is a sharded checkpoint at all
=============  ===========================================  ========================================

A directory without its metadata is no checkpoint to any reader. So metadata appears last, in the
order of this table, once every shard of every rank is known to be there, and it goes first when a
checkpoint is removed. Whoever comes in between finds nothing that looks complete.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.records import VERSION
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


__all__ = [
    "METADATA_NAMES",
    "UNFINISHED",
    "Form",
    "Saving",
    "ShardRecord",
    "check_plan",
    "contents_of",
    "form_of",
    "is_shard",
    "metadata_of",
    "missing",
    "removal_order",
    "shards_of",
]

METADATA_NAMES: Final = (".metadata", "latest", "meta.pt")
"""Files that make a directory a checkpoint, in the order in which they are published."""

UNFINISHED: Final = (
    "it is a directory without the metadata of a checkpoint (looked for "
    f"{', '.join(METADATA_NAMES)}): its save has not ended, or it was removed in part"
)
"""Why a directory cannot be loaded."""

_COMPLETE: Final = (frozenset({".metadata", "meta.pt"}), frozenset({"latest"}))
_SHARD_SUFFIX: Final = ".distcp"
_LISTED: Final = 3


class Saving(str, enum.Enum):
    """How a strategy writes checkpoints."""

    RANK_ZERO = "rank_zero"
    """Rank 0 writes all of it, through the ``CheckpointIO``."""
    GATHERED = "gathered"
    """As before, and the strategy would turn the URL into a local path first."""
    SHARDED = "sharded"
    """Every rank writes its shards, rank 0 the metadata, all with local file calls."""
    UNKNOWN = "unknown"
    """A strategy of somebody else's."""


class Form(str, enum.Enum):
    """What is under a checkpoint's name."""

    ABSENT = "absent"
    FILE = "file"
    SHARDS = "shards"
    """A directory with its metadata."""
    OTHER = "other"
    """A directory without: never finished, half removed, or no checkpoint at all."""


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written of a checkpoint, still on its own node.

    Args:
        v: Version of the format.
        rank: The rank.
        sizes: Length of each of its files in bytes, by the path below the checkpoint's directory.
        digests: xxh3-128 of each, as a manifest has it.
    """

    v: int = VERSION
    rank: int
    sizes: dict[str, int]
    digests: dict[str, str] = {}


def is_shard(name: str) -> bool:
    """Tell whether torch's distributed checkpoint gives shards such names."""
    return name.endswith(_SHARD_SUFFIX) and "/" not in name


def shards_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that are not metadata, by name."""
    return {name: size for name, size in sizes.items() if name not in METADATA_NAMES}


def metadata_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that are metadata, in the order in which they may appear."""
    return {name: sizes[name] for name in METADATA_NAMES if name in sizes}


def check_plan(records: Sequence[ShardRecord], *, world_size: int) -> dict[str, int]:
    """Merge what all ranks have written into what has to be in storage before the metadata.

    Args:
        records: What each rank has written.
        world_size: Number of ranks, ≥ 1.

    Returns:
        Size of every shard in bytes, by name.

    Raises:
        ConfigError: A rank has told nothing, nobody has written a shard, rank 0 has written no
            metadata, or two ranks have written different files of one name: the strategy writes in
            another way than is known of it.
    """
    silent = sorted(set(range(world_size)) - {record.rank for record in records})
    if silent:
        message = f"ranks {_named(map(str, silent))} have not told which shards they have written"
        raise ConfigError(message)
    owners: dict[str, ShardRecord] = {}
    for record in sorted(records, key=lambda record: record.rank):
        for name, size in shards_of(record.sizes).items():
            owner = owners.setdefault(name, record)
            if owner is not record and (owner.sizes[name] != size):
                message = (
                    f"ranks {owner.rank} and {record.rank} have both written a shard {name!r}, of "
                    f"{owner.sizes[name]} and {size} bytes. Give each rank files of its own."
                )
                raise ConfigError(message)
    if not owners:
        message = f"none of {world_size} ranks has written a shard: the checkpoint would be empty"
        raise ConfigError(message)
    written = next(record.sizes for record in records if not record.rank)
    if not any(names <= written.keys() for names in _COMPLETE):
        message = (
            "rank 0 has not written the metadata of a sharded checkpoint (.metadata and meta.pt, "
            f"or latest), but {_named(written) or 'nothing'}. Nobody could load it."
        )
        raise ConfigError(message)
    return {name: owner.sizes[name] for name, owner in owners.items()}


def contents_of(records: Sequence[ShardRecord]) -> dict[str, tuple[int, str]]:
    """Return size in bytes and digest of every file of a checkpoint, for its manifest."""
    return {
        name: (size, record.digests[name])
        for record in records
        for name, size in record.sizes.items()
    }


def missing(expected: Mapping[str, int], *, found: Mapping[str, int | None]) -> str:
    """Tell which shards are not in storage as they were written; empty where all are.

    Args:
        expected: Size of every shard in bytes, by name.
        found: Sizes that the storage reports now; None where it does not say.
    """
    absent = sorted(name for name in expected if name not in found)
    if absent:
        return (
            f"{len(absent)} of {len(expected)} shards are not there ({_named(absent)}), although "
            "the ranks that wrote them have seen them. Is it the same storage on every node?"
        )
    differing = sorted(
        name for name, size in expected.items() if found[name] is not None and found[name] != size
    )
    if differing:
        return f"{len(differing)} of {len(expected)} shards have another size ({_named(differing)})"
    return ""


def _named(names: Collection[str] | map[str]) -> str:
    listed = list(names)
    more = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def form_of(kind: str, names: Collection[str] = ()) -> Form:
    """Tell what is under a checkpoint's name.

    Args:
        kind: ``file`` or ``directory`` as fsspec says it; empty where nothing is there.
        names: What is directly in the directory.
    """
    if not kind:
        return Form.ABSENT
    if kind != "directory":
        return Form.FILE
    if any(complete <= set(names) for complete in _COMPLETE):
        return Form.SHARDS
    return Form.OTHER


def removal_order(names: Collection[str]) -> tuple[str, ...]:
    """Return which files of a directory go before the rest: what makes it look complete."""
    return tuple(name for name in reversed(METADATA_NAMES) if name in names)
