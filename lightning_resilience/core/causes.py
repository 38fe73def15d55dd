# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Why a start of the workers has ended, as far as restarts are concerned.

What workers and agents have told decides, and where nobody has told anything, who is still there. A
node that is gone explains an echo of its going; it does not explain an error.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.incident import IncidentKind
from lightning_resilience.core.outcome import FailureClass


if TYPE_CHECKING:
    from lightning_resilience.core.incident import IncidentRecord


__all__ = ["FREE", "Cause", "cause_of"]


class Cause(str, enum.Enum):
    """Why a start of the workers has ended, as far as restarts are concerned."""

    PREEMPTED = "preempted"
    GROWN = "grown"
    """Nodes have come."""
    LEFT = "left"
    """Nodes have left, and nothing else is known."""
    PERMANENT = "permanent"
    KILLED = "killed"
    FAILED = "failed"

    def __str__(self) -> str:
        """The value, so that texts read the same on every supported Python."""
        return self.value


FREE: Final = frozenset({Cause.PREEMPTED, Cause.GROWN})
"""What costs a job nothing."""


def cause_of(incident: IncidentRecord | None, *, left: int, is_called: bool = False) -> Cause:
    """Return why a start of the workers has ended.

    Args:
        incident: What workers and agents have told of it; None where nobody has told anything.
        left: Nodes that are not there any more.
        is_called: Whether this agent's own workers were well: it has told them to stop, because of
            other nodes.
    """
    is_echo = incident is not None and incident.kind == IncidentKind.ECHO.value
    if left and (incident is None or is_echo):
        return Cause.LEFT
    if incident is None:
        return Cause.GROWN
    if incident.kind == IncidentKind.SIGNAL.value:
        # An agent tells it of a node that was taken away: that one is missed, and is free.
        is_own = not incident.by_agent
        return Cause.LEFT if left and is_called and is_own else Cause.PREEMPTED
    if incident.kind == IncidentKind.KILLED.value:
        return Cause.KILLED
    if incident.failure == FailureClass.PERMANENT.value:
        return Cause.PERMANENT
    return Cause.FAILED
