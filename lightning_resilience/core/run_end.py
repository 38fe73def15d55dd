# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Does a run wait for rank 0's node at its end, and for what? The same on every rank.

Of what waits there another rank knows by a verdict. It may have missed one that the others have
read (``core.store_loss``), and they do not know that it has: whoever decided by what it has been
told would wait alone, or be waited for in vain. So nobody does. A run waits wherever it has made an
operation that may have left something behind, which lock-step makes the same on all ranks. Where
all is well that costs it one joint operation, at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.spool import DEFERRABLE
from lightning_resilience.core.store_loss import is_deferred


if TYPE_CHECKING:
    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.errors import JointUnavailableError


__all__ = ["RunEnd", "is_deaf", "rest_of"]

_LEAVES_SOMETHING: Final = DEFERRABLE - {"exists"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What all ranks know of what may wait on rank 0's node.

    Args:
        is_behind: Whether rank 0 writes in the background, after a save has ended.
        has_left: Whether an operation was begun that may have left something.
    """

    is_behind: bool = False
    has_left: bool = False

    def begun(self, op: str) -> RunEnd:
        """Return what is known once a joint operation of that name has begun, however it ends."""
        return replace(self, has_left=self.has_left or op in _LEAVES_SOMETHING)

    @property
    def is_due(self) -> bool:
        """Whether all ranks wait until nothing waits on rank 0's node."""
        return self.is_behind or self.has_left


def rest_of(final: FinalRecord) -> str:
    """Return what rank 0 has told, when all had waited, of the removals that are left.

    Args:
        final: How the wait has ended.
    """
    return "" if is_deferred(final) else final.detail


def is_deaf(error: JointUnavailableError, *, rank: int) -> bool:
    """Tell whether only this rank cannot hear how the wait has ended.

    Nothing that all ranks do together follows on it, so that is no reason to fail a run that has
    come to its end. Another one where ranks are lost: somebody must see that.

    Args:
        error: What the wait has raised.
        rank: This rank.
    """
    return error.lost_ranks == (rank,)
