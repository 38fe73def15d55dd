# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator performs effects as the blocking driver does, on clocks and faults of its own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import StoreLost
from lightning_resilience.drill.process import Strike
from lightning_resilience.drill.scenario import Store
from lightning_resilience.drill.virtual import HostClock
from lightning_resilience.errors import CorruptRecordError, ResilienceError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from tests.drill_scenes import Bench, told


if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning_resilience.drill.process import Process
    from lightning_resilience.protocols.effects import Effect


LATENCY_S = 0.25
SERVICE_S = 0.125
ROUND_TRIP_S = 2 * LATENCY_S + SERVICE_S
TIMEOUT_S = 4.0
EVENT = StoreLost(op="x", error="y")
# Offset, rate.
CLOCKS = [(0.0, 1.0), (1000.0, 0.5), (-1000.0, 2.0)]


class Script:
    """A program that performs effects in order, and keeps what came when."""

    def __init__(self, bench: Bench, *effects: Effect) -> None:
        self.bench = bench
        self.effects = effects
        self.came: list[tuple[float, Any]] = []

    def __iter__(self) -> Generator[Effect, Any, None]:
        for effect in self.effects:
            try:
                value = yield effect
            except Exception as error:  # noqa: BLE001 - a test looks at it
                value = error
            self.came.append((self.bench.agenda.now_s, value))

    @property
    def values(self) -> list[Any]:
        """What came, without the instants."""
        return told(self.came)

    @property
    def times(self) -> list[float]:
        """When."""
        return [at_s for at_s, _ in self.came]


def bench_of(**options: float) -> Bench:
    """A store with round numbers."""
    return Bench(
        store=Store(
            **{
                "latency_s": LATENCY_S,
                "service_s": SERVICE_S,
                "timeout_s": TIMEOUT_S,
                **options,
            }
        )
    )


def play(bench: Bench, *effects: Effect, **options: Any) -> tuple[Script, Process]:
    """Let a process perform effects."""
    script = Script(bench, *effects)
    return script, bench.start(iter(script), **options)


def states(bench: Bench) -> list[tuple[float, str]]:
    """What became of the one process."""
    return [(at_s, what) for at_s, _, what in bench.seen.changes]


# --- effects ------------------------------------------------------------------------------------


def test_effects_that_take_no_time_are_answered_in_the_same_instant() -> None:
    """Clock, dice, nonces and events, from the process's own sources."""
    bench = bench_of()
    script, process = play(
        bench, fx.Now(), fx.Draw(), fx.Draw(), fx.Nonce(), fx.Nonce(), fx.Emit(EVENT), at_s=2.0,
        clock=HostClock(offset_s=100.0, rate=0.5),
    )  # fmt: skip
    bench.run()

    now_s, first, second, nonce, other, emitted = script.values
    assert now_s == 101.0
    assert 0 <= first < 1
    assert first != second
    assert nonce != other
    assert process.wrote(nonce)
    assert emitted is None
    assert bench.seen.events == [(2.0, "rank 0", EVENT)]
    assert script.times == [2.0] * 6
    assert states(bench) == [(2.0, "started"), (2.0, "ended")]
    assert process.effects == 6


@pytest.mark.parametrize(("offset_s", "rate"), CLOCKS)
def test_sleeps_and_waits_last_by_the_processs_own_clock(offset_s: float, rate: float) -> None:
    """A clock that runs fast makes them shorter; its offset changes nothing."""
    bench = bench_of(lost_requests=1.0)
    script, _ = play(
        bench, fx.Sleep(3.0), fx.WaitFor("bell", 2.0), fx.Get("k"),
        clock=HostClock(offset_s=offset_s, rate=rate),
    )  # fmt: skip

    bench.run()

    assert script.times == [3.0 / rate, 5.0 / rate, (5.0 + TIMEOUT_S) / rate]
    assert script.values[:2] == [None, False]
    assert isinstance(script.values[2], StoreUnavailableError)


def test_store_operations_go_to_the_shared_store_and_are_counted() -> None:
    """Each takes a round trip; a wait is one more, however often it is looked at."""
    bench = bench_of()
    script, process = play(
        bench, fx.Set("k", b"1"), fx.Get("k"), fx.MultiGet(("k", "x")), fx.Delete("k"),
        fx.CompareAndSet("k", b"", b"2"), fx.Add("n", 2),
        fx.WaitFor("bell", 1.0), fx.WaitFor("bell", 1.0),
    )  # fmt: skip

    bench.run()

    assert script.values == [None, b"1", [b"1", None], True, b"2", 2, False, False]
    assert script.times[:6] == [ROUND_TRIP_S * number for number in range(1, 7)]
    assert process.store_operations == 7


def test_local_effects_stay_in_the_process_and_take_no_time() -> None:
    """Nobody else sees what it decides alone, and no loss reaches it."""
    bench = bench_of(lost_requests=1.0)
    script, process = play(
        bench, fx.Local(fx.Set("k", b"1")), fx.Local(fx.CompareAndSet("k", b"1", b"text")),
        fx.Local(fx.MultiGet(("k", "x"))), fx.Local(fx.Add("n", 1)), fx.Local(fx.Add("k", 1)),
        fx.Local(fx.WaitFor("k", 1.0)), fx.Local(fx.WaitFor("k", 0.0)),
        fx.Local(fx.WaitFor("x", 1.0)),
    )  # fmt: skip
    other, _ = play(bench, fx.Local(fx.Get("k")), rank=1)

    bench.run()

    assert script.values[:4] == [None, b"text", [b"text", None], 1]
    assert isinstance(script.values[4], CorruptRecordError)
    assert script.values[5:] == [True, False, False]
    assert script.times == [0.0] * 7 + [1.0]
    assert other.values == [None]
    assert bench.store.operations == process.store_operations == 0


# --- bells --------------------------------------------------------------------------------------


def test_a_bell_that_rings_while_its_process_does_something_else_is_heard_later() -> None:
    """The wait is kept: the next one for the same key costs nothing and ends at once."""
    bench = bench_of()
    script, process = play(bench, fx.WaitFor("bell", 1.0), fx.Sleep(5.0), fx.WaitFor("bell", 9.0))
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=3.0)

    bench.run()

    assert script.came == [(1.0, False), (6.0, None), (6.0, True)]
    assert process.store_operations == 1


def test_a_wait_that_broke_while_its_process_did_something_else_is_told_later() -> None:
    """The store's failure is thrown into the next wait for the same key, once."""
    bench = bench_of()
    script, _ = play(
        bench, fx.WaitFor("bell", 1.0), fx.Sleep(5.0), fx.WaitFor("bell", 9.0),
        fx.WaitFor("bell", 1.0),
    )  # fmt: skip
    bench.at(3.0, bench.store.go)
    bench.at(4.0, lambda: bench.store.come_back(empty=False))

    bench.run()

    assert isinstance(script.values[2], StoreUnavailableError)
    assert script.times[2] == 6.0
    assert script.came[3] == (7.0, False)


def test_a_store_that_goes_while_a_process_waits_is_thrown_into_the_wait() -> None:
    """As in the blocking driver: the wait breaks, it does not time out."""
    bench = bench_of()
    script, _ = play(bench, fx.WaitFor("bell", 9.0))
    bench.at(2.0, bench.store.go)

    bench.run()

    assert isinstance(script.values[0], StoreUnavailableError)
    assert script.times == [2.0 + LATENCY_S]


def test_a_wait_without_time_begins_the_wait_and_does_not_look() -> None:
    """It says False even where the key is there; the next one has its answer."""
    bench = bench_of()
    bench.store.cells.set("bell", b"")
    script, process = play(
        bench, fx.WaitFor("bell", 0.0), fx.Sleep(1.0), fx.WaitFor("bell", -1.0),
        fx.WaitFor("bell", 5.0),
    )  # fmt: skip

    bench.run()

    assert script.came == [(0.0, False), (1.0, None), (1.0, False), (1.0, True)]
    assert process.store_operations == 1


def test_a_wait_for_another_key_ends_the_one_before() -> None:
    """Each process has one at a time; an old bell is asked for anew."""
    bench = bench_of()
    script, process = play(
        bench, fx.WaitFor("old", 1.0), fx.WaitFor("new", 3.0), fx.WaitFor("old", 9.0)
    )
    bench.ask(bench.process(1), fx.Set("old", b""), at_s=2.0)

    bench.run()

    assert script.values == [False, False, True]
    assert script.times == [1.0, 4.0, 4.0 + ROUND_TRIP_S]
    assert process.store_operations == 3


# --- crashes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "effect",
    [fx.Sleep(10.0), fx.Get("k"), fx.WaitFor("bell", 10.0)],
    ids=["sleep", "store", "wait"],
)
def test_a_process_can_be_killed_in_whatever_it_waits_for(effect: Effect) -> None:
    """It never goes on, and nothing that comes for it is taken."""
    bench = bench_of()
    script, process = play(bench, effect, fx.Set("after", b""))
    bench.at(0.375, lambda: bench.simulator.crash(process))
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=1.0)

    bench.run()

    assert script.came == []
    assert bench.store.cells.get("after") is None
    assert states(bench) == [(0.0, "started"), (0.375, "crashed")]
    assert process.state == "crashed"
    assert bench.simulator.living == 0


def test_a_killed_process_waits_at_the_store_no_longer() -> None:
    """Its connection is closed: the store's thread wakes nobody when the bell rings."""
    bench = bench_of()
    _, process = play(bench, fx.WaitFor("bell", 10.0))
    bench.at(1.0, lambda: bench.simulator.crash(process))
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=2.0)

    heard = bench.ask(bench.process(1), fx.Get("bell"), at_s=2.0)
    bench.run()

    assert heard.at_s == 2.0 + ROUND_TRIP_S + SERVICE_S


def test_what_a_killed_process_has_sent_arrives() -> None:
    """Its last message is on its way, and changes the store."""
    bench = bench_of()
    _, process = play(bench, fx.Set("k", b"1"))
    bench.at(0.125, lambda: bench.simulator.crash(process))

    bench.run()

    assert bench.store.cells.get("k") == b"1"


def test_a_process_that_has_ended_cannot_be_struck() -> None:
    """Neither killed, nor stopped, nor interrupted: nothing happens."""
    bench = bench_of()
    _, process = play(bench, fx.Now())
    bench.at(1.0, lambda: bench.simulator.crash(process))
    bench.at(1.0, lambda: bench.simulator.pause(process, 1.0))
    bench.at(1.0, lambda: bench.simulator.interrupt(process))

    bench.run()

    assert process.state == "ended"
    assert states(bench) == [(0.0, "started"), (0.0, "ended")]


def test_dying_runs_no_effects() -> None:
    """Code that would clean up is not asked what it wants to do."""
    bench = bench_of()

    def program() -> Generator[Effect, Any, None]:
        try:
            yield fx.Sleep(10.0)
        except Exception:  # noqa: BLE001 - what a careful program does
            yield fx.Set("k", b"cleaned up")

    process = bench.start(program())
    bench.at(1.0, lambda: bench.simulator.crash(process))
    bench.run()

    assert bench.store.cells.get("k") is None


# --- pauses -------------------------------------------------------------------------------------


def test_a_process_that_stands_still_gets_what_came_when_it_wakes() -> None:
    """Its sleep is over, its answer is there; the clock has gone on."""
    bench = bench_of()
    script, process = play(bench, fx.Sleep(1.0), fx.Now(), fx.Get("k"), fx.Now())
    bench.at(0.5, lambda: bench.simulator.pause(process, 10.0))
    bench.at(10.75, lambda: bench.simulator.pause(process, 10.0))

    bench.run()

    assert script.came == [(10.5, None), (10.5, 10.5), (20.75, None), (20.75, 20.75)]
    assert states(bench)[1:3] == [(0.5, "paused for 10.000 s"), (10.5, "woke")]


def test_what_comes_to_who_stands_still_comes_in_its_order() -> None:
    """A bell before the end of the time is a bell, however late its process wakes."""
    bench = bench_of()
    script, process = play(bench, fx.WaitFor("bell", 3.0), fx.WaitFor("bell", 1.0))
    bench.at(1.0, lambda: bench.simulator.pause(process, 10.0))
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=1.5)

    bench.run()

    # And it was heard once: the next wait is a new one.
    assert script.came == [(11.0, True), (11.0 + ROUND_TRIP_S, True)]
    assert process.store_operations == 2


def test_a_bell_after_the_end_of_the_time_is_not_lost_on_who_stands_still() -> None:
    """The time was up first; the bell is heard by the next wait, at once and for nothing."""
    bench = bench_of()
    script, process = play(bench, fx.WaitFor("bell", 3.0), fx.WaitFor("bell", 1.0))
    bench.at(1.0, lambda: bench.simulator.pause(process, 10.0))
    bench.ask(bench.process(1), fx.Set("bell", b""), at_s=5.0)

    bench.run()

    assert script.came == [(11.0, False), (11.0, True)]
    assert process.store_operations == 1


def test_a_pause_within_a_pause_ends_with_the_first() -> None:
    """As one signal continues a process however often it was stopped."""
    bench = bench_of()
    script, process = play(bench, fx.Sleep(1.0))
    bench.at(0.5, lambda: bench.simulator.pause(process, 2.0))
    bench.at(1.0, lambda: bench.simulator.pause(process, 10.0))

    bench.run()

    assert script.times == [2.5]


def test_a_process_that_is_killed_while_it_stands_still_does_not_wake() -> None:
    """There is nobody to wake."""
    bench = bench_of()
    script, process = play(bench, fx.Sleep(1.0))
    bench.at(0.5, lambda: bench.simulator.pause(process, 2.0))
    bench.at(2.0, lambda: bench.simulator.crash(process))

    bench.run()

    assert script.came == []
    assert [what for _, what in states(bench)] == ["started", "paused for 2.000 s", "crashed"]


# --- interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "effect",
    [fx.Sleep(10.0), fx.Get("k"), fx.WaitFor("bell", 10.0)],
    ids=["sleep", "store", "wait"],
)
def test_an_interruption_is_thrown_into_whatever_a_process_waits_for(effect: Effect) -> None:
    """At once, and it ends the process, for nobody has caught it."""
    bench = bench_of()
    caught: list[float] = []

    def program() -> Generator[Effect, Any, None]:
        try:
            yield effect
        except KeyboardInterrupt:
            caught.append(bench.agenda.now_s)
            raise

    process = bench.start(program())
    bench.at(0.375, lambda: bench.simulator.interrupt(process))
    bench.run()

    assert caught == [0.375]
    assert process.state == "interrupted"
    assert states(bench)[1:] == [(0.375, "is interrupted"), (0.375, "interrupted")]


@pytest.mark.parametrize(("timeout_s", "lasts_s"), [(4.0, 0.5), (0.25, 0.25)])
def test_last_words_wait_half_a_second_for_the_store(timeout_s: float, lasts_s: float) -> None:
    """On the process's own clock, and never longer than any other operation."""
    bench = bench_of(lost_requests=1.0, timeout_s=timeout_s)
    errors: list[tuple[float, BaseException]] = []

    def program() -> Generator[Effect, Any, None]:
        try:
            yield fx.Sleep(10.0)
        except KeyboardInterrupt:
            try:
                yield fx.Set("k", b"last words")
            except StoreUnavailableError as error:
                errors.append((bench.agenda.now_s, error))
            raise

    process = bench.start(program(), clock=HostClock(rate=0.5))
    bench.at(1.0, lambda: bench.simulator.interrupt(process))
    bench.run()

    [(at_s, _)] = errors
    assert at_s == 1.0 + lasts_s / 0.5
    assert process.state == "interrupted"


def test_work_that_is_interrupted_leaves_half_a_second_as_well() -> None:
    """Whatever throws an interruption: from then on the program says its last words."""
    bench = bench_of(lost_requests=1.0)
    times: list[float] = []

    def interrupted(_token: object) -> None:
        raise KeyboardInterrupt

    def program() -> Generator[Effect, Any, None]:
        try:
            yield fx.Call(interrupted)
        except KeyboardInterrupt:
            with contextlib.suppress(StoreUnavailableError):
                yield fx.Set("k", b"last words")
            times.append(bench.agenda.now_s)
            raise

    process = bench.start(program())
    bench.run()

    assert times == [0.5]
    assert process.state == "interrupted"


def test_who_stands_still_is_interrupted_when_it_wakes_and_before_all_else() -> None:
    """What it had waited for came too late for it."""
    bench = bench_of()
    came: list[object] = []

    def program() -> Generator[Effect, Any, None]:
        try:
            came.append((yield fx.Get("k")))
        except KeyboardInterrupt:
            came.append(bench.agenda.now_s)
            raise

    process = bench.start(program())
    bench.at(0.125, lambda: bench.simulator.pause(process, 5.0))
    bench.at(3.0, lambda: bench.simulator.interrupt(process))
    bench.run()

    assert came == [5.125]
    assert process.state == "interrupted"


def test_a_program_that_swallows_an_interruption_goes_on() -> None:
    """The simulator has no say in that; a check has."""
    bench = Bench()

    def program() -> Generator[Effect, Any, None]:
        with contextlib.suppress(KeyboardInterrupt):
            yield fx.Sleep(10.0)
        yield fx.Set("k", b"1")

    process = bench.start(program())
    bench.at(1.0, lambda: bench.simulator.interrupt(process))
    bench.run()

    assert process.state == "ended"
    assert bench.store.cells.get("k") == b"1"


# --- strikes between effects --------------------------------------------------------------------


EFFECTS = (fx.Now(), fx.Draw(), fx.Set("k", b"1"), fx.Now(), fx.Sleep(1.0), fx.Nonce())


def struck(bench: Bench, strike: Strike, *, after: int) -> tuple[Script, Process]:
    """Let something happen to a process in place of one of its effects."""
    script, process = play(bench, *EFFECTS)
    process.strikes.append((after, strike))
    return script, process


@pytest.mark.parametrize("after", range(1, len(EFFECTS) + 1))
def test_a_crash_can_strike_before_every_effect(after: int) -> None:
    """The ones before are performed, that one is not."""
    bench = bench_of()
    script, process = struck(bench, Strike(what="crash"), after=after)

    bench.run()

    assert len(script.came) == after - 1
    assert process.state == "crashed"
    assert bench.store.operations == (after > 3)
    assert bench.simulator.living == 0


@pytest.mark.parametrize("after", range(1, len(EFFECTS) + 1))
def test_a_pause_can_strike_before_every_effect(after: int) -> None:
    """That one is performed when the process wakes, and everything after it is later by as much."""
    undisturbed, _ = play(plain := bench_of(), *EFFECTS)
    plain.run()
    bench = bench_of()
    script, process = struck(bench, Strike(what="pause", for_s=8.0), after=after)

    bench.run()

    expected = [
        at_s + 8.0 * (number >= after) for number, at_s in enumerate(undisturbed.times, start=1)
    ]
    assert script.times == expected
    assert process.state == "ended"
    assert script.values[1] == undisturbed.values[1]
    assert bench.store.cells.get("k") == b"1"


@pytest.mark.parametrize("after", range(1, len(EFFECTS) + 1))
def test_an_interruption_can_strike_before_every_effect(after: int) -> None:
    """It is thrown in instead of what the effect would have brought."""
    bench = bench_of()
    script, process = struck(bench, Strike(what="interrupt"), after=after)

    bench.run()

    assert len(script.came) == after - 1
    assert process.state == "interrupted"
    assert bench.store.operations == (after > 3)


def test_a_process_can_be_struck_again_and_again() -> None:
    """Two pauses and a crash, each before its effect."""
    bench = bench_of()
    script, process = play(bench, *EFFECTS)
    process.strikes += [
        (2, Strike(what="pause", for_s=1.0)),
        (2, Strike(what="pause", for_s=2.0)),
        (6, Strike(what="crash")),
    ]

    bench.run()

    assert script.times == [0.0, 1.0, 3.0 + ROUND_TRIP_S, 3.0 + ROUND_TRIP_S, 4.0 + ROUND_TRIP_S]
    assert process.state == "crashed"


def test_what_strikes_late_is_over_late() -> None:
    """The driver knows until when processes were disturbed: liveness is counted from then."""
    bench = bench_of()
    script, process = play(bench, *EFFECTS)
    process.strikes.append((6, Strike(what="pause", for_s=5.0)))

    bench.run()

    assert bench.simulator.struck_until_s == script.times[4] + 5.0


# --- how a process ends -------------------------------------------------------------------------


def test_a_program_that_raises_has_failed() -> None:
    """As a rank ends on an exception that nobody catches; the others go on."""
    bench = bench_of()

    def program() -> Generator[Effect, Any, None]:
        yield fx.Sleep(1.0)
        raise ResilienceError("no answer from the store")

    process = bench.start(program())
    other, _ = play(bench, fx.Sleep(2.0), rank=1)
    bench.run()

    assert process.state == "failed"
    assert str(process.error) == "no answer from the store"
    assert other.times == [2.0]
    assert bench.simulator.living == 0


def test_a_bug_in_a_program_is_seen() -> None:
    """An error that no rank would raise on purpose ends the run, not the process."""
    bench = bench_of()

    def program() -> Generator[Effect, Any, None]:
        yield fx.Sleep(1.0)
        raise TypeError("a bug")

    bench.start(program())

    with pytest.raises(TypeError, match="a bug"):
        bench.run()
