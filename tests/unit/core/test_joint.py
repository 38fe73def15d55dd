# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All ranks decide the same: the gate before, the verdict after, and the error that they raise."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import joint
from lightning_resilience.core.breaker import BreakerConfig, BreakerState, initial
from lightning_resilience.core.joint import GateVerdict, JointConfig
from lightning_resilience.core.outcome import FailureClass, Outcome
from lightning_resilience.core.records import (
    BreakerRecord,
    FinalRecord,
    GateRecord,
    OutcomeRecord,
    decode,
    encode,
)
from lightning_resilience.errors import BudgetExhaustedError, JointError, JointUnavailableError


# The order of the specification, most severe first.
SEVERITY = [
    *("cancelled", "permanent", "capacity", "auth", "unknown"),
    *("lost", "throttle", "transient", "stale"),
]
TERMS = FinalRecord(op="save", subject="s3://bucket/epoch=1.ckpt", workers=(0, 1, 2), writer="w")
PASSING = {BreakerState.CLOSED, BreakerState.RECOVERING}


def outcome(rank: int, failure: str = "", **fields: str | int) -> OutcomeRecord:
    """Return one rank's outcome."""
    error = f"SomeError: {failure} on {rank}" if failure else ""
    plain = OutcomeRecord(rank=rank, failure=failure, error=error, detail=f"detail of {rank}")
    return msgspec.structs.replace(plain, **fields)


def breaker_in(state: BreakerState) -> BreakerRecord:
    """Return a breaker's record in a state."""
    record = initial(BreakerConfig(), store_id="store", writer="w")
    return msgspec.structs.replace(
        record, state=state.value, epoch=9, reason="2 of 4 hosts voted; latest: reset"
    )


# --- the gate


@pytest.mark.parametrize("on_outage", ["wait", "fail"])
@pytest.mark.parametrize("expired", ["", "deadline_s=1800 has passed"])
@pytest.mark.parametrize("probe_owed", [False, True])
@pytest.mark.parametrize("state", BreakerState)
def test_the_gate_follows_its_table(
    state: BreakerState, on_outage: str, expired: str, *, probe_owed: bool
) -> None:
    """A circuit that passes means proceed; otherwise deadline, policy and history decide."""
    forced = state is BreakerState.FORCED_OPEN
    if state in PASSING:
        expected = GateVerdict.PROCEED
    elif expired or (on_outage == "fail" and (forced or not probe_owed)):
        expected = GateVerdict.FAIL
    else:
        expected = GateVerdict.WAIT

    decision = joint.decide_gate(
        breaker_in(state), on_outage=on_outage, expired=expired, probe_owed=probe_owed
    )

    assert decision.verdict is expected
    assert decision.reason


def test_a_gate_waits_for_the_deadline_or_for_one_probe() -> None:
    """Under "fail" the wait ends with the open wait and one lease, never after the deadline."""
    record = breaker_in(BreakerState.OPEN)
    config = BreakerConfig()
    one_probe_s = record.open_s + config.probe_lease_s

    waits = {
        (on_outage, deadline_s): joint.gate_wait_s(
            record, config, on_outage=on_outage, deadline_s=deadline_s
        )
        for on_outage in ("wait", "fail")
        for deadline_s in (1.0, 1800.0)
    }

    assert waits == {
        ("wait", 1.0): 1.0,
        ("wait", 1800.0): 1800.0,
        ("fail", 1.0): 1.0,
        ("fail", 1800.0): one_probe_s,
    }


def test_without_a_shared_dependency_the_gate_is_open() -> None:
    """What touches no guarded storage proceeds under every policy."""
    for on_outage, expired in itertools.product(("wait", "fail"), ("", "late")):
        decision = joint.decide_gate(None, on_outage=on_outage, expired=expired)
        assert decision.verdict is GateVerdict.PROCEED


def test_a_wait_says_what_it_waits_for() -> None:
    """The reason names the state, its epoch and why the circuit is open."""
    decision = joint.decide_gate(breaker_in(BreakerState.OPEN), on_outage="wait")

    assert all(part in decision.reason for part in ("open", "epoch 9", "2 of 4 hosts voted"))
    assert "operator" not in decision.reason


def test_a_forced_opening_says_who_can_end_it() -> None:
    """What an operator holds open is waited for, and the reason says that it takes an operator."""
    decision = joint.decide_gate(breaker_in(BreakerState.FORCED_OPEN), on_outage="wait")

    assert decision.verdict is GateVerdict.WAIT
    assert "operator" in decision.reason


def test_an_expired_wait_says_why_it_ends() -> None:
    """The reason of a failure by deadline is the deadline."""
    decision = joint.decide_gate(
        breaker_in(BreakerState.OPEN), on_outage="wait", expired="deadline_s=5 has passed"
    )

    assert decision.reason == "deadline_s=5 has passed"


# --- the verdict


def test_severities_are_those_of_the_specification() -> None:
    """The list above names every class of failure."""
    assert sorted(SEVERITY) == sorted(failure.value for failure in FailureClass)


@pytest.mark.parametrize(
    ("severe", "mild"), list(itertools.combinations([*SEVERITY, ""], 2)), ids=str
)
def test_the_most_severe_failure_wins(severe: str, mild: str) -> None:
    """Of any two outcomes the more severe is the verdict, whichever rank has it."""
    for first, second in ((severe, mild), (mild, severe)):
        final = joint.decide_final(TERMS, [outcome(0, first), outcome(1, second)])

        assert final.failure == severe
        assert final.first_rank == (0 if first == severe else 1)
        assert final.error == f"SomeError: {severe} on {final.first_rank}"


@pytest.mark.parametrize("failure", SEVERITY)
def test_ties_go_to_the_lowest_rank(failure: str) -> None:
    """Of equal failures that of the lowest rank is named, in whatever order they are read."""
    outcomes = [outcome(rank, failure) for rank in (12, 3, 7)]

    for order in itertools.permutations(outcomes):
        assert joint.decide_final(TERMS, order).first_rank == 3


def test_success_carries_the_lowest_workers_detail() -> None:
    """Where all went well there is no first rank, no error, and the lowest worker's detail."""
    final = joint.decide_final(TERMS, [outcome(5), outcome(2, attempts=4), outcome(9)])

    assert (final.failure, final.first_rank, final.error) == ("", -1, "")
    assert (final.detail, final.attempts) == ("detail of 2", 4)
    assert joint.error_of(final, seq=1) is None


def test_the_verdict_keeps_the_terms() -> None:
    """What the operation is, who worked and who writes stay as they were given."""
    final = joint.decide_final(TERMS, [outcome(1, "transient", attempts=5)])

    assert (final.op, final.subject, final.workers, final.writer) == (
        TERMS.op,
        TERMS.subject,
        TERMS.workers,
        TERMS.writer,
    )
    assert final.attempts == 5


def test_an_operation_without_work_went_well() -> None:
    """Where no rank had work, and none is lost, the verdict is a success."""
    assert joint.decide_final(TERMS, []) == TERMS


def test_silent_ranks_are_lost_and_named() -> None:
    """A rank that was silent for too long is lost, with its number and for how long."""
    final = joint.decide_final(TERMS, [outcome(0)], lost_ranks=(2, 1), silent_s=8.04)

    assert (final.failure, final.first_rank) == ("lost", 1)
    assert final.lost_ranks == (1, 2)
    assert final.error == "rank 1 gave no sign of life for 8.0 s"


@pytest.mark.parametrize(
    ("reported", "verdict"),
    [("unknown", "unknown"), ("cancelled", "cancelled"), ("throttle", "lost"), ("stale", "lost")],
)
def test_a_lost_rank_is_weighed_like_a_failure(reported: str, verdict: str) -> None:
    """Being lost is less severe than an unknown failure and more so than a throttled one."""
    final = joint.decide_final(TERMS, [outcome(0, reported)], lost_ranks=(1,), silent_s=8.0)

    assert final.failure == verdict
    assert final.lost_ranks == (1,)


@given(
    st.permutations(range(8)),
    st.lists(st.sampled_from([*SEVERITY, ""]), min_size=8, max_size=8),
    st.sets(st.integers(0, 7), max_size=3),
)
def test_the_order_of_reading_does_not_matter(
    order: list[int], reported: list[str], lost: set[int]
) -> None:
    """Whoever merges the outcomes, in whatever order, comes to the same bytes."""
    workers = [rank for rank in range(8) if rank not in lost]

    first = joint.decide_final(
        TERMS,
        [outcome(rank, reported[rank]) for rank in workers],
        lost_ranks=sorted(lost),
        silent_s=8.0,
    )
    second = joint.decide_final(
        TERMS,
        [outcome(rank, reported[rank]) for rank in order if rank in workers],
        lost_ranks=sorted(lost, reverse=True),
        silent_s=8.0,
    )

    assert encode(first) == encode(second)


# --- the error


@pytest.mark.parametrize("failure", SEVERITY)
def test_every_rank_raises_the_same_error(failure: str) -> None:
    """The error is made from the shared record alone, so type and text are equal on each rank."""
    final = joint.decide_final(TERMS, [outcome(0), outcome(3, failure, attempts=2)])
    errors = [
        joint.error_of(decode(FinalRecord, encode(final), key="final"), seq=17)
        for _rank in range(4)
    ]

    texts = {str(error) for error in errors}
    assert len(texts) == 1
    assert {type(error) for error in errors} == {JointError}
    text = texts.pop()
    for part in ("save", TERMS.subject, "17", failure, "rank 3", "2 attempts", final.error):
        assert part in text
    error = errors[0]
    assert error is not None
    assert (error.op, error.seq, error.outcome, error.first_rank) == ("save", 17, failure, 3)


@pytest.mark.parametrize("failure", SEVERITY)
def test_every_error_says_what_to_do(failure: str) -> None:
    """The text ends with a sentence of advice that fits the class of failure."""
    error = joint.error_of(joint.decide_final(TERMS, [outcome(1, failure)]), seq=1)

    advice = str(error).partition(f"{failure} on 1. ")[2]
    assert len(advice) > 20
    assert advice.endswith(".")


def test_one_attempt_is_not_plural() -> None:
    """The number of attempts reads well, and is left out where it is not known."""
    once = joint.decide_final(TERMS, [outcome(1, "permanent", attempts=1)])
    never = joint.decide_final(TERMS, [], lost_ranks=(1,), silent_s=8.0)

    assert "after 1 attempt:" in str(joint.error_of(once, seq=1))
    assert "attempt" not in str(joint.error_of(never, seq=1))


def test_all_lost_ranks_are_named() -> None:
    """Where several ranks were silent the error lists all of them; one is named anyway."""
    one = joint.decide_final(TERMS, [], lost_ranks=(4,), silent_s=8.0)
    many = joint.decide_final(TERMS, [], lost_ranks=(9, 4, 5), silent_s=8.0)

    assert "Lost ranks" not in str(joint.error_of(one, seq=1))
    assert "rank 4" in str(joint.error_of(one, seq=1))
    assert "Lost ranks: 4, 5, 9." in str(joint.error_of(many, seq=1))


# --- two operations at one number


def gate(op: str = "save", digest: str = "d", rank: int = 0) -> GateRecord:
    """Return a gate's record."""
    return GateRecord(
        op=op, digest=digest, verdict="proceed", epoch=1, rank=rank, reason="r", writer="w"
    )


def test_the_same_operation_is_no_conflict() -> None:
    """Ranks that do the same thing with the same arguments are in lock-step."""
    assert joint.conflict_error(gate(), op="save", digest="d", seq=3, rank=1) is None


@pytest.mark.parametrize(
    ("op", "digest", "named"),
    [
        ("remove", "d", ("'save'", "'remove'")),
        ("remove", "e", ("'save'", "'remove'")),
        ("save", "e", ("rank 5 does 'save' at d", "rank 2 at e")),
    ],
)
def test_two_operations_at_one_number_are_a_permanent_error(
    op: str, digest: str, named: tuple[str, ...]
) -> None:
    """The error names both operations and both ranks, and what usually leads to it."""
    error = joint.conflict_error(gate(rank=5), op=op, digest=digest, seq=3, rank=2)

    assert error is not None
    text = str(error)
    assert all(part in text for part in (*named, "joint operation 3", "is_global_zero"))
    assert "5" in text
    assert "2" in text
    assert (error.op, error.seq, error.outcome, error.first_rank) == (op, 3, "permanent", 2)


def test_who_cannot_learn_the_verdict_says_so() -> None:
    """The error of a rank without a store names the rank, for how long, and the store's error."""
    error = joint.unavailable_error(
        "save", seq=4, rank=6, lost_for_s=8.04, cause="ConnectionRefusedError: no route"
    )

    assert isinstance(error, JointUnavailableError)
    assert isinstance(error, JointError)
    text = str(error)
    for part in ("Rank 6", "save", "joint operation 4", "8.0 s", "ConnectionRefusedError"):
        assert part in text
    assert (error.op, error.seq, error.outcome) == ("save", 4, "lost")
    assert (error.first_rank, error.lost_ranks) == (6, (6,))


# --- how long ranks wait for each other


@pytest.mark.parametrize(
    ("group_s", "timeout_s", "beat_s"),
    [(10.0, 8.0, 2.0), (25.0, 20.0, 5.0), (30.0, 24.0, 5.0), (1800.0, 1440.0, 5.0)],
)
def test_the_bounds_follow_the_process_group(
    group_s: float, timeout_s: float, beat_s: float
) -> None:
    """By default 0.8 of the process group's timeout, and a quarter of that, at most 5 s."""
    config = JointConfig()

    assert config.timeout_s(process_group_timeout_s=group_s) == pytest.approx(timeout_s)
    assert config.beat_s(process_group_timeout_s=group_s) == pytest.approx(beat_s)


def test_explicit_bounds_win() -> None:
    """What the user asks for is taken, and the default beat follows the user's timeout."""
    both = JointConfig(joint_timeout_s=40.0, joint_beat_s=7.0)
    timeout_only = JointConfig(joint_timeout_s=4.0)

    assert both.timeout_s(process_group_timeout_s=1800.0) == 40.0
    assert both.beat_s(process_group_timeout_s=1800.0) == 7.0
    assert timeout_only.beat_s(process_group_timeout_s=1800.0) == 1.0


@given(group_s=st.floats(1e-3, 1e6))
def test_ranks_leave_before_the_watchdog_and_beat_before_they_are_lost(group_s: float) -> None:
    """For every process group the default timeout is shorter, and several beats fit into it."""
    config = JointConfig()
    timeout_s = config.timeout_s(process_group_timeout_s=group_s)

    assert timeout_s < group_s
    assert 3 * config.beat_s(process_group_timeout_s=group_s) < timeout_s


def test_a_denied_retry_is_reported_as_the_failure_that_was_to_be_retried() -> None:
    """The budget is why it was not repeated; what it is about is the storage's own failure."""
    error = BudgetExhaustedError("exhausted: 20 of 20 retries")
    error.attempts, error.last_error = 2, "ConnectionResetError: reset by peer"

    report = joint.report_of(error, rank=3, outcome=Outcome(failure=FailureClass.UNKNOWN))

    assert (report.rank, report.failure, report.attempts) == (3, "transient", 2)
    assert report.error == "ConnectionResetError: reset by peer; then: exhausted: 20 of 20 retries"
