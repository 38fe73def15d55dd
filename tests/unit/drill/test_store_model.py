# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The simulated store answers as a real one does, in the time that one takes, or does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.drill.process import Host
from lightning_resilience.drill.scenario import Store
from lightning_resilience.drill.virtual import HostClock
from lightning_resilience.errors import CorruptRecordError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from tests.drill_scenes import Bench


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import StoreEffect


# Powers of two, so that sums of times are exact.
LATENCY_S = 0.25
SERVICE_S = 0.125
TIMEOUT_S = 4.0
ROUND_TRIP_S = 2 * LATENCY_S + SERVICE_S


def plain(**options: float) -> Store:
    """A store with round numbers."""
    return Store(latency_s=LATENCY_S, service_s=SERVICE_S, timeout_s=TIMEOUT_S, **options)


def cut_off(host: Host, *, until_s: float) -> None:
    """Cut a host off from the store."""
    host.cut_off_until_s = until_s


# --- when all is well ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effect", "value"),
    [
        (fx.Get("k"), b"7"),
        (fx.Get("none"), None),
        (fx.MultiGet(("none", "k")), [None, b"7"]),
        (fx.MultiGet(()), []),
        (fx.Set("k", b"8"), None),
        (fx.Delete("k"), True),
        (fx.Delete("none"), False),
        (fx.CompareAndSet("k", b"7", b"8"), b"8"),
        (fx.CompareAndSet("k", b"6", b"8"), b"7"),
        (fx.CompareAndSet("none", b"6", b"8"), b"6"),
        (fx.CompareAndSet("none", b"", b"8"), b"8"),
        (fx.Add("k", 3), 10),
    ],
)
def test_an_operation_is_answered_after_a_round_trip(effect: StoreEffect, value: object) -> None:
    """A message each way and the thread's time, for every operation."""
    bench = Bench(store=plain())
    bench.store.cells.set("k", b"7")

    heard = bench.ask(bench.process(), effect, at_s=1.0)
    bench.run()

    assert heard.answers == [(1.0 + ROUND_TRIP_S, value)]
    assert bench.store.operations == 1


def test_what_is_no_number_is_an_error_for_its_client() -> None:
    """An addition to text is told to who asked, and the store goes on."""
    bench = Bench(store=plain())
    bench.store.cells.set("k", b"text")

    heard = bench.ask(bench.process(), fx.Add("k", 1))
    after = bench.ask(bench.process(1), fx.Get("k"), at_s=1.0)
    bench.run()

    assert isinstance(heard.value, CorruptRecordError)
    assert after.value == b"text"
    assert bench.seen.writes == []


def test_one_thread_serves_one_after_the_other_in_the_order_of_arrival() -> None:
    """Those who come at once wait for each other, and the longest wait is noted."""
    bench = Bench(store=plain())

    heard = [
        bench.ask(bench.process(rank), fx.CompareAndSet("k", b"", b"%d" % rank))
        for rank in (2, 0, 1)
    ]
    bench.run()

    assert [each.value for each in heard] == [b"2"] * 3
    assert [each.at_s for each in heard] == [
        ROUND_TRIP_S,
        ROUND_TRIP_S + SERVICE_S,
        ROUND_TRIP_S + 2 * SERVICE_S,
    ]
    assert bench.store.longest_queue_s == 2 * SERVICE_S


def test_a_queue_is_over_when_its_thread_has_done() -> None:
    """Who comes later waits for what is left of it, and no longer."""
    bench = Bench(store=plain())

    bench.ask(bench.process(0), fx.Get("k"))
    soon = bench.ask(bench.process(1), fx.Get("k"), at_s=0.0625)
    later = bench.ask(bench.process(2), fx.Get("k"), at_s=1.0)
    bench.run()

    assert soon.at_s == ROUND_TRIP_S + SERVICE_S
    assert later.at_s == 1.0 + ROUND_TRIP_S


def test_writes_are_seen_with_what_was_there_and_only_where_something_changed() -> None:
    """An observer is told of each change once, and of nothing that has changed nothing."""
    bench = Bench(store=plain())
    process = bench.process()
    effects: list[StoreEffect] = [
        fx.Set("k", b"1"),
        fx.CompareAndSet("k", b"0", b"2"),
        fx.CompareAndSet("k", b"1", b"2"),
        fx.CompareAndSet("none", b"1", b"2"),
        fx.Add("n", 1),
        fx.Delete("none"),
        fx.Delete("k"),
        fx.Get("k"),
        fx.MultiGet(("a", "b")),
        fx.MultiGet(()),
    ]

    for number, effect in enumerate(effects):
        bench.ask(process, effect, at_s=number)
    bench.run()

    assert [(key, before) for _, _, key, before in bench.seen.writes] == [
        ("k", None),
        ("k", b"1"),
        ("n", None),
        ("k", b"2"),
    ]
    assert [key for _, _, key in bench.seen.reads] == ["k", "a", "b"]


# --- what gets lost, and what is late -----------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_a_lost_request_is_not_performed_and_its_client_waits_by_its_own_clock(
    rate: float,
) -> None:
    """The client is told after its timeout: sooner on a clock that runs fast."""
    bench = Bench(store=plain(lost_requests=1.0))

    heard = bench.ask(bench.process(clock=HostClock(rate=rate)), fx.Set("k", b"1"), at_s=1.0)
    bench.run()

    assert heard.at_s == 1.0 + TIMEOUT_S / rate
    assert isinstance(heard.value, StoreUnavailableError)
    assert bench.store.cells.get("k") is None
    assert bench.store.operations == 0


def test_a_lost_answer_was_performed() -> None:
    """The client is told that nobody answered, and everybody else sees what it wrote."""
    bench = Bench(store=plain(lost_answers=1.0))

    heard = bench.ask(bench.process(), fx.Set("k", b"1"))
    bench.run()

    assert heard.at_s == TIMEOUT_S
    assert isinstance(heard.value, StoreUnavailableError)
    assert bench.seen.writes == [(LATENCY_S, "rank 0", "k", None)]


def test_a_late_request_is_performed_after_its_client_was_told() -> None:
    """What was given up on changes the store all the same, and is told nobody."""
    bench = Bench(store=plain(late_requests=1.0, late_s=1000.0))

    heard = [bench.ask(bench.process(rank), fx.Add("n", 1)) for rank in range(8)]
    bench.run()

    late = [at_s for at_s, *_ in bench.seen.writes if at_s > TIMEOUT_S]
    assert len(late) == 8
    assert {each.at_s for each in heard} == {TIMEOUT_S}
    assert bench.store.cells.get("n") == b"8"


def test_late_requests_overtake_each_other() -> None:
    """Those that their clients still wait for are answered when they come, in another order."""
    bench = Bench(store=plain(late_requests=1.0, late_s=2.0))

    heard = [bench.ask(bench.process(rank), fx.Add("n", 1)) for rank in range(8)]
    bench.run()

    assert all(isinstance(each.value, int) for each in heard)
    assert [each.value for each in heard] != list(range(1, 9))


def test_an_answer_that_comes_after_the_timeout_comes_too_late() -> None:
    """A long queue looks like a lost answer to who waits at its end."""
    bench = Bench(store=Store(latency_s=LATENCY_S, service_s=3.0, timeout_s=TIMEOUT_S))

    heard = [bench.ask(bench.process(rank), fx.Add("n", 1)) for rank in range(2)]
    bench.run()

    assert heard[0].answers == [(3.5, 1)]
    assert heard[1].at_s == TIMEOUT_S
    assert isinstance(heard[1].value, StoreUnavailableError)
    assert bench.store.cells.get("n") == b"2"


def test_so_much_is_lost_as_the_scenario_says() -> None:
    """Shares are shares: a tenth of the answers, and what they answered was performed."""
    bench = Bench(store=plain(lost_answers=0.1, lost_requests=0.2))

    heard = [bench.ask(bench.process(), fx.Add("n", 1), at_s=number) for number in range(2000)]
    bench.run()

    answered = sum(isinstance(each.value, int) for each in heard)
    assert 0.17 < 1 - bench.store.operations / 2000 < 0.23
    assert 0.69 < answered / 2000 < 0.75


# --- a server that is gone ----------------------------------------------------------------------


def test_a_server_that_is_gone_refuses_at_once() -> None:
    """Who asks it is told after a round trip, and does not wait for the timeout."""
    bench = Bench(store=plain())
    bench.at(1.0, bench.store.go)

    heard = bench.ask(bench.process(), fx.Get("k"), at_s=2.0)
    bench.run()

    assert heard.at_s == 2.0 + 2 * LATENCY_S
    assert isinstance(heard.value, StoreUnavailableError)
    assert "gone" in str(heard.value)


def test_a_refusal_that_takes_too_long_is_no_answer() -> None:
    """A client waits for its timeout and no longer, also for a server that is gone."""
    bench = Bench(store=Store(latency_s=3.0, timeout_s=TIMEOUT_S))
    bench.at(1.0, bench.store.go)

    heard = bench.ask(bench.process(), fx.Get("k"), at_s=2.0)
    bench.run()

    assert heard.at_s == 2.0 + TIMEOUT_S


def test_a_server_that_comes_back_has_no_queue() -> None:
    """What waited for its thread was refused, and delays nobody who comes then."""
    bench = Bench(store=plain())
    for rank in range(16):
        bench.ask(bench.process(rank), fx.Get("k"))
    bench.at(0.5, bench.store.go)
    bench.at(0.75, lambda: bench.store.come_back(empty=False))

    heard = bench.ask(bench.process(), fx.Get("k"), at_s=0.75)
    bench.run()

    assert heard.at_s == 0.75 + ROUND_TRIP_S


def test_who_waits_at_a_server_that_goes_is_told() -> None:
    """Also whoever is on its way to wait there."""
    bench = Bench(store=plain())
    waits = bench.watch(bench.process(0), "bell")
    comes = bench.watch(bench.process(1), "bell", at_s=1.9)
    bench.at(2.0, bench.store.go)
    too_late = bench.watch(bench.process(2), "bell", at_s=3.0)

    bench.run()

    for heard in (waits, comes, too_late):
        assert isinstance(heard.value, StoreUnavailableError)
    assert waits.at_s == 2.0 + LATENCY_S
    assert too_late.at_s == 3.0 + 2 * LATENCY_S


def test_a_request_under_way_to_a_server_that_goes_is_refused_and_not_performed() -> None:
    """Also where the server is back before it comes: its connection is not."""
    bench = Bench(store=plain())
    heard = bench.ask(bench.process(), fx.Set("k", b"1"))
    bench.at(0.0625, bench.store.go)
    bench.at(0.125, lambda: bench.store.come_back(empty=False))

    bench.run()

    assert isinstance(heard.value, StoreUnavailableError)
    assert heard.at_s < TIMEOUT_S
    assert bench.store.cells.get("k") is None


def test_a_server_that_goes_owes_the_answers_of_what_it_performed() -> None:
    """What still waits for its thread is refused; what was answered before arrives."""
    bench = Bench(store=plain())
    first = bench.ask(bench.process(0), fx.Add("n", 1))
    second = bench.ask(bench.process(1), fx.Add("n", 1))
    bench.at(LATENCY_S + SERVICE_S + 0.03125, bench.store.go)

    bench.run()

    assert first.value == 1
    assert isinstance(second.value, StoreUnavailableError)
    assert bench.store.cells.get("n") == b"2"


def test_a_late_request_does_not_reach_the_server_that_has_come_back() -> None:
    """Its connection was to the one that has gone."""
    bench = Bench(store=plain(late_requests=1.0, late_s=1000.0))
    bench.ask(bench.process(), fx.Set("k", b"1"))
    bench.at(0.0625, bench.store.go)
    bench.at(0.125, lambda: bench.store.come_back(empty=False))

    bench.run()

    assert bench.store.cells.get("k") is None


@pytest.mark.parametrize("empty", [True, False])
def test_a_server_comes_back_with_what_it_had_or_with_nothing(*, empty: bool) -> None:
    """And answers again either way; observers are told where all is lost."""
    bench = Bench(store=plain())
    bench.store.cells.set("k", b"1")
    bench.at(1.0, bench.store.go)
    bench.at(2.0, lambda: bench.store.come_back(empty=empty))

    heard = bench.ask(bench.process(), fx.Get("k"), at_s=2.0)
    bench.run()

    assert heard.answers == [(2.0 + ROUND_TRIP_S, None if empty else b"1")]
    assert bench.seen.emptied_at_s == ([2.0] if empty else [])


def test_a_server_that_several_faults_keep_away_is_back_after_the_last() -> None:
    """And empty where any of them empties it, but not while it is there."""
    bench = Bench(store=plain())
    bench.store.cells.set("k", b"1")
    bench.at(1.0, bench.store.go)
    bench.at(2.0, bench.store.go)
    bench.at(3.0, lambda: bench.store.come_back(empty=True))
    bench.at(5.0, lambda: bench.store.come_back(empty=False))
    bench.at(6.0, bench.store.go)
    bench.at(7.0, lambda: bench.store.come_back(empty=False))

    between = bench.ask(bench.process(), fx.Get("k"), at_s=4.0)
    written = bench.ask(bench.process(), fx.Add("n", 1), at_s=5.0)
    kept = bench.ask(bench.process(), fx.Get("n"), at_s=7.0)
    bench.run()

    assert isinstance(between.value, StoreUnavailableError)
    assert written.value == 1
    assert kept.value == b"1"
    assert bench.seen.emptied_at_s == [5.0]


# --- a host that is cut off ---------------------------------------------------------------------


def test_a_request_from_a_cut_off_host_never_comes() -> None:
    """Its client waits for its whole time, also where the server is gone meanwhile."""
    bench = Bench(store=plain())
    host = Host(0, HostClock())
    cut_off(host, until_s=1.0)
    bench.at(0.75, bench.store.go)

    before = bench.ask(bench.process(host=host), fx.Add("n", 1), at_s=0.5)
    refused = bench.ask(bench.process(host=host), fx.Add("n", 1), at_s=0.875)
    bench.run()

    assert before.at_s == 0.5 + TIMEOUT_S
    assert refused.at_s == 0.875 + TIMEOUT_S
    assert "not answered within 4 s" in str(refused.value)
    assert bench.store.operations == 0


def test_an_answer_to_a_host_that_is_cut_off_meanwhile_never_comes() -> None:
    """The operation was performed: to its client it is a lost answer."""
    bench = Bench(store=plain())
    host = Host(0, HostClock())
    heard = bench.ask(bench.process(host=host), fx.Add("n", 1))
    bench.at(LATENCY_S + 0.0625, lambda: cut_off(host, until_s=1.0))

    bench.run()

    assert heard.at_s == TIMEOUT_S
    assert isinstance(heard.value, StoreUnavailableError)
    assert bench.store.cells.get("n") == b"1"


def test_a_cut_off_host_does_not_hear_that_its_request_was_refused() -> None:
    """A closed connection is told by a message, too."""
    bench = Bench(store=plain())
    host = Host(0, HostClock())
    heard = bench.ask(bench.process(host=host), fx.Add("n", 1))
    bench.at(0.0625, lambda: cut_off(host, until_s=1.0))
    bench.at(0.125, bench.store.go)

    bench.run()

    assert heard.at_s == TIMEOUT_S


def test_a_bell_reaches_a_cut_off_host_when_the_way_is_free() -> None:
    """It is neither lost nor heard before."""
    bench = Bench(store=plain())
    host = Host(0, HostClock())
    heard = bench.watch(bench.process(host=host), "bell")
    bench.at(0.5, lambda: cut_off(host, until_s=10.0))
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=2.0)

    bench.run()

    assert heard.answers == [(10.0, True)]


def test_a_cut_off_host_hears_that_the_server_has_gone_when_the_way_is_free() -> None:
    """Nothing tells it so before."""
    bench = Bench(store=plain())
    host = Host(0, HostClock())
    heard = bench.watch(bench.process(host=host), "bell")
    bench.at(0.5, lambda: cut_off(host, until_s=10.0))
    bench.at(1.0, bench.store.go)

    bench.run()

    assert heard.at_s == 10.0
    assert isinstance(heard.value, StoreUnavailableError)


def test_a_wait_that_begins_on_a_cut_off_host_begins_when_the_way_is_free() -> None:
    """And is then as good as any."""
    bench = Bench(store=plain())
    host = Host(0, HostClock())
    cut_off(host, until_s=5.0)
    heard = bench.watch(bench.process(host=host), "bell")
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=7.0)

    bench.run()

    assert heard.value is True
    assert 7.0 < heard.at_s < 8.0


# --- waits --------------------------------------------------------------------------------------


def test_a_wait_for_a_key_that_is_there_is_answered_at_once() -> None:
    """It takes a round trip, as every operation does."""
    bench = Bench(store=plain())
    bench.store.cells.set("bell", b"")

    heard = bench.watch(bench.process(), "bell", at_s=1.0)
    bench.run()

    assert heard.answers == [(1.0 + ROUND_TRIP_S, True)]


@pytest.mark.parametrize(
    "effect", [fx.Set("bell", b""), fx.CompareAndSet("bell", b"", b"1"), fx.Add("bell", 1)]
)
def test_everybody_who_waits_is_woken_by_whatever_writes_the_key(effect: StoreEffect) -> None:
    """One after the other: the thread sends a message to each."""
    bench = Bench(store=plain())
    heard = [bench.watch(bench.process(rank), "bell") for rank in range(3)]
    bench.ask(bench.process(9), effect, at_s=1.0)

    bench.run()

    written_at_s = 1.0 + LATENCY_S
    assert [each.answers for each in heard] == [
        [(written_at_s + (2 + number) * SERVICE_S + LATENCY_S, True)] for number in range(3)
    ]


def test_a_wait_that_is_forgotten_costs_the_server_nothing_and_is_told_nothing() -> None:
    """Its connection is closed: the thread sends it no message."""
    bench = Bench(store=plain())
    heard: list[object] = []
    watch = bench.store.watch(bench.process(), "bell", heard.append)
    bench.at(0.5, lambda: bench.store.forget(watch))
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=1.0)
    after = bench.ask(bench.process(1), fx.Get("bell"), at_s=1.0)

    bench.run()

    assert heard == []
    assert after.at_s == 1.0 + ROUND_TRIP_S + SERVICE_S


def test_a_wait_that_is_forgotten_on_its_way_never_begins() -> None:
    """Nor does it stay at the server."""
    bench = Bench(store=plain())
    heard: list[object] = []
    watch = bench.store.watch(bench.process(), "bell", heard.append)
    bench.store.forget(watch)
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=1.0)

    bench.run()

    assert heard == []
