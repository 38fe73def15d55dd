# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Who takes part in what: the values that describe a joint operation.

``Member`` is this rank, ``Joint`` the operation (described alike on every rank), ``Part`` this
rank's work in it, and ``JointResult`` how it ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_resilience.core.store_loss import Refusals, Unsettled


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.keys import Keys
    from lightning_resilience.core.records import FinalRecord, OutcomeRecord
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.probe import Patience


__all__ = ["Arrival", "Joint", "JointResult", "Member", "Part"]


@dataclass(slots=True, kw_only=True)
class Member:
    """Who this rank is in joint operations. Not for two threads at once.

    Args:
        keys: Names of the keys of this run and incarnation.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Silence after which a rank is taken for lost, in seconds.
        beat_s: How often a working rank shows that it lives, in seconds.
        on_outage: ``wait`` or ``fail``, for operations that do not say otherwise.
        store_patience_s: How long the shared store may be away, in seconds; 0 gives up at once.
        defer_after_s: How long nobody must have listened at the store's address, in seconds, before
            an operation that may be is deferred; also how long ranks that show nothing are awaited
            in a store that has lost what it held. None where nothing is deferred.
        last_seq: Number of the operation that it has left with its verdict, 0 once it has enlisted.
            Where it is there, the store is the one that the verdict is from. None where the last
            operation was left otherwise. ``perform`` keeps that up to date, and what follows.
        refusals: Since when no server is there, as far as it knows.
        unsettled: Operations that have ended differently for different ranks, maybe.
    """

    keys: Keys
    rank: int
    world_size: int
    timeout_s: float
    beat_s: float
    on_outage: str
    store_patience_s: float
    defer_after_s: float | None = None
    last_seq: int | None = None
    refusals: Refusals = field(default_factory=Refusals)
    unsettled: Unsettled = field(default_factory=Unsettled)


@dataclass(slots=True, kw_only=True)
class Arrival:
    """How this rank came to one joint operation, and what it has learnt of it.

    Args:
        started_at_s: When it arrived, on its own clock.
        is_in_new_store: Whether the store has lost what this rank once wrote, or may have: then
            whoever has shown nothing in it may have gone on.
        has_called_roll: Whether all have said in the present store that they are in the operation.
        report: What this rank has reported, as one of several that work; None before.
    """

    started_at_s: float
    is_in_new_store: bool = False
    has_called_roll: bool = False
    report: OutcomeRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """One joint operation, described alike on every rank.

    Args:
        op: Its name.
        seq: Its number; lock-step gives all ranks the same.
        digest: Where in training it is, in words, and nothing that may differ between ranks in
            lock-step; a rank with another one is not.
        subject: What it is about, for errors.
        workers: Ranks that have work, in ascending order.
        circuit: The breaker of what it needs, or None.
        patience: How to wait for it.
        deadline_s: Longest time at the gate, in seconds.
        on_outage: What it does while that is ill: ``wait``, ``fail``, or ``proceed`` where there is
            another way; empty for what the member says.
        may_be_deferred: Whether it has another way where the shared store is gone.
    """

    op: str
    seq: int
    digest: str
    subject: str
    workers: tuple[int, ...]
    circuit: Circuit | None
    patience: Patience
    deadline_s: float
    on_outage: str = ""
    may_be_deferred: bool = False

    def silence_s(self, member: Member, arrival: Arrival) -> float:
        """Return after which silence a rank is not awaited any more, in seconds."""
        if self.may_be_deferred and member.defer_after_s is not None and arrival.is_in_new_store:
            return member.defer_after_s
        return member.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's work, if it has any.

    Args:
        run: Makes the protocol that does it, from the time when this rank arrived on its own clock,
            so that waiting at the gate and the work have one deadline.
        detail: Makes of its result what the other ranks are told.
        outcome: Makes an outcome record of the exception that it ended with.
        instead: Makes the protocol that does without the shared store what is done instead where
            the operation is deferred, given why; None where there is nothing to do.
    """

    run: Callable[[float], Protocol[Any]]
    detail: Callable[[Any], str]
    outcome: Callable[[BaseException], OutcomeRecord]
    instead: Callable[[str], Protocol[Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JointResult:
    """How a joint operation ended.

    Args:
        final: The verdict, the same on every rank.
        value: What this rank's own work returned, or None.
        error: What this rank's own work raised, or None.
    """

    final: FinalRecord
    value: Any = None
    error: BaseException | None = None
