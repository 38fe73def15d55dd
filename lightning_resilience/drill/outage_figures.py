# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an outage costs a job of any size: the figures that the design bounds, and the bounds.

Every rank makes one call that all make at the same time, the dependency is down from the beginning,
and heals. What counts is what the store is asked, what reaches storage, and when the last rank is
served. Nobody can be served sooner than by

::

    lag + S · ⌈log2 L⌉ + N / C

where *lag* is the time from healing until the first probe after it, *S* how long a call takes, *L*
how many are let in at once (the ramp doubles up to it), *N* the number of ranks and *C* the calls
per second that *L* callers make.

Where answers of the store are lost, that is no longer in anybody's power: a slot whose claim was
executed and not answered stays taken, and idle, until its holder has waited for the store's whole
timeout. A share *p* of lost answers makes of *S* in *N / C* an *S + p · timeout*, and the last rank
waits for one such answer as a rule. That time is told as well; the bound is on the other one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.checks import all_checks, liveness_bound_s
from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.scenario import Outage, Scenario, Store
from lightning_resilience.drill.world import World


if TYPE_CHECKING:
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["OutageFigures", "limits", "outage_scenario", "run_outage"]

_RANKS_PER_HOST: Final = 8
_MOST_MEAN: Final = 12.0
_MOST_P99: Final = 40.0
_MOST_OF_IDEAL: Final = 1.25
_P99: Final = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageFigures:
    """What came of one outage.

    Args:
        operations: Store operations of each rank, the fewest first.
        unserved: Ranks that have not been served: they have failed, or not ended.
        lag_s: From healing until the first probe after it, in seconds.
        served_s: From healing until the last call has ended, in seconds.
        ideal_s: The soonest that could have been, in seconds.
        lossy_s: The same, with the time that lost answers take from slots, in seconds.
        most_in_flight: Calls that were at storage at once, at most.
        permits: How many may be.
        calls_in_outage: Calls that reached storage while it was down; probes are none.
        probes: Probes that reached storage, in all.
        entries: Entries of the agenda that have happened.
    """

    operations: tuple[int, ...]
    unserved: int
    lag_s: float
    served_s: float
    ideal_s: float
    lossy_s: float
    most_in_flight: int
    permits: int
    calls_in_outage: int
    probes: int
    entries: int

    @property
    def mean_operations(self) -> float:
        """Store operations per rank."""
        return sum(self.operations) / len(self.operations)

    @property
    def p99_operations(self) -> int:
        """Store operations that 99 % of the ranks do not exceed."""
        return self.operations[math.ceil(_P99 * len(self.operations)) - 1]

    @property
    def of_ideal(self) -> float:
        """When the last was served, as a multiple of the soonest that could have been."""
        return self.served_s / self.ideal_s

    @property
    def of_lossy(self) -> float:
        """The same, as a multiple of the time that lost answers leave."""
        return self.served_s / self.lossy_s

    @property
    def of_permits(self) -> float:
        """Most calls at storage at once, as a share of those that may be."""
        return self.most_in_flight / self.permits


def limits(figures: OutageFigures) -> list[tuple[str, float, float]]:
    """Return each figure that is bounded: what it is, its value, and the largest that it may be."""
    return [
        ("store operations per rank, mean", figures.mean_operations, _MOST_MEAN),
        ("store operations per rank, p99", figures.p99_operations, _MOST_P99),
        ("served ÷ soonest", figures.of_ideal, _MOST_OF_IDEAL),
        ("in flight ÷ permits", figures.of_permits, 1.0),
        ("ranks that are not served", figures.unserved, 0.0),
    ]


def outage_scenario(
    ranks: int, *, for_s: float = 150.0, lost_answers: float = 0.0, timeout_s: float = 5.0
) -> Scenario:
    """Return a job of a given size in an outage that begins with it.

    Args:
        ranks: How many, ≥ 1; eight share a host.
        for_s: How long the outage lasts, in seconds.
        lost_answers: Share of the store's answers that are lost, in [0, 1].
        timeout_s: How long a rank waits for an answer of the store, in seconds.
    """
    return Scenario(
        name=f"an outage of {for_s:g} s for {ranks} ranks",
        ranks=ranks,
        hosts=math.ceil(ranks / _RANKS_PER_HOST),
        store=Store(lost_answers=lost_answers, timeout_s=timeout_s),
        faults=(Outage(at_s=0.0, for_s=for_s),),
    )


class _Watch(Observer):
    """Counts what reaches storage.

    Args:
        healed_at_s: When it is well again, on the virtual clock.
    """

    def __init__(self, healed_at_s: float) -> None:
        self.in_flight = 0
        self.most_in_flight = 0
        self.calls_in_outage = 0
        self.probes = 0
        self.probed_at_s: float | None = None
        self.served_at_s = 0.0
        self._healed_at_s = healed_at_s

    def began(self, now_s: float, request: Request) -> None:
        """Count a call, or a probe."""
        is_over = now_s >= self._healed_at_s
        if request.kind == "probe":
            self.probes += 1
            if is_over and self.probed_at_s is None:
                self.probed_at_s = now_s
            return
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.calls_in_outage += not is_over

    def ended(self, now_s: float, request: Request) -> None:
        """Note when the last call has ended."""
        if request.kind != "probe":
            self.in_flight -= 1
            self.served_at_s = now_s


def run_outage(scenario: Scenario, seed: int, *, with_checks: bool = True) -> OutageFigures:
    """Let a job go through its outage.

    Args:
        scenario: From :func:`outage_scenario`.
        seed: Decides what that leaves open.
        with_checks: Whether every promise is checked after every event.

    Raises:
        DrillFailedError: A promise was not kept.
    """
    healed_at_s = max(fault.at_s + getattr(fault, "for_s", 0.0) for fault in scenario.faults)
    watch = _Watch(healed_at_s)
    world = World(
        scenario,
        seed,
        make_observers=lambda world: [*(all_checks(world) if with_checks else ()), watch],
    )
    world.run(until_s=healed_at_s + liveness_bound_s(scenario))
    probed_at_s = healed_at_s if watch.probed_at_s is None else watch.probed_at_s
    lag_s = probed_at_s - healed_at_s
    return OutageFigures(
        operations=tuple(sorted(process.store_operations for process in world.processes)),
        unserved=sum(not _is_served(process) for process in world.processes),
        lag_s=lag_s,
        served_s=watch.served_at_s - healed_at_s,
        ideal_s=_served_by_s(scenario, lag_s=lag_s, idle_s=0.0),
        lossy_s=_served_by_s(scenario, lag_s=lag_s, idle_s=scenario.store.timeout_s),
        most_in_flight=watch.most_in_flight,
        permits=scenario.breaker.max_concurrent,
        calls_in_outage=watch.calls_in_outage,
        probes=watch.probes,
        entries=world.agenda.happened,
    )


def _served_by_s(scenario: Scenario, *, lag_s: float, idle_s: float) -> float:
    """Return within what time all can be served, where a lost answer costs a slot ``idle_s``."""
    permits, service_s = scenario.breaker.max_concurrent, scenario.storage.service_s
    lost = scenario.store.lost_answers
    last_s = idle_s if lost else 0.0
    ramp_s = service_s * math.ceil(math.log2(permits))
    return lag_s + ramp_s + scenario.ranks * (service_s + lost * idle_s) / permits + last_s


def _is_served(process: Process) -> bool:
    return (
        process.state == "ended" and process.operation is not None and not process.operation.error
    )
