# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A call that went straight to its function and failed belongs to the view that let it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.guard import Guard
from lightning_resilience.adapters.standalone import close_connections
from lightning_resilience.core.events import BreakerChanged, Event
from lightning_resilience.errors import CircuitOpenError, RetriesExhaustedError


if TYPE_CHECKING:
    from collections.abc import Iterator


OPTIONS: dict[str, Any] = {
    "retry": {"max_attempts": 3, "base_delay_s": 0.01, "max_delay_s": 4.0},
    "breaker": {
        "trip_failures": 2,
        "view_max_age_s": 1.0,
        "open_for_s": 2.2,
        "probe_timeout_s": 0.1,
        "probe_lease_s": 2.0,
    },
}


@pytest.fixture(autouse=True)
def _closed_connections() -> Iterator[None]:
    yield
    close_connections()


def test_a_straight_call_that_fails_after_a_trip_does_not_undo_the_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the circuit, and its old failure is not taken for one of the recovery."""
    dependency = f"https://{uuid.uuid4().hex}"
    waiting = Guard(dependency, **OPTIONS)
    other = Guard(dependency, **OPTIONS, when_open="raise")
    events: list[Event] = []
    monkeypatch.setattr(
        "lightning_resilience.adapters.telemetry.LoggingSink.emit",
        lambda _sink, event: events.append(event),
    )
    calls = []

    def fails() -> None:
        raise ConnectionResetError("reset by peer")

    def is_overtaken() -> str:
        calls.append(1)
        if len(calls) > 1:
            return "well"
        with pytest.raises((CircuitOpenError, RetriesExhaustedError)):
            other.call(fails)
        raise ConnectionResetError("reset by peer")

    waiting.call(int)
    value = waiting.call(is_overtaken)

    changes = [event.state for event in events if isinstance(event, BreakerChanged)]
    assert value == "well"
    assert len(calls) == 2
    assert changes.count("open") == 1
