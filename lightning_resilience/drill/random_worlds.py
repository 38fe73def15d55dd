# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A world for every seed: how large it is, what it does, and what goes wrong, several at once.

Drawn so that a run is short and yet goes wrong where it matters. Open waits and leases are seconds,
and their relations are those that a job is held to. Most worlds are small; one in twenty has
more than 48 ranks. Faults begin around the start of a round or of another fault, and all end within
five minutes. Processes that die without a restart to come are less than all of them, so that
somebody is left who can be asked whether the promises hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast, get_args

from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.drill.random_joints import seconds as _seconds, with_joint_work
from lightning_resilience.drill.scenario import (
    Brownout,
    BrownoutFailure,
    Clocks,
    Crash,
    Fault,
    GroupRestart,
    Interrupt,
    Kind,
    Outage,
    OutageFailure,
    Pause,
    Scenario,
    Storage,
    StoragePartition,
    Store,
    StoreGone,
    StorePartition,
    Workload,
)
from lightning_resilience.drill.virtual import SeededDice


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random


__all__ = ["random_scenario"]

_T = TypeVar("_T")

# Smallest and largest number of ranks, and how often of twenty times: 12.8 on average.
_SIZES: Final = (
    ((1, 1), 2),
    ((2, 4), 6),
    ((5, 12), 6),
    ((13, 24), 3),
    ((25, 48), 2),
    ((49, 64), 1),
)
_MOST_HOSTS: Final = 8
_KINDS: Final[tuple[Kind, ...]] = ("single", "collective", "joint")
# How many faults, and how often of twenty times. A crash may bring a restart with it.
_COUNTS: Final = ((0, 1), (1, 4), (2, 5), (3, 5), (4, 3), (5, 2))
# Two hosts then differ by 1.44 at most; leases allow for 1.5.
_LARGEST_RATE: Final = 1.2
# What follows from a process group's timeout of half an hour.
_JOINT_TIMEOUT_S: Final = 1440.0
# How long after an outage faults may still strike, in seconds: an open wait, a probe, a ramp.
_AFTERMATH_S: Final = 12.0
# Shortest and longest fault, in seconds, and how often of ten times.
_SPANS_S: Final = (((0.1, 3.0), 4), ((3.0, 20.0), 4), ((20.0, 60.0), 2))


def random_scenario(seed: int) -> Scenario:
    """Return the world of a seed, the same in every process.

    Args:
        seed: Any whole number.

    Returns:
        A scenario of 1 to 64 ranks on 1 to 8 hosts, whose options keep all relations and whose
        faults end within 300 s.
    """
    chance = SeededDice(seed, "scenario").random
    ranks = chance.randint(*_weighted(chance, _SIZES))
    hosts = chance.randint(1, min(_MOST_HOSTS, ranks))
    workload = _workload(chance)
    breaker = _breaker(chance)
    retry = _retry(chance, breaker)
    scenario = Scenario(
        name=f"random world {seed}",
        ranks=ranks,
        hosts=hosts,
        clocks=_clocks(chance),
        workload=workload,
        store=_store(chance),
        storage=_storage(chance, breaker, ranks=ranks),
        breaker=breaker,
        retry=retry,
        budget=_budget(chance, breaker),
        admission=_admission(chance),
        may_go_alone=chance.choice((False, True)),
        faults=_faults(chance, ranks=ranks, hosts=hosts, workload=workload),
    )
    # Drawn last, so that the worlds without one are what they were before there were any.
    return with_joint_work(chance, scenario)


def _weighted(chance: Random, choices: Sequence[tuple[_T, int]]) -> _T:
    values, weights = zip(*choices, strict=True)
    return cast("_T", chance.choices(values, weights)[0])


def _clocks(chance: Random) -> Clocks:
    return Clocks(
        offset_s=chance.choice((0.0, 1000.0, 1e6)),
        rate=chance.choice((1.0, round(chance.uniform(1, _LARGEST_RATE), 3), _LARGEST_RATE)),
    )


def _workload(chance: Random) -> Workload:
    kinds = [chance.choice(_KINDS) for _ in range(chance.randint(1, 3))]
    return Workload(
        kinds=tuple(kinds),
        rounds=chance.randint(1, 4),
        every_s=_seconds(chance, 5, 20),
        spread_s=chance.choice((0.0, 0.05, _seconds(chance, 0, 3))),
        on_outage=chance.choice(("wait", "wait", "fail")),
        when_open=chance.choice(("wait", "wait", "raise")),
        joint_timeout_s=chance.choice((_JOINT_TIMEOUT_S, _seconds(chance, 20, 120))),
    )


def _store(chance: Random) -> Store:
    # Half of the stores lose nothing: there, nothing that goes wrong may be put down to a loss.
    loses = chance.choice((False, True))

    def share() -> float:
        return chance.choice((0.0, round(chance.uniform(0.001, 0.05), 4))) if loses else 0.0

    timeout_s = _seconds(chance, 1, 5)
    return Store(
        latency_s=round(chance.uniform(0.0002, 0.005), 5),
        service_s=round(chance.uniform(0.00002, 0.0005), 6),
        timeout_s=timeout_s,
        lost_requests=share(),
        lost_answers=share(),
        late_requests=share(),
        late_s=round(timeout_s * chance.uniform(0.1, 3), 3),
    )


def _storage(chance: Random, breaker: BreakerConfig, *, ranks: int) -> Storage:
    throttles = chance.choice((True, False, False, False))
    slots = breaker.max_concurrent + chance.choice((0, chance.randint(1, 16)))
    service_s = _seconds(chance, 0.01, 0.5)
    jitter = chance.choice((0.0, round(chance.uniform(0, 0.9), 2)))
    # A probe that waits behind one other is answered in time, also by the fastest clock: a storage
    # whose every answer is too late for the probe is never well.
    longest_s = breaker.probe_timeout_s / (2 * _LARGEST_RATE * (1 + jitter))
    return Storage(
        slots=slots,
        service_s=round(min(service_s, longest_s), 3),
        jitter=jitter,
        failing_s=_seconds(chance, 0.01, 1),
        # One call of every rank within a second is let through, their retries may not be.
        per_s=round(max(ranks, 4) * chance.uniform(1, 4), 1) if throttles else 0.0,
    )


def _breaker(chance: Random) -> BreakerConfig:
    # A tenth of a second between any two that are related, so that rounding breaks no relation.
    probe_timeout_s = _seconds(chance, 0.5, 2)
    probe_lease_s = round(1.5 * (probe_timeout_s + 0.5) + 1 + chance.uniform(0.1, 1), 3)
    open_for_s = round(probe_lease_s + chance.uniform(0.1, 3), 3)
    max_concurrent = chance.choice((1, 2, 4, 16, chance.randint(1, 16)))
    return BreakerConfig(
        trip_failures=chance.randint(1, 4),
        window_s=_seconds(chance, 60, 120),
        quorum_fraction=chance.choice((0.25, 0.5, 1.0)),
        view_max_age_s=round(open_for_s * chance.uniform(0.1, 0.9), 3),
        open_for_s=open_for_s,
        max_open_for_s=round(open_for_s * chance.uniform(1, 3) + 0.1, 3),
        probe_timeout_s=probe_timeout_s,
        probe_lease_s=probe_lease_s,
        reopen_failures=chance.randint(1, 3),
        max_concurrent=max_concurrent,
        ramp_start=chance.choice((1, chance.randint(1, max_concurrent))),
    )


def _retry(chance: Random, breaker: BreakerConfig) -> RetryPolicy:
    # Three attempts that hang until they are abandoned, and the waits between them, are 54 s at
    # most: less than the breaker's shortest window.
    max_attempts = breaker.trip_failures + chance.randint(1, 4)
    max_delay_s = _seconds(chance, 2, 8)
    return RetryPolicy(
        base_delay_s=_seconds(chance, 0.1, 1),
        max_delay_s=max_delay_s,
        max_attempts=max_attempts,
        deadline_s=chance.choice((1800.0, 1800.0, _seconds(chance, 20, 120))),
        stall_timeout_s=_seconds(chance, 2, 10),
        throttle_base_delay_s=_seconds(chance, 0.2, 2),
        retry_after_max_s=_seconds(chance, 0, 20),
        unknown_max_attempts=chance.randint(1, max_attempts),
    )


def _budget(chance: Random, breaker: BreakerConfig) -> BudgetConfig:
    # As much as eight hosts need to vote, and no more in a third of the worlds.
    needed = max(1, 8 * (breaker.trip_failures - 1))
    return BudgetConfig(
        retry_ratio=chance.choice((0.0, 0.1, 0.5)),
        retry_floor=needed + chance.choice((0, chance.randint(1, 20), 20)),
        budget_window_s=_seconds(chance, 10, 60),
    )


def _admission(chance: Random) -> AdmissionConfig:
    beat_every_s = _seconds(chance, 0.5, 2)
    return AdmissionConfig(
        slot_lease_s=round(3 * beat_every_s + chance.uniform(0.5, 4), 3),
        beat_every_s=beat_every_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What faults are drawn for.

    Args:
        chance: The dice.
        ranks: Ranks of the world.
        hosts: Its hosts.
        mortal: Ranks that may die without a restart to come; never all.
    """

    chance: Random
    ranks: int
    hosts: int
    mortal: tuple[int, ...]

    def for_s(self) -> float:
        return _seconds(self.chance, *_weighted(self.chance, _SPANS_S))

    def effects(self) -> int:
        return self.chance.choice((0, self.chance.randint(1, 5), self.chance.randint(6, 40)))

    def some(self, numbers: Sequence[int]) -> tuple[int, ...]:
        most = self.chance.choice((1, len(numbers)))
        return tuple(sorted(self.chance.sample(numbers, self.chance.randint(1, most))))


def _faults(chance: Random, *, ranks: int, hosts: int, workload: Workload) -> tuple[Fault, ...]:
    mortal = tuple(sorted(chance.sample(range(ranks), ranks // 2)))
    setting = _Setting(chance=chance, ranks=ranks, hosts=hosts, mortal=mortal)
    count = _weighted(chance, _COUNTS)
    faults: list[Fault] = []
    at_s = last_s = 0.0
    if count > 1 and chance.choice((False, True)):
        # What is worst comes together: while the circuit is open, or is just being closed.
        start_s = chance.randrange(workload.rounds) * workload.every_s
        at_s = round(max(0.0, start_s + chance.uniform(-1, 0.5)), 3)
        outage = _long_outage(setting, at_s)
        faults.append(outage)
        last_s = outage.for_s + _AFTERMATH_S
        count -= 1
    for number in range(count):
        if last_s:
            fault_at_s = round(at_s + chance.uniform(0, last_s), 3)
        elif number == 0 or chance.choice((False, True)):
            start_s = chance.randrange(workload.rounds) * workload.every_s
            fault_at_s = at_s = round(
                max(0.0, start_s + chance.uniform(-1, workload.every_s / 2)), 3
            )
        else:
            fault_at_s = at_s = round(at_s + chance.uniform(0, 5), 3)
        faults += _weighted(chance, _MAKERS)(setting, fault_at_s)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _long_outage(setting: _Setting, at_s: float) -> Outage:
    # Long enough for a probe that fails, short enough for one that does not.
    error = setting.chance.choice(get_args(OutageFailure))
    return Outage(at_s=at_s, for_s=_seconds(setting.chance, 3, 40), error=error)


def _outage(setting: _Setting, at_s: float) -> list[Fault]:
    error = setting.chance.choice(get_args(OutageFailure))
    return [Outage(at_s=at_s, for_s=setting.for_s(), error=error)]


def _brownout(setting: _Setting, at_s: float) -> list[Fault]:
    chance = setting.chance
    return [
        Brownout(
            at_s=at_s,
            for_s=setting.for_s(),
            share=chance.choice((1.0, round(chance.uniform(0.05, 0.9), 2))),
            slowdown=chance.choice((1.0, round(chance.uniform(1, 20), 1))),
            error=chance.choice(get_args(BrownoutFailure)),
        )
    ]


def _restart_after(setting: _Setting, at_s: float) -> GroupRestart:
    return GroupRestart(at_s=round(at_s + setting.chance.uniform(0.5, 20), 3))


def _crash(setting: _Setting, at_s: float) -> list[Fault]:
    for_good = setting.chance.choice((False, True))
    if for_good and setting.mortal:
        ranks = setting.some(setting.mortal)
        return [Crash(at_s=at_s, ranks=ranks, effects=setting.effects())]
    # Who performs effects for longer than that would die after the restart, for good.
    ranks = setting.some(range(setting.ranks))
    return [Crash(at_s=at_s, ranks=ranks), _restart_after(setting, at_s)]


def _interrupt(setting: _Setting, at_s: float) -> list[Fault]:
    if setting.mortal:
        ranks = setting.some(setting.mortal)
        return [Interrupt(at_s=at_s, ranks=ranks, effects=setting.effects())]
    return [Interrupt(at_s=at_s, ranks=(0,)), _restart_after(setting, at_s)]


def _pause(setting: _Setting, at_s: float) -> list[Fault]:
    ranks = setting.some(range(setting.ranks))
    return [Pause(at_s=at_s, ranks=ranks, effects=setting.effects(), for_s=setting.for_s())]


def _store_partition(setting: _Setting, at_s: float) -> list[Fault]:
    hosts = setting.some(range(setting.hosts))
    return [StorePartition(at_s=at_s, for_s=setting.for_s(), hosts=hosts)]


def _storage_partition(setting: _Setting, at_s: float) -> list[Fault]:
    hosts = setting.some(range(setting.hosts))
    return [StoragePartition(at_s=at_s, for_s=setting.for_s(), hosts=hosts)]


def _store_gone(setting: _Setting, at_s: float) -> list[Fault]:
    empty = setting.chance.choice((False, True))
    return [StoreGone(at_s=at_s, for_s=setting.for_s(), comes_back_empty=empty)]


def _group_restart(setting: _Setting, at_s: float) -> list[Fault]:
    del setting
    return [GroupRestart(at_s=at_s)]


_MAKERS: Final[tuple[tuple[Callable[[_Setting, float], list[Fault]], int], ...]] = (
    (_outage, 5),
    (_brownout, 3),
    (_crash, 3),
    (_pause, 3),
    (_interrupt, 2),
    (_store_partition, 2),
    (_storage_partition, 2),
    (_store_gone, 2),
    (_group_restart, 1),
)
