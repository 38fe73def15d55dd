# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One process reads, changes and reports to the breaker's shared record."""

from __future__ import annotations

import pytest

from lightning_resilience.core.breaker import BreakerConfig, ForcedOpen, HostVoted, ProbeClaimed
from lightning_resilience.core.breaker_record import rebuilt
from lightning_resilience.core.events import BreakerChanged, RecordVanished, VoteCast
from lightning_resilience.core.outcome import OK, FailureClass, Outcome
from lightning_resilience.core.records import StoreIdRecord, decode, encode
from lightning_resilience.errors import CorruptRecordError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import (
    Circuit,
    apply,
    apply_to,
    begin,
    current,
    learn,
    refresh,
    report,
)
from tests.scenes import CONFIG, DEPENDENCY, KEYS, assert_legal, circuit, put, record, states
from tests.scripted_driver import Lost, Task, World, run


TRANSIENT = Outcome(failure=FailureClass.TRANSIENT, error="ConnectionResetError: reset")


def begun(world: World, mine: Circuit, *, name: int = 0) -> Circuit:
    """Let a process make its first read."""
    run(begin(mine, new_incarnation=False), world, name=name)
    return mine


def fail(world: World, mine: Circuit, times: int = 1, *, name: int = 0) -> None:
    """Report failed attempts."""
    for _ in range(times):
        view = run(current(mine), world, name=name)
        run(report(mine, TRANSIENT, epoch=view.record.epoch), world, name=name)


def pass_time(world: World, duration_s: float) -> None:
    """Let virtual time pass."""

    def wait() -> fx.Protocol[None]:
        yield fx.Sleep(duration_s)

    run(wait(), world)


def test_the_first_read_creates_a_closed_record() -> None:
    """Where nobody has been, the record is created: closed, epoch 1, of this store."""
    world = World()

    view = run(refresh(circuit()), world)

    assert (view.record.state, view.record.epoch) == ("closed", 1)
    assert record(world) == view.record
    assert KEYS.store_id in world.values


@pytest.mark.parametrize("seed", range(10))
def test_processes_that_come_together_agree_on_one_record(seed: int) -> None:
    """All who create at once end with the bytes of one of them."""
    world = World(seed=seed)
    tasks = [world.spawn(refresh(circuit()), name=name) for name in range(8)]

    world.run()

    assert {task.result.raw for task in tasks} == {world.values[KEYS.breaker(DEPENDENCY)]}
    assert len({task.result.record.store_id for task in tasks}) == 1


def test_a_fresh_closed_view_costs_no_read() -> None:
    """Under a fresh view nothing reaches for the store; past its age one read does."""
    world = World()
    mine = begun(world, circuit())

    young = world.spawn(current(mine))
    world.run()
    pass_time(world, CONFIG.view_max_age_s)
    old = world.spawn(current(mine))
    world.run()

    assert young.store_operations() == 0
    assert old.store_operations() == 1


def test_age_counts_from_when_the_read_was_sent() -> None:
    """A read that took long is as old as its question, not as its answer."""
    world = World()
    mine = begun(world, circuit())

    assert mine.view is not None
    assert mine.view.read_at_s <= mine.view.sighting.first_seen_at_s
    assert mine.view.read_at_s == pytest.approx(0.0)


def test_a_read_that_was_overtaken_changes_nothing() -> None:
    """A thread whose answer comes late does not put back what another has seen since."""
    world = World()
    mine = begun(world, circuit())
    assert mine.view is not None
    old = mine.view.raw
    fail(world, mine, CONFIG.trip_failures)
    opened = mine.view

    found = learn(mine, old, read_at_s=0.0, seen_at_s=world.now_s)

    assert found is opened
    assert mine.view is opened
    assert mine.view.record.state == "open"


def test_a_store_that_came_back_empty_is_rebuilt_at_a_higher_epoch() -> None:
    """The last state that was seen is created again, one epoch later, and it is reported."""
    world = World()
    mine = begun(world, circuit())
    fail(world, mine, 3)
    before = record(world)
    world.values.clear()

    task = world.spawn(refresh(mine))
    world.run()

    after = task.result.record
    assert (before.state, after.state) == ("open", "open")
    assert after.epoch == before.epoch + 1
    assert after.store_id != before.store_id
    assert task.emitted(RecordVanished) == [
        RecordVanished(key=KEYS.breaker(DEPENDENCY), epoch=before.epoch)
    ]


def test_empty_is_never_read_as_open() -> None:
    """A closed circuit stays closed when the store loses everything."""
    world = World()
    mine = begun(world, circuit())
    world.values.clear()

    view = run(refresh(mine), world)

    assert view.record.state == "closed"
    assert "open" not in states(world)


def test_a_probe_that_the_store_forgot_is_over() -> None:
    """HALF_OPEN is rebuilt as OPEN: nobody can settle that permit any more."""
    world = World()
    mine = begun(world, circuit())
    put(world, state="half_open", epoch=5, holder="n99")
    run(refresh(mine), world)
    world.values.clear()

    view = run(refresh(mine), world)

    assert (view.record.state, view.record.holder, view.record.epoch) == ("open", "", 6)


def test_a_change_of_a_vanished_record_is_not_believed() -> None:
    """A vote meets an empty store: the record is rebuilt, and nobody is told that it counted."""
    world = World()
    mine = begun(world, circuit(hosts=4))
    epoch = record(world).epoch
    world.values.clear()

    run(apply(mine, HostVoted(host="host", hosts=4, reason="x")), world)

    assert record(world).votes == ()
    assert record(world).epoch == epoch + 1


def test_who_saw_a_higher_epoch_overrules_a_rebuild() -> None:
    """The store came back, somebody who knew less rebuilt it; who saw more writes over it."""
    world = World()
    behind, ahead = begun(world, circuit()), begun(world, circuit())
    fail(world, ahead, 3)
    put(world, state="open", epoch=7)
    run(refresh(ahead), world)
    world.values.clear()
    run(refresh(behind), world)
    assert (record(world).state, record(world).epoch) == ("closed", 2)

    run(refresh(ahead), world)
    view = run(refresh(behind), world)

    assert (view.record.state, view.record.epoch) == ("open", 8)


def lost_store(world: World, *, state: str = "open") -> tuple[Circuit, Circuit]:
    """Two processes, one of which has seen more; then the store came back empty."""
    behind, ahead = begun(world, circuit()), begun(world, circuit())
    put(world, state=state, epoch=7)
    run(refresh(ahead), world)
    world.values.clear()
    return behind, ahead


def test_who_saw_a_higher_epoch_overrules_whoever_is_faster() -> None:
    """Both find nothing, and the one that knew less creates the record first."""
    world = World()
    behind, ahead = lost_store(world)
    key = KEYS.breaker(DEPENDENCY)

    def behind_is_faster(_task: Task, _index: int, effect: fx.Effect) -> None:
        if isinstance(effect, fx.CompareAndSet) and effect.key == key and key not in world.values:
            world.fault = lambda *_: None
            store_id = decode(StoreIdRecord, world.values[KEYS.store_id], key="").store_id
            assert behind.view is not None
            less = rebuilt(behind.view.record, store_id=store_id, writer="behind")
            world.values[key] = encode(less)

    world.fault = behind_is_faster
    view = run(refresh(ahead), world)

    assert (view.record.state, view.record.epoch) == ("open", 8)
    assert record(world) == view.record


def test_who_saw_a_higher_epoch_overrules_before_it_votes() -> None:
    """A vote meets what somebody who knew less has rebuilt: it does not make that the truth."""
    world = World()
    behind, ahead = lost_store(world, state="closed")
    run(refresh(behind), world)

    view = run(apply(ahead, HostVoted(host="host", hosts=1, reason="x")), world)

    assert (view.record.state, view.record.epoch) == ("closed", 8)
    assert record(world) == view.record


def test_who_saw_a_higher_epoch_overrules_when_its_claim_fails() -> None:
    """A claim meets what somebody who knew less has rebuilt: the trip is not forgotten."""
    world = World()
    behind, ahead = lost_store(world)
    run(refresh(behind), world)
    assert ahead.view is not None

    won = run(apply_to(ahead, ahead.view, ProbeClaimed(holder="mine", unchanged_s=99.0)), world)

    assert not won
    assert ahead.view.record == record(world)
    assert (record(world).state, record(world).epoch) == ("open", 8)


def test_a_higher_epoch_of_the_new_store_is_accepted() -> None:
    """Who saw less accepts what it finds, although the store is another."""
    world = World()
    mine = begun(world, circuit())
    put(world, store_id="another", epoch=9, state="open")

    view = run(refresh(mine), world)

    assert (view.record.epoch, view.record.state) == (9, "open")


def test_enough_failures_of_one_host_trip_a_job_of_one_host() -> None:
    """trip_failures in a row make the vote, and with one host the vote is the quorum."""
    world = World()
    mine = begun(world, circuit())

    fail(world, mine, CONFIG.trip_failures - 1)
    before = record(world).state
    fail(world, mine)

    assert (before, record(world).state) == ("closed", "open")
    assert_legal(record(world))


def test_one_host_of_many_does_not_trip_the_job() -> None:
    """A host with a broken link casts one vote, however often it fails."""
    world = World()
    mine = begun(world, circuit("lonely", hosts=8))

    fail(world, mine, 20)

    assert record(world).state == "closed"
    assert record(world).votes == ("lonely",)


def test_ranks_of_one_host_have_one_vote() -> None:
    """Two ranks on the same host are no quorum of two hosts."""
    world = World()
    ranks = [begun(world, circuit("same", hosts=8)) for _ in range(2)]

    for mine in ranks:
        fail(world, mine, 3)

    assert record(world).state == "closed"
    assert record(world).votes == ("same",)


def test_a_quorum_of_hosts_trips_in_one_transition() -> None:
    """The vote that completes the quorum opens the circuit, for everybody at the same epoch."""
    world = World()
    hosts = [begun(world, circuit(f"host{number}", hosts=8)) for number in range(3)]

    fail(world, hosts[0], 3)
    fail(world, hosts[1], 3)
    views = [run(refresh(mine), world) for mine in hosts]

    assert {(view.record.state, view.record.epoch) for view in views} == {("open", 2)}
    assert record(world).votes == ()


def test_who_is_listed_writes_nothing_more() -> None:
    """Further failures of a host whose vote stands only read."""
    world = World()
    mine = begun(world, circuit(hosts=8))
    fail(world, mine, 3)
    raw = world.values[KEYS.breaker(DEPENDENCY)]

    fail(world, mine, 5)

    assert world.values[KEYS.breaker(DEPENDENCY)] == raw


def test_a_vote_is_reported_once() -> None:
    """The event of a vote says how many have voted and how many must."""
    world = World()
    mine = begun(world, circuit(hosts=8))
    fail(world, mine, 2)
    task = world.spawn(report(mine, TRANSIENT, epoch=1))

    world.run()

    assert task.emitted(VoteCast) == [
        VoteCast(dependency=DEPENDENCY, host="host", votes=1, quorum=2)
    ]


def test_a_success_withdraws_the_vote() -> None:
    """A host whose latest result is a success no longer says that the dependency is ill."""
    world = World()
    mine = begun(world, circuit(hosts=8))
    fail(world, mine, 3)

    run(report(mine, OK, epoch=1), world)

    assert record(world).votes == ()


def test_a_success_under_a_closed_circuit_costs_nothing() -> None:
    """Where there is no vote to withdraw, a success reaches for nothing."""
    world = World()
    mine = begun(world, circuit())
    task = world.spawn(report(mine, OK, epoch=1))

    world.run()

    assert task.store_operations() == 0


def test_anybody_drops_a_vote_that_has_not_changed_for_the_window() -> None:
    """A host that died with its vote standing does not hold it for ever."""
    world = World()
    voter, observer = begun(world, circuit("dead", hosts=8)), begun(world, circuit("b", hosts=8))
    fail(world, voter, 3)
    run(refresh(observer), world)

    pass_time(world, CONFIG.window_s - 1)
    run(refresh(observer), world)
    before = record(world).votes
    pass_time(world, 2)
    run(refresh(observer), world)

    assert (before, record(world).votes) == (("dead",), ())


def test_a_vote_is_timed_on_the_observers_own_sight() -> None:
    """Who looks for the first time after an hour waits a whole window before it drops a vote."""
    world = World()
    voter = begun(world, circuit("a", hosts=8))
    fail(world, voter, 3)
    pass_time(world, 3600)

    run(refresh(circuit("late", hosts=8)), world)

    assert record(world).votes == ("a",)


def test_old_failures_and_new_ones_make_no_vote() -> None:
    """Failures further apart than the window are not in a row."""
    world = World()
    mine = begun(world, circuit())

    fail(world, mine, 2)
    pass_time(world, CONFIG.window_s + 1)
    fail(world, mine, 2)

    assert record(world).state == "closed"


def test_failures_from_before_an_outage_do_not_count_after_it() -> None:
    """Results of one epoch change nothing in a later one, also if the outage went unseen here."""
    world = World()
    mine = begun(world, circuit())
    fail(world, mine, 2)
    put(world, state="closed", epoch=9)

    fail(world, mine, 2)

    assert record(world).state == "closed"


@pytest.mark.parametrize(
    "failure", [FailureClass.PERMANENT, FailureClass.AUTH, FailureClass.CAPACITY]
)
def test_failures_that_say_nothing_about_health_never_trip(failure: FailureClass) -> None:
    """Refused, expired, full: the caller's problem, not the dependency's."""
    world = World()
    mine = begun(world, circuit())

    for _ in range(20):
        run(report(mine, Outcome(failure=failure, error="x"), epoch=1), world)

    assert (record(world).state, record(world).votes) == ("closed", ())


def test_a_new_incarnation_begins_without_votes() -> None:
    """Votes of the incarnation before say nothing about this one."""
    world = World()
    fail(world, begun(world, circuit("old", hosts=8)), 3)

    run(begin(circuit("new", hosts=8), new_incarnation=True), world)

    assert record(world).votes == ()


def test_the_ramp_doubles_to_the_limit_and_closes() -> None:
    """While recovering, each success of the epoch doubles the limit; at the limit: closed."""
    world = World()
    mine = begun(world, circuit())
    put(world, state="recovering", epoch=5, limit=1)
    run(refresh(mine), world)

    limits = []
    while record(world).state == "recovering":
        limits.append(record(world).limit)
        assert mine.view is not None
        run(report(mine, OK, epoch=mine.view.record.epoch), world)

    assert limits == [1, 2, 4, 8]
    assert (record(world).state, record(world).limit) == ("closed", CONFIG.max_concurrent)


def test_a_result_of_an_epoch_that_is_over_changes_nothing() -> None:
    """A call that was admitted before the ramp moved neither doubles nor halves it."""
    world = World()
    mine = begun(world, circuit())
    put(world, state="recovering", epoch=5, limit=4)
    run(refresh(mine), world)
    raw = world.values[KEYS.breaker(DEPENDENCY)]

    run(report(mine, OK, epoch=4), world)
    run(report(mine, TRANSIENT, epoch=4), world)

    assert world.values[KEYS.breaker(DEPENDENCY)] == raw


def test_a_failed_ramp_opens_for_twice_as_long() -> None:
    """A failure at the ramp's start leaves nothing to halve: open again, in a new generation."""
    world = World()
    mine = begun(world, circuit())
    before = put(world, state="recovering", epoch=5, limit=1, generation=1)
    run(refresh(mine), world)

    run(report(mine, TRANSIENT, epoch=5), world)

    after = record(world)
    assert (after.state, after.open_s) == ("open", 2 * before.open_s)
    assert after.generation == before.generation + 1


def test_after_a_failure_the_next_call_reads_again() -> None:
    """A fresh view needs that no call has failed since."""
    world = World()
    mine = begun(world, circuit())
    fail(world, mine)
    task = world.spawn(current(mine))

    world.run()

    assert task.store_operations() == 1


def test_a_record_that_does_not_decode_is_reported_and_left_alone() -> None:
    """Garbage under the breaker's key is an error that names the key, never a guess."""
    world = World()
    mine = begun(world, circuit())
    world.values[KEYS.breaker(DEPENDENCY)] = b"garbage"

    with pytest.raises(CorruptRecordError, match="breaker"):
        run(refresh(mine), world)

    assert world.values[KEYS.breaker(DEPENDENCY)] == b"garbage"


def test_a_trip_whose_answer_was_lost_is_found_by_the_next_read() -> None:
    """The voter is told of the failure; the trip stands, once."""
    world = World()
    mine = begun(world, circuit())
    fail(world, mine, 2)
    world.fault = lambda _task, _index, effect: (
        Lost() if isinstance(effect, fx.CompareAndSet) else None
    )
    task = world.spawn(report(mine, TRANSIENT, epoch=1))
    world.run()
    world.fault = lambda _task, _index, _effect: None

    view = run(refresh(mine), world)

    assert task.error is not None
    assert (view.record.state, view.record.epoch) == ("open", 2)


def test_keys_of_old_trips_are_removed() -> None:
    """However often the circuit trips, the number of keys does not grow."""
    world = World()
    mine = begun(world, circuit(config=BreakerConfig(ramp_start=16)))
    counts = []
    for _ in range(20):
        fail(world, mine, 3)
        generation = record(world).generation
        world.values[KEYS.waiting(DEPENDENCY, generation)] = b"3"
        world.values[KEYS.bell(DEPENDENCY, generation)] = b"1"
        put(world, state="closed", epoch=record(world).epoch + 3)
        run(refresh(mine), world)
        counts.append(len(world.values))

    assert max(counts[5:]) == counts[5]


def test_only_the_winner_reports_a_transition() -> None:
    """Eight processes force the same change; one event says that it happened."""
    world = World(seed=1)
    ranks = [begun(world, circuit()) for _ in range(8)]
    tasks = [
        world.spawn(apply(mine, ForcedOpen(reason="maintenance")), name=name)
        for name, mine in enumerate(ranks)
    ]

    world.run()

    assert sum(len(task.emitted(BreakerChanged)) for task in tasks) == 1
    assert {task.result.record.state for task in tasks} == {"forced_open"}


def test_a_long_outage_does_not_make_a_circuit_inherited() -> None:
    """Who has seen calls pass once knows it after any number of failed probes."""
    world = World()
    mine = begun(world, circuit())

    for epoch in range(2, 102, 2):
        put(world, state="open", epoch=epoch)
        run(refresh(mine), world)
        put(world, state="half_open", epoch=epoch + 1, holder="n")
        run(refresh(mine), world)

    assert not mine.inherited


def test_a_circuit_that_was_never_seen_to_pass_is_inherited() -> None:
    """A restarted process finds the circuit open, until it has seen it let calls through."""
    world = World()
    begun(world, circuit())
    put(world, state="open", epoch=2)
    mine = begun(world, circuit())

    before = mine.inherited
    put(world, state="recovering", epoch=4, limit=1)
    run(refresh(mine), world)

    assert (before, mine.inherited) == (True, False)
