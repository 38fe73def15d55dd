# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How an agent leaves that leaves by itself: what the job's record says of the others is no matter.

====================================  ==============================================================
the agent                             leaves with
====================================  ==============================================================
was told to stop by a signal          143: the others go on, or are told to stop as well
has failed, and cannot read what the  160: the one status that may be wrong and does no harm
others make of it
has failed because a transport broke  160: another agent has gone, or the store
has no part in the present start of   its own: the workers of that start are well, and it is not
the workers, and would end the job    its to end
====================================  ==============================================================

An agent that was on its way out already, with the status of the job, leaves with that.

Who may end a job for all is fenced by its start: an agent that was cut off, or waits to join, knows
nothing of those who train. So it ends the job only where none has begun, or the last one that has
is the one that it had part in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_resilience.core.evidence import one_line
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.incident import is_echo
from lightning_resilience.core.quota import Ending


if TYPE_CHECKING:
    from lightning_resilience.core.restart import IncarnationRecord


__all__ = ["Apart", "broken_off", "is_theirs", "told_to_stop", "unread", "used_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """An agent leaves, and the job goes on without it.

    Args:
        ending: With what it leaves.
    """

    ending: Ending


def is_theirs(present: IncarnationRecord | None, *, own: str) -> bool:
    """Tell whether the job is for others to end: a start of the workers without this agent.

    Args:
        present: The start of the workers that has begun last; None where none has.
        own: The incarnation that this agent had part in last; empty where it never had.
    """
    return present is not None and present.incarnation != own


def broken_off(error: BaseException | None) -> Ending | None:
    """Return how an agent leaves with an exception of its own; None for the launcher's status.

    Torch's agents wait for each other when they give the workers their ranks, and one that has gone
    by then ends all others.

    Args:
        error: The exception that ends it; None where nothing does.
    """
    if error is None or not is_echo(error):
        return None
    reason = (
        "Torch's agent has ended, because another agent or the store had gone while it waited for "
        f"them: {one_line(error).rstrip('.')}."
    )
    return Ending(code=ExitCode.OUTAGE, reason=reason)


def told_to_stop(name: str) -> Ending:
    """Return how an agent leaves that a signal has told to stop.

    Args:
        name: The signal's name.
    """
    reason = f"This agent was told to stop: it got signal {name}, and has ended its workers."
    return Ending(code=ExitCode.PREEMPTED, reason=reason)


def used_up(node: int, *, incarnation: str) -> Ending:
    """Return how a job ends whose agent asks for no other rendezvous: torch's limit is reached.

    Args:
        node: Number of its node in the round.
        incarnation: The start of the workers that has ended.
    """
    reason = (
        f"Workers of node {node} have failed, and torch restarts none there any more: its "
        "--max-restarts is used up. Raise it; restart_quota counts for the whole job."
    )
    return Ending(code=ExitCode.DEAD_LETTERED, reason=reason, incarnation=incarnation)


def unread(text: str) -> Ending:
    """Return how an agent leaves that has failed, and cannot read what the others make of it.

    Args:
        text: Why it cannot, in one line.
    """
    reason = f"This agent has failed, and how the job has ended could not be read: {text}."
    return Ending(code=ExitCode.OUTAGE, reason=reason)
