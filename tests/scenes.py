# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The cast of protocol tests: a dependency that can be ill, and ranks that need it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_resilience.core.breaker import BreakerConfig, BreakerState
from lightning_resilience.core.breaker_record import LEGAL
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import BreakerRecord, OutcomeRecord, Transition, decode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.protocols.circuit import Circuit, begin
from lightning_resilience.protocols.guard import Guarded, GuardedCall, guard
from lightning_resilience.protocols.joint import Joint, Member, Part
from lightning_resilience.protocols.probe import Patience
from tests.scripted_driver import Token


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol
    from tests.scripted_driver import World


KEYS = Keys(run_id="run", incarnation="1")
DEPENDENCY = "s3://bucket:write"
CONFIG = BreakerConfig()
POLICY = RetryPolicy()


@dataclass
class Dependency:
    """Storage that is ill at times, and counts who comes.

    Args:
        world: Whose clock counts.
        heals_at_s: It is ill before this instant, and well from then on.
        lasts_s: How long a call takes.
        error: What a call raises while it is ill.
    """

    world: World
    heals_at_s: float = 0.0
    lasts_s: float = 0.01
    error: Callable[[], BaseException] = lambda: ConnectionResetError("reset by peer")
    calls: list[float] = field(default_factory=list)
    probes: list[tuple[float, float]] = field(default_factory=list)

    def call(self, token: CancelToken) -> str:
        """Do what a save does."""
        self.calls.append(self.world.now_s)
        return self._answer(token)

    def probe(self, token: CancelToken) -> str:
        """Do what a probe does."""
        self.probes.append((self.world.now_s, self.world.now_s + self.lasts_s))
        return self._answer(token)

    def most_probes_at_once(self) -> int:
        """Largest number of probes under way at one instant."""
        return max(
            (sum(start <= at < end for start, end in self.probes) for at, _ in self.probes),
            default=0,
        )

    def most_calls_at_once(self) -> int:
        """Largest number of calls in flight at one instant."""
        ends = [(at + self.lasts_s, -1) for at in self.calls]
        under_way = most = 0
        # At one instant those that end go first.
        for _, change in sorted([*((at, 1) for at in self.calls), *ends]):
            under_way += change
            most = max(most, under_way)
        return most

    def _answer(self, token: CancelToken) -> str:
        assert isinstance(token, Token)
        token.spend(self.lasts_s)
        if self.world.now_s < self.heals_at_s:
            raise self.error()
        return "done"


def circuit(
    host: str = "host", *, hosts: int = 1, keys: Keys = KEYS, config: BreakerConfig = CONFIG
) -> Circuit:
    """One process's memory of the breaker."""
    return Circuit(DEPENDENCY, config=config, keys=keys, host=host, hosts=hosts)


def patience(dependency: Dependency, **options: Any) -> Patience:
    """How a rank waits for the dependency."""
    return Patience(probe=dependency.probe, classify=classify, **options)


def guarded(
    mine: Circuit,
    dependency: Dependency,
    *,
    policy: RetryPolicy = POLICY,
    waiting: Patience | None = None,
    **options: Any,
) -> Protocol[Guarded]:
    """Begin, then one guarded call of the dependency."""
    call = GuardedCall(
        **{
            "work": dependency.call,
            "operation": "save",
            "target": "a.ckpt",
            "policy": policy,
            "patience": waiting or patience(dependency),
            **options,
        }
    )
    if mine.view is None:
        yield from begin(mine, new_incarnation=True)
    return (yield from guard(mine, call))


def member(rank: int, *, world_size: int = 2, **options: Any) -> Member:
    """A rank of a small job."""
    return Member(
        **{
            "keys": KEYS,
            "rank": rank,
            "world_size": world_size,
            "timeout_s": 40.0,
            "beat_s": 5.0,
            "on_outage": "wait",
            "store_patience_s": 40.0,
            **options,
        }
    )


def joint(mine: Circuit | None, waiting: Patience, **options: Any) -> Joint:
    """A save on which only rank 0 works."""
    return Joint(
        **{
            "op": "save",
            "seq": 1,
            "digest": "d",
            "subject": "a.ckpt",
            "workers": (0,),
            "circuit": mine,
            "patience": waiting,
            "deadline_s": 1800.0,
            **options,
        }
    )


def part(run: Callable[[], Protocol[Any]], *, rank: int = 0) -> Part:
    """Work that reports its result as text."""

    def outcome(error: BaseException) -> OutcomeRecord:
        failure = classify(error).failure
        assert failure is not None
        return OutcomeRecord(rank=rank, failure=failure.value, error=repr(error))

    return Part(run=lambda _started_at_s: run(), detail=str, outcome=outcome)


def record(world: World, *, keys: Keys = KEYS) -> BreakerRecord:
    """The breaker's record as it is in the store now."""
    key = keys.breaker(DEPENDENCY)
    return decode(BreakerRecord, world.values[key], key=key)


def states(world: World) -> list[str]:
    """The states that the breaker has gone through."""
    return [entry.state for entry in record(world).history]


def assert_legal(found: BreakerRecord) -> None:
    """Check that a history is one sequence of legal transitions, epoch by epoch."""
    entries = found.history
    assert entries[-1].epoch == found.epoch
    assert entries[-1].state == found.state
    for before, after in pairwise(entries):
        assert after.epoch == before.epoch + 1
        pair = BreakerState(before.state), BreakerState(after.state)
        # A rebuilt record says so, and repeats the state that was seen.
        assert pair in LEGAL or after.reason.startswith("rebuilt")


def put(world: World, **fields: Any) -> BreakerRecord:
    """Write a breaker's record from outside; its history begins there."""
    changed = msgspec.structs.replace(record(world), writer="outside", **fields)
    entry = Transition(epoch=changed.epoch, state=changed.state, reason="from outside")
    changed = msgspec.structs.replace(changed, history=(entry,))
    world.values[KEYS.breaker(DEPENDENCY)] = msgspec.json.encode(changed)
    return changed
