# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a simulated job goes through between its starts: how each ends, and what goes wrong beside.

Times are a tenth of what jobs really have, so that a run of ten virtual minutes sees a whole window
of restarts. What follows from them does not change: every bound is in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.restart_config import RestartConfig
from lightning_resilience.drill import scenario as given


if TYPE_CHECKING:
    from random import Random

    from lightning_resilience.drill.virtual import SeededDice


__all__ = ["Fate", "FateKind", "RestartPlan", "last_fault_s", "random_restarts"]

GRACE_S: Final = 15.0
KEEP_ALIVE_S: Final = 5.0
LAST_CALL_S: Final = 3.0
JOIN_S: Final = 90.0

_LARGE: Final = 0.04
_UNEQUAL_CLOCKS: Final = 1.2
_MANY: Final = 16
_LONG: Final = 0.2
_RARELY: Final = 0.04


class FateKind(str, Enum):
    """How a start of the workers ends."""

    DONE = "done"
    """They have trained to the end."""
    ERROR = "error"
    """A worker says with which exception it leaves."""
    SAME = "same"
    """The same, and it is the same exception at the same step each time."""
    PERMANENT = "permanent"
    """The same, with an exception that every attempt would end with."""
    KILLED = "killed"
    """A worker is gone by SIGKILL, and its agent sees that."""
    SILENT = "silent"
    """A worker ends with a status, and says nothing."""
    SIGNAL = "signal"
    """Workers were told to stop, and say so."""
    TOLD = "told"
    """The agent of a node was told to stop: it says so, ends its workers, and leaves."""
    CALM = "calm"
    """Nothing ends it but nodes that come or leave; in the end, training does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How one start of the workers ends.

    Args:
        kind: How.
        after_s: When, in seconds after it began.
        node: On which node, counted among those that have part in it.
        echo_s: Within how many seconds the workers of the others fail with it; 0 where they hang.
        saves: Whether a checkpoint was verified meanwhile.
    """

    kind: FateKind = FateKind.DONE
    after_s: float = 20.0
    node: int = 0
    echo_s: float = 0.0
    saves: bool = False


def _restart_config() -> RestartConfig:
    return RestartConfig(
        restart_window_s=360.0,
        restart_base_delay_s=1.0,
        restart_max_delay_s=12.0,
        gate_deadline_s=180.0,
        settle_s=0.5,
        linger_s=5.0,
    )


def _breaker_config() -> BreakerConfig:
    return BreakerConfig(max_open_for_s=20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    """One simulated job.

    Args:
        nodes: How many nodes it may have.
        least: How many it must have.
        fates: How its starts end, one after the other; those after them end well.
        arrivals: Which node's agent begins when, in seconds, where it has none then.
        torch_restarts: How often an agent restarts its workers itself, as ``--max-restarts``.
        launches: How often a scheduler starts all agents anew, with a store of their own.
        is_mirrored: Whether the record of restarts is kept on storage as well.
        is_mirror_ill: Whether that fails.
        restart: Quotas and delays.
        breaker: Options of the circuits.
        clocks: How clocks differ.
        store: The shared store.
        faults: What goes wrong.
        ill_after: Storage becomes ill, and is known to be, when so many agents have passed the gate
            after the first start; 0 for never.
        ill_s: For how long, in seconds.
        lags: Which node is how late in the rounds of the rendezvous that it has part in, in
            seconds, one after the other: it lives, and has not seen yet that the round is complete.
    """

    nodes: int = 2
    least: int = 1
    fates: tuple[Fate, ...] = ()
    arrivals: tuple[tuple[int, float], ...] = ((0, 0.0), (1, 0.0))
    torch_restarts: int = 100
    launches: int = 0
    is_mirrored: bool = False
    is_mirror_ill: bool = False
    restart: RestartConfig = field(default_factory=_restart_config)
    breaker: BreakerConfig = field(default_factory=_breaker_config)
    clocks: given.Clocks = field(default_factory=given.Clocks)
    store: given.Store = field(default_factory=given.Store)
    faults: tuple[given.Fault, ...] = ()
    ill_after: int = 0
    ill_s: float = 0.0
    lags: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        """Every field that is not as usual, in one line."""
        usual = RestartPlan()
        told = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{k}={v}" for k, v in told if v != getattr(usual, k)) or "as usual"


def last_fault_s(plan: RestartPlan) -> float:
    """Return when the last thing is over that a plan lets go wrong, in virtual seconds."""
    ends = (fault.at_s + float(getattr(fault, "for_s", 0.0)) for fault in plan.faults)
    return max([*ends, *(at_s for _, at_s in plan.arrivals)], default=0.0)


def random_restarts(dice: SeededDice) -> RestartPlan:
    """Draw a job.

    Args:
        dice: The dice.
    """
    chance = dice.random
    nodes = 2 + int(chance.random() ** 2 * 7)
    if chance.random() < _LARGE:
        nodes = chance.randint(_MANY, 64)
    least = chance.choice((1, nodes, max(1, nodes // 2), max(1, nodes - 1)))
    fates = tuple(_fate(chance, nodes) for _ in range(chance.randint(0, 7)))
    quotas = replace(
        _restart_config(),
        restart_quota=chance.choice((0, 1, 2, 3, 3, 3, 6)),
        killed_quota=chance.choice((0, 1, 2, 2)),
        membership_quota=chance.choice((1, 3, 10, 10)),
    )
    rate = chance.choice((1.0, 1.0, _UNEQUAL_CLOCKS))
    is_mirrored = chance.random() < 0.5  # noqa: PLR2004 - a coin
    plan = RestartPlan(
        nodes=nodes,
        least=least,
        fates=fates,
        arrivals=_arrivals(chance, nodes),
        torch_restarts=chance.choice((100, 100, 100, 3, 1, 0)),
        launches=chance.choice((0, 0, 1, 2, 4)),
        is_mirrored=is_mirrored,
        is_mirror_ill=chance.choice((False, False, False, is_mirrored)),
        restart=quotas,
        clocks=given.Clocks(rate=rate),
        store=_store(chance),
        faults=_faults(chance, nodes, within_s=_lasts_s(fates)),
        ill_after=chance.choice((0, 0, 0, chance.randint(1, 2 * nodes))),
        ill_s=chance.choice((30.0, 120.0, 250.0)),
    )
    if chance.random() < _LONG:
        plan = _outlasted(chance, plan)
    elif chance.random() < _LONG:
        plan = _late(chance, plan)
    elif chance.random() < _LONG:
        plan = replace(plan, fates=_stops(chance, nodes))
    # So many may never be in the rendezvous at the same time where messages are lost.
    return plan if nodes < _MANY else replace(plan, store=given.Store(), launches=plan.launches % 2)


def _outlasted(chance: Random, plan: RestartPlan) -> RestartPlan:
    """Let workers train through an outage that lasts longer than an agent waits at the gate."""
    outage = given.Outage(at_s=chance.uniform(5, 40), for_s=chance.uniform(150, 300))
    comes = (chance.randrange(plan.nodes), chance.uniform(20, 80))
    calm = Fate(kind=FateKind.CALM) if chance.random() < _LONG else Fate(after_s=400.0)
    return replace(
        plan,
        fates=(calm, Fate(after_s=400.0)),
        arrivals=(*plan.arrivals, comes),
        faults=(*plan.faults, outage),
    )


def _late(chance: Random, plan: RestartPlan) -> RestartPlan:
    """Let nodes be late in complete rounds, and maybe lose the store while they are."""
    lags = tuple(
        (
            chance.randrange(plan.nodes),
            chance.choice((GRACE_S, 2 * GRACE_S)) * chance.uniform(0.5, 2),
        )
        for _ in range(chance.randint(1, 3))
    )
    lost = given.StoreGone(at_s=chance.uniform(3, 20), for_s=1.0, comes_back_empty=True)
    return replace(plan, lags=lags, faults=(*plan.faults, *chance.choice(((), (), (lost,)))))


def _stops(chance: Random, nodes: int) -> tuple[Fate, ...]:
    """Let workers be told to stop at start after start, by who leaves their agents alone."""
    others = chance.choice(((), (), tuple(FateKind)))
    return tuple(
        Fate(
            kind=chance.choice((*others, *(FateKind.SIGNAL,) * len(FateKind))),
            after_s=chance.choice((0.0, 2.0)),
            node=chance.randrange(nodes),
            saves=chance.random() < _RARELY,
        )
        for _ in range(chance.randint(4, 12))
    )


def _fate(chance: Random, nodes: int) -> Fate:
    kinds = list(FateKind)[1:]
    return Fate(
        kind=chance.choice((*kinds, FateKind.ERROR, FateKind.ERROR, FateKind.KILLED)),
        after_s=chance.choice((0.0, 2.0, chance.uniform(0, 60))),
        node=chance.randrange(nodes),
        echo_s=chance.choice((0.0, 0.3, 10.0)),
        saves=chance.choice((True, False, False)),
    )


def _arrivals(chance: Random, nodes: int) -> tuple[tuple[int, float], ...]:
    first = [(node, chance.choice((0.0, chance.uniform(0, 5)))) for node in range(nodes)]
    # Who is still there then has not to come.
    again = [
        (chance.randrange(nodes), chance.uniform(0, 400)) for _ in range(chance.choice((0, 1, 4)))
    ]
    late = chance.choice((0.0, 0.0, chance.uniform(10, 200)))
    first[-1] = (nodes - 1, first[-1][1] + late)
    return (*first, *again)


def _store(chance: Random) -> given.Store:
    if chance.random() < 0.6:  # noqa: PLR2004 - more than half of the worlds lose nothing
        return given.Store()
    return given.Store(
        lost_requests=chance.choice((0.0, 0.01)),
        lost_answers=chance.choice((0.0, 0.01, 0.03)),
        late_requests=chance.choice((0.0, 0.01)),
    )


def _lasts_s(fates: tuple[Fate, ...]) -> float:
    """Return about how long a job lasts in which nothing else goes wrong, in seconds."""
    return 30.0 + sum(10.0 + fate.after_s for fate in fates)


def _faults(chance: Random, nodes: int, *, within_s: float) -> tuple[given.Fault, ...]:
    count = chance.choice((0, 0, 1, 1, 2, 3))
    return tuple(_fault(chance, nodes, within_s=within_s) for _ in range(count))


def _fault(chance: Random, nodes: int, *, within_s: float) -> given.Fault:
    at_s = chance.uniform(0, within_s)
    who = tuple(sorted(chance.sample(range(nodes), chance.randint(1, max(1, nodes // 2)))))
    effects = chance.choice((0, chance.randint(1, 60)))
    long_s = chance.choice((1.0, 8.0, chance.uniform(0, 100)))
    makers = (
        lambda: given.Outage(at_s=at_s, for_s=chance.uniform(5, 120)),
        lambda: given.Outage(at_s=at_s, for_s=chance.choice((10.0, 150.0, 400.0))),
        lambda: given.Crash(at_s=at_s, ranks=who, effects=effects),
        lambda: given.Crash(at_s=at_s, ranks=who[:1], effects=effects),
        lambda: given.Pause(at_s=at_s, ranks=who, effects=effects, for_s=long_s),
        lambda: given.StorePartition(at_s=at_s, hosts=who, for_s=long_s),
        lambda: given.StoreGone(
            at_s=at_s,
            for_s=min(long_s, 30.0),
            comes_back_empty=chance.random() < 0.7,  # noqa: PLR2004 - mostly
        ),
        lambda: given.GroupRestart(at_s=at_s),
    )
    return chance.choice(makers)()
