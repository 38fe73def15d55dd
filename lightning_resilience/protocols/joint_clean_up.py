# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Remove the keys of joint operations that every rank has left behind.

A rank is past an operation once it has *arrived* at a later one, so nothing is removed that anybody
may still read. Rank 0 alone does it, for a batch at a time, and notes in the store how far it has
come; so the number of keys stays bounded over any number of operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.records import FinalRecord, decode
from lightning_resilience.protocols.effects import Delete, Get, MultiGet, Set


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Member


__all__ = ["CLEAN_UP_EVERY", "clean_up"]

CLEAN_UP_EVERY: Final = 16
"""Operations in a batch: one read of all ranks' numbers for as many operations."""

_MOST_ROUNDS: Final = 1000


def clean_up(member: Member, seq: int) -> Protocol[None]:
    """Remove what nobody will read again, if it is this rank's turn.

    Args:
        member: Who this rank is.
        seq: Number of the operation that has just ended here.
    """
    if member.rank != 0 or seq % CLEAN_UP_EVERY:
        return
    cleaned_key = member.keys.joint("cleaned", 0)
    arrived: list[bytes | None] = yield MultiGet(
        (cleaned_key, *(member.keys.joint("arrived", rank) for rank in range(member.world_size)))
    )
    cleaned_below, *numbers = (int(raw or b"0") for raw in arrived)
    # One less than all have left: a save inside a signal handler comes between two numbers.
    done_below = min(numbers) - 1
    for done in range(cleaned_below, done_below):
        yield from _remove(member, done)
    yield Set(cleaned_key, str(max(cleaned_below, done_below)).encode())


def _remove(member: Member, seq: int) -> Protocol[None]:
    final_key = member.keys.joint("final", seq)
    raw: bytes | None = yield Get(final_key)
    if raw is not None:
        for rank in decode(FinalRecord, raw, key=final_key).workers:
            yield Delete(member.keys.joint("out", seq, rank))
    for part in ("final", "done", "count"):
        yield Delete(member.keys.joint(part, seq))
    for round_number in range(_MOST_ROUNDS):
        if not (yield Delete(member.keys.joint("gate", seq, round_number))):
            return
