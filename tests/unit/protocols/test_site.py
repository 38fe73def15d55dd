# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that share a storage and a site stay away from it together, and none is hurt by the site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lightning_resilience.core.events import (
    BreakerChanged,
    ProbeStarted,
    SiteLost,
    SiteReturned,
    VoteCast,
)
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import BreakerRecord, decode
from lightning_resilience.core.site import SITE_RUN, name_at_site
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin, refresh
from lightning_resilience.protocols.circuit_memory import Link, give_upstream
from lightning_resilience.protocols.probe import Patience, await_passage
from lightning_resilience.protocols.restart import Dependency as Needed, may_grow
from lightning_resilience.protocols.site import heed
from tests.scenes import CONFIG, DEPENDENCY, Dependency, assert_legal, circuit, guarded, record
from tests.scripted_driver import Away, Crash, Fault, Task, World


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerConfig
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Effect, Protocol


SITE = Keys(run_id=SITE_RUN, incarnation="")
SITE_KEY = SITE.breaker(name_at_site(DEPENDENCY))


def keys_of(job: str) -> Keys:
    """Names of a job's keys."""
    return Keys(run_id=job, incarnation="1")


def member_of(job: str, *, looks: bool = True, config: BreakerConfig = CONFIG) -> Circuit:
    """One process's memory of its job's breaker, under that of the site."""
    mine = circuit(keys=keys_of(job), config=config)
    give_upstream(mine, link=Link(), looks=looks)
    return mine


def site(world: World) -> BreakerRecord:
    """The site's record as it is now."""
    return decode(BreakerRecord, world.values[SITE_KEY], key=SITE_KEY)


def of_job(world: World, job: str) -> BreakerRecord:
    """A job's record as it is now."""
    return record(world, keys=keys_of(job))


def rewritten(found: BreakerRecord, **fields: Any) -> bytes:
    """Return a record's bytes, with some fields replaced."""
    return msgspec.json.encode(msgspec.structs.replace(found, writer="operator", **fields))


def asked(task: Task) -> int:
    """How many operations a task has made at the site's store."""
    return sum(isinstance(effect, fx.AtSite) for effect in task.performed)


def away_at_site(_task: Task, _index: int, effect: Effect, *, only: int | None = None) -> Any:
    """The site's store does not answer; with ``only``, one task."""
    strikes = isinstance(effect, fx.AtSite) and only in {None, _task.name}
    return Away() if strikes else None


def calls(mine: Circuit, dependency: Dependency, *, number: int, every_s: float) -> Protocol[None]:
    """Make a guarded call now and then."""
    for _ in range(number):
        yield from guarded(mine, dependency)
        yield fx.Sleep(every_s)


def ill_until(heals_at_s: float, *jobs: str, world: World | None = None) -> Any:
    """A world in which these jobs call a storage that is ill, each once."""
    world = world or World()
    dependency = Dependency(world, heals_at_s=heals_at_s)
    tasks = [
        world.spawn(guarded(member_of(job), dependency), name=name, at_s=world.now_s + name)
        for name, job in enumerate(jobs)
    ]
    return world, dependency, tasks


def test_a_healthy_job_reads_the_sites_record_once_per_view() -> None:
    """Calls within ``view_max_age_s`` ask the site once, and the first creates its record."""
    world = World()
    task = world.spawn(calls(member_of("a"), Dependency(world), number=20, every_s=0.1))
    world.run()
    first = asked(task)

    later = world.spawn(calls(member_of("b"), Dependency(world), number=20, every_s=0.1))
    world.run()

    assert first == 4, "a read, the store, the record, and whether they belong together"
    assert asked(later) == 1


def test_a_job_that_does_not_call_asks_nothing_of_the_site() -> None:
    """There is no polling: an hour between two calls costs one read."""
    world = World()
    world.spawn(calls(member_of("b"), Dependency(world), number=1, every_s=0.0))
    world.run()
    task = world.spawn(calls(member_of("a"), Dependency(world), number=2, every_s=3600.0))
    world.run()

    assert asked(task) == 2


def test_a_process_that_does_not_look_for_its_job_asks_nothing_while_all_is_well() -> None:
    """One process of a job looks, and not each of thousands."""
    world = World()
    mine = member_of("a", looks=False)
    task = world.spawn(calls(mine, Dependency(world), number=5, every_s=60.0))
    world.run()

    assert asked(task) == 0


def test_a_job_that_is_ill_alone_votes_and_opens_nothing_above_it() -> None:
    """Its vote stands at the site, which stays closed; it probes and comes back by itself."""
    world, dependency, (task,) = ill_until(25.0, "a")
    world.run()

    assert task.result.value == "done"
    assert site(world).state == "closed"
    assert site(world).votes == ("a",)
    assert len(dependency.probes) == 2
    assert "open" in [entry.state for entry in of_job(world, "a").history]
    assert task.emitted(VoteCast)


def test_a_job_withdraws_its_vote_with_the_first_call_after_its_recovery() -> None:
    """A vote says that the job's circuit is open now."""
    world, dependency, _ = ill_until(25.0, "a")
    world.run()
    world.spawn(guarded(member_of("a"), dependency))
    world.run()

    assert site(world).votes == ()


@pytest.mark.parametrize("seed", range(8))
def test_two_jobs_that_are_ill_open_the_sites_circuit_and_a_third_is_held(seed: int) -> None:
    """The third has seen no failure of its own, and its first call waits without being made."""
    world, dependency, _ = ill_until(90.0, "a", "b", world=World(seed=seed))
    healthy = Dependency(world)
    third = world.spawn(guarded(member_of("c"), healthy), name=2, at_s=60.0)

    world.run(limit_s=300)

    assert "open" in [entry.state for entry in site(world).history]
    assert of_job(world, "c").history[1].reason.startswith("the circuit of the site is open")
    assert third.ended_at_s is not None
    assert healthy.calls[0] > 60.0
    for job in "abc":
        assert_legal(of_job(world, job))
    assert_legal(site(world))
    assert dependency.calls


@pytest.mark.parametrize("seed", range(8))
def test_while_the_sites_circuit_is_open_only_its_own_probe_reaches_storage(seed: int) -> None:
    """Of three jobs at most one probe is under way, and each has an epoch of the site's record."""
    world, dependency, tasks = ill_until(150.0, "a", "b", "c", world=World(seed=seed))

    world.run(limit_s=400)

    opened_at_s = min(
        at_s
        for task in tasks
        for at_s, event in task.events
        if isinstance(event, BreakerChanged) and event.dependency.endswith("@site")
    )
    sites = [event for task in tasks for event in task.emitted(ProbeStarted)]
    epochs = [event.epoch for event in sites if event.dependency.endswith("@site")]
    probes = [start for start, _ in dependency.probes if opened_at_s < start < 150.0]
    assert len(set(epochs)) == len(epochs)
    assert len(probes) <= len(epochs) + 1, "one may have been under way"
    assert dependency.most_probes_at_once() <= 2
    assert all(task.result.value == "done" for task in tasks)


@pytest.mark.parametrize("seed", range(8))
def test_all_jobs_are_back_within_the_waits_after_their_storage(seed: int) -> None:
    """The site's longest open wait, twice where a job passes over, and each job's own look."""
    heals_at_s = 200.0
    world, _, tasks = ill_until(heals_at_s, "a", "b", "c", world=World(seed=seed))

    world.run(limit_s=heals_at_s + 3 * CONFIG.max_open_for_s + 4 * CONFIG.open_for_s)

    assert all(task.result.value == "done" for task in tasks)
    assert site(world).state == "closed"


def test_a_vote_of_a_job_that_has_died_is_no_evidence() -> None:
    """An hour later another job trips: the site stays closed, and the old vote lapses."""
    world, _, _ = ill_until(25.0, "dead")
    world.run()
    world.now_s += 3600.0
    heals_at_s = world.now_s + 1000.0
    dependency = Dependency(world, heals_at_s=heals_at_s)
    task = world.spawn(calls(member_of("b"), dependency, number=2, every_s=60.0))

    world.run(limit_s=heals_at_s + 300.0)

    assert task.error is None
    assert [entry.state for entry in site(world).history] == ["closed"]
    assert "dead" not in site(world).votes


@pytest.mark.parametrize("seed", range(4))
def test_a_site_whose_store_is_away_hurts_no_job(seed: int) -> None:
    """Each job trips, probes and comes back by itself, and says once that its site is lost."""
    world, _, tasks = ill_until(40.0, "a", "b", world=World(seed=seed, fault=away_at_site))

    world.run(limit_s=40.0 + CONFIG.max_open_for_s)

    for task in tasks:
        assert task.result.value == "done"
        assert len(task.emitted(SiteLost)) == 1
        assert task.emitted(SiteReturned) == []
        assert asked(task) <= 8
    assert SITE_KEY not in world.values


def test_a_site_that_is_lost_while_it_holds_a_job_lets_it_go() -> None:
    """At its next look the job is told nothing, and probes for itself."""
    lost = [False]

    def strike(_task: Task, _index: int, effect: Effect) -> Fault | None:
        return Away() if lost[0] and isinstance(effect, fx.AtSite) else None

    world, _, _ = ill_until(1e6, "a", "b", world=World(fault=strike))
    healthy = Dependency(world)
    third = world.spawn(guarded(member_of("c"), healthy), name=2, at_s=60.0)
    world.at(65.0, lambda: lost.__setitem__(0, True))

    while not third.ended:
        world.run_until(world.now_s + 1.0)
        assert world.now_s < 65.0 + 3 * CONFIG.open_for_s

    assert third.result.value == "done"
    assert of_job(world, "c").state == "recovering"


def test_a_site_that_answers_again_is_asked_again_and_named() -> None:
    """The job says for how long it was without."""
    ends_at_s = 30.0

    def strike(_task: Task, _index: int, effect: Effect) -> Fault | None:
        return Away() if isinstance(effect, fx.AtSite) and world.now_s < ends_at_s else None

    world = World(fault=strike)
    task = world.spawn(calls(member_of("a"), Dependency(world), number=20, every_s=6.0))
    world.run()

    assert len(task.emitted(SiteLost)) == 1
    (returned,) = task.emitted(SiteReturned)
    assert returned.lost_for_s >= ends_at_s
    assert site(world).state == "closed"


def test_something_else_in_the_sites_record_is_a_site_that_is_lost() -> None:
    """Bytes that are no record stop nobody and are left alone."""
    world = World()
    world.values[SITE_KEY] = b"something else"
    task = world.spawn(calls(member_of("a"), Dependency(world), number=3, every_s=60.0))
    world.run()

    assert task.error is None
    assert len(task.emitted(SiteLost)) == 1
    assert world.values[SITE_KEY] == b"something else"


@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_dies_with_the_sites_probe_is_replaced(seed: int) -> None:
    """Its claim is a lease: another job takes over, and all the others come back."""
    died: list[int] = []

    def strike(task: Task, _index: int, effect: Effect) -> Fault | None:
        is_sites = any(event.dependency.endswith("@site") for event in task.emitted(ProbeStarted))
        if isinstance(effect, fx.Call) and is_sites and not died:
            died.append(task.name)
            return Crash()
        return None

    world, _, tasks = ill_until(100.0, "a", "b", "c", world=World(seed=seed, fault=strike))

    world.run(limit_s=500)

    assert died
    assert [task.result.value for task in tasks if not task.crashed] == ["done", "done"]
    assert site(world).state == "closed"


@pytest.mark.parametrize("seed", range(6))
def test_a_job_with_a_broken_link_does_not_keep_the_others_from_their_storage(seed: int) -> None:
    """Its probes for the site fail; another job's is sent, and the site closes."""
    world = World(seed=seed)
    shared, broken = Dependency(world, heals_at_s=60.0), Dependency(world, heals_at_s=1e6)
    world.spawn(guarded(member_of("broken"), broken), name=9)
    tasks = [
        world.spawn(guarded(member_of(job), shared), name=name, at_s=1.0 + name)
        for name, job in enumerate("bc")
    ]

    while not all(task.ended for task in tasks):
        world.run_until(world.now_s + 1.0)
        assert world.now_s < 60.0 + 6 * CONFIG.max_open_for_s

    assert all(task.result.value == "done" for task in tasks)


def test_an_operator_holds_the_site_and_no_probe_lets_a_job_through() -> None:
    """What a person has forced open only a person lets go."""
    world, dependency, _ = ill_until(0.0, "a")
    world.run()
    held = decode(BreakerRecord, world.values[SITE_KEY], key=SITE_KEY)
    fields = {"state": "forced_open", "epoch": held.epoch + 1, "generation": 1, "limit": 0}
    world.values[SITE_KEY] = rewritten(held, **fields)
    made = len(dependency.calls)
    task = world.spawn(guarded(member_of("a"), dependency), at_s=world.now_s + 60.0)

    world.run_until(world.now_s + 1000.0)

    assert not task.ended
    assert len(dependency.calls) == made
    assert dependency.probes == []
    assert site(world).state == "forced_open"


def test_what_waits_before_a_start_heeds_the_site() -> None:
    """An agent looks, finds the site open, and waits behind its own job's circuit."""
    world, _, _ = ill_until(1e6, "a", "b")
    world.run_until(60.0)
    assert site(world).state != "closed"
    mine, dependency = member_of("c"), Dependency(world)

    def gate() -> Protocol[Any]:
        yield from begin(mine, new_incarnation=False)
        yield from heed(mine)
        patience = Patience(probe=dependency.probe, classify=classify)
        deadline_at_s = (yield fx.Now()) + 40.0
        return (
            yield from await_passage(
                mine, patience, operation="restart", deadline_at_s=deadline_at_s
            )
        )

    task = world.spawn(gate(), name=2)
    world.run_until(world.now_s + 5.0)

    assert not task.ended
    assert of_job(world, "c").upstream


def test_a_sick_reader_of_old_news_does_not_withdraw_the_vote_of_its_job() -> None:
    """Another process has opened the job's circuit meanwhile, and voted."""
    world = World()
    stale = member_of("a")
    world.spawn(guarded(stale, Dependency(world)))
    world.run()
    world, _, _ = ill_until(1e6, "a", world=world)
    world.run_until(world.now_s + 8.0)
    assert site(world).votes == ("a",)

    task = world.spawn(heed(stale), name=5)
    world.run_until(world.now_s + 0.5)

    assert task.ended
    assert site(world).votes == ("a",)


def test_whoever_lets_no_nodes_in_opens_nothing_that_nobody_waits_for() -> None:
    """An agent whose workers are well says "not now", and their circuit stays as it is."""
    world, _, _ = ill_until(1e6, "a", "b")
    world.run_until(60.0)
    assert site(world).state != "closed"
    mine, other = member_of("c"), Dependency(world)
    needed = Needed(circuit=mine, patience=Patience(probe=other.probe, classify=classify))

    task = world.spawn(may_grow((needed,)), name=5)
    world.run_until(world.now_s + 1.0)

    assert task.result is False
    assert of_job(world, "c").state == "closed"


def closed_after_both(world: World) -> Circuit:
    """A process of a third job that has last seen the site open, and not called since."""
    stale = member_of("c")
    task = world.spawn(heed(stale), name=5)
    world.run_until(world.now_s + 1.0)
    assert task.ended
    assert stale.upstream is not None
    assert stale.upstream.circuit.view is not None
    assert stale.upstream.circuit.view.record.state != "closed"
    world.run(limit_s=500)
    assert site(world).state == "closed"
    return stale


@pytest.mark.parametrize("is_made_by_another", [False, True])
def test_old_news_of_a_store_that_is_no_more_opens_nothing(*, is_made_by_another: bool) -> None:
    """Whoever comes with it a day later finds, or makes, a circuit that is closed."""
    world, dependency, _ = ill_until(90.0, "a", "b")
    world.run_until(60.0)
    stale = closed_after_both(world)
    for key in [key for key in world.values if key.startswith(f"lr/{SITE_RUN}/")]:
        del world.values[key]
    world.now_s += 86400.0
    if is_made_by_another:
        world.spawn(guarded(member_of("fresh"), dependency))
        world.run(limit_s=1e5)

    begins_at_s = world.now_s
    task = world.spawn(calls(stale, dependency, number=2, every_s=60.0), name=6)
    world.run(limit_s=1e5)

    assert task.error is None
    last = site(world).history[-1]
    assert last.state == "closed"
    assert last.reason.startswith(("created", "rebuilt"))
    assert task.ended_at_s is not None
    assert task.ended_at_s - begins_at_s < 125.0


def test_what_an_operator_holds_open_is_rebuilt_where_the_store_was_lost() -> None:
    """Also where somebody who knew nothing of it was faster."""
    world, dependency, _ = ill_until(0.0, "a")
    world.run()
    held = decode(BreakerRecord, world.values[SITE_KEY], key=SITE_KEY)
    fields = {"state": "forced_open", "epoch": held.epoch + 1, "generation": 1, "limit": 0}
    world.values[SITE_KEY] = rewritten(held, **fields)
    witness = member_of("c")
    world.spawn(guarded(witness, dependency), name=5)
    world.run_until(world.now_s + 1.0)
    for key in [key for key in world.values if key.startswith(f"lr/{SITE_RUN}/")]:
        del world.values[key]
    world.spawn(guarded(member_of("fresh"), dependency), name=6)

    world.run_until(world.now_s + 60.0)

    assert site(world).state == "forced_open"


def test_a_call_looks_at_the_site_where_another_has_closed_the_circuit_that_it_found_open() -> None:
    """Its own last view was open, so it had left the look to whoever was to probe."""
    world, _, _ = ill_until(1e6, "a", "b")
    world.run_until(30.0)
    stale, well = member_of("c"), Dependency(world)
    world.spawn(begin(stale, new_incarnation=False), name=5)
    world.run_until(world.now_s + 0.5)
    before = of_job(world, "c")
    world.values[stale.key] = rewritten(before, state="open", epoch=2, generation=1, limit=0)
    world.spawn(refresh(stale), name=6)
    world.run_until(world.now_s + 0.5)
    world.values[stale.key] = rewritten(before, epoch=5, generation=1)
    world.run_until(60.0)
    assert site(world).state != "closed"

    task = world.spawn(guarded(stale, well), name=7)
    world.run_until(world.now_s + 5.0)

    assert not task.ended
    assert well.calls == []
    assert of_job(world, "c").upstream


@pytest.mark.parametrize("is_away", [False, True])
def test_nodes_are_let_in_where_nothing_is_known_of_the_site(*, is_away: bool) -> None:
    """A site that is well, or cannot be asked, stops no growth."""
    world = World(fault=away_at_site) if is_away else World()
    mine = member_of("c")
    needed = Needed(
        circuit=mine, patience=Patience(probe=Dependency(world).probe, classify=classify)
    )

    task = world.spawn(may_grow((needed,)))
    world.run()

    assert task.result is True
