# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated storage serves so many at once, and is ill as the scenario says."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.drill.process import Host
from lightning_resilience.drill.scenario import Brownout, Outage, Refusal, Storage
from lightning_resilience.drill.virtual import HostClock
from tests.drill_scenes import Bench


if TYPE_CHECKING:
    from lightning_resilience.drill.storage_model import Request


SERVICE_S = 1.0
FAILING_S = 0.125


def bench_of(**options: Any) -> Bench:
    """Storage with two slots and round numbers."""
    return Bench(
        storage=Storage(**{"slots": 2, "service_s": SERVICE_S, "failing_s": FAILING_S, **options})
    )


def ill(bench: Bench, fault: Outage | Brownout | Refusal) -> None:
    """Let storage be ill for as long as the fault says."""
    bench.at(fault.at_s, lambda: bench.storage.begin(fault))
    bench.at(fault.at_s + fault.for_s, lambda: bench.storage.end(fault))


def ends(requests: list[Request]) -> list[float | None]:
    """When each ended."""
    return [request.ended_at_s for request in requests]


def failures(requests: list[Request]) -> list[FailureClass | None]:
    """How each ended, as a client takes it."""
    return [
        None if request.failed is None else classify(request.failed).failure for request in requests
    ]


# --- slots, queue and time ----------------------------------------------------------------------


def test_so_many_are_served_at_once_and_the_others_queue_in_their_order() -> None:
    """Two slots, five requests: two, two and one."""
    bench = bench_of()

    requests = [bench.request(bench.process(rank)) for rank in range(5)]
    bench.run()

    assert ends(requests) == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert failures(requests) == [None] * 5


def test_those_that_queue_are_in_flight() -> None:
    """Storage counts whoever has come and is not done with."""
    bench = bench_of()

    for rank in range(5):
        bench.request(bench.process(rank))
    bench.run(until_s=0.5)
    at_first = bench.storage.in_flight
    bench.run(until_s=1.5)
    later = bench.storage.in_flight
    bench.run()

    assert (at_first, later, bench.storage.in_flight) == (5, 3, 0)
    assert bench.seen.most_in_flight == 5


def test_whoever_is_told_of_an_end_may_come_again_behind_those_who_wait() -> None:
    """A slot that comes free goes to the queue first."""
    bench = bench_of(slots=1)
    again: list[Request] = []
    first = bench.request(
        bench.process(0),
        on_end=lambda _request: again.append(bench.request(bench.process(0), at_s=1)),
    )
    second = bench.request(bench.process(1))

    bench.run()

    assert ends([first, second, *again]) == [1.0, 2.0, 3.0]


def test_the_time_of_a_request_varies_as_much_as_the_scenario_says() -> None:
    """To either side alike, and never by more."""
    bench = bench_of(slots=1000, jitter=0.5)

    requests = [bench.request(bench.process(rank)) for rank in range(1000)]
    bench.run()

    times = [request.ended_at_s or 0.0 for request in requests]
    assert min(times) >= 0.5
    assert max(times) <= 1.5
    assert statistics.mean(times) == pytest.approx(1.0, abs=0.03)
    assert statistics.pstdev(times) == pytest.approx(1 / 12**0.5, abs=0.02)


# --- outages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ("reset", FailureClass.TRANSIENT),
        ("timeout", FailureClass.TRANSIENT),
        ("throttle", FailureClass.THROTTLE),
        ("unknown", FailureClass.UNKNOWN),
        ("auth", FailureClass.AUTH),
        ("permanent", FailureClass.PERMANENT),
    ],
)
def test_every_kind_of_error_is_taken_for_what_it_is_meant_to_be(
    error: str, failure: FailureClass
) -> None:
    """Clients classify what storage raises here as they classify a real one's errors."""
    bench = bench_of()
    ill(bench, Brownout(at_s=0, for_s=5, share=1.0, error=error))  # type: ignore[arg-type]  # all are

    requests = [bench.request(bench.process(), at_s=1.0)]
    bench.run()

    assert failures(requests) == [failure]


def test_an_outage_fails_every_request_soon_and_without_a_queue() -> None:
    """They take no slot: an ill storage is not a slow one."""
    bench = bench_of()
    ill(bench, Outage(at_s=0, for_s=5))

    requests = [bench.request(bench.process(rank), at_s=1.0) for rank in range(5)]
    bench.run()

    assert ends(requests) == [1.0 + FAILING_S] * 5
    assert failures(requests) == [FailureClass.TRANSIENT] * 5
    assert bench.seen.most_in_flight == 5


def test_an_outage_that_begins_meanwhile_fails_who_is_served() -> None:
    """It shows at the end of the request; one that ends before is none for it."""
    bench = bench_of()
    ill(bench, Outage(at_s=0.5, for_s=0.25))
    ill(bench, Outage(at_s=2.5, for_s=5))

    requests = [bench.request(bench.process(), at_s=0), bench.request(bench.process(), at_s=2)]
    bench.run()

    assert failures(requests) == [None, FailureClass.TRANSIENT]
    assert ends(requests) == [1.0, 3.0]


def test_storage_is_ill_from_the_first_instant_of_an_outage_to_its_end() -> None:
    """And well in the instant in which it ends."""
    bench = bench_of()
    ill(bench, Outage(at_s=1, for_s=2))

    requests = [bench.request(bench.process(), at_s=at_s) for at_s in (1.0, 3.0)]
    bench.run(until_s=2.0)
    was_ill = bench.storage.is_ill
    bench.run()

    assert failures(requests) == [FailureClass.TRANSIENT, None]
    assert (was_ill, bench.storage.is_ill) == (True, False)


def test_a_hang_answers_nobody_before_it_is_over() -> None:
    """Who came meanwhile is served then, and who was being served as well, slots in order."""
    bench = bench_of()
    ill(bench, Outage(at_s=0.5, for_s=9.5, error="hang"))

    requests = [bench.request(bench.process(), at_s=at_s) for at_s in (0.0, 2.0, 3.0)]
    bench.run(until_s=9.0)
    in_flight = bench.storage.in_flight
    bench.run()

    assert in_flight == 3
    assert failures(requests) == [None] * 3
    assert sorted(ended or 0.0 for ended in ends(requests)) == [11.0, 11.0, 12.0]


def test_an_outage_within_a_hang_leaves_no_mark_on_who_hangs() -> None:
    """What hangs has not failed: it is served once both are over."""
    bench = bench_of()
    ill(bench, Outage(at_s=0.5, for_s=4.5))
    ill(bench, Outage(at_s=0.5, for_s=9.5, error="hang"))

    requests = [bench.request(bench.process())]
    bench.run()

    assert failures(requests) == [None]
    assert ends(requests) == [11.0]


def test_two_outages_at_once_are_over_with_the_last() -> None:
    """The end of one does not heal what the other has broken."""
    bench = bench_of()
    ill(bench, Outage(at_s=0, for_s=2))
    ill(bench, Outage(at_s=1, for_s=3))

    requests = [bench.request(bench.process(), at_s=at_s) for at_s in (3.0, 4.0)]
    bench.run()

    assert failures(requests) == [FailureClass.TRANSIENT, None]


# --- brown-outs and throttling ------------------------------------------------------------------


def test_a_brownout_fails_its_share() -> None:
    """And serves the others."""
    bench = bench_of(slots=2000)
    ill(bench, Brownout(at_s=0, for_s=5, share=0.3))

    requests = [bench.request(bench.process(), at_s=1.0) for _ in range(2000)]
    bench.run()

    failed = [request for request in requests if request.failed is not None]
    assert len(failed) / 2000 == pytest.approx(0.3, abs=0.04)
    assert set(ends(failed)) == {1.0 + FAILING_S}


@pytest.mark.parametrize("error", ["auth", "permanent", "capacity"])
def test_a_refusal_strikes_the_requests_of_some_ranks(error: Any) -> None:
    """The others are served, and afterwards all are."""
    bench = bench_of(slots=8)
    ill(bench, Refusal(at_s=0, for_s=5, ranks=(1, 3), error=error))
    asked: list[Request] = []

    def ask(rank: int) -> None:
        asked.append(bench.request(bench.process(rank)))

    for at_s in (1.0, 6.0):
        for rank in range(4):
            bench.at(at_s, partial(ask, rank))
    bench.run()

    refused = FailureClass(error)
    assert failures(asked) == [None, refused, None, refused, None, None, None, None]


def test_a_brownout_makes_those_slow_that_begin_in_it() -> None:
    """Also who has queued since before; who is being served already ends as meant."""
    bench = bench_of(slots=1)
    ill(bench, Brownout(at_s=0.5, for_s=1.0, share=0.0, slowdown=4.0))

    requests = [bench.request(bench.process()) for _ in range(3)]
    bench.run()

    assert ends(requests) == [1.0, 5.0, 6.0]


def test_storage_throttles_above_its_rate() -> None:
    """So many within any second; those that are turned away count for nobody."""
    bench = bench_of(slots=100, per_s=4)

    requests = [bench.request(bench.process(), at_s=0.125 * number) for number in range(24)]
    bench.run()

    came = [request.began_at_s for request in requests if request.failed is None]
    assert came == [0.0, 0.125, 0.25, 0.375, 1.0, 1.125, 1.25, 1.375, 2.0, 2.125, 2.25, 2.375]
    assert set(failures(requests)) == {None, FailureClass.THROTTLE}


# --- who never arrives, and who goes ------------------------------------------------------------


def test_a_host_that_is_cut_off_from_storage_is_not_counted_there() -> None:
    """Its requests fail before they arrive, and storage is well."""
    bench = bench_of()
    host = Host(0, HostClock())
    host.cut_off_from_storage_until_s = 2.0

    requests = [bench.request(bench.process(host=host), at_s=at_s) for at_s in (1.0, 2.0)]
    bench.run()

    assert failures(requests) == [FailureClass.TRANSIENT, None]
    assert bench.seen.requests == requests[1:]
    assert bench.seen.most_in_flight == 1
    assert bench.storage.in_flight == 0


def test_the_request_of_a_process_that_dies_ends_with_its_connection() -> None:
    """It is counted no more, nobody is told, and its slot goes to the next."""
    bench = bench_of(slots=1)
    told: list[Request] = []
    requests = [bench.request(bench.process(rank), on_end=told.append) for rank in range(3)]
    bench.at(0.25, lambda: bench.storage.abort(requests[1]))
    bench.at(0.5, lambda: bench.storage.abort(requests[0]))

    bench.run()

    assert ends(requests) == [0.5, 0.25, 1.5]
    assert told == requests[2:]
    assert bench.storage.in_flight == 0


@pytest.mark.parametrize("error", ["hang", "reset"])
def test_a_request_that_was_given_up_in_an_outage_does_not_come_back(error: str) -> None:
    """Neither when a hang ends, nor when its failure would have been told."""
    bench = bench_of(slots=1)
    ill(bench, Outage(at_s=0, for_s=5, error=error))  # type: ignore[arg-type]  # both are
    told: list[Request] = []
    dead = bench.request(bench.process(0), at_s=1.0, on_end=told.append)
    bench.at(1.0625, lambda: bench.storage.abort(dead))
    alive = bench.request(bench.process(1), at_s=5.0)

    bench.run()

    assert told == []
    assert ends([dead, alive]) == [1.0625, 6.0]


def test_a_request_ends_once() -> None:
    """Aborting one that has ended changes nothing."""
    bench = bench_of()
    request = bench.request(bench.process())
    bench.at(2.0, lambda: bench.storage.abort(request))

    bench.run()

    assert request.failed is None
    assert request.ended_at_s == 1.0
    assert bench.storage.in_flight == 0
