# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A process without the shared store, or whose host alone is ill, goes its own way and returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.breaker import BreakerState
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.events import (
    BreakerChanged,
    HostIsolated,
    HostRejoined,
    LocalModeEnded,
    LocalModeEntered,
    ProbeStarted,
    RecordVanished,
    StoreLost,
    ViewTrusted,
)
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import BudgetRecord, decode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CircuitOpenError,
    StoreUnavailableError,
)
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin, refresh
from lightning_resilience.protocols.circuit_memory import Circuit, Limits, Link, give_detour
from lightning_resilience.protocols.probe import Patience
from tests.scenes import (
    CONFIG,
    DEPENDENCY,
    KEYS,
    Dependency,
    guarded,
    patience,
    put,
    record,
    states,
)
from tests.scripted_driver import STORE_EFFECTS, Away, Fault, Lost, Task, World


if TYPE_CHECKING:
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Effect


PROCESSES = 4
PATIENT = RetryPolicy(max_delay_s=5.0)


def process(
    host: str = "host",
    *,
    hosts: int = 1,
    link: Link | None = None,
    dependency: str = DEPENDENCY,
    budget: BudgetConfig | None = None,
    processes: int = PROCESSES,
) -> Circuit:
    """A process that may go its own way."""
    limits = Limits(budget=budget or BudgetConfig())
    mine = Circuit(dependency, config=CONFIG, keys=KEYS, host=host, hosts=hosts, limits=limits)
    give_detour(mine, link=link or Link(), processes=processes)
    return mine


@dataclass
class Scene:
    """One world whose store is away at times, and what happens there.

    Args:
        seed: Decides draws.
        heals_at_s: The dependency is ill before.
        patience_s: How long a call waits for the store.
    """

    seed: int = 0
    heals_at_s: float = 0.0
    patience_s: float | None = 0.0
    alone: bool = True
    away: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(seed=self.seed, fault=self.strike)
        self.dependency = Dependency(self.world, heals_at_s=self.heals_at_s)

    def strike(self, _task: Task, _index: int, effect: Effect) -> Fault | None:
        """The store does not answer while it is away."""
        now_s = self.world.now_s
        gone = any(since_s <= now_s < until_s for since_s, until_s in self.away)
        return Away() if gone and isinstance(effect, STORE_EFFECTS) else None

    def start(
        self, mine: Circuit, *, at_s: float | None = None, name: int = 0, **options: Any
    ) -> Task:
        """Start a call."""
        options = {
            "policy": PATIENT,
            "may_go_alone": self.alone,
            "store_patience_s": self.patience_s,
            **options,
        }
        return self.world.spawn(guarded(mine, self.dependency, **options), name=name, at_s=at_s)

    def call(self, mine: Circuit, *, at_s: float | None = None, **options: Any) -> Task:
        """Make a call, and wait for its end."""
        task = self.start(mine, at_s=at_s, **options)
        self.world.run()
        return task

    def settled(self, *circuits: Circuit) -> None:
        """Let processes read the record before anything happens."""
        for name, mine in enumerate(circuits):
            self.world.spawn(begin(mine, new_incarnation=True), name=name)
        self.world.run()


def took_s(task: Task, *, at_s: float) -> float:
    """How long a call took."""
    assert task.ended_at_s is not None
    return task.ended_at_s - at_s


def lose_all(world: World) -> None:
    """Empty the shared store; what processes keep for themselves stays."""
    for key in [key for key in world.values if not key.startswith("own/")]:
        del world.values[key]


# --- one store error on a closed view --------------------------------------------------------


@pytest.mark.parametrize("patience_s", [0.0, 5.0])
def test_a_call_goes_ahead_at_once_where_the_store_does_not_answer(patience_s: float) -> None:
    """The last view let calls through and is young enough: nobody waits for the store."""
    scene = Scene(away=[(10.0, 12.0)], patience_s=patience_s)
    mine = process()
    scene.settled(mine)

    task = scene.call(mine, at_s=10.0)

    assert task.result.value == "done"
    assert took_s(task, at_s=10.0) < 0.1
    (trusted,) = task.emitted(ViewTrusted)
    assert trusted.age_s == pytest.approx(10.0, abs=0.1)
    assert trusted.longest_s == 30.0
    assert "no answer to Get" in trusted.error


@pytest.mark.parametrize("patience_s", [0.0, 5.0])
def test_a_store_that_did_not_answer_is_left_alone_for_a_while(patience_s: float) -> None:
    """Until the next try no call asks it; then one does, and all is as before."""
    scene = Scene(away=[(10.0, 10.1)], patience_s=patience_s)
    mine = process()
    scene.settled(mine)
    scene.call(mine, at_s=10.0)

    soon = scene.call(mine, at_s=10.3)
    later = scene.call(mine, at_s=11.1)
    at_last = scene.call(mine, at_s=11.2)

    assert soon.store_operations() == 0
    assert later.store_operations() == 1
    # The view is fresh again.
    assert at_last.store_operations() == 0
    assert not any(task.events for task in (soon, later, at_last))


def test_calls_on_a_trusted_view_ask_more_and_more_rarely() -> None:
    """Ten calls a second in the grace: a few of them ask, and each says so once."""
    scene = Scene(away=[(6.0, 1e9)])
    mine = process()
    scene.settled(mine)

    tasks = [scene.call(mine, at_s=6.0 + turn / 10) for turn in range(200)]

    assert not any(task.emitted(LocalModeEntered) for task in tasks)
    asked = [task for task in tasks if task.store_operations()]
    assert 4 <= len(asked) <= 7
    assert all(len(task.emitted(ViewTrusted)) == 1 for task in asked)


@pytest.mark.parametrize("state", ["open", "half_open"])
def test_a_view_that_stops_calls_is_not_trusted(state: str) -> None:
    """The outage that it is about may be over: the process decides alone, from that state on."""
    scene = Scene(away=[(10.0, 1e9)])
    mine = process(processes=1)
    scene.settled(mine)
    put(scene.world, state=state, epoch=7, limit=0, holder="x" if state == "half_open" else "")
    scene.call(mine, at_s=6.0, waiting=patience(scene.dependency, when_open="raise"))

    task = scene.call(mine, at_s=12.0)

    assert task.result.value == "done"
    assert len(task.emitted(LocalModeEntered)) == 1
    assert task.emitted(ViewTrusted) == []
    assert task.emitted(BreakerChanged)[0].state == "half_open"


# --- alone -----------------------------------------------------------------------------------


def test_after_the_grace_a_process_decides_alone() -> None:
    """It says so once, with its share; its calls go on without a store operation."""
    scene = Scene(away=[(10.0, 1e9)])
    mine = process()
    scene.settled(mine)

    first = scene.call(mine, at_s=31.0)
    second = scene.call(mine, at_s=31.1)

    (entered,) = first.emitted(LocalModeEntered)
    assert entered.share == 1 / PROCESSES
    assert "no answer" in entered.error
    assert first.result.value == second.result.value == "done"
    assert second.store_operations() == 0
    assert second.events == []


@pytest.mark.parametrize("patience_s", [0.0, 5.0])
def test_alone_no_call_waits_long_for_the_store(patience_s: float) -> None:
    """Once it is lost, whoever finds out whether it is back does not wait for it."""
    scene = Scene(away=[(10.0, 1e9)], patience_s=patience_s)
    mine = process()
    scene.settled(mine)
    scene.call(mine, at_s=41.0)

    tasks = [(at_s, scene.call(mine, at_s=at_s)) for at_s in (50.0, 61.0, 83.0, 120.0)]

    assert all(took_s(task, at_s=at_s) < 0.1 for at_s, task in tasks)
    assert any(task.store_operations() for _, task in tasks)


def test_alone_a_process_trips_and_recovers_by_itself() -> None:
    """Its own breaker opens after three failures, probes, and lets its call through in the end."""
    scene = Scene(away=[(10.0, 1e9)], heals_at_s=70.0)
    mine = process(processes=1)
    scene.settled(mine)

    task = scene.call(mine, at_s=31.0)

    assert task.result.value == "done"
    assert sum(at < 70.0 for at in scene.dependency.calls) == 3
    moved = [event.state for event in task.emitted(BreakerChanged)]
    assert moved[0] == "open"
    # One success after the probe doubles the limit.
    assert moved[-1] == "recovering"
    assert mine.detour is not None
    assert mine.detour.circuit.view is not None
    assert mine.detour.circuit.view.record.limit == 2
    assert took_s(task, at_s=31.0) < 39.0 + CONFIG.max_open_for_s + 10.0


def test_what_is_decided_alone_is_never_written_to_the_shared_store() -> None:
    """Trips, probes, charges and slots of a process that is alone leave the shared keys alone."""
    scene = Scene(away=[(10.0, 1e9)], heals_at_s=70.0)
    mine = process(processes=1)
    scene.settled(mine)
    before = dict(scene.world.values)

    scene.call(mine, at_s=31.0, collective=True)

    after = {key: raw for key, raw in scene.world.values.items() if not key.startswith("own/")}
    assert after == before
    assert any(key.startswith("own/") for key in scene.world.values)


def probes_alone(seed: int) -> int:
    """Probes that a process of four sends in an outage that outlasts it, alone."""
    scene = Scene(seed=seed, away=[(10.0, 1e9)], heals_at_s=1e9)
    mine = process()
    scene.settled(mine)
    task = scene.call(mine, at_s=31.0, policy=RetryPolicy(deadline_s=1500.0))
    assert isinstance(task.error, CircuitOpenError)
    assert task.emitted(ProbeStarted) == task.emitted(ProbeStarted)[: len(scene.dependency.probes)]
    return len(scene.dependency.probes)


def test_alone_a_probe_that_is_due_is_sent_with_the_probability_of_the_share() -> None:
    """Four processes that are alone send together as many probes as one would: a quarter each."""
    sent = [probes_alone(seed) for seed in range(12)]

    # One open wait of 10 s, then a quarter of those that double to 60 s: at most 1470 / 60 and 6.
    assert 4 <= sum(sent) / len(sent) <= 11
    assert min(sent) >= 1


def test_alone_a_process_has_its_share_of_the_slots_and_of_the_retries() -> None:
    """Of 16 slots and 20 retries a minute, one of four has four and five."""
    mine = process()
    assert mine.detour is not None

    own = mine.detour.circuit

    assert (own.config.max_concurrent, own.ledger.config.retry_floor) == (4, 5)
    assert own.is_own


def test_alone_retries_are_charged_to_the_own_budget() -> None:
    """A share of one retry denies the second."""
    scene = Scene(away=[(10.0, 1e9)], heals_at_s=1e9)
    mine = process(budget=BudgetConfig(retry_floor=4))
    scene.settled(mine)

    task = scene.call(mine, at_s=31.0, waiting=patience(scene.dependency, when_open="raise"))

    assert isinstance(task.error, BudgetExhaustedError)
    assert (task.error.attempts, task.error.used, task.error.quota) == (2, 1, 1)


@pytest.mark.parametrize("processes", [64, 256, 1000])
def test_a_share_that_is_used_up_trips_whoever_is_alone(processes: int) -> None:
    """It is less than a trip takes: the process stays away then, and comes back with the store."""
    scene = Scene(away=[(10.0, 400.0)], heals_at_s=75.0)
    mine = process(processes=processes)
    scene.settled(mine)
    assert mine.detour is not None

    task = scene.call(mine, at_s=40.0)

    assert task.result.value == "done"
    assert (task.ended_at_s or 1e9) < 400.0 + 60.0
    assert len(scene.dependency.calls) <= 4
    changes = [event.state for event in task.emitted(BreakerChanged)]
    assert changes[:1] == ["open"]


def test_alone_the_quota_rests_on_the_calls_of_this_process() -> None:
    """A share of the floor alone would trip whoever makes many calls, of which few fail."""
    budget = BudgetConfig(retry_floor=1, retry_ratio=0.1, budget_window_s=1000.0)
    scene = Scene(away=[(1.0, 1e9)])
    mine = process(budget=budget, processes=1)
    scene.settled(mine)
    for number in range(40):
        scene.call(mine, at_s=40.0 + number)
    scene.dependency.heals_at_s = scene.world.now_s + 0.005

    for number in range(2):
        scene.dependency.heals_at_s = scene.world.now_s + 0.005
        task = scene.call(mine, at_s=scene.world.now_s)
        assert task.error is None, number

    assert not any(task.emitted(BreakerChanged) for task in scene.world.tasks)


@pytest.mark.parametrize("seed", range(3))
def test_alone_a_collective_call_waits_for_its_slot_as_ever(seed: int) -> None:
    """Also where nobody waits for an outage, and the store is asked again meanwhile."""
    scene = Scene(seed=seed, away=[(1.0, 1e9)])
    mine = process(processes=16)
    scene.settled(mine)
    scene.dependency.lasts_s = 20.0
    waiting = patience(scene.dependency, when_open="raise")

    first = scene.start(mine, at_s=50.0, collective=True, waiting=waiting)
    second = scene.start(mine, at_s=50.1, collective=True, waiting=waiting)
    scene.world.run()

    assert (first.error, second.error) == (None, None)
    assert scene.dependency.calls[1] >= scene.dependency.calls[0] + 20.0


def test_every_dependency_says_when_it_is_the_jobs_again() -> None:
    """One call finds the store back; the others that were alone say so when they are next used."""
    scene = Scene(away=[(10.0, 100.0)])
    link = Link()
    first, second = process(link=link), process(link=link, dependency="s3://other:read")
    scene.settled(first, second)
    scene.call(first, at_s=41.0)
    scene.call(second, at_s=41.1)
    found = scene.call(first, at_s=200.0)

    told = scene.call(second, at_s=201.0)

    assert [len(task.emitted(LocalModeEnded)) for task in (found, told)] == [1, 1]
    assert told.emitted(LocalModeEnded)[0].dependency == "s3://other:read"


def test_a_second_dependency_goes_alone_by_its_own_last_state() -> None:
    """The store was found lost by a call of another: the share holds here too, and it is said."""
    scene = Scene(away=[(10.0, 1e9)])
    link = Link()
    first, second = process(link=link), process(link=link, dependency="s3://other:read")
    scene.settled(first, second)
    scene.call(first, at_s=31.0)
    assert second.detour is not None

    task = scene.call(second, at_s=31.1)

    assert task.result.value == "done"
    assert task.store_operations() == 0
    assert len(task.emitted(LocalModeEntered)) == 1
    assert second.detour.circuit.probe_share.share == 1 / PROCESSES


# --- the store's return ----------------------------------------------------------------------


def test_a_store_that_answers_again_is_followed() -> None:
    """The shared state counts, whatever was decided alone; the end is said, with its length."""
    scene = Scene(away=[(10.0, 60.0)], heals_at_s=50.0)
    mine = process(processes=1)
    scene.settled(mine)
    alone = scene.call(mine, at_s=31.0)

    task = scene.call(mine, at_s=100.0)

    assert alone.emitted(LocalModeEntered)
    ended = [*alone.emitted(LocalModeEnded), *task.emitted(LocalModeEnded)]
    assert len(ended) == 1
    assert ended[0].lost_for_s >= 60.0 - 31.0 - 1.0
    assert record(scene.world).epoch == 1
    assert states(scene.world) == ["closed"]


def test_an_outage_that_others_have_seen_stops_whoever_comes_back() -> None:
    """Closed alone, open in the job: after the return the call waits with the others."""
    scene = Scene(away=[(10.0, 60.0)], heals_at_s=0.0)
    mine = process()
    scene.settled(mine)
    scene.call(mine, at_s=31.0)
    put(scene.world, state="open", epoch=9, generation=3, limit=0)

    task = scene.call(mine, at_s=100.0, waiting=patience(scene.dependency, when_open="raise"))

    assert isinstance(task.error, CircuitOpenError)
    assert task.error.epoch == 9
    assert len(task.emitted(LocalModeEnded)) == 1


def test_a_store_that_comes_back_empty_is_rebuilt_at_a_higher_epoch() -> None:
    """From the last shared state, and never from what was decided alone."""
    scene = Scene(away=[(10.0, 60.0)], heals_at_s=90.0)
    mine = process(processes=1)
    scene.settled(mine)
    put(scene.world, epoch=5)
    scene.call(mine, at_s=6.0, work=lambda _token: "done")
    scene.start(mine, at_s=37.0)
    scene.world.at(59.0, partial(lose_all, scene.world))

    scene.world.run()

    task = scene.call(mine, at_s=200.0)
    found = record(scene.world)
    rebuilt = found.history[-1]
    assert (found.epoch, rebuilt.epoch, rebuilt.state) == (6, 6, "closed")
    assert rebuilt.reason.startswith("rebuilt")
    vanished = [event for each in scene.world.tasks for event in each.emitted(RecordVanished)]
    assert [event.epoch for event in vanished] == [5]
    assert task.result.value == "done"


def test_a_recovery_after_the_store_came_back_empty_makes_the_slots_anew() -> None:
    """Keys that are not there cannot be read in one round trip, and all come back at once."""
    scene = Scene(heals_at_s=5.0)
    mine = process()
    scene.settled(mine)
    scene.call(mine)
    slots = [KEYS.slot(DEPENDENCY, index) for index in range(CONFIG.max_concurrent)]
    assert all(key in scene.world.values for key in slots)

    lose_all(scene.world)
    scene.dependency.heals_at_s = scene.world.now_s + 15.0
    scene.call(mine, at_s=scene.world.now_s + 10.0)

    assert all(key in scene.world.values for key in slots)


def test_the_second_time_alone_begins_anew() -> None:
    """What was decided alone before is over: the state is the job's last, at a later own epoch."""
    scene = Scene(away=[(10.0, 60.0), (105.0, 1e9)], heals_at_s=62.0)
    mine = process(processes=1)
    scene.settled(mine)
    scene.call(mine, at_s=31.0)
    assert mine.detour is not None
    own = mine.detour.circuit
    assert own.view is not None
    before = own.view.record.epoch

    back = scene.call(mine, at_s=100.0)
    again = scene.call(mine, at_s=140.0)

    assert back.result.value == again.result.value == "done"
    assert len(again.emitted(LocalModeEntered)) == 1
    assert own.view.record.state == BreakerState.CLOSED.value
    assert own.view.record.epoch == before + 1


def test_who_waits_alone_is_let_go_by_the_store_that_returns() -> None:
    """Its own circuit is open, and it hardly ever probes: the job's closed one lets it go."""
    scene = Scene(away=[(10.0, 45.0)], heals_at_s=40.0)
    mine = process(processes=10**6, budget=BudgetConfig(retry_floor=10**8))
    scene.settled(mine)

    task = scene.call(mine, at_s=31.0)

    assert task.result.value == "done"
    assert scene.dependency.probes == []
    assert took_s(task, at_s=45.0) <= 31.0
    assert len(task.emitted(LocalModeEnded)) == 1


# --- a host that is cut off ------------------------------------------------------------------


@dataclass
class Isolation:
    """Several hosts, of which the first has a broken link for a while.

    Args:
        asked: When it tried to reach the dependency, by a call or by a probe.
    """

    scene: Scene
    circuits: list[Circuit]
    ill_until_s: float
    asked: list[float] = field(default_factory=list)

    def reach(self, name: int, token: CancelToken) -> str:
        """Reach the dependency from a host."""
        if name == 0:
            self.asked.append(self.scene.world.now_s)
            if self.scene.world.now_s < self.ill_until_s:
                raise ConnectionResetError("no route to host")
        return self.scene.dependency.call(token)

    def start(self, name: int, *, at_s: float, **options: Any) -> Task:
        """Start a call of a process; its probe is an operation of its own host."""
        reach = partial(self.reach, name)
        waiting = Patience(probe=reach, classify=classify, **options)
        return self.scene.start(
            self.circuits[name], at_s=at_s, name=name, work=reach, waiting=waiting
        )


def isolation(hosts: int = 3, *, ill_until_s: float = 60.0) -> Isolation:
    """Several processes, each on its own host."""
    scene = Scene()
    circuits = [process(f"host {name}", hosts=hosts, processes=hosts) for name in range(hosts)]
    scene.settled(*circuits)
    return Isolation(scene, circuits, ill_until_s)


@pytest.mark.parametrize("hosts", [2, 3, 9])
def test_a_host_whose_calls_alone_fail_trips_itself_and_not_the_job(hosts: int) -> None:
    """It waits behind a breaker of its own; the others' calls are made meanwhile."""
    went = isolation(hosts)
    ill = went.start(0, at_s=1.0)
    others = [
        (at_s, went.start(name, at_s=at_s))
        for name in range(1, hosts)
        for at_s in (2.0, 12.0, 22.0, 32.0, 42.0)
    ]
    went.scene.world.run()

    (isolated,) = ill.emitted(HostIsolated)
    assert (isolated.host, len(ill.emitted(HostRejoined))) == ("host 0", 1)
    assert "3 failures in a row" in isolated.reason
    assert ill.error is None
    for at_s, task in others:
        assert task.error is None
        assert took_s(task, at_s=at_s) < 0.1
    # The vote is withdrawn on the way back.
    assert states(went.scene.world) == ["closed"]
    assert record(went.scene.world).votes == ()


def test_an_isolated_host_makes_no_more_requests_than_its_probes() -> None:
    """Three failures isolate it; after that one probe for each open wait, which doubles."""
    went = isolation(2, ill_until_s=200.0)

    task = went.start(0, at_s=1.0)
    went.scene.world.run()

    assert task.error is None
    gaps = [after - before for before, after in pairwise(went.asked)]
    assert all(gap < 5.0 for gap in gaps[:2])
    assert [round(gap, -1) for gap in gaps[2:6]] == [10.0, 20.0, 40.0, 60.0]


def test_who_has_rejoined_is_isolated_again_by_new_failures_only() -> None:
    """Back with the job, one failure is one failure."""
    went = isolation(2, ill_until_s=30.0)
    went.start(0, at_s=1.0)
    went.scene.world.run()
    went.ill_until_s = went.scene.world.now_s + 10.0
    came_s = went.scene.world.now_s + 9.95

    task = went.start(0, at_s=came_s)
    went.scene.world.run()

    assert task.result.attempts == 2
    assert task.emitted(HostIsolated) == []


def test_a_host_that_is_cut_off_with_a_quorum_trips_the_job() -> None:
    """Where the others fail too it is an outage, and nobody is isolated."""
    scene = Scene(heals_at_s=40.0)
    circuits = [process(f"host {name}", hosts=2) for name in range(2)]
    scene.settled(*circuits)

    tasks = [scene.start(mine, name=name, at_s=1.0) for name, mine in enumerate(circuits)]
    scene.world.run()

    assert [task.error for task in tasks] == [None, None]
    assert "open" in states(scene.world)
    assert sum(len(task.emitted(HostIsolated)) for task in tasks) <= 1


def test_an_isolated_host_is_refused_where_it_does_not_wait() -> None:
    """With ``raise``, its calls fail at once and name the reason, until its own probe succeeds."""
    went = isolation(2, ill_until_s=60.0)
    went.start(0, at_s=1.0, when_open="raise")
    went.scene.world.run()

    refused = went.start(0, at_s=20.0 - 18.0 + went.scene.world.now_s, when_open="raise")
    went.scene.world.run()
    later = went.start(0, at_s=300.0, when_open="raise")
    went.scene.world.run()

    assert isinstance(refused.error, CircuitOpenError)
    assert "no quorum of 2 hosts" in str(refused.error)
    assert later.result.value == "done"
    assert len(later.emitted(HostRejoined)) == 1


def test_an_isolated_host_probes_in_full_also_after_it_was_alone() -> None:
    """One host is cut off, not all: its share of the probes is the whole."""
    went = isolation(2, ill_until_s=0.0)
    mine = went.circuits[0]
    assert mine.detour is not None
    went.scene.away = [(10.0, 60.0)]
    went.start(0, at_s=40.0)
    went.scene.world.run()
    went.ill_until_s = 150.0

    task = went.start(0, at_s=100.0)
    went.scene.world.run()

    assert len(task.emitted(HostIsolated)) == len(task.emitted(HostRejoined)) == 1
    assert task.result.value == "done"
    assert mine.detour.circuit.probe_share.share == 1.0


def test_the_processes_of_an_isolated_host_share_its_probes() -> None:
    """Eight processes a host send one probe per wait together, an eighth of the waits each."""
    scene = Scene()
    mine = process("host 0", hosts=2, processes=16)
    scene.settled(mine)
    went = Isolation(scene, [mine], 60.0)

    task = went.start(0, at_s=1.0)
    scene.world.run()

    assert task.emitted(HostIsolated)
    assert mine.detour is not None
    assert mine.detour.circuit.probe_share.share == 1 / 8


def test_who_rejoins_hands_in_no_result_for_an_epoch_that_others_have_seen() -> None:
    """Its call was let in by its own circuit: the ramp of the job is not moved by it."""
    scene = Scene()
    mine = process(hosts=8)
    scene.settled(mine)
    assert mine.detour is not None
    mine.detour.is_isolated = True
    put(scene.world, state="recovering", epoch=9, generation=1, limit=4)
    scene.world.spawn(refresh(mine))
    scene.world.run()

    task = scene.call(mine)

    assert task.emitted(HostRejoined)
    assert (record(scene.world).epoch, record(scene.world).limit) == (9, 4)


def test_who_has_rejoined_follows_the_job_again() -> None:
    """Its next call, by a view that is too old, reads the shared record and says nothing."""
    went = isolation(2, ill_until_s=30.0)
    went.start(0, at_s=1.0)
    went.scene.world.run()

    task = went.start(0, at_s=went.scene.world.now_s + 10.0)
    went.scene.world.run()

    assert task.events == []
    assert task.store_operations() == 1


# --- strict, and joint -----------------------------------------------------------------------


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("patience_s", [0.0, 5.0])
def test_strict_raises_before_the_attempt(patience_s: float, collective: bool) -> None:  # noqa: FBT001 - data
    """No call is decided without the store: after the patience its failure is raised."""
    scene = Scene(away=[(10.0, 1e9)], patience_s=patience_s, alone=False)
    mine = process()
    scene.settled(mine)

    task = scene.call(mine, at_s=40.0, collective=collective)

    assert isinstance(task.error, StoreUnavailableError)
    assert scene.dependency.calls == []
    assert patience_s <= took_s(task, at_s=40.0) <= patience_s + 0.1
    assert task.emitted(LocalModeEntered) == []


def test_strict_never_goes_by_what_others_decide_alone() -> None:
    """A process that is alone has calls that may be, and one that may not: that one raises."""
    scene = Scene(away=[(10.0, 1e9)])
    mine = process()
    scene.settled(mine)
    scene.call(mine, at_s=40.0)

    task = scene.call(mine, at_s=40.1, may_go_alone=False)

    assert isinstance(task.error, StoreUnavailableError)
    assert len(scene.dependency.calls) == 1


def test_strict_pays_for_its_retries_with_the_jobs_budget() -> None:
    """Also in a process that is alone otherwise: its gate was the job's, and so is its budget."""
    scene = Scene(away=[(10.0, 41.0)], heals_at_s=43.0)
    mine = process()
    scene.settled(mine)
    scene.call(mine, at_s=40.9, policy=RetryPolicy(max_attempts=4, deadline_s=0.05))
    assert mine.detour is not None
    assert mine.detour.link.lost_since_s is not None

    task = scene.call(mine, at_s=41.1, may_go_alone=False, store_patience_s=None)

    assert task.result.attempts > 1
    budget = decode(BudgetRecord, scene.world.values[KEYS.budget(DEPENDENCY)], key="budget")
    assert sum(budget.retries) >= 1


def test_strict_waits_for_a_store_that_comes_back_in_time() -> None:
    """An absence shorter than the patience costs the call nothing but that time."""
    scene = Scene(away=[(40.0, 42.0)], patience_s=5.0, alone=False)
    mine = process()
    scene.settled(mine)

    task = scene.call(mine, at_s=40.0)

    assert task.result.value == "done"
    assert 2.0 <= took_s(task, at_s=40.0) <= 5.0


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("state", ["closed", "recovering"])
@pytest.mark.parametrize("kind", [Away, Lost])
def test_the_result_of_an_attempt_that_succeeded_is_never_lost(
    collective: bool,  # noqa: FBT001 - data
    alone: bool,  # noqa: FBT001 - data
    state: str,
    kind: type[Away | Lost],
) -> None:
    """The store goes while the attempt runs: report and release are missed, the value is not."""
    scene = Scene(patience_s=5.0, alone=alone)
    mine = process(hosts=2)
    scene.settled(mine)
    put(scene.world, state=state, epoch=4, limit=2, votes=("host",) if state == "closed" else ())
    scene.world.spawn(refresh(mine))
    scene.world.run()
    called = False

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        nonlocal called
        called = called or isinstance(effect, fx.Call)
        return kind() if called and isinstance(effect, STORE_EFFECTS) else None

    scene.world.fault = fault
    task = scene.call(mine, at_s=40.0, collective=collective)

    assert task.result.value == "done"
    assert len(scene.dependency.calls) == 1
    assert task.emitted(StoreLost)
    assert bool(task.emitted(LocalModeEntered)) is alone


@pytest.mark.parametrize("kind", [Away, Lost])
def test_a_slot_that_cannot_be_given_back_is_no_reason_to_go_alone(
    kind: type[Away | Lost],
) -> None:
    """All three tries are lost, and the process stays with the job: the next call finds out."""
    scene = Scene()
    mine = process(hosts=2)
    scene.settled(mine)

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        called = any(isinstance(done, fx.Call) for done in task.performed)
        return kind() if called and isinstance(effect, fx.CompareAndSet) else None

    scene.world.fault = fault
    task = scene.call(mine, at_s=40.0, collective=True)

    assert task.result.value == "done"
    assert len(task.emitted(StoreLost)) == 1
    assert not task.emitted(LocalModeEntered)
    assert mine.detour is not None
    assert mine.detour.link.tries == 0
    assert mine.detour.link.lost_since_s is None


@pytest.mark.parametrize("after", ["before", "attempt"])
def test_without_patience_the_stores_failure_is_raised_as_it_is(after: str) -> None:
    """A joint operation sees it: no view is trusted, nothing is decided alone, nothing is said."""
    scene = Scene(patience_s=None, alone=False)
    mine = process(hosts=2)
    scene.settled(mine)
    called = after == "before"

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        nonlocal called
        called = called or isinstance(effect, fx.Call)
        return Away() if called and isinstance(effect, STORE_EFFECTS) else None

    scene.world.fault = fault
    task = scene.call(mine, at_s=10.0, collective=after == "attempt")

    assert isinstance(task.error, StoreUnavailableError)
    assert len(scene.dependency.calls) == (after == "attempt")
    assert task.events == []
    assert mine.detour is not None
    assert mine.detour.link.tries == 0
