# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""CLOSED: calls go through, and hosts vote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_resilience.core.breaker import (
    BreakerConfig,
    BreakerState,
    ForcedOpen,
    VoteDropped,
    VotesCleared,
    passes,
    quorum,
)
from lightning_resilience.core.events import BreakerChanged, VoteCast
from tests.unit.core.breaker.samples import (
    CONFIG,
    DEPENDENCY,
    EPOCH,
    WRITER,
    apply,
    claim,
    record_in,
    vote,
)


CLOSED = record_in(BreakerState.CLOSED)


def test_closed_passes() -> None:
    """A closed circuit lets calls through."""
    assert passes(CLOSED)


def test_the_only_host_trips_alone() -> None:
    """Where one host uses the dependency, its vote opens the circuit."""
    stepped = apply(CLOSED, vote(hosts=1))

    assert stepped.record.state == "open"
    assert stepped.record.votes == ()


def test_one_host_of_several_does_not_trip() -> None:
    """One host's broken link is written down and opens nothing, in the same epoch."""
    stepped = apply(CLOSED, vote("host-a", hosts=1000))

    assert stepped.record.state == "closed"
    assert stepped.record.votes == ("host-a",)
    assert stepped.record.epoch == EPOCH
    assert stepped.record.writer == WRITER
    assert stepped.events == (VoteCast(dependency=DEPENDENCY, host="host-a", votes=1, quorum=8),)


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 12, 16, 32, 1024, 16384])
def test_it_takes_exactly_the_quorum(hosts: int) -> None:
    """The circuit stays closed until the last vote of the quorum, and opens with it."""
    record = CLOSED
    needed = quorum(hosts, fraction=CONFIG.quorum_fraction)

    for number in range(needed):
        assert record.state == "closed"
        assert len(record.votes) == number
        record = apply(record, vote(f"host-{number}", hosts=hosts)).record

    assert record.state == "open"
    assert record.epoch == EPOCH + 1


def test_a_host_votes_once() -> None:
    """A host that is listed writes nothing, however often its calls fail."""
    once = apply(CLOSED, vote("host-a")).record

    again = apply(once, vote("host-a"))

    assert again.record is once
    assert again.events == ()


def test_a_trip_says_who_and_why() -> None:
    """The trip's record, history and event carry the number of votes and the latest failure."""
    voted = apply(CLOSED, vote("host-a")).record

    stepped = apply(voted, vote("host-b"))

    record = stepped.record
    assert "2 of 4 hosts" in record.reason
    assert "ConnectionResetError" in record.reason
    assert record.history[-1].reason == record.reason == stepped.reason
    assert stepped.events == (
        BreakerChanged(
            dependency=DEPENDENCY,
            epoch=EPOCH + 1,
            previous="closed",
            state="open",
            reason=record.reason,
            open_s=10.0,
            limit=0,
        ),
    )


def test_a_trip_begins_anew() -> None:
    """A trip has a new epoch and generation, the first open wait, no votes, no permit, no limit."""
    voted = record_in(BreakerState.CLOSED, votes=("host-a",), open_s=10.0)

    record = apply(voted, vote("host-b")).record

    assert (record.epoch, record.generation) == (EPOCH + 1, voted.generation + 1)
    assert (record.votes, record.holder, record.limit, record.failures) == ((), "", 0, 0)
    assert record.open_s == CONFIG.open_for_s
    assert record.writer == WRITER
    assert record.store_id == voted.store_id


def test_the_open_wait_is_that_of_the_config() -> None:
    """A trip starts with the configured open wait, whatever the record says from before."""
    config = BreakerConfig(open_for_s=15.0)

    assert apply(CLOSED, vote(hosts=1), config=config).record.open_s == 15.0


def test_a_vote_is_withdrawn() -> None:
    """A vote that no longer stands is removed, and only that one."""
    record = record_in(BreakerState.CLOSED, votes=("host-a", "host-b", "host-c"))

    stepped = apply(record, VoteDropped(host="host-b"))

    assert stepped.record.votes == ("host-a", "host-c")
    assert stepped.record.epoch == EPOCH
    assert stepped.record.writer == WRITER
    assert stepped.events == ()


def test_a_withdrawn_vote_can_be_cast_again() -> None:
    """Votes are level-triggered: they come and go with what the host sees."""
    record = apply(CLOSED, vote("host-a")).record
    record = apply(record, VoteDropped(host="host-a")).record
    assert record.votes == ()

    assert apply(record, vote("host-a")).record.votes == ("host-a",)


def test_a_vote_that_is_not_there_cannot_be_withdrawn() -> None:
    """Withdrawing twice changes nothing."""
    assert apply(CLOSED, VoteDropped(host="host-a")).record is CLOSED


@pytest.mark.parametrize(
    ("epoch", "store_id", "counts"),
    [(0, "", True), (1, "", False), (-1, "", False), (0, "x", False)],
)
def test_what_others_did_in_another_epoch_makes_nobody_vote(
    epoch: int, store_id: str, *, counts: bool
) -> None:
    """A process that stood still after its look would vote on what is long over."""
    record = CLOSED
    seen = (store_id or record.store_id, record.epoch + epoch)

    stepped = apply(record, replace(vote("host-a"), seen=seen))

    assert stepped.changed is counts
    assert ("host-a" in stepped.record.votes) is counts


def test_a_new_incarnation_clears_all_votes() -> None:
    """What hosts saw before a restart does not count after it."""
    record = record_in(BreakerState.CLOSED, votes=("host-a", "host-b"))

    stepped = apply(record, VotesCleared())

    assert stepped.record.votes == ()
    assert stepped.record.epoch == EPOCH
    assert apply(stepped.record, VotesCleared()).record is stepped.record


def test_nothing_is_probed() -> None:
    """A closed circuit has no permit to give."""
    assert apply(CLOSED, claim()).record is CLOSED


def test_an_operator_opens_it() -> None:
    """A forced opening is a trip of its own generation, with the operator's reason."""
    record = apply(CLOSED, ForcedOpen(reason="maintenance")).record

    assert record.state == "forced_open"
    assert record.limit == 0
    assert record.generation == CLOSED.generation + 1
    assert "maintenance" in record.reason
    assert "operator" in record.reason
