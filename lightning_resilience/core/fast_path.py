# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Until when calls may go straight to their function, without a look at anything but the clock.

All is well when the circuit is closed by a view that is fresh, nobody here has failed since, no
vote of this host stands, and the shared breaker is the one that is followed. Then the next call's
gate would let it through without asking anybody, and its success would have nothing to report.
Until the view is too old, that stays so.

What such a call reports if it fails belongs to the epoch that let it through, so the view goes with
the permission.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import BreakerState


if TYPE_CHECKING:
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.core.window import Window


__all__ = ["NO_PASSAGE", "Passage", "passage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Leave to go straight.

    Args:
        until_s: Until when, on this process's clock; by default an instant that has always passed.
        view: The view that gives it; None where there is none to give it.
    """

    until_s: float = float("-inf")
    view: BreakerView | None = None


NO_PASSAGE: Final = Passage()
"""No leave: the gate decides."""


def passage(
    view: BreakerView | None, window: Window, config: BreakerConfig, *, host: str, is_alone: bool
) -> Passage:
    """Return the leave that calls have now.

    Args:
        view: What this process knows of the breaker.
        window: What it has seen of its own calls.
        config: The breaker's configuration.
        host: This host.
        is_alone: Whether the process follows a breaker of its own.
    """
    if view is None or is_alone or window.failures or host in view.record.votes:
        return NO_PASSAGE
    if view.record.state != BreakerState.CLOSED.value:
        return NO_PASSAGE
    return Passage(until_s=view.read_at_s + config.view_max_age_s, view=view)
