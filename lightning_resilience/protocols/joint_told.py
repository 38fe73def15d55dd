# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What every rank has told in a joint operation in which all of them had work.

The verdict carries what one rank has told. Where a decision needs the words of all, as the metadata
of a sharded checkpoint does, one rank reads the reports themselves. They stay in the shared store
until every rank has arrived at a later operation, so they are read before the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core.records import FinalRecord, OutcomeRecord, decode
from lightning_resilience.protocols.effects import Get, MultiGet
from lightning_resilience.protocols.member_patience import patience_of
from lightning_resilience.protocols.persistent import with_persistence


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Member


__all__ = ["read_reports"]


def read_reports(member: Member, op: str, *, seq: int) -> Protocol[tuple[OutcomeRecord, ...]]:
    """Read the reports of all ranks, after the operation's verdict and before the next operation.

    Args:
        member: Who this rank is.
        op: Name of the operation.
        seq: Its number.

    Returns:
        Those that are there, by rank. One that is not was lost with the store.

    Raises:
        JointUnavailableError: This rank could not reach the shared store for too long.
    """
    return (yield from with_persistence(_read(member, seq), patience_of(member, op, seq=seq)))


def _read(member: Member, seq: int) -> Protocol[tuple[OutcomeRecord, ...]]:
    if member.world_size == 1:
        # The only worker writes the verdict at once, and no report besides.
        final_key = member.keys.joint("final", seq)
        final: bytes | None = yield Get(final_key)
        told = "" if final is None else decode(FinalRecord, final, key=final_key).detail
        return (OutcomeRecord(rank=member.rank, detail=told),)
    keys = tuple(member.keys.joint("out", seq, rank) for rank in range(member.world_size))
    values: list[bytes | None] = yield MultiGet(keys)
    return tuple(
        decode(OutcomeRecord, raw, key=key)
        for key, raw in zip(keys, values, strict=True)
        if raw is not None
    )
