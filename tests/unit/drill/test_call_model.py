# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated call lasts, speaks, beats, renews and is given up as one in the blocking driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import CallStalled, StoreLost
from lightning_resilience.drill.process import Operation, Process
from lightning_resilience.drill.scenario import Outage, Storage, Store
from lightning_resilience.drill.storage_model import Request
from lightning_resilience.drill.virtual import HostClock
from lightning_resilience.errors import CallTimeoutError
from lightning_resilience.protocols import effects as fx
from tests.drill_scenes import Bench


if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning_resilience.drill.call_model import Token
    from lightning_resilience.protocols.effects import Effect


LATENCY_S = 0.0625
SERVICE_S = 0.0625
ROUND_TRIP_S = 2 * LATENCY_S + SERVICE_S
TIMEOUT_S = 2.0


@dataclass
class Renewal(fx.Renewal):
    """A lease whose holder's bytes are its last nonce."""

    every_s: float = 1.0
    is_local: bool = False
    is_lost: bool = False
    raw: bytes = b"held"
    asked: bytes = b""
    answers: list[bytes] = field(default_factory=list)

    def request(self, nonce: str) -> fx.CompareAndSet | fx.Local | None:
        """Replace the bytes by others."""
        if self.is_lost:
            return None
        self.asked = nonce.encode()
        effect = fx.CompareAndSet("slot", self.raw, self.asked)
        return fx.Local(effect) if self.is_local else effect

    def answered(self, returned: bytes) -> None:
        """Hold on to what was written."""
        self.answers.append(returned)
        if returned == self.asked:
            self.raw = returned


@dataclass
class Caller:
    """A process that makes one call, and writes down how it came back."""

    bench: Bench
    stays_s: float = 0.0
    came: list[tuple[float, Any]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    process: Process | None = None

    def call(self, *, clock: HostClock | None = None, **options: Any) -> Process:
        """Begin at 0."""
        self.process = self.bench.start(self._program(options), clock=clock)
        return self.process

    def _program(self, options: dict[str, Any]) -> Generator[Effect, Any, None]:
        try:
            value = yield fx.Call(self._work, **options)
        except Exception as error:  # noqa: BLE001 - a test looks at it
            value = error
        except KeyboardInterrupt as error:
            self.came.append((self.bench.agenda.now_s, error))
            yield fx.Sleep(self.stays_s)
            raise
        self.came.append((self.bench.agenda.now_s, value))
        yield fx.Sleep(self.stays_s)

    def _work(self, token: Any) -> Request:
        self.tokens.append(token)
        assert self.process is not None
        operation = Operation(process=self.process, kind="single", number=1)
        request = Request("call", self.process, operation, attempt=1)
        self.requests.append(request)
        self.bench.storage.submit(request)
        return request


def bench_of(*, lasts_s: float = 10.0, **store: float) -> Bench:
    """A store with round numbers, and storage that takes its time."""
    options = {
        "latency_s": LATENCY_S, "service_s": SERVICE_S, "timeout_s": TIMEOUT_S, **store,
    }  # fmt: skip
    return Bench(store=Store(**options), storage=Storage(service_s=lasts_s, failing_s=0.25))


def writes(bench: Bench, key: str) -> list[float]:
    """When a key was written."""
    return [at_s for at_s, _, written, _ in bench.seen.writes if written == key]


def stalled(silent_s: float) -> CallStalled:
    """The voice of a call."""
    return CallStalled(
        dependency="d", operation="save", target="t", stalled_s=silent_s, timeout_s=9.0
    )


# --- how a call ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_call_lasts_as_long_as_its_request(timeout_s: float | None) -> None:
    """It returns when storage has done with it."""
    caller = Caller(bench_of())
    caller.call(timeout_s=timeout_s)

    caller.bench.run()

    assert caller.came == [(10.0, "done")]
    assert not caller.requests[0].is_abandoned


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_call_raises_what_storage_raised(timeout_s: float | None) -> None:
    """When storage has failed it."""
    caller = Caller(bench_of())
    caller.bench.at(0.0, lambda: caller.bench.storage.begin(Outage(at_s=0, for_s=1)))
    caller.call(timeout_s=timeout_s)

    caller.bench.run()

    [(at_s, error)] = caller.came
    assert at_s == 0.25
    assert isinstance(error, ConnectionResetError)


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_work_that_sends_nothing_ends_at_once(timeout_s: float | None) -> None:
    """With what it returns, or raises."""
    bench = bench_of()
    came: list[object] = []

    def fail(_token: object) -> None:
        raise ValueError("odd")

    def program() -> Generator[Effect, Any, None]:
        came.append((yield fx.Call(lambda _token: 7, timeout_s=timeout_s)))
        try:
            yield fx.Call(fail, timeout_s=timeout_s)
        except ValueError as error:
            came.append(str(error))

    bench.start(program())
    bench.run()

    assert came == [7, "odd"]
    assert bench.simulator.living == 0


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("is_leased", [True, False])
def test_a_call_without_an_end_is_given_up_by_its_callers_clock(
    rate: float, *, is_leased: bool
) -> None:
    """Its token is set, its request goes on at storage, and its result is for nobody."""
    caller = Caller(bench_of(lasts_s=100.0))
    caller.call(clock=HostClock(offset_s=50.0, rate=rate), timeout_s=3.0, is_leased=is_leased)

    caller.bench.run()

    [(at_s, error)] = caller.came
    [request] = caller.requests
    assert at_s == 3.0 / rate
    assert isinstance(error, CallTimeoutError)
    assert "3 s" in str(error)
    assert caller.tokens[0].cancelled
    assert request.is_abandoned
    assert request.ended_at_s == 100.0
    assert caller.bench.storage.in_flight == 0


def test_a_cancelled_token_stops_who_looks_at_it() -> None:
    """Work that asks it is told to stop; before that it is told nothing."""
    caller = Caller(bench_of())
    caller.call(timeout_s=3.0)
    caller.bench.run(until_s=1.0)
    [token] = caller.tokens
    token.raise_if_cancelled()
    token.progress()

    caller.bench.run()

    with pytest.raises(CallTimeoutError, match="abandoned"):
        token.raise_if_cancelled()


# --- while it lasts -----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_a_call_beats_and_speaks_by_its_callers_clock(rate: float) -> None:
    """Each beat is another value; the voice says for how long nothing was heard."""
    caller = Caller(bench_of())
    caller.call(
        clock=HostClock(rate=rate),
        timeout_s=100.0,
        beat=fx.Beat("beat", 4.0),
        voice=fx.Voice(3.0, stalled),
    )

    caller.bench.run()

    beats = writes(caller.bench, "beat")
    assert beats == [at_s / rate + LATENCY_S for at_s in (4.0, 8.0, 12.0, 16.0) if at_s < 10 * rate]
    spoken = [
        (at_s, event.stalled_s)
        for at_s, _, event in caller.bench.seen.events
        if isinstance(event, CallStalled)
    ]
    expected = [at_s for at_s in (3.0, 6.0, 9.0, 12.0, 15.0, 18.0) if at_s < 10 * rate]
    assert spoken == [(at_s / rate, at_s) for at_s in expected]
    assert caller.came == [(10.0, "done")]


def test_a_call_in_its_callers_thread_neither_beats_nor_speaks() -> None:
    """There is nobody to do it: as in the blocking driver."""
    caller = Caller(bench_of())
    caller.call(beat=fx.Beat("beat", 1.0), voice=fx.Voice(1.0, stalled))

    caller.bench.run()

    assert caller.bench.seen.writes == []
    assert caller.bench.seen.events == []


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_lease_is_renewed_from_exactly_the_bytes_that_were_written_last(
    timeout_s: float | None,
) -> None:
    """Again and again, until the call ends and no longer."""
    caller = Caller(bench_of(lasts_s=3.5))
    caller.bench.store.cells.set("slot", b"held")
    renewal = Renewal()
    caller.call(timeout_s=timeout_s, renewal=renewal)

    caller.bench.run()

    assert len(renewal.answers) == len(set(renewal.answers)) == 3
    assert renewal.raw == renewal.answers[-1] == caller.bench.store.cells.get("slot")
    assert caller.process is not None
    assert caller.process.store_operations == len(renewal.answers)


def test_a_helper_sleeps_anew_after_each_renewal_and_a_caller_does_not() -> None:
    """Two renewals lie a round trip further apart where a helper makes them."""
    times = []
    for timeout_s in (None, 100.0):
        caller = Caller(bench_of())
        caller.bench.store.cells.set("slot", b"held")
        caller.call(timeout_s=timeout_s, renewal=Renewal())
        caller.bench.run()
        times.append(writes(caller.bench, "slot")[:3])

    alone, waited_for = times
    assert waited_for == [1.0 + LATENCY_S, 2.0 + LATENCY_S, 3.0 + LATENCY_S]
    assert alone == [number * (1.0 + ROUND_TRIP_S) + 1.0 + LATENCY_S for number in range(3)]


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_lease_of_its_own_is_renewed_without_the_shared_store(timeout_s: float | None) -> None:
    """A process that is alone renews its own slot."""
    caller = Caller(bench_of(lasts_s=3.5))
    renewal = Renewal(is_local=True)
    process = caller.call(timeout_s=timeout_s, renewal=renewal)
    process.own.set("slot", b"held")

    caller.bench.run()

    assert len(renewal.answers) == 3
    assert process.own.get("slot") == renewal.raw
    assert caller.bench.store.operations == 0


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_lease_that_is_lost_is_not_renewed(timeout_s: float | None) -> None:
    """Nobody asks the store for it, and the call goes on."""
    caller = Caller(bench_of())
    caller.call(timeout_s=timeout_s, renewal=Renewal(is_lost=True))

    caller.bench.run()

    assert caller.bench.store.operations == 0
    assert caller.came == [(10.0, "done")]


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_renewal_that_is_not_answered_is_reported_and_asked_again(
    timeout_s: float | None,
) -> None:
    """The lease keeps the bytes that it knows, and the work goes on."""
    caller = Caller(bench_of(lost_requests=1.0))
    renewal = Renewal()
    caller.call(timeout_s=timeout_s, renewal=renewal)

    caller.bench.run()

    events = [event for _, _, event in caller.bench.seen.events]
    assert {type(event) for event in events} == {StoreLost}
    assert len(events) >= 3
    assert renewal.answers == []
    assert caller.came[0][1] == "done"


# --- a call that ends while its caller asks the store --------------------------------------------


def test_a_caller_that_asks_the_store_hears_of_the_end_when_that_has_answered() -> None:
    """It is one thread, and it is busy."""
    caller = Caller(bench_of(lasts_s=1.03125))
    renewal = Renewal()
    caller.bench.store.cells.set("slot", b"held")
    caller.call(timeout_s=100.0, renewal=renewal)

    caller.bench.run()

    assert caller.came == [(1.0 + ROUND_TRIP_S, "done")]
    assert len(renewal.answers) == 1


def test_a_call_that_ended_while_its_caller_asked_the_store_has_not_timed_out() -> None:
    """The end is looked for before the time, however long the store was away."""
    caller = Caller(bench_of(lasts_s=1.5, lost_requests=1.0))
    caller.call(timeout_s=2.0, renewal=Renewal())

    caller.bench.run()

    assert caller.came == [(1.0 + TIMEOUT_S, "done")]


def test_a_call_whose_time_was_up_while_its_caller_asked_the_store_is_given_up_then() -> None:
    """Nobody looked at the time before."""
    caller = Caller(bench_of(lasts_s=50.0, lost_requests=1.0))
    caller.call(timeout_s=2.0, renewal=Renewal())

    caller.bench.run()

    [(at_s, error)] = caller.came
    assert at_s == 1.0 + TIMEOUT_S
    assert isinstance(error, CallTimeoutError)


def test_a_call_in_its_callers_thread_waits_for_the_renewal_under_way() -> None:
    """So that whoever gives the lease back knows its bytes."""
    caller = Caller(bench_of(lasts_s=1.03125))
    renewal = Renewal()
    caller.bench.store.cells.set("slot", b"held")
    caller.call(renewal=renewal)

    caller.bench.run()

    assert caller.came == [(1.0 + ROUND_TRIP_S, "done")]
    assert renewal.raw == caller.bench.store.cells.get("slot")


def test_a_call_in_its_callers_thread_does_not_wait_for_a_store_that_is_away() -> None:
    """Not longer than for last words; the helper is left behind, and says what it has found."""
    caller = Caller(bench_of(lasts_s=1.25, lost_requests=1.0))
    caller.call(renewal=Renewal())

    caller.bench.run()

    assert caller.came == [(1.75, "done")]


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_it_leaves_a_renewal_behind_after_half_a_second_of_its_clock(rate: float) -> None:
    """And takes note of its answer all the same, as the helper does that it has left."""
    bench = bench_of(lasts_s=1.0 / rate + 0.03125, latency_s=3.0, timeout_s=50.0)
    bench.store.cells.set("slot", b"held")
    caller = Caller(bench, stays_s=40.0)
    renewal = Renewal()
    caller.call(renewal=renewal, clock=HostClock(rate=rate))

    bench.run()

    assert caller.came == [(1.5 / rate + 0.03125, "done")]
    assert renewal.answers == [renewal.asked]


# --- standing still, dying and being interrupted ------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, 3.0])
def test_a_call_that_ended_while_its_process_stood_still_is_a_success(
    timeout_s: float | None,
) -> None:
    """Its time was up long ago, and nobody holds that against it."""
    caller = Caller(bench_of(lasts_s=5.0))
    process = caller.call(timeout_s=timeout_s)
    caller.bench.at(1.0, lambda: caller.bench.simulator.pause(process, 10.0))

    caller.bench.run()

    assert caller.came == [(11.0, "done")]


def test_a_call_that_still_runs_when_its_process_wakes_is_given_up_then() -> None:
    """Its time was up while it stood still."""
    caller = Caller(bench_of(lasts_s=50.0))
    process = caller.call(timeout_s=3.0)
    caller.bench.at(1.0, lambda: caller.bench.simulator.pause(process, 10.0))

    caller.bench.run()

    [(at_s, error)] = caller.came
    assert at_s == 11.0
    assert isinstance(error, CallTimeoutError)


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_who_stands_still_renews_nothing_and_says_nothing(timeout_s: float | None) -> None:
    """What was due meanwhile is done once when it wakes."""
    caller = Caller(bench_of())
    caller.bench.store.cells.set("slot", b"held")
    process = caller.call(timeout_s=timeout_s, renewal=Renewal(), voice=fx.Voice(1.5, stalled))
    caller.bench.at(0.5, lambda: caller.bench.simulator.pause(process, 8.0))

    caller.bench.run()

    renewed = writes(caller.bench, "slot")
    assert renewed[0] == 8.5 + LATENCY_S
    assert all(at_s >= 8.5 for at_s in renewed)
    assert all(at_s >= 8.5 for at_s, _, _ in caller.bench.seen.events)


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_who_stands_still_takes_note_of_its_renewal_when_it_wakes(timeout_s: float | None) -> None:
    """The answer came meanwhile; neither it nor a loss is told before."""
    caller = Caller(bench_of(lasts_s=5.0, lost_answers=1.0))
    renewal = Renewal()
    caller.bench.store.cells.set("slot", b"held")
    process = caller.call(timeout_s=timeout_s, renewal=renewal)
    caller.bench.at(1.125, lambda: caller.bench.simulator.pause(process, 3.0))

    caller.bench.run()

    assert caller.bench.seen.events[0][0] == 4.125


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_process_that_dies_in_a_call_takes_its_request_with_it(timeout_s: float | None) -> None:
    """The connection is closed, and storage counts it no more."""
    caller = Caller(bench_of())
    process = caller.call(timeout_s=timeout_s, renewal=Renewal(), beat=fx.Beat("beat", 1.0))
    caller.bench.at(1.5, lambda: caller.bench.simulator.crash(process))

    caller.bench.run()

    assert caller.came == []
    assert caller.requests[0].ended_at_s == 1.5
    assert isinstance(caller.requests[0].failed, ConnectionAbortedError)
    assert caller.bench.store.operations <= 2


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_an_interruption_in_a_call_abandons_it(timeout_s: float | None) -> None:
    """Its request goes on at storage, and nobody renews anything for it."""
    caller = Caller(bench_of())
    caller.bench.store.cells.set("slot", b"held")
    process = caller.call(timeout_s=timeout_s, renewal=Renewal())
    caller.bench.at(1.5, lambda: caller.bench.simulator.interrupt(process))

    caller.bench.run()

    [(at_s, error)] = caller.came
    assert at_s == 1.5
    assert isinstance(error, KeyboardInterrupt)
    assert caller.requests[0].is_abandoned
    assert caller.requests[0].ended_at_s == 10.0
    assert len(writes(caller.bench, "slot")) == 1
    assert process.state == "interrupted"


def test_a_caller_that_is_interrupted_while_it_asks_does_not_learn_the_answer() -> None:
    """It was thrown out of its question, and the store has performed it."""
    caller = Caller(bench_of(), stays_s=5.0)
    renewal = Renewal()
    caller.bench.store.cells.set("slot", b"held")
    process = caller.call(timeout_s=100.0, renewal=renewal)
    caller.bench.at(1.125, lambda: caller.bench.simulator.interrupt(process))

    caller.bench.run()

    assert caller.came[0][0] == 1.125
    assert renewal.answers == []
    assert caller.bench.store.cells.get("slot") == renewal.asked


def test_work_in_its_callers_thread_is_interrupted_after_the_renewal_under_way() -> None:
    """Whoever gives the lease back knows its bytes: as in the blocking driver."""
    caller = Caller(bench_of())
    renewal = Renewal()
    caller.bench.store.cells.set("slot", b"held")
    process = caller.call(renewal=renewal)
    caller.bench.at(1.125, lambda: caller.bench.simulator.interrupt(process))

    caller.bench.run()

    assert caller.came[0][0] == 1.0 + ROUND_TRIP_S
    assert isinstance(caller.came[0][1], KeyboardInterrupt)
    assert renewal.raw == caller.bench.store.cells.get("slot")
