# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Facts, in the past tense, that protocols report.

An event is a frozen value with a stable name (its class) and stable keys (its fields). Core and
protocols never log: they emit events, and a sink (``adapters.telemetry``) turns them into log
lines. Each branch that "should never be forgotten" emits one, so that a test can point at it by
name.

Durations are seconds; instants do not occur, because an event may be read on another host.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_resilience.core.event import Event
from lightning_resilience.core.events_checkpoints import (
    CheckpointPublished,
    CheckpointRemoved,
    CheckpointRetained,
    CheckpointSetAside,
    CheckpointSpooled,
    CheckpointsUnpublished,
    CheckpointSuperseded,
    DeferralsSettled,
    DirectoryTried,
    DiversionFailed,
    OperationDeferred,
    SaveSkipped,
    SaveTolerated,
)
from lightning_resilience.core.events_site import SiteLost, SiteReturned


__all__ = [
    "AttemptFailed",
    "BreakerChanged",
    "CallAbandoned",
    "CallStalled",
    "CheckpointPublished",
    "CheckpointRemoved",
    "CheckpointRetained",
    "CheckpointSetAside",
    "CheckpointSpooled",
    "CheckpointSuperseded",
    "CheckpointsUnpublished",
    "CollectivesEnded",
    "DeferralsSettled",
    "DependencyAwaited",
    "DirectoryTried",
    "DiversionFailed",
    "Event",
    "GateDecided",
    "HostIsolated",
    "HostRejoined",
    "LocalModeEnded",
    "LocalModeEntered",
    "OperationDeferred",
    "ProbeEnded",
    "ProbeStarted",
    "RankLeft",
    "RanksLost",
    "RecordVanished",
    "ResultDropped",
    "RetriesExhausted",
    "RetryDenied",
    "RetryScheduled",
    "SaveSkipped",
    "SaveTolerated",
    "SiteLost",
    "SiteReturned",
    "SlotAwaited",
    "SlotForgiven",
    "StoreLost",
    "StoreReturned",
    "TrainingPaused",
    "TrainingResumed",
    "VerdictReached",
    "ViewTrusted",
    "VoteCast",
    "WorkAwaited",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerChanged(Event):
    """This rank moved a breaker's shared record from one state to another.

    ``closed`` to ``open`` is the trip, ``recovering`` to ``closed`` the recovery.
    """

    dependency: str
    epoch: int
    previous: str
    state: str
    reason: str
    open_s: float
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteCast(Event):
    """This host voted that the dependency is ill; the quorum was not reached by it."""

    dependency: str
    host: str
    votes: int
    quorum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStarted(Event):
    """This rank holds the permit and probes the dependency."""

    dependency: str
    epoch: int
    taken_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEnded(Event):
    """This rank's probe ended."""

    dependency: str
    epoch: int
    succeeded: bool
    detail: str
    next_probe_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDropped(Event):
    """A result came too late: its epoch was over, so it changed nothing."""

    dependency: str
    epoch: int
    current_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyAwaited(Event):
    """This rank is waiting for an ill dependency. Emitted again and again while it waits."""

    dependency: str
    operation: str
    state: str
    elapsed_s: float
    next_probe_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAwaited(Event):
    """This rank is waiting for a slot: as many calls as may be are in flight. Emitted again."""

    dependency: str
    operation: str
    limit: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotForgiven(Event):
    """This rank took a slot from a holder that was silent for its whole lease."""

    dependency: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDenied(Event):
    """The job has made all the retries that it may make now; this one waits. Emitted again."""

    dependency: str
    operation: str
    used: int
    quota: int
    window_s: float
    next_try_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIsolated(Event):
    """This host's calls fail and the others' do not: it waits behind a breaker of its own."""

    dependency: str
    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRejoined(Event):
    """This host's calls succeed again: it follows the shared breaker again."""

    dependency: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModeEntered(Event):
    """The shared store is away: this process decides alone, on its share of every limit."""

    dependency: str
    error: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModeEnded(Event):
    """The shared store answers again: this process follows the shared breaker again."""

    dependency: str
    lost_for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewTrusted(Event):
    """The shared store did not answer once: the last view of the breaker serves for a while."""

    dependency: str
    error: str
    age_s: float
    longest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(Event):
    """One attempt at a guarded operation failed."""

    dependency: str
    operation: str
    target: str
    attempt: int
    failure: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAbandoned(Event):
    """A call made no progress for its timeout and was abandoned; its thread may still run.

    ``moved`` says how many bytes it had written, sent or read; empty where none were counted.
    """

    dependency: str
    operation: str
    target: str
    attempt: int
    timeout_s: float
    moved: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStalled(Event):
    """A call has made no progress for a while. Emitted again and again until it ends."""

    dependency: str
    operation: str
    target: str
    stalled_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryScheduled(Event):
    """A failed attempt will be repeated after a delay. Emitted again during a long one."""

    dependency: str
    operation: str
    target: str
    attempt: int
    failure: str
    delay_s: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetriesExhausted(Event):
    """A guarded operation was given up."""

    dependency: str
    operation: str
    target: str
    attempts: int
    failure: str
    reason: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecided(Event):
    """A joint operation's gate has a verdict that all ranks share."""

    op: str
    seq: int
    round_number: int
    verdict: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAwaited(Event):
    """This rank is waiting for others in a joint operation. Emitted again and again."""

    op: str
    seq: int
    elapsed_s: float
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictReached(Event):
    """A joint operation has ended with one verdict for all ranks."""

    op: str
    seq: int
    outcome: str
    first_rank: int | None
    detail: str
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksLost(Event):
    """Ranks were silent for too long, or did not come; the operation's verdict names them."""

    op: str
    seq: int
    ranks: tuple[int, ...]
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPaused(Event):
    """All ranks pause after the same step, for what is behind a breaker."""

    dependency: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResumed(Event):
    """The pause after that step is over."""

    dependency: str
    step: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLeft(Event):
    """A rank has left training with an exception; ``kind`` as in ``core.incident``."""

    first_rank: int
    kind: str
    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesEnded(Event):
    """Another rank has left, and this one's collectives were ended so that it does not wait."""

    connections: int
    nccl: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost(Event):
    """The shared store does not answer; this rank tries to reach it. Emitted again meanwhile."""

    op: str
    error: str
    lost_for_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReturned(Event):
    """The shared store answers again."""

    op: str
    lost_for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordVanished(Event):
    """A record that must exist is gone: the store came back empty. It is rebuilt, never guessed."""

    key: str
    epoch: int
