# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When one process goes its own way: its host is cut off, or the shared store is.

The shared breaker speaks for the job. Two things it cannot speak for:

* **A host whose calls fail while the others' succeed.** Its vote stands, the quorum does not agree,
  and so the circuit stays closed. That host trips *itself*: it waits behind a breaker of its own,
  with its own probes, until its calls succeed again. The job goes on.
* **A process that the shared store does not answer.** One lost answer is nothing: the last view
  serves for a while. After that the process decides alone, on a share of every limit, since the
  others that lost the store do the same: 1/N of the slots and of the retries, and 1/N of the probes
  that are due, so that in expectation as many probes are sent in each open wait as there are
  processes lost, divided by N. Chance spreads them, and a bound keeps it from passing over one
  process for ever.

What is decided alone has epochs of its own and is never written to the shared store: a process that
loses the store again and again would else overrule the job. When the store answers again, its
record is what counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core import backoff
from lightning_resilience.core.breaker_record import BreakerState, initial, passes
from lightning_resilience.core.window import wants_vote


if TYPE_CHECKING:
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.core.records import BreakerRecord
    from lightning_resilience.core.window import Window


__all__ = [
    "GRACE_VIEWS",
    "ProbeShare",
    "own_config",
    "seeded",
    "share_on_a_host",
    "stands_alone",
    "trust_s",
    "trusts",
    "try_again_s",
]

GRACE_VIEWS: Final = 6
"""A closed view serves for this many times its greatest age while the store does not answer."""

# How long a process leaves a store alone that did not answer. Retries on the store are load too.
_TRY_BASE_S: Final = 1.0
_TRY_CAP_S: Final = 30.0

_STORE_ID: Final = "local"


def trust_s(config: BreakerConfig) -> float:
    """Return for how long a view serves while the store does not answer, in seconds."""
    return GRACE_VIEWS * config.view_max_age_s


def trusts(view: BreakerView | None, config: BreakerConfig, *, now_s: float) -> bool:
    """Tell whether a call may go ahead on an old view, because the store did not answer.

    Only on one that lets calls through: an old view that stops a call may be about an outage that
    is over.
    """
    return view is not None and passes(view.record) and now_s - view.read_at_s < trust_s(config)


def try_again_s(tries: int, *, draw: float) -> float:
    """Return for how long to leave a store alone that did not answer, in seconds, > 0.

    Args:
        tries: Tries in a row that were not answered, ≥ 1.
        draw: A uniform number in [0, 1).
    """
    # Not full jitter: asking a store that is away takes its timeout, so a delay of nothing would be
    # spent waiting for it.
    return backoff.upper_bound_s(tries, base_s=_TRY_BASE_S, cap_s=_TRY_CAP_S) * (0.5 + draw / 2)


def stands_alone(
    record: BreakerRecord, window: Window, config: BreakerConfig, *, host: str, now_s: float
) -> bool:
    """Tell whether a host's vote stands without the others': its own calls fail, the circuit holds.

    Args:
        record: The shared record.
        window: What this process has seen of its own calls.
        config: The breaker's configuration.
        host: This host.
        now_s: Now, on this process's clock.
    """
    return (
        record.state == BreakerState.CLOSED.value
        and host in record.votes
        and wants_vote(
            window,
            now_s=now_s,
            window_s=config.window_s,
            trip_failures=config.trip_failures,
        )
    )


def own_config(config: BreakerConfig, *, processes: int) -> BreakerConfig:
    """Return the configuration of a breaker that one of several processes keeps for itself."""
    slots = max(1, config.max_concurrent // processes)
    return replace(config, max_concurrent=slots, ramp_start=min(config.ramp_start, slots))


def seeded(
    config: BreakerConfig,
    before: BreakerRecord | None,
    *,
    state: BreakerState,
    reason: str,
    writer: str,
) -> BreakerRecord:
    """Return the record with which a process begins to decide alone.

    Args:
        config: The process's own configuration.
        before: Its own record of the last time, if there was one: epochs and bells go on.
        state: The last state that it knows; a probe that was under way is over.
        reason: Why it is alone.
        writer: Nonce of the write.
    """
    record = initial(config, store_id=_STORE_ID, writer=writer)
    state = BreakerState.OPEN if state is BreakerState.HALF_OPEN else state
    limits = {BreakerState.CLOSED: config.max_concurrent, BreakerState.RECOVERING: 1}
    return msgspec.structs.replace(
        record,
        epoch=1 if before is None else before.epoch + 1,
        generation=0 if before is None else before.generation + 1,
        state=state.value,
        limit=limits.get(state, 0),
        history=(),
        reason=reason,
    )


def share_on_a_host(*, hosts: int, processes: int) -> float:
    """Return how often one process of an isolated host sends the probe that is due.

    Each of its processes goes its own way, and together they send one probe per wait. With one for
    each, the probes of a large host are enough to keep a small dependency from answering any.

    Args:
        hosts: Hosts that use the dependency, ≥ 1.
        processes: Processes of all hosts, ≥ 1.
    """
    return min(1.0, hosts / processes)


@dataclass(frozen=True, slots=True)
class ProbeShare:
    """Which of the probes that are due one of several processes sends, if each goes its own way.

    Independent dice would do for the load, but not for the process: with a share of 1/N it is
    passed over for longer than any bound in one case of so many. So the number of probes from one
    that is sent to the next is drawn from 1…M, each alike, with M = 2/share - 1 and the mean
    1/share. The first is drawn as if that had been going on for ever, and so each probe that is due
    is sent with the probability ``share``, as with dice: processes that begin in the same instant
    do not come to the end of their patience in the same instant.

    (A stationary renewal process with uniform intervals; where M is no whole number it is rounded
    up, and a little less than the share is sent.)

    Args:
        share: The part of the probes that are due, in (0, 1].
        passed: Probes passed over since the last that was sent.
        has_sent: Whether one was sent yet.
    """

    share: float = 1.0
    passed: int = 0
    has_sent: bool = False

    @property
    def most(self) -> int:
        """M: one of so many probes in a row is sent for certain."""
        # What a share like 2/31 loses to rounding must not cost a round.
        return max(1, math.ceil(2 / self.share - 1 - 1e-9))

    @property
    def chance(self) -> float:
        """The probability with which the next probe that is due is sent, in (0, 1]."""
        left = max(1, self.most - self.passed)
        return 1 / left if self.has_sent else 2 / (left + 1)

    def sends(self, *, draw: float) -> bool:
        """Tell whether the probe that is due is sent.

        Args:
            draw: A uniform number in [0, 1).
        """
        return draw < self.chance

    def after(self, *, sent: bool) -> ProbeShare:
        """Return what is to be remembered of a probe that was due.

        Args:
            sent: Whether it was sent.
        """
        if sent:
            return replace(self, passed=0, has_sent=True)
        return replace(self, passed=self.passed + 1)
