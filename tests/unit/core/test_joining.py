# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How long an agent tries to join, how a job ends that cannot, and what an agent answers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.joining import (
    Cadence,
    JoinFailure,
    Joining,
    OwnerRecord,
    Watch,
    ending_of,
    foreign_text,
    may_host,
    text_of,
)


def joining(join_s: float = 100.0) -> Joining:
    """An agent that begins to join."""
    return Joining(join_s=join_s, started_at_s=1000.0)


@given(st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=60))
def test_a_store_that_cannot_be_reached_is_tried_until_the_time_is_over(draws: list[float]) -> None:
    """With pauses below a bound that grows, and none that would end after the time."""
    attempt, now_s = joining(), 1000.0
    for number, draw in enumerate(draws, start=1):
        pause_s = attempt.pause_s(JoinFailure.UNREACHABLE, now_s=now_s, draw=draw)
        if pause_s is None:
            assert now_s >= 1100.0
            return
        assert 0.0 <= pause_s <= min(10.0, 0.2 * 2.0 ** (number - 1))
        now_s += pause_s + 3.0
        assert now_s <= 1100.0 + 3.0


def test_others_that_come_late_are_waited_for_once_more() -> None:
    """They may have been held up; then it is enough."""
    attempt = joining()

    assert attempt.pause_s(JoinFailure.LATE, now_s=1600.0, draw=0.5) is not None
    assert attempt.pause_s(JoinFailure.LATE, now_s=2200.0, draw=0.5) is None


def test_another_jobs_store_is_given_half_a_minute() -> None:
    """That job may just be ending."""
    attempt = joining()

    assert attempt.pause_s(JoinFailure.FOREIGN, now_s=1029.0, draw=0.5) is not None
    assert attempt.pause_s(JoinFailure.FOREIGN, now_s=1030.0, draw=0.5) is None


def test_what_is_closed_is_not_tried_again() -> None:
    """It stays closed."""
    assert joining().pause_s(JoinFailure.CLOSED, now_s=1000.0, draw=0.5) is None


def test_the_time_at_the_gate_does_not_count() -> None:
    """A restart that has waited for storage has all its time for joining."""
    attempt = joining()
    attempt.pause_s(JoinFailure.UNREACHABLE, now_s=1099.0, draw=0.5)

    attempt.begin(now_s=5000.0)

    assert attempt.pause_s(JoinFailure.UNREACHABLE, now_s=5099.0, draw=0.5) is not None


def test_a_gate_that_is_passed_again_takes_nothing_of_the_time() -> None:
    """Whatever became ill between two attempts is waited for, and the rest is what it was."""
    attempt = joining()
    attempt.passed(came_at_s=1000.0, now_s=1500.0)
    assert attempt.pause_s(JoinFailure.UNREACHABLE, now_s=1560.0, draw=0.5) is not None

    attempt.passed(came_at_s=1560.0, now_s=1900.0)

    assert attempt.pause_s(JoinFailure.UNREACHABLE, now_s=1939.0, draw=0.5) is not None
    assert attempt.pause_s(JoinFailure.UNREACHABLE, now_s=1940.0, draw=0.5) is None


def test_after_others_were_waited_for_in_vain_all_the_time_is_there_again() -> None:
    """They are waited for at the gate first, and joined then."""
    attempt = joining()
    attempt.passed(came_at_s=1000.0, now_s=1000.0)
    attempt.pause_s(JoinFailure.LATE, now_s=1100.0, draw=0.5)

    attempt.passed(came_at_s=1101.0, now_s=1300.0)

    assert attempt.pause_s(JoinFailure.UNREACHABLE, now_s=1399.0, draw=0.5) is not None


@pytest.mark.parametrize(("held_s", "goes_on"), [(24.0, False), (26.0, True)])
def test_others_that_were_held_up_as_well_are_waited_for_as_the_first_time(
    held_s: float,
    goes_on: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """Whatever this agent has waited for at the gate between two attempts."""
    attempt = joining()
    attempt.passed(came_at_s=1000.0, now_s=1000.0)
    attempt.pause_s(JoinFailure.LATE, now_s=1100.0, draw=0.5)

    attempt.passed(came_at_s=1100.0, now_s=1100.0 + held_s)

    found = attempt.pause_s(JoinFailure.LATE, now_s=1300.0, draw=0.5)
    assert (found is not None) is goes_on


def test_others_are_not_waited_for_again_and_again_for_ever() -> None:
    """Where what is ill becomes well each time, and nobody comes."""
    attempt, now_s = joining(), 1000.0
    for _ in range(100):
        attempt.passed(came_at_s=now_s, now_s=now_s + 50.0)
        now_s += 150.0
        if attempt.pause_s(JoinFailure.LATE, now_s=now_s, draw=0.5) is None:
            break

    assert now_s < 1000.0 + 150.0 * 10


@pytest.mark.parametrize(("answered_at_s", "goes_on"), [(1000.0, True), (999.0, False)])
def test_a_store_that_fails_at_the_gate_was_silent_from_its_last_answer_on(
    answered_at_s: float,
    goes_on: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """One lost answer after a long wait there is no long silence."""
    attempt = joining()

    attempt.held(came_at_s=1000.0, answered_at_s=answered_at_s, now_s=1800.0)

    found = attempt.pause_s(JoinFailure.UNREACHABLE, now_s=1800.0, draw=0.5)
    assert (found is not None) is goes_on


@pytest.mark.parametrize("at_gate_s", [0.1, 6.0])
def test_a_store_that_answers_reads_and_refuses_writes_is_not_asked_for_ever(
    at_gate_s: float,
) -> None:
    """Each attempt has an answer at the gate, and none comes through it."""
    attempt, now_s, paused_s = joining(), 1000.0, 0.0
    for _ in range(10_000):
        came_at_s, now_s = now_s, now_s + at_gate_s
        attempt.held(came_at_s=came_at_s, answered_at_s=came_at_s, now_s=now_s)
        pause_s = attempt.pause_s(JoinFailure.UNREACHABLE, now_s=now_s, draw=0.5)
        if pause_s is None:
            break
        now_s, paused_s = now_s + pause_s, paused_s + pause_s

    assert paused_s == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("failure", "is_first", "code", "said"),
    [
        (JoinFailure.CLOSED, True, ExitCode.CLOSED, "closed by an earlier run"),
        (JoinFailure.CLOSED, False, ExitCode.CLOSED, "closed by another agent"),
        (JoinFailure.FOREIGN, True, ExitCode.USAGE, "why"),
        (JoinFailure.LATE, False, ExitCode.OUTAGE, "at host:1 within 60 s: why"),
        (JoinFailure.UNREACHABLE, True, ExitCode.OUTAGE, "is_host=1"),
        (
            JoinFailure.UNREACHABLE,
            False,
            ExitCode.OUTAGE,
            "at host:1 within 60 s: why",
        ),
    ],
)
def test_a_job_that_cannot_join_says_what_to_do(
    failure: JoinFailure,
    is_first: bool,  # noqa: FBT001 - a column of the table
    code: ExitCode,
    said: str,
) -> None:
    """With the status that tells a scheduler whether to start it again."""
    ending = ending_of(failure, "why", is_first=is_first, elapsed_s=60.0, endpoint="host:1")

    assert ending.code == code
    assert said in ending.reason
    assert ("is_host" in ending.reason) is (failure is JoinFailure.UNREACHABLE and is_first)


def test_a_store_of_another_job_is_named() -> None:
    """By run, host and process; one that nobody owns is for all."""
    owner = OwnerRecord(run_id="theirs", host="node7", pid=41, writer="w")

    text = foreign_text(owner, "mine", endpoint="host0:29400")

    assert all(word in text for word in ("host0:29400", "'theirs'", "node7", "41"))
    assert foreign_text(owner, "theirs", endpoint="e") == ""
    assert foreign_text(None, "mine", endpoint="e") == ""


def watch() -> Watch:
    """An agent whose workers are well."""
    return Watch(grace_s=15.0)


def test_it_looks_around_once_in_a_while() -> None:
    """However often it is asked."""
    mine = Cadence(every_s=5.0)

    looks = [now_s for now_s in range(100, 120) if mine.is_due(now_s=float(now_s))]

    assert looks == [100, 105, 110, 115]


def test_a_moment_without_an_answer_changes_nothing() -> None:
    """What was known last holds, until a node would count as gone; then all have to join anew."""
    mine = watch()
    assert mine.answered(0, lost=0) == 0

    assert [mine.silent(now_s=float(now_s)) for now_s in (100, 105, 114, 115, 200)] == [
        0,
        0,
        0,
        1,
        1,
    ]
    assert mine.answered(0, lost=0) == 0
    assert mine.silent(now_s=300.0) == 0


def test_a_silent_store_is_tried_again_with_longer_and_longer_pauses() -> None:
    """Also that is load, for a store which has just come back; an answer begins anew."""
    mine = watch()

    tries = [t for t in range(1000) if mine.may_try(now_s=t / 10, draw=0.999)]

    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 100
    assert len(tries) < 20
    mine.answered(0, lost=0)
    assert mine.attempts == 0


def test_nodes_that_were_waiting_still_are() -> None:
    """An answer that is not there takes none of them away."""
    mine = watch()

    assert mine.answered(2, lost=0) == 2
    assert mine.silent(now_s=100.0) == 2


def test_a_node_that_is_lost_counts_as_one_that_waits() -> None:
    """Torch's agent restarts its workers for nodes that wait only."""
    assert watch().answered(0, lost=3) == 1
    assert watch().answered(2, lost=3) == 2


@pytest.mark.parametrize(
    ("options", "backend", "may"),
    [
        ({}, "c10d", True),
        ({"is_host": "0"}, "c10d", False),
        ({"store_type": "file"}, "c10d", False),
        ({}, "etcd-v2", False),
    ],
)
def test_a_node_looks_for_itself_whether_it_hosts_the_store(
    options: dict[str, str],
    backend: str,
    may: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """Unless it was told, or the store is not one that a node hosts."""
    assert may_host(options, backend=backend) is may


def test_an_error_is_told_with_its_cause() -> None:
    """Torch's own text says no more than that there is one."""
    error = ConnectionError("has failed")
    alone = text_of(error)
    error.__cause__ = OSError("no such name")

    assert alone == "ConnectionError: has failed"
    assert text_of(error) == "ConnectionError: has failed (OSError: no such name)"
