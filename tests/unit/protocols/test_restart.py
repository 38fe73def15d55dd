# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Agents pass the gate together: one charge, one delay, and nobody while a dependency is ill."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from lightning_resilience.core import quota
from lightning_resilience.core.events import RestartsNotKept
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.leaving import Apart
from lightning_resilience.core.quota import Cause, Closed, Ending, RestartRecord
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.restart import GoRecord, IncarnationRecord
from lightning_resilience.core.restart_config import RestartConfig
from lightning_resilience.core.worker_exits import incident_of_exit
from lightning_resilience.errors import CorruptRecordError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx, restart_record
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.incarnation import announce, tell_progress
from lightning_resilience.protocols.incident import publish_incident, tell_incident
from lightning_resilience.protocols.restart import (
    LOOKS,
    Dependency,
    Gate,
    News,
    begins_anew,
    charge_missed,
    look_around,
    pass_first_gate,
    pass_gate,
)
from lightning_resilience.protocols.restart_record import Memory, Mirror
from tests import scenes
from tests.scenes import circuit, patience, put
from tests.scripted_driver import Away, Crash, Fault, Interrupt, Lost, Pause, Task, World, run


if TYPE_CHECKING:
    from collections.abc import Callable


CONFIG = RestartConfig(restart_base_delay_s=8.0, settle_s=1.0, gate_deadline_s=600.0)
RUN = "run"


def keys(number: int = 1) -> Keys:
    """Keys of a start of the workers that is over."""
    return Keys(run_id=RUN, incarnation=f"{number}-n")


def gate(number: int = 1, **options: Any) -> Gate:
    """One agent's way."""
    options = {"is_failure": True, "config": CONFIG, "memory": Memory(keys(number)), **options}
    return Gate(**options)


def failed(rank: int = 0, **fields: Any) -> IncidentRecord:
    """What a rank has told."""
    return IncidentRecord(
        **{
            "rank": rank,
            "kind": "error",
            "error": "ValueError: bad",
            "step": 5,
            "fingerprint": "f",
            "writer": f"w{rank}",
            **fields,
        }
    )


def record(world: World) -> RestartRecord:
    """The record of restarts as it is in the store now."""
    return decode(RestartRecord, world.values[keys().restarts], key="restarts")


def agents(world: World, count: int, number: int = 1, **options: Any) -> list[Task]:
    """Let so many agents come to the gate, a little apart."""
    tasks = [
        world.spawn(pass_gate(gate(number, **options)), name=name, at_s=world.now_s + 0.1 * name)
        for name in range(count)
    ]
    world.run()
    return tasks


@pytest.mark.parametrize("seed", range(10))
def test_all_agents_wait_for_the_same_delay_and_charge_once(seed: int) -> None:
    """One number for the job, timed by each from when it has seen it."""
    world = World(seed=seed)
    run(publish_incident(keys(), failed()), world)

    tasks = agents(world, 4)

    go = tasks[0].result
    assert isinstance(go, GoRecord)
    assert all(task.result == go for task in tasks)
    assert (go.number, go.cause) == (1, "failed")
    assert 0.0 <= go.delay_s < CONFIG.restart_base_delay_s
    assert len(record(world).charges) == 1
    for task in tasks:
        assert task.ended_at_s is not None
        assert task.ended_at_s >= CONFIG.settle_s + go.delay_s


@pytest.mark.parametrize("index", range(16))
@pytest.mark.parametrize("fault", [Crash(), Lost(), Away(), Pause(30.0)])
def test_one_agent_that_fails_anywhere_holds_up_nobody(fault: Fault, index: int) -> None:
    """Nobody leads: another one does what it has left undone, and nothing is done twice."""
    struck: list[int] = []

    def strike(task: Task, at: int, effect: Any) -> Fault | None:
        is_store = isinstance(effect, (fx.Get, fx.MultiGet, fx.CompareAndSet))
        if task.name == 0 and at == index and (is_store or isinstance(fault, Crash)):
            struck.append(at)
            return fault
        return None

    world = World()
    run(publish_incident(keys(), failed(1)), world)
    world.fault = strike

    tasks = agents(world, 3)

    others = tasks[1:]
    assert all(isinstance(task.result, GoRecord) for task in others)
    assert others[0].result == others[1].result
    assert len(record(world).charges) == 1
    late_s = 30.0 + CONFIG.settle_s + CONFIG.restart_base_delay_s
    assert all(task.ended_at_s is not None and task.ended_at_s < late_s for task in others)
    if isinstance(fault, Crash):
        assert tasks[0].crashed is bool(struck)
    elif struck and isinstance(fault, (Lost, Away)):
        assert isinstance(tasks[0].error, StoreUnavailableError)
    else:
        assert tasks[0].result == others[0].result


def test_nobody_joins_while_a_dependency_is_ill() -> None:
    """All come when it is well, and the wait is not charged."""
    world = World()
    storage = scenes.Dependency(world, heals_at_s=120.0)
    circuits = [circuit(f"host{name}", keys=keys()) for name in range(3)]
    run(begin(circuits[0], new_incarnation=False), world)
    view = scenes.record(world, keys=keys())
    put(world, state="open", epoch=view.epoch + 1, generation=1)
    run(publish_incident(keys(), failed()), world)

    tasks = [
        world.spawn(
            _begun(
                mine, gate(dependencies=(Dependency(circuit=mine, patience=patience(storage)),))
            ),
            name=name,
            at_s=0.1 * name,
        )
        for name, mine in enumerate(circuits)
    ]
    world.run()

    assert all(isinstance(task.result, GoRecord) for task in tasks)
    assert all(task.ended_at_s is not None and task.ended_at_s >= 120.0 for task in tasks)
    assert storage.most_probes_at_once() == 1
    assert len(record(world).charges) == 1


def test_an_outage_that_outlasts_the_deadline_is_not_held_against_the_job() -> None:
    """All agents leave with the status that lets a scheduler start the job again."""
    world = World()
    storage = scenes.Dependency(world, heals_at_s=1e9)
    circuits = [circuit(f"host{name}", keys=keys()) for name in range(2)]
    run(begin(circuits[0], new_incarnation=False), world)
    put(world, state="open", epoch=scenes.record(world, keys=keys()).epoch + 1, generation=1)

    tasks = [
        world.spawn(
            _begun(
                mine, gate(dependencies=(Dependency(circuit=mine, patience=patience(storage)),))
            ),
            name=name,
        )
        for name, mine in enumerate(circuits)
    ]
    world.run()

    assert [task.result.code for task in tasks] == [ExitCode.OUTAGE] * 2
    assert tasks[0].result == tasks[1].result
    assert record(world).charges == ()
    assert "gate_deadline_s=600" in tasks[0].result.reason


def test_a_store_that_fails_at_the_gate_does_not_prolong_the_wait() -> None:
    """One incident has one deadline, however often an agent comes to the gate; the next a new."""
    world, memory = World(), Memory(keys())
    storage = scenes.Dependency(world, heals_at_s=1e9)
    mine = circuit("host", keys=keys())
    run(begin(mine, new_incarnation=False), world)
    put(world, state="open", epoch=scenes.record(world, keys=keys()).epoch + 1, generation=1)
    needed = (Dependency(circuit=mine, patience=patience(storage)),)
    world.fault = _once(lambda: world.now_s >= CONFIG.gate_deadline_s - 100.0)

    first = world.spawn(pass_gate(gate(memory=memory, dependencies=needed)), name=0)
    world.run()
    again = world.spawn(
        pass_gate(gate(memory=memory.followed_by(keys()), dependencies=needed)), name=1
    )
    world.run()
    ended_at_s = world.now_s

    assert isinstance(first.error, StoreUnavailableError)
    assert again.result.code == ExitCode.OUTAGE
    assert ended_at_s < CONFIG.gate_deadline_s + 60.0
    assert memory.followed_by(keys(2)).came_at_s(now_s=ended_at_s) == ended_at_s


def _once(is_due: Callable[[], bool]) -> Any:
    struck: list[float] = []

    def strike(_task: Task, at: int, effect: Any) -> Fault | None:
        if struck or not isinstance(effect, (fx.Get, fx.MultiGet)) or not is_due():
            return None
        struck.append(at)
        return Away()

    return strike


def _begun(mine: Any, way: Gate) -> Any:
    yield from begin(mine, new_incarnation=False)
    return (yield from pass_gate(way))


def test_it_is_known_whether_a_start_is_over() -> None:
    """By the bell of an agent that has seen a worker end, or by what agents have agreed on."""
    by_bell, by_go = World(), World()
    run(publish_incident(keys(), failed()), by_bell)
    run(pass_gate(gate(is_failure=False, left=1)), by_go)

    assert run(begins_anew(keys()), by_bell)
    assert run(begins_anew(keys()), by_go)
    assert not run(begins_anew(keys(2)), by_go)


def test_a_worker_that_ends_for_want_of_another_does_not_hide_that_it_was_told_to_stop() -> None:
    """Its agent comes first, and knows no more than a status; the other one has seen the signal."""
    world = World()
    echo = incident_of_exit(rank=0, status=1, message="", writer="a")
    cause = incident_of_exit(rank=1, status=-15, message="", writer="b")
    for each in (echo, cause):
        run(publish_incident(keys(), each), world)

    tasks = agents(world, 2)

    assert [task.result.cause for task in tasks] == ["preempted"] * 2
    assert record(world).charges == ()


def test_workers_that_an_agent_stops_do_not_hide_the_one_that_has_failed() -> None:
    """A signal that a rank tells may be its own agent's, which has seen another one end first."""
    world = World()
    exited = incident_of_exit(rank=0, status=1, message="", writer="a")
    stopped = failed(1, kind="signal", fingerprint="", error="SIGTERMException")
    for each in (exited, stopped):
        run(publish_incident(keys(), each), world)

    tasks = agents(world, 2)

    assert [task.result.cause for task in tasks] == ["failed"] * 2


def test_a_permanent_error_ends_the_job_for_all_agents() -> None:
    """Nobody restarts anything, and each has the same reason."""
    world = World()
    run(publish_incident(keys(), failed(2, failure="permanent")), world)

    tasks = agents(world, 3)

    assert [task.result.code for task in tasks] == [ExitCode.PERMANENT] * 3
    assert len({task.result.reason for task in tasks}) == 1
    assert "Rank 2 failed first" in tasks[0].result.reason


def test_a_crash_loop_ends_at_the_quota() -> None:
    """On all agents in the same round; who comes later leaves at once with the same."""
    world = World()
    for number in range(1, 4):
        run(publish_incident(keys(number), failed(fingerprint=f"f{number}")), world)
        assert all(isinstance(task.result, GoRecord) for task in agents(world, 2, number))

    run(publish_incident(keys(4), failed(fingerprint="f4")), world)
    tasks = agents(world, 2, 4)
    began_at_s = world.now_s
    late = agents(world, 1, 4)

    assert [task.result.code for task in tasks] == [ExitCode.DEAD_LETTERED] * 2
    assert late[0].result == tasks[0].result
    assert world.now_s - began_at_s < 0.1


def test_progress_between_failures_lets_the_job_go_on() -> None:
    """A verified checkpoint later than at the last charge."""
    world = World()
    for number in range(1, 12):
        run(tell_progress(keys(), step=number * 10, checkpoint_step=number * 10), world)
        run(publish_incident(keys(number), failed(fingerprint=f"f{number}")), world)
        assert [task.result.number for task in agents(world, 2, number)] == [1, 1]


def test_workers_that_say_nothing_have_failed_all_the_same() -> None:
    """Missing evidence is no growth of the job."""
    tasks = agents(World(), 1)

    assert (tasks[0].result.cause, tasks[0].result.number) == ("failed", 1)


def test_nodes_that_come_cost_neither_quota_nor_time() -> None:
    """And reports of workers that are well are not waited for."""
    world = World()

    tasks = agents(world, 2, is_failure=False)

    assert [task.result.cause for task in tasks] == ["grown", "grown"]
    assert record(world).charges == ()
    assert world.now_s < 0.2


def test_who_is_called_waits_for_the_cause_as_well() -> None:
    """The first word of a rank is often an echo; what its agent has seen comes a moment later."""
    world = World()
    run(publish_incident(keys(), failed(kind="echo", error="DistBackendError: x")), world)
    called = world.spawn(pass_gate(gate(is_failure=False)), at_s=0.0)
    world.spawn(publish_incident(keys(), failed(1, failure="permanent")), name=1, at_s=0.5)
    world.run()

    assert called.result.code == ExitCode.PERMANENT


def test_a_node_that_has_left_is_charged() -> None:
    """With the quota for membership; there is no delay for what is no failure."""
    world = World()

    tasks = agents(world, 2, is_failure=False, left=1)

    assert [each.cause for each in record(world).charges] == ["left"]
    assert tasks[0].result.delay_s == 0.0


@pytest.mark.parametrize(("gone", "causes"), [(0, []), (1, ["left"])])
def test_a_node_that_was_back_before_it_was_missed_is_charged(gone: int, causes: list[str]) -> None:
    """It looked like growth at the gate; the new round tells the difference, once for the job."""
    world = World()
    way = gate(is_failure=False)
    [task] = [world.spawn(pass_gate(way), name=0)]
    world.run()

    for _ in range(2):
        run(charge_missed(way, task.result, gone=gone), world)

    assert task.result.cause == "grown"
    assert [each.cause for each in record(world).charges] == causes


def test_a_node_that_leaves_with_a_failure_is_charged_with_it() -> None:
    """An incident is charged once."""
    world = World()
    run(publish_incident(keys(), failed()), world)
    way = gate()
    [task] = [world.spawn(pass_gate(way), name=0)]
    world.run()

    run(charge_missed(way, task.result, gone=1), world)

    assert [each.cause for each in record(world).charges] == ["failed"]


def test_a_job_that_was_told_to_stop_is_restarted_for_nothing() -> None:
    """Preemption is nobody's fault."""
    world = World()
    run(publish_incident(keys(), failed(kind="signal", error="SIGTERMException")), world)

    tasks = agents(world, 2)

    assert tasks[0].result.cause == "preempted"
    assert record(world).charges == ()


def test_a_circuit_that_opens_during_the_delay_is_waited_for() -> None:
    """What was agreed still holds; nothing is charged again."""
    world = World()
    storage = scenes.Dependency(world, heals_at_s=60.0)
    mine = circuit(keys=keys())
    config = replace(CONFIG, restart_base_delay_s=50.0)
    run(publish_incident(keys(), failed()), world)
    way = gate(config=config, dependencies=(Dependency(circuit=mine, patience=patience(storage)),))
    task = world.spawn(_begun(mine, way))

    def trip() -> None:
        put(world, state="open", epoch=scenes.record(world, keys=keys()).epoch + 1, generation=1)

    world.at(1.05, trip)
    world.run()

    assert isinstance(task.result, GoRecord)
    assert task.ended_at_s is not None
    assert task.ended_at_s >= 60.0
    assert len(record(world).charges) == 1


def test_an_agent_that_comes_to_the_gate_again_does_not_wait_anew() -> None:
    """The delay is timed from when it has first seen what was agreed."""
    world = World()
    memory = Memory(keys())
    config = replace(CONFIG, restart_base_delay_s=100.0)
    run(publish_incident(keys(), failed()), world)
    go = run(pass_gate(gate(memory=memory, config=config)), world)
    assert isinstance(go, GoRecord)
    began_at_s = world.now_s

    again = run(pass_gate(gate(memory=memory, config=config)), world)

    assert again == go
    assert world.now_s - began_at_s < CONFIG.settle_s + 0.1


def test_an_agent_that_stood_still_charges_nothing_that_progress_has_cleared() -> None:
    """What is over was counted, though the record does not say so any more."""
    world = World()
    run(publish_incident(keys(1), failed()), world)

    def strike(task: Task, at: int, effect: Any) -> Fault | None:
        del at
        is_look = isinstance(effect, fx.MultiGet) and keys(1).progress in effect.keys
        return Pause(500.0) if task.name == 0 and is_look else None

    world.fault = strike
    stopped = world.spawn(pass_gate(gate(1)), name=0)
    other = world.spawn(pass_gate(gate(1)), name=1, at_s=5.0)
    world.spawn(tell_progress(keys(), step=9, checkpoint_step=9), name=2, at_s=100.0)
    world.spawn(publish_incident(keys(2), failed(fingerprint="g")), name=3, at_s=101.0)
    world.spawn(pass_gate(gate(2)), name=4, at_s=102.0)
    world.run()

    assert stopped.result == other.result
    assert [each.incarnation for each in record(world).charges] == ["2-n"]
    assert record(world).restarts == 2


# An agent that begins -----------------------------------------------------------------------------


def _first(memory: Memory, *needed: Dependency) -> Gate:
    return gate(memory=memory, is_failure=False, dependencies=needed)


def test_an_agent_that_begins_waits_for_what_is_ill() -> None:
    """Those who wait already are not disturbed, and its time to join does not run out."""
    world = World()
    storage = scenes.Dependency(world, heals_at_s=90.0)
    first = Keys(run_id=RUN, incarnation="")
    mine = circuit(keys=first)
    run(begin(mine, new_incarnation=False), world)
    put(world, state="open", epoch=scenes.record(world, keys=first).epoch + 1, generation=1)
    mine.view = None
    needed = Dependency(circuit=mine, patience=patience(storage))

    found = run(pass_first_gate(_first(Memory(first), needed)), world)

    assert found is None
    assert world.now_s >= 90.0
    assert record(world).charges == ()


def test_an_agent_that_begins_leaves_with_what_a_person_has_to_release() -> None:
    """And takes no notice of what a scheduler has heeded by starting it."""
    world = World()
    held, heeded = Ending(code=86, reason="enough"), Ending(code=160, reason="outage")
    run(restart_record.end(Memory(keys()), heeded), world)

    assert run(pass_first_gate(_first(Memory(keys()))), world) is None
    run(restart_record.end(Memory(keys()), held), world)
    assert run(pass_first_gate(_first(Memory(keys()))), world) == held


def test_an_agent_that_has_begun_heeds_what_ends_the_job_it_waits_for() -> None:
    """Only its first look is that of a new start."""
    world = World()
    memory, outage = Memory(keys()), Ending(code=160, reason="outage")
    run(pass_first_gate(_first(memory)), world)
    run(restart_record.end(Memory(keys()), outage), world)

    assert run(pass_first_gate(_first(memory)), world) == outage


def test_an_agent_that_begins_in_an_outage_ends_with_it() -> None:
    """After as long as any other one."""
    world = World()
    storage = scenes.Dependency(world, heals_at_s=1e9)
    first = Keys(run_id=RUN, incarnation="")
    mine = circuit(keys=first)
    run(begin(mine, new_incarnation=False), world)
    put(world, state="open", epoch=scenes.record(world, keys=first).epoch + 1, generation=1)
    mine.view = None
    needed = Dependency(circuit=mine, patience=patience(storage))

    found = run(pass_first_gate(_first(Memory(first), needed)), world)

    assert isinstance(found, Ending)
    assert found.code == ExitCode.OUTAGE
    assert record(world).ending == found


# What an agent sees whose workers are well --------------------------------------------------------


def looks(world: World, memory: Memory) -> list[News]:
    """Return what an agent sees that looks around until it has seen everything."""
    return [run(look_around(memory, turn), world) for turn in range(LOOKS)]


def test_who_looks_around_sees_that_others_are_at_the_gate() -> None:
    """At the next look or the one after it, because whoever comes to the gate rings."""
    world = World()
    memory = Memory(keys())
    run(restart_record.read(memory), world)
    assert looks(world, memory) == [News()] * LOOKS

    run(publish_incident(keys(), failed()), world)

    assert [news.is_over for news in looks(world, memory)] == [True, False, True, False]


def test_a_look_around_is_one_read_of_one_key() -> None:
    """Whatever there is to see, and whoever has looked how often."""
    world = World()
    memory = Memory(keys())
    run(restart_record.read(memory), world)

    for turn in range(2 * LOOKS):
        task = world.spawn(look_around(memory, turn))
        world.run()
        asked = [e for e in task.performed if not isinstance(e, (fx.Now, fx.Nonce))]
        assert [type(e) for e in asked] == [fx.Get]


@pytest.mark.parametrize("cause", ["charged", "go"])
def test_who_looks_around_sees_what_was_agreed_without_a_bell(cause: str) -> None:
    """Nodes that come are no failure; an agent may have been slow to see them wait."""
    world = World()
    memory = Memory(keys())
    agents(world, 1, is_failure=cause == "charged")
    world.run()
    assert keys().joint("failed", 0) not in world.values

    assert any(news.is_over for news in looks(world, memory))


def test_workers_that_have_told_why_they_leave_are_not_over_yet() -> None:
    """What they save meanwhile has its time: an agent rings once it has seen one end."""
    world = World()

    run(tell_incident(keys(), failed()), world)

    assert looks(world, Memory(keys())) == [News()] * LOOKS


def test_who_looks_around_sees_how_the_job_has_ended() -> None:
    """Also where that came from an agent that never was at the gate."""
    world = World()
    memory, ending = Memory(keys()), Ending(code=86, reason="enough")
    run(restart_record.end(Memory(keys()), ending), world)

    assert ending in [news.ending for news in looks(world, memory)]


def test_an_incident_of_an_earlier_start_is_none_of_this_one() -> None:
    """Its keys have another name."""
    world = World()
    run(publish_incident(keys(1), failed()), world)
    agents(world, 1, 1)

    assert looks(world, Memory(keys(2))) == [News()] * LOOKS


# The record ---------------------------------------------------------------------------------------


def test_a_store_that_came_back_empty_is_told_what_was_seen() -> None:
    """Neither restarts nor the ending are forgotten, whoever asks first."""
    world = World()
    memory = Memory(keys())
    run(publish_incident(keys(), failed()), world)
    run(pass_gate(gate(memory=memory)), world)
    seen = record(world)
    world.values.clear()
    run(restart_record.read(Memory(keys())), world)
    assert record(world).charges == ()

    again = run(restart_record.read(memory), world)

    assert again == record(world)
    assert again.charges == seen.charges
    assert again.epoch > seen.epoch


def test_an_empty_store_is_no_end_of_a_job() -> None:
    """Nor a denial: a new record lets everything through."""
    world = World()

    found = run(restart_record.read(Memory(keys())), world)

    assert (found.ending, found.charges) == (None, ())


class Kept:
    """Shared storage for one record."""

    def __init__(self) -> None:
        self.record: RestartRecord | None = None
        self.error: Exception | None = None

    def mirror(self) -> Mirror:
        """What an agent is given."""
        return Mirror(self.load, self.save, timeout_s=5.0)

    def load(self, token: Any) -> RestartRecord | None:
        """Read it."""
        del token
        if self.error is not None:
            raise self.error
        return self.record

    def save(self, record: RestartRecord, token: Any) -> None:
        """Write it."""
        del token
        if self.error is not None:
            raise self.error
        self.record = record


def test_restarts_outlive_the_launcher_where_they_are_mirrored() -> None:
    """A crash loop in which each start has a new store ends all the same."""
    kept = Kept()
    codes = []
    for number in range(1, 6):
        world = World(seed=number)
        run(publish_incident(keys(number), failed(fingerprint=f"f{number}")), world)
        memory = Memory(keys(number), mirror=kept.mirror())
        result = run(pass_gate(gate(number, memory=memory)), world)
        codes.append(result.code if isinstance(result, Ending) else 0)

    assert codes == [0, 0, 0, 86, 86]
    assert kept.record is not None
    assert kept.record.ending is not None


def test_a_mirror_that_fails_holds_up_nobody() -> None:
    """The store's own record stands without it; that nothing was kept is said each time."""
    kept = Kept()
    kept.error = OSError("away")
    world, mirror = World(), kept.mirror()

    task = world.spawn(pass_gate(gate(memory=Memory(keys(), mirror=mirror))))
    world.run()

    assert isinstance(task.result, GoRecord)
    assert len(record(world).charges) == 1
    assert task.emitted(RestartsNotKept) == [RestartsNotKept(error="OSError: away")] * 2


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "save"])
def test_an_agent_that_is_told_to_stop_at_its_mirror_stops(*, is_load: bool) -> None:
    """What torch's launcher raises for a signal is no failure of the storage."""
    kept, world = Kept(), World()
    told = SignalException("told to stop", signal.SIGTERM)
    mirror = kept.mirror()
    wanted = mirror._load if is_load else mirror._save

    def fault(_task: Task, _index: int, effect: Any) -> Fault | None:
        work = getattr(effect, "work", None)
        return Interrupt(told) if wanted in {work, getattr(work, "func", None)} else None

    world.fault = fault
    task = world.spawn(pass_gate(gate(memory=Memory(keys(), mirror=mirror))))
    world.run()

    assert task.error is told


def test_a_record_that_cannot_be_read_is_an_error_and_not_a_restart() -> None:
    """Nobody knows how many there were."""
    world = World()
    world.values[keys().restarts] = b"{}"

    with pytest.raises(CorruptRecordError):
        run(pass_gate(gate()), world)


@pytest.mark.parametrize("seed", range(10))
def test_agents_that_end_the_job_for_different_reasons_agree_on_one(seed: int) -> None:
    """Whoever is first; nothing replaces it."""
    world = World(seed=seed)
    endings = [Ending(code=code, reason=f"r{code}") for code in (78, 86, 160)]

    tasks = [
        world.spawn(restart_record.end(Memory(keys()), ending), name=name, at_s=0.0)
        for name, ending in enumerate(endings)
    ]
    world.run()

    assert len({task.result for task in tasks}) == 1
    assert tasks[0].result == record(world).ending


def _start(number: int) -> IncarnationRecord:
    return IncarnationRecord(incarnation=f"{number}-n", nodes=2, writer=f"{number}")


def _train(world: World, number: int) -> None:
    run(announce(keys(), _start(number)), world)


@pytest.mark.parametrize("own", [keys(1), Keys(run_id=RUN, incarnation="")], ids=["1-n", "none"])
def test_who_has_no_part_in_the_present_start_leaves_it_alone(own: Keys) -> None:
    """It was cut off, or waits to join: whatever it has met, the others train."""
    world = World()
    _train(world, 2)
    mine = Ending(code=160, reason="not within 600 s")

    found = run(restart_record.end(Memory(own), mine), world)

    assert found == Apart(ending=mine)
    assert record(world).ending is None


@pytest.mark.parametrize("own", [keys(2), Keys(run_id=RUN, incarnation="")], ids=["2-n", "none"])
def test_who_finds_that_the_job_has_ended_leaves_with_that(own: Keys) -> None:
    """Also where it could not have ended it."""
    world = World()
    _train(world, 1)
    first = Ending(code=86, reason="enough")

    assert run(restart_record.end(Memory(keys(1)), first), world) == first
    assert run(restart_record.end(Memory(own), Ending(code=160, reason="late")), world) == first


def test_a_job_that_begins_anew_meanwhile_is_not_ended_for_what_was_before() -> None:
    """The others have charged a loss, and begun, between an agent's look and its word."""
    world = World()
    _train(world, 1)
    run(restart_record.read(Memory(keys(1))), world)
    lost = Closed(incarnation="1-n", cause=Cause.LEFT)

    def overtake(task: Task, at: int, effect: Any) -> Fault | None:
        del task, at
        if isinstance(effect, fx.CompareAndSet):
            found = record(world)
            ruling = quota.charge(CONFIG, found, lost, unchanged_s=0.0, writer="other")
            world.values[keys().restarts] = encode(ruling.record)
            world.values[keys().present] = encode(_start(2))
        return None

    world.fault = overtake
    mine = Ending(code=160, reason="late")
    assert run(restart_record.end(Memory(keys(1)), mine), world) == Apart(ending=mine)
    assert record(world).ending is None


def test_an_agent_that_waits_in_vain_to_join_those_who_train_goes_alone() -> None:
    """They train through the outage that it waits for."""
    world = World()
    _train(world, 1)
    storage = scenes.Dependency(world, heals_at_s=1e9)
    first = Keys(run_id=RUN, incarnation="")
    mine = circuit(keys=first)
    run(begin(mine, new_incarnation=False), world)
    put(world, state="open", epoch=scenes.record(world, keys=first).epoch + 1, generation=1)
    mine.view = None
    needed = Dependency(circuit=mine, patience=patience(storage))

    found = run(pass_first_gate(_first(Memory(first), needed)), world)

    assert isinstance(found, Apart)
    assert found.ending.code == ExitCode.OUTAGE
    assert record(world).ending is None


def test_a_store_that_is_emptied_again_and_again_is_given_up() -> None:
    """The loop is bounded, and says what has happened."""
    world = World()

    def empty(task: Task, at: int, effect: Any) -> Fault | None:
        del task, at
        if isinstance(effect, fx.CompareAndSet) and effect.expected:
            world.values.clear()
        return None

    world.fault = empty
    task = world.spawn(restart_record.end(Memory(keys()), Ending(code=86, reason="r")))
    world.run()

    assert isinstance(task.error, StoreUnavailableError)
    assert "came back empty" in str(task.error)


def test_what_a_restart_costs_is_aged_by_local_sight() -> None:
    """Who has seen the record for an hour adds that hour."""
    world = World()
    memory = Memory(keys(1))
    run(publish_incident(keys(1), failed()), world)
    run(pass_gate(gate(1, memory=memory)), world)

    world.at(world.now_s + 3000.0, lambda: None)
    world.run()
    task = world.spawn(pass_gate(gate(2, memory=_moved(memory, 2))), at_s=3000.0)
    world.run()

    assert isinstance(task.result, GoRecord)
    ages = [each.age_s for each in record(world).charges]
    assert 2900.0 < ages[0] < 3010.0
    assert ages[1] == 0.0


def _moved(memory: Memory, number: int) -> Memory:
    moved = Memory(keys(number))
    moved.seen, moved.sighting = memory.seen, memory.sighting
    return moved


def test_the_first_record_is_what_core_makes() -> None:
    """Nothing is charged to a new job."""
    world = World()
    run(restart_record.read(Memory(keys())), world)

    assert encode(record(world)) == encode(quota.created(writer=record(world).writer))
