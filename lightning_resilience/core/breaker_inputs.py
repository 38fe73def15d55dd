# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Everything that can happen to a circuit breaker, as values.

Each is a fact that one process reports; ``core.breaker.step`` decides what it changes. A fact that
was learnt in one epoch names it, so that it cannot change a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


__all__ = [
    "AttemptFailed",
    "AttemptSucceeded",
    "BreakerInput",
    "ForceReleased",
    "ForcedOpen",
    "HeldUpstream",
    "HostVoted",
    "ProbeClaimed",
    "ProbeFailed",
    "ProbeReleased",
    "ProbeSucceeded",
    "VoteDropped",
    "VotesCleared",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostVoted:
    """The latest results of ``host`` failed.

    Args:
        host: The host.
        hosts: Hosts that use this dependency, as the adapter declares it.
        reason: The latest failure.
        seen: The store and the epoch in which others were seen to fail as well, where the vote
            rests on that; None where its own failures are enough.
        witnessed: Votes that the reporter knows to be young, which alone count with its own; None
            where each vote counts (``core.site``).
    """

    host: str
    hosts: int
    reason: str
    seen: tuple[str, int] | None = None
    witnessed: tuple[str, ...] | None = None

    def counted(self, votes: tuple[str, ...], *, stands: bool) -> int:
        """Return how many of ``votes``, this one among them, make up the quorum.

        Args:
            votes: All that would be in the record.
            stands: Whether this one was there before.
        """
        if self.witnessed is None:
            return 0 if stands else len(votes)
        return sum(vote == self.host or vote in self.witnessed for vote in votes)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteDropped:
    """The vote of ``host`` no longer stands: withdrawn by it, or unchanged for ``window_s``."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VotesCleared:
    """A new incarnation has begun: votes of the former one say nothing about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeClaimed:
    """Somebody wants the probe's permit.

    Args:
        holder: Nonce of the claim.
        unchanged_s: How long the claimant has seen this (store, epoch), on its own clock, in
            seconds.
    """

    holder: str
    unchanged_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSucceeded:
    """The probe of this epoch and holder was answered."""

    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailed:
    """The probe of this epoch and holder failed."""

    epoch: int
    holder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReleased:
    """The probe of this epoch and holder was cancelled: it says nothing, the permit is free."""

    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUpstream:
    """The circuit of the site is open, so this one is (``core.site``).

    Args:
        upstream: Epoch of the site's record.
        open_s: When to look at it again, in seconds from now.
        reason: What its record says.
        claim: Epoch and holder of the probe that was held back; None where there was none.
    """

    upstream: int
    open_s: float
    reason: str
    claim: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSucceeded:
    """A call that was admitted in ``epoch`` of ``store_id`` succeeded.

    Records that were rebuilt in another store may repeat an epoch; an empty ``store_id`` is of the
    record that is read.
    """

    epoch: int
    store_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """A call that was admitted in ``epoch`` of ``store_id`` failed in a way that counts."""

    epoch: int
    reason: str
    store_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedOpen:
    """An operator holds the circuit open."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForceReleased:
    """The operator lets go; a probe decides what follows."""

    reason: str


BreakerInput: TypeAlias = (
    HostVoted
    | VoteDropped
    | VotesCleared
    | ProbeClaimed
    | ProbeSucceeded
    | ProbeFailed
    | ProbeReleased
    | HeldUpstream
    | AttemptSucceeded
    | AttemptFailed
    | ForcedOpen
    | ForceReleased
)
