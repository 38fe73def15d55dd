# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs that start again and again: one trouble at any place, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.drill import restart_world
from lightning_resilience.drill.job_kinds import RESTARTS
from lightning_resilience.drill.restart_plan import Fate, FateKind, RestartPlan
from lightning_resilience.drill.scenario import (
    Crash,
    Outage,
    Pause,
    Store,
    StoreGone,
    StorePartition,
)


if TYPE_CHECKING:
    from lightning_resilience.drill.job_sweep import JobRun


FAILS = Fate(kind=FateKind.ERROR, after_s=5.0, echo_s=0.3)
BASE = RestartPlan(least=2, fates=(FAILS,))


def well(plan: RestartPlan, seed: int = 0) -> JobRun[RestartPlan]:
    """Run a plan in which every promise has to be kept."""
    run = RESTARTS.of_plan(plan, seed)
    assert not run.check, "\n".join(RESTARTS.told(run))
    return run


def test_who_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bound passes, the failure says who is still there, and where."""
    monkeypatch.setattr(restart_world, "_START_S", 0.5)

    run = RESTARTS.of_plan(BASE)

    assert run.check == "I3 RestartsEnd"
    assert "agent 0 at: " in run.what


# One trouble at any place -------------------------------------------------------------------------

EFFECTS = 90
"""More than an agent performs from its beginning to its second start."""


@pytest.mark.parametrize("fate", [FAILS, Fate(kind=FateKind.KILLED, after_s=5.0)], ids=str)
@pytest.mark.parametrize("least", [1, 2])
def test_an_agent_that_is_killed_anywhere_breaks_no_promise(fate: Fate, least: int) -> None:
    """Before each effect that it performs; another one comes in its place."""
    plan = RestartPlan(least=least, fates=(fate,), launches=1)
    for effects in range(1, EFFECTS):
        crash = Crash(at_s=0.0, ranks=(0,), effects=effects)
        arrivals = (*plan.arrivals, (0, 40.0), (0, 80.0))
        run = well(replace(plan, faults=(crash,), arrivals=arrivals))
        assert 0 in run.statuses


@pytest.mark.parametrize("for_s", [8.0, 60.0])
def test_an_agent_that_stands_still_anywhere_breaks_no_promise(for_s: float) -> None:
    """For shorter and for longer than until it is taken for gone."""
    for effects in range(1, EFFECTS):
        pause = Pause(at_s=0.0, ranks=(0,), effects=effects, for_s=for_s)
        run = well(replace(BASE, least=1, faults=(pause,)))
        assert 0 in run.statuses


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_comes_back_empty_at_any_time_breaks_no_promise(seed: int) -> None:
    """Whoever lives tells it what there was."""
    for at in range(1, 40):
        gone = StoreGone(at_s=0.5 * at, for_s=2.0, comes_back_empty=True)
        run = well(replace(BASE, faults=(gone,)), seed)
        assert 0 in run.statuses


# A round that is given up ---------------------------------------------------------------------

THREE = RestartPlan(nodes=3, least=2, arrivals=((0, 0.0), (1, 0.0), (2, 0.0)))
LONG = Fate(after_s=300.0)
NO_QUOTA = replace(THREE.restart, restart_quota=0, killed_quota=0, membership_quota=0)


def given_up(run: JobRun[RestartPlan]) -> set[str]:
    """Which rounds agents have found given up."""
    ends = (line.partition(" finds round ")[2] for line in run.story)
    return {end.partition(" ")[0] for end in ends if end.endswith(" given up")}


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("late_s", [20.0, 45.0])
def test_a_node_that_is_late_in_a_round_costs_the_job_nothing(late: int, late_s: float) -> None:
    """The others begin anew with it, once it has come, and train in the first start there is."""
    run = well(replace(THREE, restart=NO_QUOTA, lags=((late, late_s),)))

    assert run.statuses == (0, 0, 0)
    assert run.counts["starts"] == 1
    assert "of 3 nodes" in "\n".join(run.story)
    # Node 0 is waited for twice as long: it may be waiting for others itself.
    assert bool(given_up(run)) is (late_s > 30.0 or late > 0)


def test_a_round_is_given_up_as_often_as_nodes_are_late_in_it() -> None:
    """Another node each time, and each begins anew with all others."""
    after_first, after_second = ((0, 0.0), (0, 40.0)), ((1, 0.0), (1, 0.0), (1, 20.0))

    run = well(replace(THREE, fates=(FAILS,), lags=((2, 20.0), *after_first, *after_second)))

    assert run.statuses == (0, 0, 0)
    assert run.counts["starts"] == 2
    assert given_up(run) == {"1", "2", "3"}


@pytest.mark.parametrize("node", [0, 2])
def test_a_node_that_stops_anywhere_between_two_starts_is_not_begun_without(node: int) -> None:
    """For longer than the others wait: they begin without it, and it comes to a later start."""
    plan = replace(THREE, fates=(LONG, LONG))
    seen: set[str] = set()
    for effects in range(1, 40):
        pause = Pause(at_s=0.0, ranks=(node,), effects=effects, for_s=50.0)
        run = well(replace(plan, faults=(pause,)))
        assert run.statuses == (0, 0, 0)
        seen |= given_up(run)
    assert seen


def test_a_node_that_is_cut_off_from_a_complete_round_holds_nobody_up() -> None:
    """The others wait no longer than for a node that is gone, and begin with it once it is back."""
    cut_off = [StorePartition(at_s=0.005 + at / 10, hosts=(2,), for_s=40.0) for at in range(20)]
    runs = [well(replace(THREE, fates=(LONG, LONG), faults=(each,))) for each in cut_off]

    assert {run.statuses for run in runs} == {(0, 0, 0)}
    assert any(given_up(run) for run in runs)


def test_a_newcomer_that_is_killed_in_a_complete_round_costs_the_job_nothing() -> None:
    """All nodes of the start that is over are there; another one was only about to come."""
    plan = RestartPlan(restart=NO_QUOTA, fates=(LONG, LONG), arrivals=((0, 0.0), (1, 10.0)))
    killed = Crash(at_s=20.0, ranks=(1,))

    run = well(replace(plan, lags=((1, 60.0),), faults=(killed,)))

    assert run.statuses == (0, -1)
    assert given_up(run)


def test_a_slow_store_takes_no_node_for_one_that_is_missed() -> None:
    """Each answer takes nearly as long as an agent waits for one."""
    run = well(replace(THREE, store=Store(latency_s=2.2)))

    assert run.statuses == (0, 0, 0)
    assert not given_up(run)


@pytest.mark.parametrize("seed", range(4))
def test_an_agent_of_a_round_before_the_store_was_lost_has_no_part_in_a_later_one(
    seed: int,
) -> None:
    """It writes where the later one of that number is, and is in none."""
    gone = StoreGone(at_s=5.0, for_s=1.0, comes_back_empty=True)
    plan = replace(THREE, least=1, lags=((2, 14.0),), fates=(Fate(after_s=60.0),))

    run = well(replace(plan, faults=(gone,)), seed)

    assert run.statuses == (0, 0, 0)
    assert any("of 2 nodes" in line for line in run.story)


# Workers that are told to stop at each start -----------------------------------------------------

STOPPED = Fate(kind=FateKind.SIGNAL, after_s=1.0)


def began_s(run: JobRun[RestartPlan]) -> list[float]:
    """Return when the starts of a job began."""
    return [float(line.split()[0]) for line in run.story if " start " in line]


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_are_told_to_stop_at_each_start_are_no_storm(seed: int) -> None:
    """It costs nothing, and in a minute there are ever fewer starts."""
    run = well(replace(THREE, restart=NO_QUOTA, fates=(STOPPED,) * 20), seed)

    began = began_s(run)
    assert run.statuses == (0, 0, 0)
    assert len(began) == 21
    # A start takes 3 s at least, and so do twenty of them.
    assert began[-1] - began[0] > 100.0
    assert began[-1] - began[-7] > began[6] - began[0]


def test_workers_that_are_told_to_stop_after_progress_are_restarted_at_once() -> None:
    """However often: the job gets further in between."""
    saving, idle = (replace(STOPPED, after_s=4.0, saves=saves) for saves in (True, False))
    jobs = [replace(THREE, restart=NO_QUOTA, fates=(fate,) * 12) for fate in (saving, idle)]

    further, not_further = (began_s(well(job)) for job in jobs)

    assert len(further) == len(not_further) == 13
    assert further[-1] - further[0] < (not_further[-1] - not_further[0]) - 20.0


# What must come of it -----------------------------------------------------------------------------


def test_a_crash_loop_is_given_up_by_all() -> None:
    """With one status, after as many restarts as the quota allows."""
    loop = tuple(Fate(kind=FateKind.ERROR, after_s=3.0, echo_s=0.3) for _ in range(9))

    run = well(replace(BASE, fates=loop))

    assert run.statuses == (86, 86)
    assert run.counts["starts"] == 1 + BASE.restart.restart_quota


def test_a_crash_loop_is_not_begun_again_by_a_new_launcher() -> None:
    """What the mirror says stands, whatever store the new one brings."""
    loop = tuple(Fate(kind=FateKind.KILLED, after_s=3.0) for _ in range(20))

    run = well(replace(BASE, fates=loop, launches=4, is_mirrored=True))

    assert set(run.statuses) == {86}
    assert len(run.statuses) == 10
    assert run.counts["starts"] == 1 + BASE.restart.killed_quota


@pytest.mark.parametrize("seed", range(12))
def test_who_has_joined_before_the_circuit_opened_waits_for_the_others(seed: int) -> None:
    """Longer than it may wait in the rendezvous: it comes back to the gate, and the job goes on."""
    plan = replace(BASE, nodes=3, least=3, arrivals=((0, 0.0), (1, 0.0), (2, 0.0)))

    run = well(replace(plan, ill_after=1 + seed % 3, ill_s=110.0), seed)

    assert run.statuses == (0, 0, 0)
    assert run.counts["starts"] == 2


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_comes_in_an_outage_waits_with_the_others(seed: int) -> None:
    """It neither disturbs those who wait nor ends their job."""
    outage = Outage(at_s=4.0, for_s=150.0)

    run = well(
        replace(BASE, nodes=3, arrivals=((0, 0.0), (1, 0.0), (2, 30.0)), faults=(outage,)), seed
    )

    assert run.statuses == (0, 0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_one_lost_answer_after_a_long_wait_at_the_gate_ends_no_job(seed: int) -> None:
    """The wait was for an ill dependency, and not for the store."""
    plan = replace(BASE, faults=(Outage(at_s=4.0, for_s=150.0),), store=Store(lost_answers=0.02))

    assert 160 not in well(plan, seed).statuses


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_waits_in_vain_does_not_end_the_job_of_those_who_train(seed: int) -> None:
    """They train through the outage that it waits for, and it leaves alone."""
    outage, arrivals = Outage(at_s=5.0, for_s=250.0), ((0, 0.0), (1, 20.0))

    run = well(RestartPlan(fates=(LONG,), arrivals=arrivals, faults=(outage,)), seed)

    assert run.statuses == (0, 160)


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_was_cut_off_does_not_end_the_job_that_goes_on_without_it(seed: int) -> None:
    """It comes back in an outage, and waits at the gate of a start that is over for the others."""
    cut_off = StorePartition(at_s=10.0, hosts=(1,), for_s=45.0)
    outage = Outage(at_s=50.0, for_s=260.0)

    run = well(RestartPlan(fates=(LONG, LONG), faults=(cut_off, outage)), seed)

    assert run.statuses == (0, 160)


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_is_taken_away_costs_the_job_nothing(seed: int) -> None:
    """Its agent has said so; the store is silent until the others miss it too, and it is free."""
    silent = StoreGone(at_s=13.2, for_s=18.0, comes_back_empty=False)
    plan = RestartPlan(nodes=3, fates=(Fate(kind=FateKind.TOLD, after_s=8.0, node=1),))
    quotas = replace(plan.restart, membership_quota=0)
    arrivals = ((0, 0.0), (1, 0.0), (2, 0.0))

    run = well(replace(plan, restart=quotas, arrivals=arrivals, faults=(silent,)), seed)

    assert run.statuses == (0, 143, 0)


def test_an_outage_that_outlasts_the_gate_is_an_outage_on_all() -> None:
    """The quota is not touched, and a scheduler may start the job again."""
    outage = Outage(at_s=4.0, for_s=400.0)

    run = well(replace(BASE, faults=(outage,)))

    assert run.statuses == (160, 160)
