# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Slots are leases, tickets are hints, and what a freed slot says is what others go by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import admission
from lightning_resilience.core.admission import AdmissionConfig, Slot
from lightning_resilience.core.breaker import BreakerConfig, initial
from lightning_resilience.core.lease import Silence
from lightning_resilience.core.records import SlotRecord
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord


LEASE_S = 30.0

draws = st.floats(0.0, 1.0, exclude_max=True)
paces = st.none() | st.floats(1e-6, 1e6)


def slot(index: int = 0, **fields: Any) -> Slot:
    """A slot that somebody has used; without fields, one that nobody has."""
    if not fields:
        return Slot(index=index, raw=b"", record=None)
    record = SlotRecord(**{"writer": "w", **fields})
    return Slot(index=index, raw=msgspec.json.encode(record), record=record)


def held(index: int = 0, holder: str = "somebody", **fields: Any) -> Slot:
    """A slot that somebody holds."""
    return slot(index, holder=holder, **fields)


def unheard(*slots: Slot, for_s: float) -> dict[int, Silence]:
    """These slots as they are have been watched for so long."""
    return {
        each.index: Silence(version=(each.raw.decode(),), watched_s=for_s, looked_at_s=0.0)
        for each in slots
    }


def chosen(*slots: Slot, **options: Any) -> int | None:
    """Number of the slot that a waiter claims."""
    found = admission.choose(
        slots,
        **{
            "limit": len(slots),
            "silences": {},
            "lease_s": LEASE_S,
            "draw": 0.0,
            **options,
        },
    )
    return None if found is None else found.index


def breaker_in(state: str) -> BreakerRecord:
    """A breaker's record in a state."""
    record = initial(BreakerConfig(), store_id="store", writer="w")
    return msgspec.structs.replace(record, state=state)


# --- options ---------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_table() -> None:
    """A holder beats every 5 s, and is taken for dead after 30 s of silence."""
    assert AdmissionConfig() == AdmissionConfig(slot_lease_s=30.0, beat_every_s=5.0)


@pytest.mark.parametrize("name", ["slot_lease_s", "beat_every_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "5", None])
def test_what_is_no_duration_is_refused(name: str, value: Any) -> None:
    """Lease and beat are finite, positive numbers of seconds; the text names option and value."""
    with pytest.raises(ConfigError, match=rf"{name}=.*finite number of seconds > 0") as caught:
        AdmissionConfig(**{name: value})

    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("lease_s", "beat_s", "allowed"),
    [(30.0, 9.99, True), (30.0, 10.0, False), (30.0, 30.0, False), (0.31, 0.1, True)],
)
def test_two_late_beats_fit_into_the_lease(lease_s: float, beat_s: float, allowed: bool) -> None:  # noqa: FBT001 - data
    """Three beats are less than the lease, or one late beat would cost a living holder its slot."""
    if allowed:
        assert AdmissionConfig(slot_lease_s=lease_s, beat_every_s=beat_s).beat_every_s == beat_s
        return
    with pytest.raises(ConfigError) as caught:
        AdmissionConfig(slot_lease_s=lease_s, beat_every_s=beat_s)

    text = str(caught.value)
    assert f"3 · (beat_every_s={beat_s:g})={3 * beat_s:g}" in text
    assert "slot_lease_s" in text
    assert "30" in text


# --- who passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["closed", "recovering"])
@pytest.mark.parametrize("collective", [True, False])
def test_only_a_single_caller_at_a_closed_circuit_needs_no_slot(
    state: str,
    collective: bool,  # noqa: FBT001 - data
) -> None:
    """A collective call always takes a slot; any call does while the circuit recovers."""
    needed = admission.needs_slot(breaker_in(state), collective=collective)

    assert needed is (collective or state == "recovering")


@pytest.mark.parametrize(
    ("state", "when_open", "waits"),
    [
        ("closed", "wait", True),
        ("closed", "raise", True),
        ("recovering", "wait", True),
        ("recovering", "raise", False),
    ],
)
def test_a_slot_at_a_closed_circuit_is_only_a_queue(
    state: str,
    when_open: str,
    waits: bool,  # noqa: FBT001 - data
) -> None:
    """Who does not wait for an ill dependency waits for a slot all the same while it is well."""
    assert (
        admission.waits_for_slot(breaker_in(state), collective=False, when_open=when_open) is waits
    )
    assert admission.waits_for_slot(breaker_in(state), collective=True, when_open=when_open)


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("when_open", ["wait", "raise"])
def test_who_has_seen_nothing_yet_waits_for_a_slot_by_what_it_is(
    collective: bool,  # noqa: FBT001 - data
    when_open: str,
) -> None:
    """A collective call waits whatever the first look will show; a single one by its policy."""
    waits = admission.waits_for_slot(None, collective=collective, when_open=when_open)

    assert waits is (collective or when_open == "wait")


@pytest.mark.parametrize("state", ["closed", "open", "half_open", "recovering", "forced_open"])
@pytest.mark.parametrize("collective", [True, False])
def test_only_a_single_call_at_a_closed_circuit_passes_freely(
    state: str,
    collective: bool,  # noqa: FBT001 - data
) -> None:
    """All others take a slot, or wait."""
    freely = admission.passes_freely(breaker_in(state), collective=collective)

    assert freely is (state == "closed" and not collective)


@pytest.mark.parametrize("state", ["closed", "recovering"])
@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("when_open", ["wait", "raise"])
def test_who_needs_no_slot_comes_back_over_a_spread(
    state: str,
    collective: bool,  # noqa: FBT001 - data
    when_open: str,
) -> None:
    """The spread is for those that no ticket tells when to come, and that have waited at all."""
    spread = admission.spreads(breaker_in(state), collective=collective, when_open=when_open)

    assert spread is (state == "closed" and not collective and when_open == "wait")


@pytest.mark.parametrize("state", ["closed", "open", "recovering"])
@pytest.mark.parametrize("may_wait", [True, False])
def test_only_who_can_wait_lines_up_when_everybody_comes(
    state: str,
    may_wait: bool,  # noqa: FBT001 - data
) -> None:
    """A ticket comes first while the circuit recovers; of one that cannot wait it would be void."""
    first = admission.lines_up_first(breaker_in(state), may_wait=may_wait)

    assert first is (may_wait and state == "recovering")
    assert not admission.lines_up_first(None, may_wait=True)


# --- what is watched -------------------------------------------------------------------------


def watched(*looks: tuple[float, float, float], changes: tuple[int, ...] = ()) -> float:
    """Silence of one slot after looks (sent, answered, meant to look away); some find a change."""
    silences: dict[int, Silence] = {}
    version = 0
    for number, (sent_at_s, seen_at_s, away_s) in enumerate(looks):
        version += number in changes
        silences = admission.heard(
            silences,
            [held(3, took_s=float(version))],
            sent_at_s=sent_at_s,
            seen_at_s=seen_at_s,
            away_s=away_s,
            lease_s=LEASE_S,
        )
    return silences[3].watched_s


def test_only_time_that_was_watched_counts_as_silence() -> None:
    """From one answer to the next question, and no more of it than was meant to be looked away."""
    assert watched((0.0, 0.0, 0.0)) == 0.0
    assert watched((0.0, 0.0, 0.0), (5.0, 5.0, 5.0)) == 5.0
    # The store took 20 s to answer.
    assert watched((0.0, 0.0, 0.0), (5.0, 25.0, 5.0), (30.0, 30.0, 5.0)) == 10.0
    # This process was stopped for an hour.
    assert watched((0.0, 0.0, 0.0), (3600.0, 3600.0, 5.0)) == LEASE_S / 4
    # It meant to look away for 12 s, or for minutes: half a lease counts of that.
    assert watched((0.0, 0.0, 0.0), (12.0, 12.0, 12.0)) == 12.0
    assert watched((0.0, 0.0, 0.0), (150.0, 150.0, 150.0)) == LEASE_S / 2


def test_a_change_ends_the_silence() -> None:
    """A beat, or another holder: what was watched before says nothing any more."""
    looks = [(5.0 * number, 5.0 * number, 5.0) for number in range(6)]

    assert watched(*looks) == 25.0
    assert watched(*looks, changes=(3,)) == 10.0
    assert watched(*looks, changes=(5,)) == 0.0


# --- which slot ------------------------------------------------------------------------------


def test_a_free_slot_below_the_limit_is_chosen() -> None:
    """Of a held and a free one the free one is taken; above the limit none is."""
    assert chosen(held(0), slot(1)) == 1
    assert chosen(held(0), slot(1), limit=1) is None
    assert chosen(slot(0), limit=0) is None


def test_a_silent_holder_gives_way_only_after_a_whole_lease() -> None:
    """A held slot is had once this waiter has seen its bytes for the lease, not before."""
    for watched_s, index in ((LEASE_S - 0.001, None), (LEASE_S, 0)):
        assert chosen(held(0), silences=unheard(held(0), for_s=watched_s)) == index


def test_the_silence_of_another_holder_is_not_this_ones() -> None:
    """A thread may note an older look after a newer: the slot has a living holder by then."""
    before, now = held(0, took_s=1.0), held(0, took_s=2.0)

    assert chosen(now, silences=unheard(before, for_s=1e9)) is None


def test_a_slot_that_was_never_looked_at_is_not_forgiven() -> None:
    """A newcomer waits a whole lease of its own: what it has not watched it does not claim."""
    assert chosen(held(0), silences={}) is None


def test_a_free_slot_is_preferred_to_a_silent_one() -> None:
    """Nobody is taken for dead while there is room."""
    silences = unheard(held(0), slot(1), for_s=99.0)

    for draw in (0.0, 0.5, 0.999):
        assert chosen(held(0), slot(1), silences=silences, draw=draw) == 1


@given(count=st.integers(1, 1024), draw=draws | st.just(math.nextafter(1.0, 0.0)))
def test_the_draw_chooses_among_all_that_are_free(count: int, draw: float) -> None:
    """Any draw below 1 names one of the free slots, and equal parts of it name each."""
    slots = [slot(index) for index in range(count)]

    index = chosen(*slots, draw=draw)

    assert index is not None
    assert index <= draw * count < index + 1


@st.composite
def _cells(draw: st.DrawFn) -> tuple[list[Slot], dict[int, Silence]]:
    kinds = draw(st.lists(st.sampled_from(["free", "unused", "held"]), max_size=6))
    fields: dict[str, dict[str, Any]] = {"free": {"turn": 1}, "unused": {}, "held": {"holder": "h"}}
    slots = [slot(at, **fields[kind]) for at, kind in enumerate(kinds)]
    known = draw(st.sets(st.sampled_from(range(6))))
    watched = [each for each in slots if each.index in known]
    silences: dict[int, Silence] = {}
    for each in watched:
        silences |= unheard(each, for_s=draw(st.floats(0.0, 2 * LEASE_S)))
    return slots, silences


@given(cells=_cells(), limit=st.integers(0, 8), draw=draws)
def test_what_is_chosen_is_one_of_those_that_may_be(
    cells: tuple[list[Slot], dict[int, Silence]], limit: int, draw: float
) -> None:
    """Compared with a list of candidates written down rule by rule: free ones, else silent ones."""
    slots, silences = cells
    free, silent = set(), set()
    for each in slots:
        if each.index < limit and (each.record is None or each.record.holder == ""):
            free.add(each.index)
        elif each.index < limit:
            watched_s = silences[each.index].watched_s if each.index in silences else 0.0
            silent |= {each.index} if watched_s >= LEASE_S else set()

    index = chosen(*slots, limit=limit, silences=silences, draw=draw)

    candidates = free or silent
    assert index in candidates if candidates else index is None
