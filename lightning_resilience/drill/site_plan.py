# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What several simulated jobs go through that share a storage and a site's store.

Each job is on a host of its own, and its processes make guarded calls now and then. What goes wrong
concerns all of them (storage), one of them (its host's way to storage), or the site's store.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.drill import scenario as given


if TYPE_CHECKING:
    from random import Random

    from lightning_resilience.drill.virtual import SeededDice


__all__ = ["SitePlan", "last_fault_s", "random_site"]


_DEAD_VOTER: Final = 0.1
_OLD_NEWS: Final = 0.05
_OFTEN: Final = 5
_OFTEN_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """Several simulated jobs.

    Args:
        jobs: How many there are; job j is on host j.
        processes: How many processes each has; the first looks at the site for all.
        calls: How many calls each of them makes.
        every_s: Time between two calls of one process, in seconds, about.
        seldom: How much longer that is for a process that looks at the site, which makes as many
            calls fewer.
        starts_s: When each job starts, in seconds.
        breaker: Options of the circuits.
        clocks: How clocks differ.
        site: The site's store; ``timeout_s`` is how long a process waits for it.
        gone: When the site's store is away: from, for how long (in seconds), and whether it comes
            back empty.
        when_open: Whether a call waits where a circuit is open, or is refused.
        grows: Whether nodes wait to be let into each job: then its agent looks now and then.
        faults: What else goes wrong; ranks of a crash or a pause count through all jobs.
    """

    jobs: int = 2
    processes: int = 1
    calls: int = 4
    every_s: float = 10.0
    seldom: int = 1
    starts_s: tuple[float, ...] = (0.0, 0.0)
    breaker: BreakerConfig = field(default_factory=lambda: BreakerConfig(window_s=300.0))
    clocks: given.Clocks = field(default_factory=given.Clocks)
    site: given.Store = field(default_factory=lambda: given.Store(timeout_s=0.5))
    gone: tuple[tuple[float, float, bool], ...] = ()
    when_open: str = "wait"
    grows: bool = False
    faults: tuple[given.Fault, ...] = ()

    def __str__(self) -> str:
        """Every field that is not as usual, in one line."""
        usual = SitePlan()
        told = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{k}={v}" for k, v in told if v != getattr(usual, k)) or "as usual"


def last_fault_s(plan: SitePlan) -> float:
    """Return when the last thing is over that a plan lets go wrong, in virtual seconds."""
    ends = [fault.at_s + float(getattr(fault, "for_s", 0.0)) for fault in plan.faults]
    away = [at_s + for_s for at_s, for_s, _ in plan.gone]
    return max([*ends, *away, *plan.starts_s])


def random_site(dice: SeededDice) -> SitePlan:
    """Draw several jobs.

    Args:
        dice: The dice.
    """
    chance = dice.random
    jobs, processes = chance.choice((2, 2, 3, 3, 4)), chance.choice((1, 1, 2, 3))
    starts_s = tuple(chance.choice((0.0, chance.uniform(0, 60))) for _ in range(jobs))
    quorum = chance.choice((2, 2, 2, 3, 1))
    rare = chance.random()
    if rare < _OLD_NEWS:
        return _old_news(chance)
    if rare < _OLD_NEWS + _DEAD_VOTER:
        return _dead_voter(chance)
    every_s = chance.choice((1.0, _OFTEN_S, 40.0, 200.0))
    return SitePlan(
        jobs=jobs,
        processes=processes,
        calls=chance.randint(2, 8) * (_OFTEN if every_s == 1 else 1),
        every_s=every_s,
        seldom=chance.choice((1, 1, 8)) if every_s == _OFTEN_S else 1,
        starts_s=starts_s,
        breaker=BreakerConfig(window_s=300.0, site_quorum=quorum),
        clocks=given.Clocks(rate=chance.choice((1.0, 1.0, 1.2))),
        site=_store(chance),
        gone=_gone(chance),
        when_open=chance.choice(("wait", "wait", "raise")),
        grows=chance.choice((False, True)),
        faults=_faults(chance, jobs=jobs, ranks=jobs * processes),
    )


def _dead_voter(chance: Random) -> SitePlan:
    """Draw two jobs, of which one dies with a vote, long before the other is ill by itself."""
    late_s = chance.uniform(600, 2000)
    return SitePlan(
        every_s=2.0,
        starts_s=(0.0, late_s),
        faults=(
            given.StoragePartition(at_s=0.0, hosts=(0,), for_s=500.0),
            given.Crash(at_s=chance.uniform(100, 400), ranks=(0,)),
            given.StoragePartition(at_s=late_s, hosts=(1,), for_s=chance.uniform(150, 400)),
        ),
    )


def _old_news(chance: Random) -> SitePlan:
    """Draw a job that has stood still since the site's circuit was open, and a site that forgot.

    The last of the jobs begins when nothing is left of that, and the one before it when storage is
    ill already.
    """
    forgot_s = chance.uniform(450, 700)
    return SitePlan(
        jobs=4,
        processes=2,
        calls=3,
        starts_s=(0.0, 0.0, 25.0, forgot_s + 5.0),
        gone=((forgot_s, 2.0, True),),
        faults=(
            given.Outage(at_s=0.0, for_s=90.0),
            given.Pause(at_s=chance.uniform(40, 90), ranks=(4,), for_s=forgot_s + 20.0),
        ),
    )


def _store(chance: Random) -> given.Store:
    # There and back, it takes up to 0.45 s of the half second that there is.
    latency_s = chance.choice((given.Store().latency_s, chance.uniform(0.05, 0.225)))
    if chance.random() < 0.7:  # noqa: PLR2004 - most sites lose nothing
        return given.Store(timeout_s=0.5, latency_s=latency_s)
    return given.Store(
        timeout_s=0.5,
        latency_s=latency_s,
        lost_requests=chance.choice((0.0, 0.05)),
        lost_answers=chance.choice((0.0, 0.05, 0.2)),
        late_requests=chance.choice((0.0, 0.02)),
    )


def _gone(chance: Random) -> tuple[tuple[float, float, bool], ...]:
    if chance.random() < 0.6:  # noqa: PLR2004 - as above
        return ()
    at_s = chance.choice((0.0, chance.uniform(0, 200)))
    return ((at_s, chance.choice((2.0, 60.0, 5000.0)), chance.choice((True, True, False))),)


def _faults(chance: Random, *, jobs: int, ranks: int) -> tuple[given.Fault, ...]:
    count = chance.choice((0, 1, 1, 2, 3))
    return tuple(_fault(chance, jobs=jobs, ranks=ranks) for _ in range(count))


def _fault(chance: Random, *, jobs: int, ranks: int) -> given.Fault:
    at_s = chance.choice((0.0, chance.uniform(0, 150)))
    for_s = chance.choice((20.0, 120.0, chance.uniform(0, 500)))
    effects = chance.choice((0, chance.randint(1, 80)))
    who = (chance.randrange(ranks),)
    makers = (
        lambda: given.Outage(at_s=at_s, for_s=for_s, error=chance.choice(("reset", "hang"))),
        lambda: given.Outage(at_s=at_s, for_s=for_s),
        lambda: given.StoragePartition(at_s=at_s, hosts=(chance.randrange(jobs),), for_s=for_s),
        lambda: given.Crash(at_s=at_s, ranks=who, effects=effects),
        lambda: given.Pause(
            at_s=at_s, ranks=who, effects=effects, for_s=chance.choice((3.0, 12.0, 70.0))
        ),
    )
    return chance.choice(makers)()
