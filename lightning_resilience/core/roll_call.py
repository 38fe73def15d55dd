# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Who may have left a joint operation, when the shared store has lost what it held.

Each rank writes the number of the operation in which it is. In a store that is not the one in which
the operation began, a rank that has written nothing, or a later number, may have left it with a
verdict that is gone. Then no verdict is made up: two ranks would return different ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core.muster import named
from lightning_resilience.core.records import FinalRecord
from lightning_resilience.errors import JointUnavailableError


if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "absent_ranks",
    "has_gone_on",
    "is_spoiled",
    "may_be_lost",
    "replaced_error",
    "spoiled",
]


def replaced_error(op: str, *, seq: int, rank: int, absent: Sequence[int]) -> JointUnavailableError:
    """Return the error of a rank that finds another store than the operation began in.

    Args:
        op: Name of the operation.
        seq: Sequence number.
        rank: This rank.
        absent: Ranks that do not say in this store that they are in the operation.
    """
    message = (
        f"Rank {rank} cannot know how {op} (joint operation {seq}) ended: the shared store has "
        f"lost what it held, or may have, and rank{_plural(absent)} may have left the operation "
        "with a verdict that was lost with it. No other verdict is made up. Restart the job from "
        "its last checkpoint, and look at why the store's server was replaced."
    )
    return JointUnavailableError(message, op=op, seq=seq, first_rank=rank, lost_ranks=(rank,))


def _plural(ranks: Sequence[int]) -> str:
    return f"s {named(ranks)}" if len(ranks) > 1 else f" {named(ranks)}"


def spoiled(op: str, *, absent: Sequence[int], writer: str) -> FinalRecord:
    """Return what is put in the place of a verdict that nobody may make any more.

    Args:
        op: Name of the operation.
        absent: Ranks that may have left it with a verdict that is lost.
        writer: Nonce of the write.
    """
    return FinalRecord(op=op, lost_ranks=tuple(absent), is_open=True, writer=writer)


def is_spoiled(record: FinalRecord) -> bool:
    """Tell whether no verdict will take the place of this ballot."""
    return record.is_open and bool(record.lost_ranks)


def absent_ranks(arrived: Sequence[bytes | None], *, seq: int) -> tuple[int, ...]:
    """Return the ranks that do not say that they are in an operation.

    Args:
        arrived: What each rank has written when it arrived last, by rank.
        seq: Number of the operation.
    """
    mine = str(seq).encode()
    return tuple(rank for rank, raw in enumerate(arrived) if raw != mine)


def has_gone_on(arrived: Sequence[bytes | None], *, seq: int) -> bool:
    """Tell whether a rank is in a later operation, and so has left this one with a verdict.

    Args:
        arrived: What each rank has written when it arrived last, by rank.
        seq: Number of the operation.
    """
    return any(raw is not None and int(raw) > seq for raw in arrived)


def may_be_lost(arrived: bytes | None, *, is_in_new_store: bool) -> bool:
    """Tell whether the silence of a rank says that it is lost.

    In a store that is not the one in which the operation began, a rank that has never written
    anything may have gone on.

    Args:
        arrived: What the rank has written when it arrived last.
        is_in_new_store: Whether the store has lost what this rank once wrote.
    """
    return arrived is not None or not is_in_new_store
