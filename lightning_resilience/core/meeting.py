# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Under which name and number do ranks go on together that have met in somebody else's exchange?

A library that gathers something from all ranks and hands something to all is a meeting: each rank
offers where its last operation has left it, and one of them makes of all offers the terms that hold
for everybody. A rank that has missed an operation, because the library failed in between, is
brought up to the others; ranks that come from different beginnings get a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["Offer", "Terms", "agree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Where one rank could go on.

    Args:
        incarnation: The name under which it has worked together with others; empty for a rank that
            has not.
        seq: Number of its last operation under that name.
        world_size: With how many ranks, itself included.
    """

    incarnation: str = ""
    seq: int = 0
    world_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Where one rank goes on.

    Args:
        incarnation: The name under which all ranks work together.
        seq: Number of the last operation; the next has the one after it.
        world_size: Number of ranks.
        rank: This rank.
    """

    incarnation: str
    seq: int
    world_size: int
    rank: int


def agree(offers: Sequence[Offer], *, nonce: str) -> tuple[Terms, ...]:
    """Make of all offers what holds for everybody.

    Args:
        offers: One of each rank, by rank.
        nonce: A name that nobody has used, for ranks that cannot go on where they are.

    Returns:
        The terms of each rank.
    """
    world_size = len(offers)
    common = {(offer.incarnation, offer.world_size) for offer in offers}
    incarnation, last = nonce, 0
    if len(common) == 1 and offers[0].incarnation and offers[0].world_size == world_size:
        incarnation, last = offers[0].incarnation, max(offer.seq for offer in offers)
    return tuple(
        Terms(incarnation=incarnation, seq=last, world_size=world_size, rank=rank)
        for rank in range(world_size)
    )
