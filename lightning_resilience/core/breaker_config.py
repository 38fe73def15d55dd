# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When a circuit opens, how it probes, and how it lets calls through again: the options.

The meaning of each is in ``core.breaker``; the relations between them are checked here, because two
options that contradict each other fail in the middle of an outage and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_resilience.core.validation import (
    check_at_least,
    check_less,
    check_seconds,
    check_share,
    check_whole,
    option,
)


__all__ = ["MOST_VOTES", "BreakerConfig"]

MOST_VOTES: Final = 8
"""No trip needs more votes, so a record names no more."""

# The claim's round trip and the margin that the lease has over the work that it covers.
_CLAIM_ROUND_TRIP_S: Final = 0.5
_LEASE_FACTOR: Final = 1.5
_LEASE_MARGIN_S: Final = 1.0
# Each slot is a key, and a waiter reads all of them at each look.
_MOST_SLOTS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When a circuit opens, how it probes, and how it lets calls through again.

    Args:
        trip_failures: Failures in a row that make a host's vote, ≥ 1.
        window_s: How long a failure and a vote are remembered, in seconds, > 0.
        quorum_fraction: Share of the hosts that must agree, in (0, 1]; at least 2 hosts where there
            are as many, at most 8.
        view_max_age_s: How old a view of the record may be for a call to go ahead on it, in
            seconds, > 0.
        open_for_s: First open wait, in seconds, > 0.
        max_open_for_s: Longest open wait, in seconds; the longest lag until a recovery is noticed.
        probe_timeout_s: Time that a probe has, in seconds, > 0.
        probe_lease_s: Time after which a silent prober is taken for dead, in seconds.
        reopen_failures: Failures while recovering that open the circuit again, ≥ 1.
        max_concurrent: Collective calls that may be in flight, over all ranks, from 1 to 1024; the
            limit at which a circuit has recovered.
        ramp_start: Limit right after a probe, ≥ 1, at most ``max_concurrent``; doubles with each
            success.
        site_quorum: Jobs whose circuits must open for the site's to open, from 1 to 8; of no use
            without a ``site_store``.

    Raises:
        ConfigError: An option is out of range or contradicts another.
    """

    trip_failures: int = option(3, why="false trip 1e-4 at 5 % errors")
    window_s: float = option(
        600.0, why="≥ 3 · (`stall_timeout_s` + `max_delay_s`), else hangs never trip"
    )
    quorum_fraction: float = option(0.25, why="of the hosts: 8 at 32 hosts")
    view_max_age_s: float = option(5.0, why="less than `open_for_s`")
    open_for_s: float = option(10.0, why="one probe for the whole job is cheap")
    max_open_for_s: float = option(60.0, why="a recovery is noticed within a minute")
    probe_timeout_s: float = option(4.0, why="a small object")
    probe_lease_s: float = option(8.0, why="≥ 1.5 · (`probe_timeout_s` + 0.5) + 1")
    reopen_failures: int = option(3, why="as the trip")
    max_concurrent: int = option(
        16, why="one read of 17 keys; the ramp ends here, four successes after a probe"
    )
    ramp_start: int = option(1, why="gentle: doubles with each success")
    site_quorum: int = option(2, why="one job that is ill is ill by itself")

    def __post_init__(self) -> None:
        for name in ("window_s", "view_max_age_s", "open_for_s", "max_open_for_s"):
            check_seconds(name, getattr(self, name))
        for name in ("probe_timeout_s", "probe_lease_s"):
            check_seconds(name, getattr(self, name))
        for name in ("trip_failures", "reopen_failures", "ramp_start"):
            check_whole(name, getattr(self, name), minimum=1)
        check_whole("max_concurrent", self.max_concurrent, minimum=1, maximum=_MOST_SLOTS)
        check_whole("site_quorum", self.site_quorum, minimum=1, maximum=MOST_VOTES)
        check_share("quorum_fraction", self.quorum_fraction)
        self._check_relations()

    def _check_relations(self) -> None:
        open_for = ("open_for_s", self.open_for_s)
        check_less(
            ("view_max_age_s", self.view_max_age_s),
            open_for,
            why="a rank with an old view would still call when the probe is due",
        )
        check_at_least(
            ("max_open_for_s", self.max_open_for_s), open_for, why="it is the cap of the open wait"
        )
        check_at_least(
            ("probe_lease_s", self.probe_lease_s),
            (
                "1.5 · (probe_timeout_s + 0.5) + 1",
                _LEASE_FACTOR * (self.probe_timeout_s + _CLAIM_ROUND_TRIP_S) + _LEASE_MARGIN_S,
            ),
            why="a prober that is merely slow would be taken for dead",
        )
        check_less(
            ("probe_lease_s", self.probe_lease_s),
            open_for,
            why="a dead prober must be replaced sooner than a failed probe is repeated",
        )
        check_at_least(
            ("max_concurrent", float(self.max_concurrent)),
            ("ramp_start", float(self.ramp_start)),
            why="the ramp ends at the limit",
        )
