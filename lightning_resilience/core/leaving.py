# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How an agent leaves that leaves by itself: what the job's record says of the others is no matter.

====================================  ==============================================================
the agent                             leaves with
====================================  ==============================================================
was told to stop by a signal          143: the others go on, or are told to stop as well
has failed, and cannot read what the  160: the one status that may be wrong and does no harm
others make of it
====================================  ==============================================================

An agent that was on its way out already, with the status of the job, leaves with that.
"""

from __future__ import annotations

from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.quota import Ending


__all__ = ["told_to_stop", "unread"]


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
