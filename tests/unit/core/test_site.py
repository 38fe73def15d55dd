# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that share a storage: whose votes count at their site, and when a job looks there."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import BreakerConfig, BreakerState, BreakerView, HostVoted
from lightning_resilience.core.lease import Sighting
from lightning_resilience.core.site import (
    Lookout,
    is_for_good,
    look_again_s,
    name_at_site,
    needs_look,
    outlived,
    reason_of,
    site_config,
    watch,
    witnessed,
)


CONFIG = BreakerConfig()
SITE = site_config(CONFIG)
RECORD = breaker.initial(SITE, store_id="store", writer="first")


def seen(*votes: str, at_s: float, store_id: str = "store", state: str = "closed") -> BreakerView:
    """Return what a read that was sent at ``at_s`` has shown."""
    record = msgspec.structs.replace(RECORD, votes=votes, store_id=store_id, state=state)
    sighting = Sighting(version=(store_id, record.epoch), first_seen_at_s=at_s)
    return BreakerView(record=record, raw=b"", read_at_s=at_s, sighting=sighting)


def vote(
    *votes: str, host: str = "mine", quorum: int = 2, witnesses: tuple[str, ...] = ()
) -> breaker.BreakerStep:
    """Return what a job's vote makes of a record with these votes."""
    event = HostVoted(host=host, hosts=quorum, reason="ill", witnessed=witnesses)
    record = msgspec.structs.replace(RECORD, votes=votes)
    return breaker.step(SITE, record, event, dependency="d", writer="next")


def test_a_vote_that_was_there_at_the_first_look_counts_for_nobody() -> None:
    """Whoever has never seen the record without a vote cannot know how old it is."""
    lookout = watch(Lookout(), seen("old", at_s=100.0))

    assert witnessed(lookout, SITE, now_s=100.0) == ()


def test_a_vote_that_was_seen_to_appear_counts_for_the_window() -> None:
    """It is younger than the last look without it, by the looker's own clock."""
    lookout = watch(watch(Lookout(), seen(at_s=100.0)), seen("new", at_s=200.0))

    assert witnessed(lookout, SITE, now_s=100.0 + SITE.window_s - 0.1) == ("new",)
    assert witnessed(lookout, SITE, now_s=100.0 + SITE.window_s) == ()


def test_a_vote_keeps_its_age_through_later_looks() -> None:
    """That it is still there at the next look makes it no younger."""
    lookout = watch(watch(Lookout(), seen(at_s=100.0)), seen("new", at_s=200.0))

    later = watch(lookout, seen("new", "newer", at_s=500.0))

    assert later.absent_at_s == {"new": 100.0, "newer": 200.0}


def test_a_vote_that_was_withdrawn_and_cast_again_is_young() -> None:
    """Its age counts from the last look at which it was not there."""
    lookout = Lookout()
    for at_s, votes in ((100.0, ()), (200.0, ("a",)), (300.0, ()), (400.0, ("a",))):
        lookout = watch(lookout, seen(*votes, at_s=at_s))

    assert lookout.absent_at_s == {"a": 300.0}


def test_votes_in_another_store_are_of_unknown_age() -> None:
    """What was not in the store that is gone says nothing about the one that has come."""
    lookout = watch(watch(Lookout(), seen(at_s=100.0)), seen("a", at_s=110.0, store_id="other"))

    assert witnessed(lookout, SITE, now_s=110.0) == ()


def test_votes_of_unknown_age_never_open_the_sites_circuit() -> None:
    """Seven jobs that nobody has seen vote, and one that does now, are one job."""
    stepped = vote(*(f"job-{number}" for number in range(7)))

    assert stepped.record.state == BreakerState.CLOSED.value
    assert "mine" in stepped.record.votes


def test_a_record_names_no_more_votes_than_a_trip_needs() -> None:
    """With eight votes of unknown age there, the oldest makes room for the new one."""
    stepped = vote(*(f"job-{number}" for number in range(8)))

    assert stepped.record.votes == (*(f"job-{number}" for number in range(1, 8)), "mine")


def test_a_vote_with_a_witnessed_one_opens_the_circuit() -> None:
    """Two jobs, one of them seen to have voted, are a quorum of two."""
    stepped = vote("other", witnesses=("other",))

    assert stepped.record.state == BreakerState.OPEN.value


def test_a_vote_that_stands_opens_the_circuit_once_another_is_seen_to_appear() -> None:
    """Whoever has voted first looks again, sees the second, and makes the quorum of it."""
    stepped = vote("mine", "other", witnesses=("other",))

    assert stepped.record.state == BreakerState.OPEN.value


def test_a_vote_that_stands_alone_writes_nothing() -> None:
    """A job that looks again and again costs one read each time."""
    assert not vote("mine").changed
    assert not vote("mine", "old").changed


@pytest.mark.parametrize(("quorum", "needed"), [(1, 1), (2, 2), (3, 3), (8, 8)])
def test_the_quorum_of_a_site_is_a_number_of_jobs(quorum: int, needed: int) -> None:
    """It is no share of anything: nobody knows how many jobs there are."""
    others = tuple(f"job-{number}" for number in range(needed - 1))

    assert vote(*others, quorum=quorum, witnesses=others).record.state == "open"
    if others:
        assert vote(*others[1:], quorum=quorum, witnesses=others).record.state == "closed"


def test_a_probe_that_was_answered_closes_the_sites_circuit_at_once() -> None:
    """There is no ramp that one job, ill by itself, could fail for all."""
    record = msgspec.structs.replace(RECORD, state="half_open", holder="h", limit=0)
    answered = breaker.ProbeSucceeded(epoch=record.epoch, holder="h")

    stepped = breaker.step(SITE, record, answered, dependency="d", writer="next")

    assert stepped.record.state == BreakerState.CLOSED.value


def test_a_job_looks_before_a_call_where_its_view_is_old_or_stops_it() -> None:
    """A view that lets calls through serves for its age, and no other does."""
    fresh = seen(at_s=100.0)
    stopping = seen(at_s=100.0, state="open")

    assert needs_look(None, SITE, now_s=100.0)
    assert not needs_look(fresh, SITE, now_s=100.0 + SITE.view_max_age_s - 0.1)
    assert needs_look(fresh, SITE, now_s=100.0 + SITE.view_max_age_s)
    assert needs_look(stopping, SITE, now_s=100.0)


def test_a_held_job_looks_again_no_sooner_than_it_would_probe_and_no_later_than_the_longest() -> (
    None
):
    """Jobs that were held at one instant spread, within the limits of the open wait."""
    assert look_again_s(CONFIG, draw=0.0) == CONFIG.open_for_s
    assert look_again_s(CONFIG, draw=0.5) == CONFIG.open_for_s * 1.5
    short = replace(CONFIG, max_open_for_s=CONFIG.open_for_s)
    assert look_again_s(short, draw=0.99) == CONFIG.open_for_s


def test_a_job_that_is_held_says_what_the_site_says() -> None:
    """The reason in a job's record names the site's state, epoch and reason."""
    record = msgspec.structs.replace(RECORD, state="open", reason="2 of 2", epoch=4)

    assert reason_of(record) == "the circuit of the site is open (epoch 4: 2 of 2)"


def test_the_sites_breaker_has_a_name_of_its_own() -> None:
    """Events of the job's breaker and of the site's can be told apart."""
    assert name_at_site("s3://bucket:write") == "s3://bucket:write@site"


@pytest.mark.parametrize("state", list(BreakerState))
def test_a_lost_store_leaves_nothing_but_what_a_person_holds_open(
    state: BreakerState,
) -> None:
    """Every other state lets calls through again, with the first open wait ahead of it."""
    last = msgspec.structs.replace(RECORD, state=state.value, epoch=7, open_s=60.0, limit=0)

    left = outlived(last, SITE)

    is_held = state is BreakerState.FORCED_OPEN
    assert is_for_good(last) == is_held
    assert (left is last) == is_held
    assert breaker.passes(left) != is_held
    assert left.epoch == 7
    assert is_held or (left.open_s, left.limit) == (SITE.open_for_s, SITE.max_concurrent)
