# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A breaker written down as a person would tell it, only to compare the real one with.

It knows neither records nor tables: one object that changes itself, one method for each thing that
may happen, and plain sentences as branches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_resilience.core import breaker_inputs as happened


if TYPE_CHECKING:
    from typing import TypeAlias

    from lightning_resilience.core.breaker import BreakerConfig, BreakerInput

    Result: TypeAlias = (
        happened.AttemptSucceeded
        | happened.AttemptFailed
        | happened.ProbeSucceeded
        | happened.ProbeFailed
        | happened.ProbeReleased
    )


class NaiveBreaker:
    """One breaker, told what happened."""

    def __init__(self, config: BreakerConfig) -> None:
        self.config = config
        self.mode = "closed"
        self.epoch = 1
        self.trips = 0
        self.voters: list[str] = []
        self.prober: str | None = None
        self.allowed = config.max_concurrent
        self.stumbles = 0
        self.failed_recoveries = 0
        self.first_wait_s: float = config.open_for_s
        self.story = [(1, "closed")]

    @property
    def wait_s(self) -> float:
        """How long the circuit stays open before a probe: doubled with each failed recovery."""
        longest_s: float = self.config.max_open_for_s
        return min(longest_s, self.first_wait_s * 2.0**self.failed_recoveries)

    def tell(self, event: BreakerInput) -> bool:
        """Take one input; return whether anything changed."""
        before = self._snapshot()
        if isinstance(event, happened.HostVoted | happened.VoteDropped | happened.VotesCleared):
            if self.mode == "closed":
                self._hear_hosts(event)
        elif isinstance(event, happened.ForcedOpen | happened.ForceReleased):
            self._hear_operator(opens=isinstance(event, happened.ForcedOpen))
        elif isinstance(event, happened.ProbeClaimed):
            self._hear_claim(event)
        elif isinstance(event, happened.HeldUpstream):
            self._hear_site(event)
        elif event.epoch == self.epoch:
            self._hear_result(event)
        return self._snapshot() != before

    def _snapshot(self) -> tuple[object, ...]:
        return (self.epoch, tuple(self.voters))

    def _hear_hosts(
        self, event: happened.HostVoted | happened.VoteDropped | happened.VotesCleared
    ) -> None:
        if isinstance(event, happened.VotesCleared):
            self.voters = []
        elif isinstance(event, happened.VoteDropped):
            self.voters = [host for host in self.voters if host != event.host]
        elif event.host not in self.voters:
            self.voters.append(event.host)
            share = math.ceil(round(self.config.quorum_fraction * event.hosts, 6))
            wanted = sorted([2, share, 8])[1]
            if len(self.voters) >= wanted or len(self.voters) >= event.hosts:
                self._forget_waits()
                self._stop("open")

    def _hear_operator(self, *, opens: bool) -> None:
        if opens and self.mode != "forced_open":
            self._stop("forced_open")
        if not opens and self.mode == "forced_open":
            self._forget_waits()
            self._stop("open")

    def _hear_site(self, event: happened.HeldUpstream) -> None:
        is_probers = self.mode == "half_open" and event.claim == (self.epoch, self.prober)
        if is_probers or (event.claim is None and self.mode in {"closed", "recovering"}):
            self.failed_recoveries, self.first_wait_s = 0, event.open_s
            self._stop("open")

    def _hear_result(self, event: Result) -> None:
        if isinstance(event, happened.AttemptSucceeded | happened.AttemptFailed):
            if self.mode == "recovering":
                self._hear_call(succeeded=isinstance(event, happened.AttemptSucceeded))
        elif self.mode == "half_open" and event.holder == self.prober:
            self._hear_prober(event)

    def _hear_claim(self, event: happened.ProbeClaimed) -> None:
        overdue = (self.mode == "open" and event.unchanged_s >= self.wait_s) or (
            self.mode == "half_open" and event.unchanged_s >= self.config.probe_lease_s
        )
        if overdue:
            self._stop("half_open")
            self.prober = event.holder

    def _hear_prober(
        self, event: happened.ProbeSucceeded | happened.ProbeFailed | happened.ProbeReleased
    ) -> None:
        if isinstance(event, happened.ProbeSucceeded):
            self._let_through(self.config.ramp_start)
        else:
            if isinstance(event, happened.ProbeFailed):
                self.failed_recoveries += 1
            self._stop("open")

    def _hear_call(self, *, succeeded: bool) -> None:
        if succeeded:
            self._let_through(self.allowed * 2)
            return
        self.stumbles += 1
        half = math.floor(self.allowed / 2)
        if half < self.config.ramp_start or self.stumbles >= self.config.reopen_failures:
            self.failed_recoveries += 1
            self._stop("open")
        else:
            self._let_through(half)

    def _let_through(self, calls: int) -> None:
        if calls < self.config.max_concurrent:
            self._enter("recovering")
            self.allowed = calls
        else:
            self._enter("closed")
            self.allowed = self.config.max_concurrent
            self._forget_waits()
            self.stumbles = 0

    def _forget_waits(self) -> None:
        self.failed_recoveries, self.first_wait_s = 0, self.config.open_for_s

    def _stop(self, mode: str) -> None:
        if self.mode in {"closed", "recovering"}:
            self.trips += 1
        self._enter(mode)
        self.allowed = 0
        self.stumbles = 0

    def _enter(self, mode: str) -> None:
        self.mode = mode
        self.epoch += 1
        self.voters = []
        self.prober = None
        self.story.append((self.epoch, mode))
