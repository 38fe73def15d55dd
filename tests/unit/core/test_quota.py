# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an incident costs a job, and when a person has to look at it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import quota
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.core.quota import Cause, Closed, Ending, RestartRecord, Ruling
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.restart_config import RestartConfig


if TYPE_CHECKING:
    from collections.abc import Sequence


CONFIG = RestartConfig()
NEW = quota.created(writer="w")


def incident(
    kind: str = "error", *, step: int = 5, fingerprint: str = "", failure: str = ""
) -> IncidentRecord:
    """What workers have told."""
    return IncidentRecord(
        rank=3,
        kind=kind,
        error="ValueError: bad",
        step=step,
        failure=failure,
        fingerprint=fingerprint,
        writer="i",
    )


def closed(
    number: int,
    cause: Cause = Cause.FAILED,
    *,
    told: IncidentRecord | None = None,
    checkpoint_step: int = -1,
) -> Closed:
    """The end of a start of the workers."""
    return Closed(
        incarnation=f"{number}-n",
        cause=cause,
        incident=told or incident(fingerprint=f"f{number}"),
        checkpoint_step=checkpoint_step,
    )


def charged(
    record: RestartRecord, end: Closed, *, after_s: float = 0.0, config: RestartConfig = CONFIG
) -> Ruling:
    """Charge one, so many seconds after the last change of the record."""
    return quota.charge(config, record, end, unchanged_s=after_s, writer=f"w{end.incarnation}")


def code_after(ends: list[tuple[Closed, float]], config: RestartConfig = CONFIG) -> list[int]:
    """Return the status after each end, 0 where the job goes on."""
    codes, record = [], NEW
    for end, after_s in ends:
        ruling = charged(record, end, after_s=after_s, config=config)
        record = ruling.record
        codes.append(0 if ruling.ending is None else ruling.ending.code)
    return codes


def test_three_failures_are_restarted_and_the_fourth_is_a_persons() -> None:
    """It says so with the numbers, the first cause, and the option."""
    record = NEW
    for number in range(1, 4):
        record = charged(record, closed(number), after_s=60.0).record
    ruling = charged(record, closed(4), after_s=60.0)

    record = ruling.record
    assert ruling.ending is not None
    assert ruling.ending.code == ExitCode.DEAD_LETTERED
    assert ruling.ending.incarnation == "4-n"
    assert "Rank 3 failed first, after step 5, with ValueError: bad." in ruling.ending.reason
    assert "4 failures without progress within 3600 s, and restart_quota=3" in ruling.ending.reason
    assert [each.age_s for each in record.charges] == [180.0, 120.0, 60.0, 0.0]


def test_an_incident_is_charged_once() -> None:
    """Whoever comes second finds it charged, with the same number of failures."""
    first = charged(NEW, closed(1))
    second = charged(first.record, closed(1), after_s=10.0)

    assert second.record is first.record
    assert (first.number, second.number, first.record.restarts) == (1, 1, 1)


def test_progress_refills() -> None:
    """A newer verified checkpoint than at the last charge; the same one is none."""
    steps = [100, 200, 300, 400, 500, 600]
    with_progress = [(closed(n, checkpoint_step=step), 1.0) for n, step in enumerate(steps)]
    without = [(closed(n, checkpoint_step=100), 1.0) for n in range(4)]

    assert code_after(with_progress) == [0] * 6
    assert code_after(without) == [0, 0, 0, 86]


def test_an_older_checkpoint_is_no_progress() -> None:
    """A run that went back to an older one has to come past where it was."""
    steps = [500, 300, 400, 500]

    assert code_after([(closed(n, checkpoint_step=s), 1.0) for n, s in enumerate(steps)])[-1] == 86


def test_what_is_older_than_the_window_does_not_count() -> None:
    """Three an hour go on for ever, where nothing is known of progress."""
    apart_s = CONFIG.restart_window_s / 3 + 1

    assert code_after([(closed(n), apart_s) for n in range(20)]) == [0] * 20


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.GROWN])
def test_what_nobody_is_to_blame_for_is_free(cause: Cause) -> None:
    """It is no charge, and nothing is waited for."""
    ruling = charged(NEW, closed(1, cause))

    assert (ruling.record.charges, ruling.record.restarts) == ((), 0)
    assert (ruling.number, ruling.delays, ruling.ending) == (0, 0, None)


def test_nodes_that_come_write_nothing() -> None:
    """However many they are."""
    assert charged(NEW, closed(1, Cause.GROWN)).record is NEW


def stopped(*apart_s: float, steps: Sequence[int] = ()) -> list[int]:
    """Return the delays of starts of the workers that were told to stop, one after the other."""
    record, found = NEW, []
    for number, unchanged_s in enumerate(apart_s):
        step = steps[number] if steps else -1
        what = closed(number, Cause.PREEMPTED, checkpoint_step=step)
        ruling = charged(record, what, after_s=unchanged_s)
        # Another agent at the same gate finds it noted.
        assert charged(ruling.record, what).record is ruling.record
        assert charged(ruling.record, what).delays == ruling.delays
        record = ruling.record
        assert (record.charges, record.restarts, record.ending) == ((), 0, None)
        found.append(ruling.delays)
    return found


def test_workers_that_are_told_to_stop_again_and_again_are_restarted_ever_later() -> None:
    """Free of charge, but no storm: something ends them at each start."""
    assert stopped(*[1.0] * 5) == [0, 1, 2, 3, 4]


def test_a_stop_after_progress_or_long_after_the_last_is_a_first_one() -> None:
    """A preemption an hour is what cheap machines are."""
    assert stopped(*[1.0] * 4, steps=[100, 200, 200, 300]) == [0, 0, 1, 0]
    assert stopped(1.0, 1.0, CONFIG.restart_window_s, 1.0) == [0, 1, 0, 1]


def test_a_failure_after_stops_is_counted_from_its_first() -> None:
    """What delays it are failures."""
    record = NEW
    for number in range(3):
        record = charged(record, closed(number, Cause.PREEMPTED)).record

    ruling = charged(record, closed(3))

    assert (ruling.number, ruling.delays) == (1, 1)


def test_a_person_who_releases_a_job_clears_its_stops() -> None:
    """It begins as a new one."""
    record = charged(charged(NEW, closed(1, Cause.PREEMPTED)).record, closed(2)).record

    assert quota.released(record, writer="w").stops == 0


def test_a_permanent_error_is_not_repeated() -> None:
    """One attempt in total, whatever is left of the quotas."""
    ruling = charged(NEW, closed(1, Cause.PERMANENT))

    assert ruling.ending is not None
    assert ruling.ending.code == ExitCode.PERMANENT
    assert "ValueError: bad" in ruling.ending.reason


def test_the_same_error_at_the_same_step_twice_is_no_accident() -> None:
    """At another step, or another error, it may be one."""
    same = incident(step=7, fingerprint="a")
    other_step, other_error = incident(step=8, fingerprint="a"), incident(step=7, fingerprint="b")

    assert code_after([(closed(1, told=same), 1.0), (closed(2, told=same), 1.0)]) == [0, 86]
    for other in (other_step, other_error):
        assert code_after([(closed(1, told=same), 1.0), (closed(2, told=other), 1.0)]) == [0, 0]


def test_an_error_that_nobody_knows_is_never_the_same() -> None:
    """Two ranks that were killed have both said nothing."""
    unknown = incident("exit", step=-1)

    assert code_after([(closed(n, told=unknown), 1.0) for n in range(3)]) == [0, 0, 0]


def test_kills_without_progress_have_a_smaller_quota() -> None:
    """A worker that has run out of memory does so again."""
    kills = [(closed(n, Cause.KILLED, told=incident("killed", step=-1)), 1.0) for n in range(3)]

    assert code_after(kills) == [0, 0, 86]


def test_nodes_that_leave_have_a_quota_of_their_own() -> None:
    """And use up none of the others."""
    config = replace(CONFIG, membership_quota=2)
    losses = [(closed(n, Cause.LEFT), 1.0) for n in range(3)]
    failures = [(closed(n), 1.0) for n in range(3, 6)]

    assert code_after(losses, config) == [0, 0, 86]
    assert code_after([*losses[:2], *failures], config) == [0] * 5


def test_nothing_changes_how_a_job_has_ended() -> None:
    """No later incident, and no other ending."""
    ending = Ending(code=ExitCode.OUTAGE, reason="s3 was ill")
    record = quota.ended(NEW, ending, writer="a")

    assert charged(record, closed(9, Cause.PERMANENT)).record is record
    other = Ending(code=ExitCode.PERMANENT, reason="another")
    assert quota.ended(record, other, writer="b") is record


def test_a_person_lets_it_start_again() -> None:
    """All quotas are full again, and the epoch goes on."""
    record = quota.ended(
        charged(NEW, closed(1)).record, Ending(code=86, reason="enough"), writer="a"
    )

    again = quota.released(record, writer="b")

    assert (again.ending, again.charges, again.restarts) == (None, (), 1)
    assert again.epoch > record.epoch
    assert not quota.outranks(record, again)


@pytest.mark.parametrize(
    ("code", "is_held"), [(86, True), (78, False), (79, False), (160, False), (143, False)]
)
def test_only_what_a_person_has_to_release_holds_in_the_next_start(
    code: int,
    is_held: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """Whatever else had ended the job, somebody has started it again."""
    kept = quota.ended(NEW, Ending(code=code, reason="r"), writer="a")

    assert (quota.carried_over(kept).ending is not None) is is_held


def test_what_was_seen_counts_for_more_than_a_store_that_came_back_empty() -> None:
    """And not for more than what others have written since."""
    one = charged(NEW, closed(1)).record
    two = charged(one, closed(2)).record

    assert quota.outranks(two, NEW)
    assert quota.outranks(two, one)
    assert not quota.outranks(one, two)
    assert not quota.outranks(two, two)
    rebuilt = quota.rebuilt(two, writer="x")
    assert not quota.outranks(two, rebuilt)
    assert rebuilt.charges == two.charges


def test_who_has_not_read_the_last_change_rebuilds_less_than_is_known() -> None:
    """Its record has the epoch of that change, and is not taken for it."""
    one = charged(NEW, closed(1)).record
    two = charged(one, closed(2)).record
    lagging = quota.rebuilt(one, writer="x")
    assert lagging.epoch == two.epoch

    assert quota.outranks(two, lagging)
    assert quota.outranks(quota.ended(one, Ending(code=86, reason="r"), writer="a"), lagging)
    again = quota.rebuilt(two, writer="y", over=quota.rebuilt(lagging, writer="z"))

    assert (again.restarts, again.epoch) == (2, lagging.epoch + 2)
    assert not quota.outranks(two, again)


@pytest.mark.parametrize(
    ("told", "left", "cause"),
    [
        (None, 0, Cause.GROWN),
        (None, 1, Cause.LEFT),
        (incident("signal"), 0, Cause.PREEMPTED),
        (incident("killed"), 1, Cause.KILLED),
        (incident("error", failure="permanent"), 0, Cause.PERMANENT),
        (incident("error", failure="transient"), 0, Cause.FAILED),
        (incident("error"), 1, Cause.FAILED),
        (incident("echo"), 0, Cause.FAILED),
        (incident("echo"), 1, Cause.LEFT),
        (incident("exit"), 0, Cause.FAILED),
    ],
)
def test_the_cause_is_what_was_told_else_who_is_there(
    told: IncidentRecord | None, left: int, cause: Cause
) -> None:
    """A node that left because its worker was killed has left because of that."""
    assert quota.cause_of(told, left=left) is cause


def test_workers_that_were_told_to_stop_because_a_node_left_are_not_preempted() -> None:
    """Else nodes that come and go would cost nothing, since each stop tells of itself."""
    told = incident("signal")

    assert quota.cause_of(told, left=1, is_called=True) is Cause.LEFT
    assert quota.cause_of(told, left=0, is_called=True) is Cause.PREEMPTED
    assert quota.cause_of(told, left=1, is_called=False) is Cause.PREEMPTED


def test_a_preemption_that_an_agent_tells_of_is_free_whoever_is_missed() -> None:
    """The node that was taken away is the one that is missed, and who sees that first is chance."""
    told = msgspec.structs.replace(incident("signal"), by_agent=True)

    for left, is_called in itertools.product((0, 1), (False, True)):
        assert quota.cause_of(told, left=left, is_called=is_called) is Cause.PREEMPTED


def test_a_record_survives_the_way_through_the_store() -> None:
    """With charges and ending."""
    record = quota.ended(
        charged(NEW, closed(1)).record, Ending(code=86, reason="r", incarnation="1-n"), writer="a"
    )

    assert decode(RestartRecord, encode(record), key="k") == record


@given(
    gaps_s=st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=40),
    late_s=st.lists(st.floats(0.0, 100.0), min_size=40, max_size=40),
    limit=st.integers(0, 5),
)
def test_no_window_ever_holds_more_restarts_than_the_quota(
    gaps_s: list[float], late_s: list[float], limit: int
) -> None:
    """Whatever an observer has missed: it only ever takes a charge for younger than it is."""
    config = replace(CONFIG, restart_quota=limit, membership_quota=0)
    at_s = list(itertools.accumulate(gaps_s))
    restarted_at_s: list[float] = []
    record = NEW
    for number, (gap_s, late) in enumerate(zip(gaps_s, late_s, strict=False)):
        ruling = charged(record, closed(number), after_s=max(0.0, gap_s - late), config=config)
        if ruling.ending is not None:
            break
        record = ruling.record
        restarted_at_s.append(at_s[number])

    for begin_s in restarted_at_s:
        window = [at for at in restarted_at_s if begin_s <= at < begin_s + config.restart_window_s]
        assert len(window) <= limit


@pytest.mark.parametrize(("failures", "losses"), [(63, 0), (0, 63), (31, 32), (3, 10)])
def test_every_quota_that_is_allowed_has_an_end(failures: int, losses: int) -> None:
    """The record has room for what both quotas allow, and for the one that is denied."""
    config = RestartConfig(
        restart_quota=failures, membership_quota=losses, restart_window_s=1e9, killed_quota=0
    )
    causes = [Cause.FAILED] * failures + [Cause.LEFT] * losses

    for last in (Cause.FAILED, Cause.LEFT):
        ends = [(closed(number, cause), 1.0) for number, cause in enumerate([*causes, last])]
        assert code_after(ends, config) == [0] * len(causes) + [86]


@given(st.lists(st.sampled_from(sorted(Cause)), max_size=100))
def test_a_record_stays_small(causes: list[Cause]) -> None:
    """Whatever happens to the job, and with any quota."""
    config = RestartConfig(restart_quota=32, killed_quota=10**6, membership_quota=31)
    record = NEW
    for number, cause in enumerate(causes):
        record = charged(record, closed(number, cause), config=config).record

    assert len(record.charges) <= 64
    assert decode(RestartRecord, encode(record), key="k") == record


@given(
    # Whole seconds: nothing is lost in a sum.
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(0, 4000), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_agents_that_are_replaced_never_make_more_restarts_than_the_quota(
    ends: list[tuple[int, int, bool]],
) -> None:
    """Each has seen the record for at most as long as it is there, so no charge looks too old."""
    record, now_s, at_s = NEW, 0, list[int]()
    for number, (gap_s, seen_s, ends_well) in enumerate(ends):
        now_s += gap_s
        cause = Cause.GROWN if ends_well else Cause.FAILED
        ruling = charged(record, closed(number, cause), after_s=min(gap_s, seen_s))
        if ruling.ending is not None:
            break
        record = ruling.record
        at_s += [] if ends_well else [now_s]
        ages = [each.age_s for each in record.charges]
        assert all(
            age_s <= now_s - each for age_s, each in zip(ages[::-1], at_s[::-1], strict=False)
        )
        window = [each for each in at_s if now_s - each < CONFIG.restart_window_s]
        assert len(window) <= CONFIG.restart_quota
