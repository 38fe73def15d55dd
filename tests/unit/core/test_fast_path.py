# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When calls may go straight to their function, and until when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lightning_resilience.core.breaker import BreakerConfig, BreakerState, BreakerView, initial
from lightning_resilience.core.fast_path import NO_PASSAGE, passage
from lightning_resilience.core.lease import Sighting
from lightning_resilience.core.records import encode
from lightning_resilience.core.window import EMPTY, Window, record_failure


CONFIG = BreakerConfig(view_max_age_s=5.0)
FAILED = record_failure(EMPTY, now_s=99.0, window_s=600.0)


def view(*, read_at_s: float = 100.0, **changes: Any) -> BreakerView:
    """Return a view of a closed circuit; these fields are different."""
    record = msgspec.structs.replace(initial(CONFIG, store_id="store", writer="w"), **changes)
    sighting = Sighting(version=("store", record.epoch), first_seen_at_s=read_at_s)
    return BreakerView(record=record, raw=encode(record), read_at_s=read_at_s, sighting=sighting)


def test_a_closed_view_lets_calls_go_straight_until_it_is_too_old() -> None:
    """The leave ends ``view_max_age_s`` after the read was sent, and names the view."""
    closed = view(read_at_s=100.0)

    leave = passage(closed, EMPTY, CONFIG, host="a", is_alone=False)

    assert leave.until_s == 105.0
    assert leave.view is closed


def test_votes_of_other_hosts_stop_nobody() -> None:
    """A circuit that other hosts have voted against is closed until the quorum says otherwise."""
    leave = passage(view(votes=("b",)), EMPTY, CONFIG, host="a", is_alone=False)

    assert leave.until_s == 105.0


@pytest.mark.parametrize("state", [state for state in BreakerState if state != "closed"])
def test_a_circuit_that_is_not_closed_lets_nobody_go_straight(state: BreakerState) -> None:
    """Whoever calls while it is open, probed, recovering or forced open asks at the gate."""
    leave = passage(view(state=state.value), EMPTY, CONFIG, host="a", is_alone=False)

    assert leave is NO_PASSAGE


@pytest.mark.parametrize(
    ("seen", "window", "is_alone"),
    [
        (None, EMPTY, False),
        (view(), FAILED, False),
        (view(votes=("a",)), EMPTY, False),
        (view(), EMPTY, True),
    ],
    ids=["no view", "a failure that a success must end", "a vote to be taken back", "alone"],
)
def test_whoever_has_something_to_report_or_nobody_to_ask_does_not_go_straight(
    seen: BreakerView | None, window: Window, *, is_alone: bool
) -> None:
    """A success that goes straight is reported to nobody, so nothing may wait for it."""
    assert passage(seen, window, CONFIG, host="a", is_alone=is_alone) is NO_PASSAGE


def test_no_passage_has_always_ended() -> None:
    """No instant of any clock is before its end."""
    assert min(-1e300, NO_PASSAGE.until_s) == NO_PASSAGE.until_s
    assert NO_PASSAGE.view is None
