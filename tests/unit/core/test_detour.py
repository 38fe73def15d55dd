# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one process may decide alone, and for how long it trusts what it last saw."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import detour, window
from lightning_resilience.core.breaker import BreakerConfig, BreakerState, BreakerView, initial
from lightning_resilience.core.lease import Sighting
from lightning_resilience.core.records import encode


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord


CONFIG = BreakerConfig()


def record(state: str = "closed", **fields: Any) -> BreakerRecord:
    """A shared record in a state."""
    first = initial(CONFIG, store_id="store", writer="w")
    return msgspec.structs.replace(first, state=state, **fields)


def view(state: str = "closed", *, read_at_s: float = 0.0) -> BreakerView:
    """A view of such a record."""
    found = record(state)
    sighting = Sighting(version=("store", 1), first_seen_at_s=read_at_s)
    return BreakerView(record=found, raw=encode(found), read_at_s=read_at_s, sighting=sighting)


# --- trust -----------------------------------------------------------------------------------


def test_a_view_serves_for_half_a_minute_while_the_store_is_silent() -> None:
    """Six times the greatest age that a view has while it answers."""
    assert detour.trust_s(CONFIG) == 30.0
    assert detour.trust_s(BreakerConfig(view_max_age_s=2.0)) == 12.0


@pytest.mark.parametrize(
    ("state", "passes"),
    [
        ("closed", True),
        ("recovering", True),
        ("open", False),
        ("half_open", False),
        ("forced_open", False),
    ],
)
def test_only_a_view_that_lets_calls_through_is_trusted(state: str, passes: bool) -> None:  # noqa: FBT001 - data
    """An old view that stops a call may be about an outage that is over."""
    assert detour.trusts(view(state), CONFIG, now_s=29.9) is passes


def test_trust_ends_with_the_grace() -> None:
    """The view's age counts from when its read was sent; without a view there is nothing."""
    seen = view(read_at_s=100.0)

    assert detour.trusts(seen, CONFIG, now_s=129.999)
    assert not detour.trusts(seen, CONFIG, now_s=130.0)
    assert not detour.trusts(None, CONFIG, now_s=0.0)


@given(tries=st.integers(1, 10**9), draw=st.floats(0.0, 1.0, exclude_max=True))
def test_a_silent_store_is_left_alone_for_longer_each_time(tries: int, draw: float) -> None:
    """From half to the whole of a bound that doubles from a second to half a minute; never zero."""
    bound_s = min(30.0, 2.0 ** min(tries - 1, 60))

    wait_s = detour.try_again_s(tries, draw=draw)

    assert bound_s / 2 <= wait_s <= bound_s
    assert wait_s == pytest.approx(bound_s * (1 + draw) / 2)


# --- isolation -------------------------------------------------------------------------------


def stands(
    *, state: str = "closed", votes: tuple[str, ...] = ("me",), failures: int = 3, age_s: float = 0
) -> bool:
    """Tell whether the vote of ``me`` stands alone."""
    seen = window.Window(failures=failures, last_failure_at_s=100.0)
    return detour.stands_alone(
        record(state, votes=votes), seen, CONFIG, host="me", now_s=100.0 + age_s
    )


def test_a_vote_without_a_quorum_stands_alone() -> None:
    """The own calls fail, the own vote is there, and the circuit is closed all the same."""
    assert stands()
    assert stands(votes=("other", "me"))


def test_every_part_of_it_is_needed() -> None:
    """Not where the circuit is not closed, the vote is not cast, or the failures are few or old."""
    assert not any(stands(state=state) for state in ("open", "half_open", "recovering"))
    assert not stands(state="forced_open")
    assert not stands(votes=())
    assert not stands(votes=("other",))
    assert not stands(failures=2)
    assert not stands(age_s=CONFIG.window_s + 1)


# --- the own breaker -------------------------------------------------------------------------


@given(most=st.integers(1, 1024), start=st.integers(1, 1024), processes=st.integers(1, 10**6))
def test_all_own_breakers_together_let_in_no_more_than_the_shared_one(
    most: int, start: int, processes: int
) -> None:
    """N processes share the slots, one each at least, and nothing else changes."""
    start = min(start, most)
    config = BreakerConfig(max_concurrent=most, ramp_start=start, open_for_s=20.0)

    own = detour.own_config(config, processes=processes)

    assert own.max_concurrent == max(1, most // processes)
    assert processes * own.max_concurrent <= max(most, processes)
    assert own.ramp_start == min(start, own.max_concurrent)
    assert (own.open_for_s, own.trip_failures) == (20.0, config.trip_failures)


@pytest.mark.parametrize(
    ("seen", "begins", "limit"),
    [
        (BreakerState.CLOSED, "closed", 16),
        (BreakerState.OPEN, "open", 0),
        (BreakerState.HALF_OPEN, "open", 0),
        (BreakerState.RECOVERING, "recovering", 1),
        (BreakerState.FORCED_OPEN, "forced_open", 0),
    ],
)
def test_a_process_begins_alone_where_it_last_saw_the_job(
    seen: BreakerState, begins: str, limit: int
) -> None:
    """Only a probe that was under way is over: nobody can settle it any more."""
    found = detour.seeded(CONFIG, None, state=seen, reason="alone", writer="n")

    assert (found.state, found.limit, found.epoch, found.generation) == (begins, limit, 1, 0)
    assert (found.holder, found.votes, found.history) == ("", (), ())
    assert (found.reason, found.writer) == ("alone", "n")


def test_what_is_decided_alone_is_told_apart_and_goes_on_counting() -> None:
    """Its store has a name of its own; a second time alone has later epochs and other bells."""
    before = detour.seeded(CONFIG, None, state=BreakerState.OPEN, reason="first", writer="n")
    before = msgspec.structs.replace(before, epoch=9, generation=4)

    again = detour.seeded(CONFIG, before, state=BreakerState.OPEN, reason="second", writer="m")

    assert again.store_id == before.store_id == "local"
    assert (again.epoch, again.generation) == (10, 5)


def chances_of_a_send(hosts: int, processes: int, *, rounds: int) -> list[float]:
    """The probability that one process sends, for each of so many probes that are due."""
    share = detour.share_on_a_host(hosts=hosts, processes=processes)
    states = {detour.ProbeShare(share): 1.0}
    sent = []
    for _ in range(rounds):
        after: dict[detour.ProbeShare, float] = {}
        total = 0.0
        for state, probability in states.items():
            total += probability * state.chance
            for is_sent, part in ((True, state.chance), (False, 1 - state.chance)):
                following = state.after(sent=is_sent)
                after[following] = after.get(following, 0.0) + probability * part
        states = {state: probability for state, probability in after.items() if probability}
        sent.append(total)
    return sent


@pytest.mark.parametrize(
    ("hosts", "processes"), [(1, 1), (1, 2), (2, 16), (2, 31), (1, 64), (2, 3), (7, 1024)]
)
def test_each_probe_that_is_due_is_sent_with_the_probability_of_the_share(
    hosts: int, processes: int
) -> None:
    """At every round, from the first on: those who begin together do not lose patience together."""
    sent = chances_of_a_send(hosts, processes, rounds=400)

    most = detour.ProbeShare(hosts / processes).most
    assert sent == pytest.approx([2 / (most + 1)] * 400, rel=1e-9)
    assert hosts / processes - 2 / (most + 1) == pytest.approx(0.0, abs=1 / (most + 1))
    assert sent[0] <= hosts / processes + 1e-12


@given(
    share=st.floats(0.001, 1.0),
    draws=st.lists(st.floats(0.0, 1.0, exclude_max=True), max_size=30),
)
def test_no_process_is_passed_over_more_often_than_twice_the_inverse_of_its_share(
    share: float, draws: list[float]
) -> None:
    """Whatever the dice: of ``most`` probes in a row that are due, one is sent."""
    state = detour.ProbeShare(share)
    for draw in draws:
        state = state.after(sent=state.sends(draw=draw))
    unlucky = math.nextafter(1.0, 0.0)

    passed = state.passed
    while not state.sends(draw=unlucky):
        state = state.after(sent=False)
        passed += 1
        assert passed < 2 / share

    assert passed == state.most - 1
    assert state.after(sent=True) == detour.ProbeShare(share, has_sent=True)


@given(share=st.floats(0.001, 1.0), draw=st.floats(0.0, 1.0, exclude_max=True))
def test_whoever_is_alone_on_its_host_sends_all_probes(share: float, draw: float) -> None:
    """A whole share is no matter of chance, and any other is where nothing was passed over."""
    assert detour.ProbeShare(1.0).sends(draw=draw)
    assert detour.ProbeShare(1.0, has_sent=True).sends(draw=draw)
    chance = detour.ProbeShare(share).chance
    assert detour.ProbeShare(share).sends(draw=chance * draw)
    assert chance == 1.0 or not detour.ProbeShare(share).sends(draw=chance)


@pytest.mark.parametrize(
    ("hosts", "processes", "share"),
    [(1, 1, 1.0), (2, 2, 1.0), (2, 16, 0.125), (128, 1024, 0.125), (8, 4, 1.0)],
)
def test_the_processes_of_a_host_send_one_probe_together(
    hosts: int, processes: int, share: float
) -> None:
    """Each sends its part of one probe per wait, and a process alone on its host all of it."""
    assert detour.share_on_a_host(hosts=hosts, processes=processes) == share
