# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Until when calls may go straight to their function, without a look at anything but the clock.

All is well when the circuit is closed by a view that is fresh, nobody here has failed since, no
vote of this host stands, and the shared breaker is the one that is followed. Then the next call's
gate would let it through without asking anybody, and its success would have nothing to report.
Until the view is too old, that stays so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.window import EMPTY


if TYPE_CHECKING:
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.core.window import Window


__all__ = ["NEVER_S", "straight_until_s"]

NEVER_S: Final = float("-inf")
"""An instant that has always passed."""


def straight_until_s(
    view: BreakerView | None, window: Window, config: BreakerConfig, *, host: str, is_alone: bool
) -> float:
    """Return until when calls may go straight to their function, on this process's clock.

    Args:
        view: What this process knows of the breaker.
        window: What it has seen of its own calls.
        config: The breaker's configuration.
        host: This host.
        is_alone: Whether the process follows a breaker of its own.
    """
    if view is None or is_alone or window != EMPTY or host in view.record.votes:
        return NEVER_S
    if view.record.state != BreakerState.CLOSED.value:
        return NEVER_S
    return view.read_at_s + config.view_max_age_s
