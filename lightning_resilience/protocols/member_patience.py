# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How long a rank asks a shared store that does not answer, and what it raises then.

The same for all that ranks do together: whoever gave up sooner in one of them would be taken for
lost by the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core.joint import unavailable_error
from lightning_resilience.core.store_loss import Refusals, gone_error
from lightning_resilience.protocols.persistent import Persistence, Witness


if TYPE_CHECKING:
    from lightning_resilience.errors import StoreUnavailableError
    from lightning_resilience.protocols.joint_terms import Member


__all__ = ["patience_of"]


def patience_of(member: Member, op: str, *, seq: int, may_be_deferred: bool = False) -> Persistence:
    """Return how a rank repeats its store operations.

    Args:
        member: The rank.
        op: Name of what it does, for events and the error.
        seq: Its number.
        may_be_deferred: Whether it leaves it without a verdict where the store is gone.
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
        witness=_Deferring(member, op, seq) if may_be_deferred else None,
    )


class _Deferring(Witness):
    """Says that an operation is deferred once nobody has listened at the store for long enough."""

    def __init__(self, member: Member, op: str, seq: int) -> None:
        self._member = member
        self._op = op
        self._seq = seq

    def has_answered(self) -> None:
        """Note that the store has answered."""
        self._member.refusals = Refusals()

    def has_failed(self, error: StoreUnavailableError, *, now_s: float) -> Exception | None:
        """Note a failure; return what to raise where the store is gone for everybody."""
        member = self._member
        refused = member.refusals.failed(is_refused=error.is_refused, now_s=now_s)
        member.refusals = refused
        if member.defer_after_s is None or not refused.show_that_it_is_gone(
            after_s=member.defer_after_s, now_s=now_s
        ):
            return None
        return gone_error(self._op, seq=self._seq, rank=member.rank, cause=str(error))
