# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A breaker's record outside the state machine: birth, quorum, history, age, rebirth."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import (
    HISTORY_LENGTH,
    BreakerConfig,
    BreakerState,
    BreakerView,
    ForcedOpen,
    ForceReleased,
    ProbeSucceeded,
)
from lightning_resilience.core.lease import Sighting
from lightning_resilience.core.records import BreakerRecord, Transition, encode
from lightning_resilience.errors import InvalidTransitionError
from tests.models.breaker_invariants import check_history, check_record
from tests.unit.core.breaker.samples import CONFIG, EPOCH, apply, claim, record_in, vote


def test_a_new_breaker_is_closed() -> None:
    """A breaker that nobody has used is closed, at epoch 1, with its whole story: created."""
    config = BreakerConfig(max_concurrent=5, open_for_s=12.0)

    record = breaker.initial(config, store_id="store", writer="nonce")

    assert record == BreakerRecord(
        store_id="store",
        epoch=1,
        generation=0,
        state="closed",
        limit=5,
        open_s=12.0,
        history=(Transition(epoch=1, state="closed", reason="created"),),
        reason="created",
        writer="nonce",
    )
    check_record(config, record)


@given(hosts=st.integers(1, 20_000), percent=st.integers(1, 100))
def test_the_quorum_follows_its_formula(hosts: int, percent: int) -> None:
    """The quorum is min(hosts, max(2, min(ceil(q · hosts), 8))), without rounding errors."""
    exact = min(hosts, max(2, min(math.ceil(Fraction(percent, 100) * hosts), 8)))

    assert breaker.quorum(hosts, fraction=percent / 100) == exact


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.25, 0.5, 1.0])
def test_a_quorum_is_never_one_of_several_nor_more_than_there_are(fraction: float) -> None:
    """One host of several never trips a job, eight always do, and all hosts are enough."""
    quorums = [breaker.quorum(hosts, fraction=fraction) for hosts in range(1, 2000)]

    assert quorums[0] == 1
    assert min(quorums[1:]) == 2
    assert max(quorums) <= 8
    assert all(needed <= hosts for hosts, needed in enumerate(quorums, start=1))
    assert quorums == sorted(quorums)


def test_half_the_hosts_can_be_asked_for() -> None:
    """A larger fraction asks for more hosts, up to eight."""
    assert [breaker.quorum(hosts, fraction=0.5) for hosts in (4, 5, 10, 16, 17)] == [2, 3, 5, 8, 8]
    assert breaker.quorum(7, fraction=1.0) == 7


def test_history_keeps_the_last_transitions() -> None:
    """After many transitions the history holds the last 32, without a gap."""
    record = breaker.initial(CONFIG, store_id="store", writer="w")

    for _ in range(40):
        record = apply(record, ForcedOpen(reason="on")).record
        record = apply(record, ForceReleased(reason="off")).record
        check_history(record)

    assert HISTORY_LENGTH == len(record.history) == 32
    assert record.history[0].epoch == record.epoch - 31


def test_a_whole_outage_is_one_story() -> None:
    """The history of an outage reads as one sequence of states, each with its epoch."""
    record = breaker.initial(CONFIG, store_id="store", writer="w")
    record = apply(record, vote(hosts=1)).record
    record = apply(record, claim(holder="first")).record
    record = apply(record, claim(holder="second")).record
    record = apply(record, ProbeSucceeded(epoch=record.epoch, holder="second")).record

    assert [(entry.epoch, entry.state) for entry in record.history] == [
        (1, "closed"),
        (2, "open"),
        (3, "half_open"),
        (4, "half_open"),
        (5, "recovering"),
    ]


def test_an_illegal_transition_raises_and_touches_nothing() -> None:
    """A transition that does not exist is a bug of ours and is not written."""
    record = record_in(BreakerState.OPEN)
    before = encode(record)

    with pytest.raises(InvalidTransitionError, match="from open to closed"):
        # No input leads here, so the machine is asked directly.
        breaker._move(
            breaker._Context(CONFIG, "d", "w"), record, BreakerState.CLOSED, reason="a bug"
        )

    assert encode(record) == before


def view_read_at(read_at_s: float) -> BreakerView:
    """Return a view whose read was sent at an instant."""
    record = record_in(BreakerState.CLOSED)
    return BreakerView(
        record=record,
        raw=encode(record),
        read_at_s=read_at_s,
        sighting=Sighting(version=("store", EPOCH), first_seen_at_s=read_at_s),
    )


@pytest.mark.parametrize(
    ("age_s", "fresh"), [(0.0, True), (4.999, True), (5.0, False), (5.001, False), (1e9, False)]
)
def test_a_view_is_fresh_for_less_than_its_longest_age(
    age_s: float,
    fresh: bool,  # noqa: FBT001 - data
) -> None:
    """A view is fresh while the read was sent less than view_max_age_s ago."""
    assert breaker.is_fresh(view_read_at(100.0), max_age_s=5.0, now_s=100.0 + age_s) is fresh


def test_no_view_is_not_fresh() -> None:
    """Who has never read may not go ahead, and neither may who has just seen a failure."""
    assert not breaker.is_fresh(None, max_age_s=5.0, now_s=0.0)
    assert not breaker.is_fresh(view_read_at(-math.inf), max_age_s=5.0, now_s=-1e300)


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (BreakerState.CLOSED, "closed"),
        (BreakerState.OPEN, "open"),
        (BreakerState.HALF_OPEN, "open"),
        (BreakerState.RECOVERING, "recovering"),
        (BreakerState.FORCED_OPEN, "forced_open"),
    ],
)
def test_a_lost_record_is_rebuilt_as_it_was_seen(state: BreakerState, after: str) -> None:
    """A rebuilt record has the last state seen, one epoch on; a probe under way is over."""
    seen = record_in(state, votes=("host-a",) if state is BreakerState.CLOSED else (), open_s=40.0)

    record = breaker.rebuilt(seen, store_id="new store", writer="nonce")

    assert (record.state, record.epoch, record.store_id) == (after, EPOCH + 1, "new store")
    assert (record.votes, record.holder, record.writer) == ((), "", "nonce")
    assert (record.limit, record.open_s, record.generation) == (seen.limit, 40.0, seen.generation)
    assert record.history == (
        *seen.history,
        Transition(epoch=EPOCH + 1, state=after, reason=record.reason),
    )
    assert "rebuilt" in record.reason


def test_rebuilding_keeps_the_history_short() -> None:
    """A rebuilt history is no longer than any other."""
    history = tuple(
        Transition(epoch=number, state="open", reason="r")
        for number in range(1, HISTORY_LENGTH + 1)
    )
    seen = record_in(BreakerState.OPEN, epoch=HISTORY_LENGTH, history=history)

    record = breaker.rebuilt(seen, store_id="new", writer="w")

    assert len(record.history) == HISTORY_LENGTH
    assert record.history[:-1] == history[1:]


@pytest.mark.parametrize(
    ("store_id", "found_epoch", "expected"),
    [
        ("new", EPOCH - 1, True),
        ("new", EPOCH, True),
        ("new", EPOCH + 1, False),
        ("store", EPOCH - 1, False),
        ("store", EPOCH, False),
        ("store", EPOCH + 1, False),
    ],
)
def test_who_saw_more_than_the_writer_outranks_a_rebuilt_record(
    store_id: str,
    found_epoch: int,
    expected: bool,  # noqa: FBT001 - data
) -> None:
    """A record of another store at the same epoch was rebuilt from less than was seen."""
    seen = record_in(BreakerState.OPEN)
    found = record_in(BreakerState.CLOSED, store_id=store_id, epoch=found_epoch)

    assert breaker.outranks(seen, found) is expected


def test_overruling_ends() -> None:
    """What was rebuilt from the highest epoch is not overruled by who saw less or as much."""
    low = record_in(BreakerState.CLOSED, epoch=3)
    high = record_in(BreakerState.OPEN, epoch=9)
    rebuilt = breaker.rebuilt(high, store_id="new", writer="w")

    assert breaker.outranks(high, breaker.rebuilt(low, store_id="new", writer="w"))
    assert not breaker.outranks(low, rebuilt)
    assert not breaker.outranks(high, rebuilt)


def test_the_states_pass_as_documented() -> None:
    """CLOSED and RECOVERING let calls through, the other three do not."""
    passing = {state.value for state in BreakerState if breaker.passes(record_in(state))}

    assert passing == {"closed", "recovering"}
