# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C34: one error of the shared store ends whoever was watching it, and a healthy worker with it.

Here: one error is absorbed, the last view serves for a while if the store stays away, and no longer
than that. Reported for torchx as #540 and for torchtune as #2676.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience import Guard, StoreUnavailableError
from lightning_resilience.adapters import guarded_function
from lightning_resilience.adapters.standalone import close_connections
from lightning_resilience.core.detour import GRACE_VIEWS
from tests.counted_store import CountedStore


if TYPE_CHECKING:
    from collections.abc import Iterator


VIEW_S = 0.3
GRACE_S = GRACE_VIEWS * VIEW_S
BOUND_S = 20.0
FOREVER = 10**6


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Five seconds for each loss would make this a test of a quarter of a minute.
    monkeypatch.setattr(guarded_function, "STORE_PATIENCE_S", 0.1)
    yield
    close_connections()


@pytest.fixture
def store() -> CountedStore:
    """An empty store."""
    return CountedStore()


def guard_of(store: CountedStore, **options: Any) -> Guard:
    """Return a guard whose view is soon too old."""
    return Guard(
        "x", store=store, run_id=uuid.uuid4().hex, breaker={"view_max_age_s": VIEW_S}, **options
    )


def lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """Return how many log lines have a text."""
    return sum(text in record.getMessage() for record in caplog.records)


def wait_until_stale() -> None:
    """Let the view grow too old."""
    ends_at_s = time.monotonic() + VIEW_S
    while time.monotonic() <= ends_at_s:
        time.sleep(0.01)


def call_until(guard: Guard, caplog: pytest.LogCaptureFixture, text: str) -> float:
    """Call until a log line has ``text``, and return how long that took in seconds."""
    began_at_s = time.monotonic()
    while not lines(caplog, text):
        assert time.monotonic() - began_at_s < BOUND_S
        assert guard.call(len, "ab") == 2
        time.sleep(0.01)
    return time.monotonic() - began_at_s


@pytest.mark.parametrize(
    ("strict", "asked", "said"),
    [(False, ["get"], "did not answer about x:read"), (True, ["get", "get"], "answers again")],
    ids=["goes on what it knows", "asks again"],
)
def test_one_error_is_absorbed(
    store: CountedStore,
    caplog: pytest.LogCaptureFixture,
    *,
    strict: bool,
    asked: list[str],
    said: str,
) -> None:
    """The call goes through, says what it went on, and the process does not go alone."""
    caplog.set_level(logging.INFO, "lightning_resilience")
    guard = guard_of(store, strict=strict)
    guard.call(len, "ab")
    wait_until_stale()
    del store.operations[:]
    store.outage.failing = 1

    assert guard.call(len, "ab") == 2

    assert store.operations == asked
    assert lines(caplog, said) == 1
    assert lines(caplog, "decides alone") == 0


def test_the_last_view_serves_for_a_bounded_grace(
    store: CountedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """While the store stays away the last view is trusted, and then the process decides alone."""
    caplog.set_level(logging.INFO, "lightning_resilience")
    guard = guard_of(store)
    guard.call(len, "ab")
    read_at_s = time.monotonic()
    wait_until_stale()
    store.outage.failing = FOREVER

    call_until(guard, caplog, "did not answer about x:read")
    alone_before_grace_ended = lines(caplog, "decides alone")
    call_until(guard, caplog, "decides alone")
    alone_at_s = time.monotonic()
    store.outage.failing = 0
    call_until(guard, caplog, "follows the shared circuit")

    assert alone_before_grace_ended == 0
    # The view was read before ``read_at_s``, by less than a moment.
    assert alone_at_s - read_at_s > GRACE_S - VIEW_S
    assert lines(caplog, "decides alone") == 1


def test_strict_calls_have_no_grace(store: CountedStore) -> None:
    """Under ``strict`` a call tries the store for a while, and fails without calling anything."""
    guard = guard_of(store, strict=True)
    guard.call(len, "ab")
    wait_until_stale()
    store.outage.failing = FOREVER
    calls: list[int] = []

    with pytest.raises(StoreUnavailableError, match="nobody answers"):
        guard.call(calls.append, 1)

    assert calls == []


def test_an_open_circuit_is_not_trusted_from_memory(store: CountedStore) -> None:
    """An old view that stops calls may be about an outage that is over: strict calls say so."""
    retry = {"base_delay_s": 0.001, "throttle_base_delay_s": 0.001, "max_delay_s": 0.002}
    guard = guard_of(store, strict=True, when_open="raise", retry=retry)

    def reset() -> None:
        raise ConnectionResetError

    with pytest.raises(Exception, match="open"):
        guard.call(reset)
    wait_until_stale()
    store.outage.failing = FOREVER

    with pytest.raises(StoreUnavailableError):
        guard.call(len, "ab")
