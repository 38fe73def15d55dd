# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How long a rank asks a shared store that does not answer, and what it raises then.

The same for all that ranks do together: whoever gave up sooner in one of them would be taken for
lost by the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core.joint import unavailable_error
from lightning_resilience.protocols.persistent import Persistence


if TYPE_CHECKING:
    from lightning_resilience.errors import StoreUnavailableError
    from lightning_resilience.protocols.joint_terms import Member


__all__ = ["patience_of"]


def patience_of(member: Member, op: str, *, seq: int) -> Persistence:
    """Return how a rank repeats its store operations.

    Args:
        member: The rank.
        op: Name of what it does, for events and the error.
        seq: Its number.
    """

    def unavailable(lost_for_s: float, error: StoreUnavailableError) -> Exception:
        return unavailable_error(
            op, seq=seq, rank=member.rank, lost_for_s=lost_for_s, cause=str(error)
        )

    return Persistence(
        op=op,
        patience_s=member.store_patience_s,
        error=unavailable,
        beat_key=member.keys.joint("beat", member.rank),
    )
