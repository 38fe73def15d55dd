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
====================================  ==============================================================

An agent that was on its way out already, with the status of the job, leaves with that.
"""

from __future__ import annotations

from lightning_resilience.core.evidence import one_line
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.incident import is_echo
from lightning_resilience.core.quota import Ending


__all__ = ["broken_off", "told_to_stop", "unread"]


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


def unread(text: str) -> Ending:
    """Return how an agent leaves that has failed, and cannot read what the others make of it.

    Args:
        text: Why it cannot, in one line.
    """
    reason = f"This agent has failed, and how the job has ended could not be read: {text}."
    return Ending(code=ExitCode.OUTAGE, reason=reason)
