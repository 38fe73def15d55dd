# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I3: once the faults are over, the circuit closes and everybody comes to an end, within a bound.

The bounds follow from the configuration, and are known before a run begins. They are for a world
that is well: where storage fails a request all the same (it throttles), the circuit's bound begins
anew, and an operation has until its deadline.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.detour import ProbeShare, share_on_a_host
from lightning_resilience.core.events import HostIsolated, LocalModeEntered
from lightning_resilience.core.records import GateRecord
from lightning_resilience.core.waiting import chunk_s
from lightning_resilience.drill.facts import Check
from lightning_resilience.drill.scenario import Brownout


if TYPE_CHECKING:
    from lightning_resilience.core.events import Event
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.scenario import Scenario
    from lightning_resilience.drill.storage_model import Request


__all__ = ["Closes", "Ends", "closing_bound_s", "liveness_bound_s", "operation_bound_s"]

_LEASES: Final = 1.5
# A store that did not answer is asked again after so many seconds at most.
_LINK_CAP_S: Final = 30.0
# Answers that may be lost in one operation: with 10 % of them, more are one in a million.
_LOST: Final = 24
_LOST_CLAIMS: Final = 3


def _chunk_s(scenario: Scenario) -> float:
    return chunk_s(joint_timeout_s=scenario.workload.joint_timeout_s)


def _lossy_s(scenario: Scenario) -> float:
    store = scenario.store
    is_lossy = store.lost_requests or store.lost_answers or store.late_requests
    return _LOST * (store.timeout_s + 1.0) if is_lossy else 0.0


def closing_bound_s(scenario: Scenario) -> float:
    """Return within what time a circuit closes once its dependency is well and somebody calls.

    The sum of, each on the slowest clock:

    * the open wait, ``max_open_for_s``;
    * the wake: where both of the nearest waiters are dead, the others look at the end of a chunk,
      and again where a claim of theirs is lost;
    * ``1.5 · probe_lease_s · (dead probers + 1)``: one that had died, one that takes over; where
      answers are lost, claims whose owners do not know of them count as dead;
    * the probe, ``probe_timeout_s``;
    * the ramp: a success doubles the limit, and each takes a request and a look; its first slot may
      be held by somebody dead for one and a half of its leases; and whoever calls may be in a
      backoff, or have given the store up for a while.

    Args:
        scenario: The world.

    Returns:
        Seconds of the virtual clock.
    """
    breaker, retry, storage = scenario.breaker, scenario.retry, scenario.storage
    doublings = math.ceil(math.log2(breaker.max_concurrent / breaker.ramp_start)) + 1
    request_s = storage.service_s * (1 + storage.jitter) * (1 + scenario.ranks / storage.slots)
    dead = 1 + (_LOST_CLAIMS if _lossy_s(scenario) else 0)
    total_s = (
        breaker.max_open_for_s
        + dead * _chunk_s(scenario)
        + _LEASES * breaker.probe_lease_s * (dead + 1)
        + breaker.probe_timeout_s
        + doublings * (2 * request_s + 1)
        + _LEASES * scenario.admission.slot_lease_s
        + retry.max_delay_s
        + _LINK_CAP_S
        + 2 * scenario.store.timeout_s
    )
    return total_s * scenario.clocks.rate + _lossy_s(scenario)


def _share_isolated(scenario: Scenario) -> float:
    return share_on_a_host(hosts=scenario.hosts, processes=scenario.ranks)


def _least_share(scenario: Scenario) -> float:
    isolated = _share_isolated(scenario) if scenario.hosts > 1 else 1.0
    return min(isolated, 1 / scenario.ranks if scenario.may_go_alone else 1.0)


def operation_bound_s(scenario: Scenario, *, is_joint: bool, probe_share: float = 1.0) -> float:
    """Return within what time an operation ends that begins, or goes on, in a world that is well.

    No operation lasts longer than its deadline, one attempt more, and what follows it. It ends long
    before, where storage does not throttle, by the sum of:

    * twice the time in which the circuit closes: what failed just before may open it once more;
    * what is left of a backoff, and of the wait for the retry budget, in which all ranks may stand
      with one retry each;
    * the line before the slots, twice the time in which storage serves all ranks, and one and a
      half leases of a dead holder; what was sent while storage was slow is served first;
    * in a joint operation, the silence after which a rank is lost, and a look around;
    * where its process goes alone, the open waits in which it leaves the probe that is due to
      others: these may be gone, and their probes with them.

    Args:
        scenario: The world.
        is_joint: Whether it is a joint operation, in which ranks wait for each other.
        probe_share: The least share of the probes that its process has had in it, in (0, 1].

    Returns:
        Seconds of the virtual clock.
    """
    retry, budget, storage = scenario.retry, scenario.budget, scenario.storage
    rate = scenario.clocks.rate
    grace_s = (
        retry.stall_timeout_s
        + 2 * _chunk_s(scenario)
        + 2 * scenario.workload.joint_timeout_s * is_joint
        + 4 * scenario.store.timeout_s
    ) * rate + _lossy_s(scenario)
    latest_s = retry.deadline_s * rate + grace_s
    if storage.per_s:
        return latest_s
    served_s = (
        storage.service_s
        * (1 + storage.jitter)
        * math.ceil(scenario.ranks / min(storage.slots, scenario.breaker.max_concurrent))
    )
    slow_s = max(
        (
            2 * fault.for_s
            for fault in scenario.faults
            if isinstance(fault, Brownout) and fault.slowdown > 1
        ),
        default=0.0,
    )
    well_s = (
        retry.max_delay_s
        + budget.budget_window_s * 1.25 * math.ceil(scenario.ranks / budget.retry_floor)
        + 2 * served_s
        + 2 * _LEASES * scenario.admission.slot_lease_s
    ) * rate
    alone_s = (ProbeShare(probe_share).most - 1) * scenario.breaker.max_open_for_s * rate
    return min(latest_s, 2 * closing_bound_s(scenario) + well_s + slow_s + grace_s + alone_s)


def liveness_bound_s(scenario: Scenario) -> float:
    """Return within what time after the last fault everybody has ended.

    A job that was just restarted has all its rounds before it: the time between them, and for each
    operation the bound that :func:`operation_bound_s` states.

    Args:
        scenario: The world.

    Returns:
        Seconds of the virtual clock; ``ends_at_s`` where the scenario says so.
    """
    if scenario.ends_at_s is not None:
        return scenario.ends_at_s
    work = scenario.workload
    operations = work.rounds * len(work.kinds)
    schedule_s = work.rounds * work.every_s + operations * work.spread_s
    longest_s = operation_bound_s(
        scenario, is_joint=work.has_joint, probe_share=_least_share(scenario)
    )
    # One more for what comes before the first: the record is read, with the same patience.
    return schedule_s * scenario.clocks.rate + (operations + 1) * longest_s


class Closes(Check):
    """Looks whether the circuit closes while somebody calls and storage is well.

    Args:
        facts: What is true.
    """

    promise = "I3"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._bound_s = closing_bound_s(self.scenario)
        self._joint = facts.keys.store_id.removesuffix("store_id") + "i"
        self._under_way: dict[Operation, None] = {}
        self._since_s = 0.0

    def _restart(self, now_s: float) -> None:
        self._since_s = max(self.world.healed_at_s, now_s)

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Note that somebody calls."""
        if not operation.has_work:
            # It waits for another rank, and calls nobody.
            return
        if not self._under_way:
            self._restart(now_s)
        self._under_way[operation] = None

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Note that somebody does not any more."""
        self._under_way.pop(operation, None)
        self._look(now_s)

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note that somebody is no more."""
        del what
        if not process.is_alive and process.operation is not None:
            self._under_way.pop(process.operation, None)
        self._look(now_s)

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note when the circuit is left closed, and who calls no more."""
        del before
        if key == self.facts.breaker_key:
            if self.facts.is_closed:
                self._restart(now_s)
        elif key.startswith(self._joint):
            self._joined(process, key)

    def _joined(self, process: Process, key: str) -> None:
        # Whoever has reported waits for the others, and so do all where a gate refuses them.
        _, part, number, *_rest = key[len(self._joint) :].split("/")
        raw = self.values.get(key)
        if raw is None:
            return
        if part == "out" and process.operation is not None:
            self._under_way.pop(process.operation, None)
        elif part == "gate" and self.decoded(GateRecord, key, raw).verdict == "fail":
            start = process.incarnation
            for operation in [*self._under_way]:
                if (operation.process.incarnation, str(operation.number)) == (start, number):
                    del self._under_way[operation]

    def ended(self, now_s: float, request: Request) -> None:
        """Begin anew where storage is not well after all; whoever is served calls no more."""
        if request.failed is not None:
            self._restart(now_s)
        elif request.kind == "call":
            self._under_way.pop(request.operation, None)

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Look at the time."""
        del process, key
        if now_s - self._since_s > self._bound_s:
            self._look(now_s)

    # --- what is due ---------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        facts = self.facts
        if not self._under_way or facts.record is None or facts.is_closed:
            self._restart(now_s)
            return
        if now_s - self._since_s <= self._bound_s:
            return
        waiting = [op for op in self._under_way if not facts.is_alone(op.process, op)]
        if not waiting or facts.record.state == BreakerState.FORCED_OPEN.value:
            self._restart(now_s)
            return
        self.fail(
            f"the circuit is {facts.record.state} (epoch {facts.record.epoch}) "
            f"{now_s - self._since_s:.3f} s after storage is well, while {len(waiting)} operations "
            f"wait (the first of {waiting[0].process.name}); it closes within {self._bound_s:.3f} s"
        )


class Ends(Check):
    """Looks whether each operation ends.

    Args:
        facts: What is true.
        is_joint: Whether it looks at joint operations, or at all others.
    """

    promise = "I3"

    def __init__(self, facts: Facts, *, is_joint: bool) -> None:
        super().__init__(facts)
        self._is_joint = is_joint
        self._bound_s = operation_bound_s(self.scenario, is_joint=is_joint)
        self._shares: dict[Operation, float] = {}
        self._under_way: dict[Operation, None] = {}
        self._due_at_s = math.inf

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Note what has begun."""
        if operation.is_joint is not self._is_joint:
            return
        self._under_way[operation] = None
        self._due_at_s = min(self._due_at_s, self._due(operation))
        if now_s > self._due_at_s:
            self._look(now_s)

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look at those that have not ended."""
        if now_s > self._due_at_s:
            self._look(now_s)
        self._under_way.pop(operation, None)
        self._shares.pop(operation, None)

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Look at the time."""
        del process, key
        if now_s > self._due_at_s:
            self._look(now_s)

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Look at the time, and note who goes its own way."""
        if isinstance(event, HostIsolated):
            self._goes_alone(process.operation, _share_isolated(self.scenario))
        elif isinstance(event, LocalModeEntered):
            self._goes_alone(process.operation, event.share)
        if now_s > self._due_at_s:
            self._look(now_s)

    def _goes_alone(self, operation: Operation | None, share: float) -> None:
        if operation in self._under_way:
            self._shares[operation] = min(share, self._shares.get(operation, 1.0))

    def _due(self, operation: Operation) -> float:
        bound_s = self._bound_s
        if operation in self._shares:
            bound_s = operation_bound_s(
                self.scenario, is_joint=self._is_joint, probe_share=self._shares[operation]
            )
        return max(operation.began_at_s, self.world.healed_at_s) + bound_s

    def _look(self, now_s: float) -> None:
        for gone in [op for op in self._under_way if not op.process.is_alive]:
            del self._under_way[gone]
            self._shares.pop(gone, None)
        oldest = min(self._under_way, key=self._due, default=None)
        self._due_at_s = math.inf if oldest is None else self._due(oldest)
        if oldest is not None and now_s > self._due_at_s:
            self.fail(
                f"{oldest.process.name} is still in {oldest.kind} operation {oldest.number}, which "
                f"began at {oldest.began_at_s:.3f} s; the world is well since "
                f"{self.world.healed_at_s:.3f} s, and it ends within "
                f"{self._due_at_s - max(oldest.began_at_s, self.world.healed_at_s):.3f} s"
            )
