# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When all ranks pause between two steps, because what they depend on is ill.

A save waits for its storage by itself. Between two saves nobody needs storage, and training could
go on; but what it does then is kept nowhere until the outage is over, and more of it is lost if the
job dies meanwhile. So a job may pause at the next step instead.

* **Any breaker counts** that a rank has used: of a storage, and whatever else the job will have one
  for, such as a whole site. This module sees names and records only.
* **Only a policy that waits pauses.** One that fails has nothing to wait for, and one that can
  absorb an outage trains on until it cannot.
* **What was seen once is waited for once.** A rank that had no part in the waiting knows no more of
  the circuit than before: it must not ask for another pause because of the same sight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from lightning_resilience.core.agenda import AgendaItem, AgendaKind
from lightning_resilience.core.breaker_record import passes
from lightning_resilience.core.events import (
    DependencyAwaited,
    TrainingPaused,
    TrainingResumed,
    VerdictReached,
)


if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_resilience.core.events import Event
    from lightning_resilience.core.records import BreakerRecord


__all__ = ["AT_SAVE_POINTS", "Sight", "asks", "banner", "is_time_to_look", "sight_of", "steps"]

AT_SAVE_POINTS: Final = "at_save_points"
"""The option's word for: a save waits by itself, and nothing else does."""

Sight: TypeAlias = "tuple[str, int]"
"""The store and the epoch of a breaker's record: the same for as long as its state is."""

_WAITING: Final = frozenset({"wait"})


def steps(pause_training: str | int) -> int:
    """Return after how many steps a rank looks at its breakers; 0 for never."""
    return 0 if isinstance(pause_training, str) else pause_training


def is_time_to_look(step: int, *, every: int) -> bool:
    """Tell whether a rank looks at its breakers after this step.

    Args:
        step: How many steps this fit has made; before the first it does not look.
        every: After how many steps it looks, 0 for never.
    """
    return step > 0 and every > 0 and step % every == 0


def sight_of(record: BreakerRecord) -> Sight:
    """Return what tells one state of a breaker from the next."""
    return record.store_id, record.epoch


def asks(
    records: Mapping[str, BreakerRecord], *, on_outage: str, past: Mapping[str, Sight]
) -> AgendaItem | None:
    """Return what a rank asks of all ranks, because of the breakers that it has used.

    Args:
        records: What this rank has seen last of each breaker, by name.
        on_outage: What a save does while its storage is ill.
        past: What this rank had seen of a breaker when a pause for it was over.

    Returns:
        A pause for the first breaker, by name, that lets nothing through; None where training goes
        on.
    """
    if on_outage not in _WAITING:
        return None
    for name, record in sorted(records.items()):
        if not passes(record) and past.get(name) != sight_of(record):
            reason = f"the circuit is {record.state} since epoch {record.epoch}: {record.reason}"
            return AgendaItem(kind=AgendaKind.PAUSE, reason=reason, detail=name)
    return None


def banner(event: Event) -> str | None:
    """Return what the progress bar says from now on.

    Args:
        event: What has just happened in the Trainer's thread.

    Returns:
        The text; empty for what the bar says by itself; None for what it says now.
    """
    if isinstance(event, (DependencyAwaited, TrainingPaused)):
        return f"paused, waits for {event.dependency}"
    if isinstance(event, (VerdictReached, TrainingResumed)):
        return ""
    return None
