# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Does a run wait for rank 0's node at its end, and for what? The same on every rank.

Of what waits there another rank knows by a verdict. It may have missed one that the others have
read (``core.store_loss``), and they do not know that it has: whoever decided by what it has been
told would wait alone, or be waited for in vain. So nobody does. A run waits wherever it has made an
operation that may have left something behind, which lock-step makes the same on all ranks. Where
all is well that costs it one joint operation, at its end. A rank that does not come to it fails
nothing: the run is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.spool import DEFERRABLE
from lightning_resilience.core.store_loss import is_deferred
from lightning_resilience.errors import StoreError


if TYPE_CHECKING:
    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.errors import JointError


__all__ = ["RunEnd", "is_lost", "refusal_in", "rest_of"]

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


def is_lost(error: JointError) -> bool:
    """Tell whether ranks did not find each other at the end: they were late, deaf, or are gone.

    That is no reason to fail a run that has come to its end: training waits for none of them any
    more. Whoever is gone has failed by itself, and its launcher sees that.

    Args:
        error: What a wait at the end has raised.
    """
    return error.outcome == FailureClass.LOST.value


def refusal_in(error: JointError) -> Exception | None:
    """Return what this rank's own work has met, where only the others could not be told.

    Args:
        error: What a wait at the end has raised, where ranks did not find each other.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, StoreError):
        return None
    return cause
