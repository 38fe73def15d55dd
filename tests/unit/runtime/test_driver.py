# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The blocking driver performs effects on real ports, and can always be interrupted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from lightning_resilience.core.events import Event, StoreLost, StoreReturned
from lightning_resilience.errors import CallTimeoutError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from lightning_resilience.ports import CancelToken, Clock, SharedStore
    from lightning_resilience.protocols.effects import Effect, Protocol


HANG_S = 10.0
"""Bound of everything that waits for another thread."""

PROMPT_S = 1.0
"""What is interrupted ends within this time."""

SIXTY_S = 60.0


class Sink:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)


class ManualClock:
    """A clock that a test moves, and that knows how often it was looked at."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._looks = 0
        self._looked = threading.Condition()

    def now_s(self) -> float:
        """The time that the test has set."""
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self._now_s

    def sleep(self, duration_s: float) -> None:
        """Move."""
        self.advance(duration_s)

    def advance(self, duration_s: float) -> None:
        """Let time pass."""
        with self._looked:
            self._now_s += duration_s

    def await_looks(self, number: int = 8) -> None:
        """Wait until the clock was looked at so many times more: whole turns of the driver."""
        with self._looked:
            wanted = self._looks + number
            assert self._looked.wait_for(lambda: self._looks >= wanted, HANG_S)


class LostStore(MemoryStore):
    """A store whose writes are not answered."""

    def set(self, key: str, value: bytes) -> None:
        """Fail."""
        raise StoreUnavailableError(f"no answer to set of {key}, {len(value)} bytes")


@pytest.fixture
def store() -> MemoryStore:
    """A store of this process."""
    return MemoryStore()


@pytest.fixture
def make_driver(store: MemoryStore) -> Iterator[Callable[..., Driver]]:
    """Make drivers on the store, and close them after the test."""
    made: list[Driver] = []

    def make(
        *, clock: Clock | None = None, own_store: SharedStore | None = None, **options: Any
    ) -> Driver:
        driver = Driver(
            store=own_store or store,
            clock=clock or SystemClock(),
            dice=SystemDice(),
            sink=options.pop("sink", Sink()),
            **options,
        )
        made.append(driver)
        return driver

    yield make

    for driver in made:
        driver.close()


def one(effect: Effect) -> Protocol[Any]:
    """A protocol of one effect."""
    return (yield effect)


def threads_named(name: str) -> list[threading.Thread]:
    """Living threads of ours."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def await_end(threads: list[threading.Thread]) -> None:
    """Wait until threads have ended."""
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), f"{thread.name} still runs"


# --- effects ---------------------------------------------------------------------------------


def test_store_effects_reach_the_store(
    make_driver: Callable[..., Driver], store: MemoryStore
) -> None:
    """Each store effect is one operation of the store, and is sent its result."""
    effects = (
        fx.Set("a", b"1"),
        fx.Get("a"),
        fx.Get("none"),
        fx.MultiGet(("a", "none")),
        fx.CompareAndSet("a", b"1", b"2"),
        fx.CompareAndSet("a", b"1", b"3"),
        fx.Add("counter", 2),
        fx.WaitFor("a", 1.0),
        fx.WaitFor("none", 0.01),
        fx.Delete("a"),
        fx.Delete("a"),
    )
    driver = make_driver()

    results = [driver.run(one(effect)) for effect in effects]

    assert results == [
        *(None, b"1", None, [b"1", None]),
        *(b"2", b"2", 2, True, False, True, False),
    ]
    assert store.get("counter") == b"2"


def test_time_and_chance_come_from_the_ports(make_driver: Callable[..., Driver]) -> None:
    """Now, Sleep, Draw and Nonce are answered by clock and dice."""
    clock = ManualClock()
    clock.advance(7.0)

    def protocol() -> Protocol[tuple[float, float, float, str, str]]:
        before: float = yield fx.Now()
        yield fx.Sleep(2.5)
        return before, (yield fx.Now()), (yield fx.Draw()), (yield fx.Nonce()), (yield fx.Nonce())

    before, after, draw, nonce, another = make_driver(clock=clock).run(protocol())

    assert (before, after) == (7.0, 9.5)
    assert 0.0 <= draw < 1.0
    assert nonce != another


def test_events_go_to_the_sink(make_driver: Callable[..., Driver]) -> None:
    """Emit hands the event over as it is."""
    sink = Sink()
    event = StoreReturned(op="save", lost_for_s=3.0)

    make_driver(sink=sink).run(one(fx.Emit(event)))

    assert sink.events == [event]


def test_what_a_protocol_returns_or_raises_comes_out(make_driver: Callable[..., Driver]) -> None:
    """The driver adds nothing of its own to a protocol's end."""

    def failing() -> Protocol[None]:
        yield fx.Now()
        raise ZeroDivisionError("mine")

    driver = make_driver()

    assert driver.run(one(fx.Call(lambda _token: "value"))) == "value"
    with pytest.raises(ZeroDivisionError, match="mine"):
        driver.run(failing())


def test_a_failure_is_thrown_into_the_protocol(make_driver: Callable[..., Driver]) -> None:
    """A protocol may catch what an effect raised, and goes on."""

    def protocol() -> Protocol[str]:
        try:
            yield fx.Set("a", b"1")
        except StoreUnavailableError as error:
            return str(error)
        return "not thrown"

    text = make_driver(own_store=LostStore()).run(protocol())

    assert "no answer to set of a" in text


# --- calls -----------------------------------------------------------------------------------


def test_a_call_without_timeout_runs_in_the_callers_thread(
    make_driver: Callable[..., Driver],
) -> None:
    """Inline work is not moved to another thread."""
    where = make_driver().run(one(fx.Call(lambda _token: threading.current_thread())))

    assert where is threading.current_thread()


def test_a_call_with_timeout_runs_in_a_daemon_thread(make_driver: Callable[..., Driver]) -> None:
    """Work that may hang must not keep the process alive."""
    where = make_driver().run(
        one(fx.Call(lambda _token: threading.current_thread(), timeout_s=HANG_S))
    )

    assert where is not threading.current_thread()
    assert where.daemon
    await_end([where])


@pytest.mark.parametrize("timeout_s", [None, HANG_S])
def test_what_work_raises_is_thrown_in(
    make_driver: Callable[..., Driver], timeout_s: float | None
) -> None:
    """The very exception object, with or without a thread, SystemExit included."""
    for error in (ConnectionResetError("x"), SystemExit(3)):

        def work(_token: CancelToken, error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            make_driver().run(one(fx.Call(work, timeout_s=timeout_s)))

        assert caught.value is error


def test_a_call_that_hangs_is_abandoned(make_driver: Callable[..., Driver]) -> None:
    """At the timeout the protocol goes on, the token is set, and the late result is discarded."""
    release, tokens = threading.Event(), []

    def work(token: CancelToken) -> str:
        tokens.append(token)
        assert release.wait(HANG_S)
        return "too late"

    def protocol() -> Protocol[str]:
        try:
            yield fx.Call(work, timeout_s=0.05)
        except CallTimeoutError as error:
            return str(error)
        return "not abandoned"

    text = make_driver().run(protocol())
    running = threads_named("lightning-resilience-call")
    still_cancelled = tokens[0].cancelled
    release.set()

    assert "no progress for 0.05 s" in text
    assert "stall_timeout_s" in text
    assert still_cancelled
    with pytest.raises(CallTimeoutError):
        tokens[0].raise_if_cancelled()
    await_end(running)


def test_work_that_ended_is_not_cancelled(make_driver: Callable[..., Driver]) -> None:
    """A call that came back in time keeps a token that is not set."""
    token = make_driver().run(one(fx.Call(lambda token: token, timeout_s=HANG_S)))

    assert not token.cancelled
    token.raise_if_cancelled()


def test_progress_restarts_the_stall_timeout(make_driver: Callable[..., Driver]) -> None:
    """Work of many timeouts that keeps saying that it moves is not abandoned."""
    clock = ManualClock()

    def work(token: CancelToken) -> str:
        for _ in range(6):
            token.progress()
            clock.await_looks()
            clock.advance(0.009)
            clock.await_looks()
        return "long"

    result = make_driver(clock=clock).run(one(fx.Call(work, timeout_s=0.01)))

    assert result == "long"
    assert clock.now_s() > 5 * 0.01


def test_without_progress_the_same_work_is_abandoned(make_driver: Callable[..., Driver]) -> None:
    """The clock decides, from the last sign of progress."""
    clock, over = ManualClock(), threading.Event()

    def work(token: CancelToken) -> None:
        token.progress()
        clock.await_looks()
        clock.advance(0.009)
        clock.await_looks()
        clock.advance(0.002)
        assert over.wait(HANG_S)

    with pytest.raises(CallTimeoutError):
        make_driver(clock=clock).run(one(fx.Call(work, timeout_s=0.01)))
    over.set()

    await_end(threads_named("lightning-resilience-call"))


def test_an_abandoned_call_tells_how_many_bytes_had_moved(
    make_driver: Callable[..., Driver],
) -> None:
    """What it has marked by then, of each kind that it has marked; other marks count no bytes."""
    over = threading.Event()

    def work(token: CancelToken) -> None:
        token.progress(written=70)
        token.progress()
        token.progress(sent=20)
        token.progress(sent=21)
        assert over.wait(HANG_S)

    with pytest.raises(
        CallTimeoutError, match=r"abandoned \(70 bytes written, 41 bytes sent\); "
    ) as it:
        make_driver().run(one(fx.Call(work, timeout_s=0.01)))
    over.set()

    assert it.value.moved == "70 bytes written, 41 bytes sent"


def test_nothing_is_said_of_bytes_that_nobody_has_counted(
    make_driver: Callable[..., Driver],
) -> None:
    """A request for a size, for example, or a foreign writer that marks nothing."""
    over = threading.Event()

    def work(token: CancelToken) -> None:
        token.progress()
        assert over.wait(HANG_S)

    with pytest.raises(CallTimeoutError, match="was abandoned; its thread") as it:
        make_driver().run(one(fx.Call(work, timeout_s=0.01)))
    over.set()

    assert it.value.moved == ""


def test_a_call_beats_while_it_runs(make_driver: Callable[..., Driver], store: MemoryStore) -> None:
    """Every beat writes another value, from the waiting thread and at the interval."""
    clock, seen = ManualClock(), []

    def work(token: CancelToken) -> None:
        for _ in range(3):
            token.progress()
            clock.await_looks()
            clock.advance(0.008)
            clock.await_looks()
            seen.append(store.get("beat"))

    make_driver(clock=clock).run(
        one(fx.Call(work, timeout_s=0.01, beat=fx.Beat("beat", every_s=0.016)))
    )

    assert seen[0] is None
    assert seen[1] is not None
    assert seen[2] == seen[1]


def test_a_beat_that_fails_does_not_end_the_work(make_driver: Callable[..., Driver]) -> None:
    """The store is away during a call: the work ends well, and an event says so."""
    clock, sink = ManualClock(), Sink()

    def work(token: CancelToken) -> str:
        for _ in range(3):
            token.progress()
            clock.await_looks()
            clock.advance(0.009)
            clock.await_looks()
        return "done"

    driver = make_driver(clock=clock, own_store=LostStore(), sink=sink)
    result = driver.run(one(fx.Call(work, timeout_s=0.01, beat=fx.Beat("beat", every_s=0.005))))

    assert result == "done"
    assert {type(event) for event in sink.events} == {StoreLost}


def test_what_belongs_to_the_thread_is_taken_over(make_driver: Callable[..., Driver]) -> None:
    """``adopt`` is asked in the calling thread, and what it returns runs in the call's, first."""
    order: list[tuple[str, threading.Thread]] = []

    def adopt() -> Callable[[], None]:
        order.append(("asked", threading.current_thread()))
        return lambda: order.append(("adopted", threading.current_thread()))

    def work(_token: CancelToken) -> None:
        order.append(("worked", threading.current_thread()))

    make_driver(adopt=adopt).run(one(fx.Call(work, timeout_s=HANG_S)))

    assert [name for name, _ in order] == ["asked", "adopted", "worked"]
    assert order[0][1] is threading.current_thread()
    assert order[1][1] is order[2][1] is not threading.current_thread()


# --- interruptions ---------------------------------------------------------------------------


class StopRequested(BaseException):
    """What an interrupt callback raises."""


def waits(release: threading.Event) -> list[Effect]:
    """Every effect that may last."""

    def work(_token: CancelToken) -> None:
        release.wait(HANG_S)

    return [
        fx.Sleep(SIXTY_S),
        fx.WaitFor("never", SIXTY_S),
        fx.Call(work, timeout_s=SIXTY_S),
        fx.Local(fx.WaitFor("never", SIXTY_S)),
    ]


WAITS = pytest.mark.parametrize(
    "number", [0, 1, 2, 3], ids=["Sleep", "WaitFor", "Call", "Local WaitFor"]
)


@WAITS
def test_an_interrupt_callback_ends_any_wait(
    make_driver: Callable[..., Driver], number: int
) -> None:
    """A flag set by a signal handler ends a sleep, a wait and a call in under a second."""
    release, waiting = threading.Event(), threading.Event()
    asked_at_s: list[float] = []
    looks: list[int] = []

    def interrupt() -> None:
        looks.append(1)
        if len(looks) > 1:
            waiting.set()
        if asked_at_s:
            raise StopRequested

    def ask() -> None:
        assert waiting.wait(HANG_S)
        asked_at_s.append(time.monotonic())

    asker = threading.Thread(target=ask)
    asker.start()

    with pytest.raises(StopRequested):
        make_driver(interrupt=interrupt).run(one(waits(release)[number]))
    took_s = time.monotonic() - asked_at_s[0]

    assert took_s < PROMPT_S
    release.set()
    asker.join()
    await_end(threads_named("lightning-resilience-call"))


@WAITS
def test_ctrl_c_ends_any_wait_and_last_words_are_spoken(
    make_driver: Callable[..., Driver], store: MemoryStore, number: int
) -> None:
    """A real SIGINT reaches the protocol in under a second; it may still write to the store."""
    release, waiting = threading.Event(), threading.Event()
    sent_at_s: list[float] = []
    caught_at_s: list[float] = []

    def send() -> None:
        assert waiting.wait(HANG_S)
        sent_at_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def protocol() -> Protocol[None]:
        try:
            yield waits(release)[number]
        except KeyboardInterrupt:
            caught_at_s.append(time.monotonic())
            yield fx.Set("last", b"words")
            raise

    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) > 1:
            waiting.set()

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        make_driver(interrupt=look).run(protocol())

    assert caught_at_s[0] - sent_at_s[0] < PROMPT_S
    assert store.get("last") == b"words"
    release.set()
    sender.join()
    await_end(threads_named("lightning-resilience-call"))


def test_an_interrupted_call_finds_its_token_set(make_driver: Callable[..., Driver]) -> None:
    """What was left behind by an interruption publishes nothing."""
    release, tokens = threading.Event(), []

    def work(token: CancelToken) -> None:
        tokens.append(token)
        release.wait(HANG_S)

    def interrupt() -> None:
        if tokens:
            raise StopRequested

    with pytest.raises(StopRequested):
        make_driver(interrupt=interrupt).run(one(fx.Call(work, timeout_s=SIXTY_S)))

    assert tokens[0].cancelled
    release.set()
    await_end(threads_named("lightning-resilience-call"))


def test_a_call_interrupted_as_it_begins_finds_its_token_set(
    make_driver: Callable[..., Driver],
) -> None:
    """Ctrl-C between the start of the thread and the first wait leaves no call that publishes."""
    started, tokens = threading.Event(), []

    class Interrupting(ManualClock):
        def now_s(self) -> float:
            if threading.current_thread() is threading.main_thread() and looks_after_start():
                raise KeyboardInterrupt
            return super().now_s()

    def looks_after_start() -> bool:
        return bool(threads_named("lightning-resilience-call"))

    def work(token: CancelToken) -> None:
        tokens.append(token)
        started.wait(HANG_S)

    with pytest.raises(KeyboardInterrupt):
        make_driver(clock=Interrupting()).run(one(fx.Call(work, timeout_s=SIXTY_S)))
    running = threads_named("lightning-resilience-call")
    started.set()

    await_end(running)
    assert [token.cancelled for token in tokens] == [True]


def test_a_pending_interruption_ends_every_wait_that_lasts(
    make_driver: Callable[..., Driver],
) -> None:
    """A flag that was set before ends sleeps, waits and calls without progress within a second."""

    def interrupt() -> None:
        raise StopRequested

    over = threading.Event()
    for effect in (
        fx.Sleep(SIXTY_S),
        fx.WaitFor("never", SIXTY_S),
        fx.Call(lambda _token: over.wait(SIXTY_S), timeout_s=SIXTY_S),
    ):
        began = time.monotonic()
        with pytest.raises(StopRequested):
            make_driver(interrupt=interrupt).run(one(effect))
        assert time.monotonic() - began < 3.0
    over.set()


def test_a_pending_interruption_leaves_work_alone_that_goes_on(
    make_driver: Callable[..., Driver],
) -> None:
    """A save that was due when the signal came is made: a call with progress, and short waits."""

    def interrupt() -> None:
        raise StopRequested

    def work(token: CancelToken) -> str:
        for _ in range(15):
            time.sleep(0.1)
            token.progress()
        return "saved"

    def save() -> Protocol[str]:
        yield fx.Sleep(0.01)
        saved: str = yield fx.Call(work, timeout_s=SIXTY_S)
        yield fx.Sleep(0.01)
        return saved

    assert make_driver(interrupt=interrupt).run(save()) == "saved"


def test_many_short_waits_are_one_long_one(make_driver: Callable[..., Driver]) -> None:
    """Retries whose delays are short each do not keep an interruption out for ever."""

    def interrupt() -> None:
        raise StopRequested

    def retrying() -> Protocol[None]:
        while True:
            yield fx.Sleep(0.05)

    with pytest.raises(StopRequested):
        make_driver(interrupt=interrupt).run(retrying())


# --- threads ---------------------------------------------------------------------------------


def test_one_helper_serves_all_waits_of_a_thread(make_driver: Callable[..., Driver]) -> None:
    """Connections are a cost: a hundred waits use one helper, and close ends it."""
    driver = make_driver()
    before = threads_named("lightning-resilience-bells")

    for _ in range(100):
        driver.run(one(fx.WaitFor("never", 0.0)))
    helpers = [
        thread for thread in threads_named("lightning-resilience-bells") if thread not in before
    ]
    driver.close()

    assert len(helpers) == 1
    await_end(helpers)


def test_close_ends_a_wait_that_was_left(make_driver: Callable[..., Driver]) -> None:
    """The helper of a wait that was interrupted ends with the driver, not minutes later."""
    looks: list[int] = []

    def interrupt() -> None:
        looks.append(1)
        if len(looks) > 1:
            raise StopRequested

    driver = make_driver(interrupt=interrupt)
    with pytest.raises(StopRequested):
        driver.run(one(fx.WaitFor("never", 10 * SIXTY_S)))
    driver.close()

    await_end(threads_named("lightning-resilience-bells"))


def test_after_an_interrupted_wait_the_next_one_is_answered(
    make_driver: Callable[..., Driver], store: MemoryStore
) -> None:
    """A driver can be used again after an interruption."""
    looks: list[int] = []

    def interrupt() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise StopRequested

    driver = make_driver(interrupt=interrupt)
    with pytest.raises(StopRequested):
        driver.run(one(fx.WaitFor("bell", SIXTY_S)))
    store.set("bell", b"1")

    assert driver.run(one(fx.WaitFor("bell", SIXTY_S))) is True


def test_a_thread_that_ends_takes_its_helper_with_it(make_driver: Callable[..., Driver]) -> None:
    """Threads come and go, for example for asynchronous saves: none leaves a helper behind."""
    driver = make_driver()
    helpers: list[threading.Thread] = []

    def use() -> None:
        driver.run(one(fx.WaitFor("never", 0.0)))
        helpers.extend(threads_named("lightning-resilience-bells"))

    for _ in range(3):
        user = threading.Thread(target=use)
        user.start()
        user.join()

    await_end(helpers)


def test_threads_wait_side_by_side(make_driver: Callable[..., Driver], store: MemoryStore) -> None:
    """A thread on a long wait does not hold up another one's."""
    driver = make_driver()
    results: list[bool] = []
    waiting = threading.Thread(
        target=lambda: results.append(driver.run(one(fx.WaitFor("slow", HANG_S))))
    )
    waiting.start()

    store.set("quick", b"1")
    found = driver.run(one(fx.WaitFor("quick", HANG_S)))
    store.set("slow", b"1")
    waiting.join(HANG_S)

    assert (found, results) == (True, [True])


def test_a_wait_ends_when_the_key_appears(
    make_driver: Callable[..., Driver], store: MemoryStore
) -> None:
    """A bell set by another thread wakes the waiter long before its timeout."""
    waiting = threading.Event()

    def ring() -> None:
        assert waiting.wait(HANG_S)
        store.set("bell", b"1")

    ringer = threading.Thread(target=ring)
    ringer.start()

    found = make_driver(interrupt=waiting.set).run(one(fx.WaitFor("bell", SIXTY_S)))

    assert found is True
    ringer.join()


def test_a_failing_wait_is_thrown_in_and_the_next_one_works(
    make_driver: Callable[..., Driver],
) -> None:
    """The helper hands on what the store raised, and lives on."""

    class Flaky(MemoryStore):
        failures = 1

        def watcher(self) -> MemoryStore:
            if Flaky.failures:
                Flaky.failures -= 1
                raise StoreUnavailableError("no watcher yet")
            return super().watcher()

    driver = make_driver(own_store=Flaky())

    with pytest.raises(StoreUnavailableError, match="no watcher yet"):
        driver.run(one(fx.WaitFor("never", 0.0)))
    assert driver.run(one(fx.WaitFor("never", 0.0))) is False


@pytest.mark.parametrize(
    "told",
    [StopRequested(), SignalException("told to stop", signal.SIGTERM)],
    ids=["ours", "launcher"],
)
def test_last_words_do_not_wait_for_a_store_that_is_silent(
    make_driver: Callable[..., Driver], told: BaseException
) -> None:
    """After an interruption a store that does not answer fails in under a second."""
    release = threading.Event()

    class SilentStore(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            release.wait(HANG_S)
            super().set(key, value)

    def stop(_token: CancelToken) -> None:
        raise told

    failures: list[StoreUnavailableError] = []

    def protocol() -> Protocol[None]:
        try:
            yield fx.Call(stop)
        except type(told):
            try:
                yield fx.Set("last", b"words")
            except StoreUnavailableError as error:
                failures.append(error)
            raise

    began_at_s = time.monotonic()
    with pytest.raises(type(told)):
        make_driver(own_store=SilentStore()).run(protocol())
    took_s = time.monotonic() - began_at_s
    release.set()

    assert took_s < PROMPT_S
    assert "not answered within 0.5 s" in str(failures[0])
    await_end(threads_named("lightning-resilience-call"))


# --- what a process keeps for itself ---------------------------------------------------------


def test_local_effects_reach_a_store_of_this_process_alone(
    make_driver: Callable[..., Driver], store: MemoryStore
) -> None:
    """Each is one operation of the driver's own store, which nobody else sees."""
    effects = (
        fx.Set("a", b"1"),
        fx.Get("a"),
        fx.MultiGet(("a", "none")),
        fx.CompareAndSet("a", b"1", b"2"),
        fx.Add("counter", 2),
        fx.WaitFor("a", 1.0),
        fx.WaitFor("none", 0.01),
        fx.Delete("counter"),
    )
    driver = make_driver()

    results = [driver.run(one(fx.Local(effect))) for effect in effects]

    assert results == [None, b"1", [b"1", None], b"2", 2, True, False, True]
    assert store.multi_get(("a", "counter")) == [None, None]
    assert driver.run(one(fx.Get("a"))) is None
    assert make_driver().run(one(fx.Local(fx.Get("a")))) is None


def test_local_effects_work_while_the_shared_store_is_away(
    make_driver: Callable[..., Driver],
) -> None:
    """They are for just that time, also for last words after an interruption."""
    driver = make_driver(own_store=LostStore())

    driver.run(one(fx.Local(fx.Set("a", b"1"))))

    assert driver.run(one(fx.Local(fx.Get("a"))), hurry=True) == b"1"
    with pytest.raises(StoreUnavailableError):
        driver.run(one(fx.Set("a", b"1")))


def test_threads_share_what_the_process_keeps(make_driver: Callable[..., Driver]) -> None:
    """Eight threads add to one counter, and nothing is lost."""
    driver = make_driver()
    start = threading.Barrier(8)

    def count() -> None:
        start.wait(HANG_S)
        for _ in range(200):
            driver.run(one(fx.Local(fx.Add("counter", 1))))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    await_end(threads)

    assert driver.run(one(fx.Local(fx.Get("counter")))) == b"1600"


def test_a_local_wait_ends_when_another_thread_rings(make_driver: Callable[..., Driver]) -> None:
    """The bell of a circuit of one's own wakes the threads that wait for it, and only that bell."""
    driver = make_driver()
    results: list[bool] = []
    waiter = threading.Thread(
        target=lambda: results.append(driver.run(one(fx.Local(fx.WaitFor("bell", HANG_S)))))
    )
    waiter.start()

    driver.run(one(fx.Set("bell", b"1")))
    nothing = driver.run(one(fx.Local(fx.WaitFor("bell", 0.05))))
    driver.run(one(fx.Local(fx.Set("bell", b"1"))))
    await_end([waiter])

    assert nothing is False
    assert results == [True]


def test_close_ends_the_helpers_of_both_stores(make_driver: Callable[..., Driver]) -> None:
    """Waits of both kinds have a helper each, side by side, and neither outlives the driver."""
    driver = make_driver()
    driver.run(one(fx.WaitFor("never", 0.01)))
    driver.run(one(fx.Local(fx.WaitFor("never", 0.01))))
    helpers = threads_named("lightning-resilience-bells")

    driver.close()

    assert len(helpers) == 2
    await_end(helpers)


# --- a lease that is renewed -----------------------------------------------------------------


class Lease(fx.Renewal):
    """A lease that writes its number, and tells when it has done so often enough.

    Args:
        every_s: How often.
        last: Number of the renewal after which it counts as lost, or None.
        is_own: Whether it is in the process's own store.
    """

    def __init__(self, every_s: float, *, last: int | None = None, is_own: bool = False) -> None:
        self.every_s = every_s
        self.last = last
        self.is_own = is_own
        self.nonces: list[str] = []
        self.answers: list[bytes] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def request(self, nonce: str) -> fx.CompareAndSet | fx.Local | None:
        """The next renewal."""
        with self._changed:
            self.nonces.append(nonce)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()
        if self.last is not None and len(self.answers) >= self.last:
            return None
        beat = fx.CompareAndSet("lease", self.answers[-1] if self.answers else b"", nonce.encode())
        return fx.Local(beat) if self.is_own else beat

    def answered(self, returned: bytes) -> None:
        """Note it."""
        with self._changed:
            self.answers.append(returned)
            self._changed.notify_all()

    def await_requests(self, number: int) -> None:
        """Wait until so many renewals were asked for."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.nonces) >= number, HANG_S)

    def await_answers(self, number: int) -> None:
        """Wait until so many renewals were answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.answers) >= number, HANG_S)


LEASED = pytest.mark.parametrize("timeout_s", [None, SIXTY_S], ids=["inline", "in a thread"])


@LEASED
def test_a_lease_is_renewed_while_a_call_runs(
    make_driver: Callable[..., Driver], store: MemoryStore, timeout_s: float | None
) -> None:
    """Again and again, each time by another write, from the exact bytes of the one before."""
    held = Lease(0.01)

    def work(_token: CancelToken) -> str:
        held.await_answers(3)
        return "done"

    result = make_driver().run(one(fx.Call(work, timeout_s=timeout_s, renewal=held)))

    assert result == "done"
    written = [nonce.encode() for nonce in held.nonces[: len(held.answers)]]
    assert held.answers == written
    assert len(set(held.nonces)) == len(held.nonces) >= 3
    assert store.get("lease") == held.answers[-1]


@LEASED
def test_a_lease_is_not_renewed_before_its_time(
    make_driver: Callable[..., Driver], timeout_s: float | None
) -> None:
    """A call that is shorter than the interval costs no store operation."""
    held = Lease(SIXTY_S)

    make_driver().run(one(fx.Call(lambda _token: None, timeout_s=timeout_s, renewal=held)))

    assert held.nonces == []


def test_a_lease_is_renewed_at_its_interval(make_driver: Callable[..., Driver]) -> None:
    """Turns of the wait in between renew nothing: a beat every five seconds, not every piece."""
    clock, held, seen = ManualClock(), Lease(0.016), []

    def work(token: CancelToken) -> None:
        for _ in range(5):
            token.progress()
            clock.await_looks()
            clock.advance(0.008)
            clock.await_looks()
            seen.append(len(held.nonces))

    make_driver(clock=clock).run(one(fx.Call(work, timeout_s=0.01, renewal=held)))

    assert seen == [0, 1, 1, 2, 2]


@LEASED
@pytest.mark.parametrize("error", [None, ValueError("mine"), StopRequested()])
def test_no_renewal_outlives_its_call(
    make_driver: Callable[..., Driver], timeout_s: float | None, error: BaseException | None
) -> None:
    """However the call ends, nothing renews the lease once its end is known to the protocol."""
    held = Lease(0.01)
    counted: list[int] = []

    def work(_token: CancelToken) -> None:
        held.await_answers(2)
        if error is not None:
            raise error

    def protocol() -> Protocol[BaseException | None]:
        raised: BaseException | None = None
        try:
            yield fx.Call(work, timeout_s=timeout_s, renewal=held)
        except BaseException as caught:  # noqa: BLE001 - looked at below
            raised = caught
        counted.append(len(held.nonces))
        assert threads_named("lightning-resilience-lease") == []
        return raised

    raised = make_driver().run(protocol())

    assert raised is error
    assert counted == [len(held.nonces)]


@LEASED
def test_a_renewal_without_an_answer_is_asked_again(
    make_driver: Callable[..., Driver], timeout_s: float | None
) -> None:
    """The store is away for two beats: events say so, the call goes on, the third is answered."""
    held, sink = Lease(0.01), Sink()

    class Faltering(MemoryStore):
        def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
            if len(held.nonces) <= 2:
                raise StoreUnavailableError(f"no answer about {key}")
            return super().compare_and_set(key, expected, desired)

    def work(_token: CancelToken) -> str:
        held.await_answers(1)
        return "done"

    driver = make_driver(own_store=Faltering(), sink=sink)
    result = driver.run(one(fx.Call(work, timeout_s=timeout_s, renewal=held)))

    assert result == "done"
    assert [getattr(event, "op", "") for event in sink.events] == ["beat", "beat"]
    assert all(isinstance(event, StoreLost) for event in sink.events)
    assert held.answers[0] == held.nonces[2].encode()


@LEASED
def test_a_lease_that_is_lost_is_not_renewed(
    make_driver: Callable[..., Driver], store: MemoryStore, timeout_s: float | None
) -> None:
    """Who was taken for dead writes nothing any more, while its call goes on to its end."""
    held = Lease(0.01, last=1)

    def work(_token: CancelToken) -> str:
        held.await_requests(4)
        return "done"

    result = make_driver().run(one(fx.Call(work, timeout_s=timeout_s, renewal=held)))

    assert result == "done"
    assert held.answers == [held.nonces[0].encode()]
    assert store.get("lease") == held.answers[0]


@LEASED
def test_a_lease_of_ones_own_is_renewed_in_the_own_store(
    make_driver: Callable[..., Driver], store: MemoryStore, timeout_s: float | None
) -> None:
    """A slot behind a process's own breaker beats where it is."""
    held = Lease(0.01, is_own=True)
    driver = make_driver()

    driver.run(
        one(fx.Call(lambda _token: held.await_answers(2), timeout_s=timeout_s, renewal=held))
    )

    assert store.get("lease") is None
    assert driver.run(one(fx.Local(fx.Get("lease")))) == held.answers[-1]


def test_an_inline_call_stays_in_its_thread_and_the_lease_in_another(
    make_driver: Callable[..., Driver],
) -> None:
    """Work may block or belong to its thread; what renews its lease is a daemon beside it."""
    held = Lease(0.01)
    where: list[threading.Thread] = []

    def work(_token: CancelToken) -> None:
        where.append(threading.current_thread())
        held.await_answers(1)
        assert [helper.daemon for helper in threads_named("lightning-resilience-lease")] == [True]

    make_driver().run(one(fx.Call(work, renewal=held)))

    assert where == [threading.current_thread()]
    assert held.threads == {"lightning-resilience-lease"}


def test_a_call_interrupted_as_its_lease_begins_leaves_no_renewal(
    make_driver: Callable[..., Driver],
) -> None:
    """Ctrl-C while the thread that renews is starting must not keep the slot for ever."""
    held = Lease(0.01)
    alive: list[threading.Thread] = []

    def interrupt_start(frame: FrameType, event: str, _arg: object) -> None:
        # The thread runs; whoever has started it waits for its first sign of life.
        helpers = threads_named("lightning-resilience-lease")
        starts = event == "return" and frame.f_code is threading.Thread.start.__code__
        if starts and helpers and not alive:
            alive.extend(helpers)
            raise KeyboardInterrupt

    sys.setprofile(interrupt_start)
    try:
        with pytest.raises(KeyboardInterrupt):
            make_driver().run(one(fx.Call(lambda _token: None, renewal=held)))
    finally:
        sys.setprofile(None)

    assert len(alive) == 1
    await_end(alive)


# What several jobs share -------------------------------------------------------------------------


def test_effects_at_the_site_are_performed_on_its_store_and_no_other(
    make_driver: Callable[..., Driver], store: MemoryStore
) -> None:
    """The same key is another one in the job's store, and in the process's own."""
    driver = make_driver(site=MemoryStore())

    driver.run(one(fx.AtSite(fx.Set("a", b"1"))))

    assert driver.run(one(fx.AtSite(fx.Get("a")))) == b"1"
    assert driver.run(one(fx.AtSite(fx.CompareAndSet("a", b"1", b"2")))) == b"2"
    assert driver.run(one(fx.AtSite(fx.MultiGet(("a", "b"))))) == [b"2", None]
    assert store.get("a") is None
    assert driver.run(one(fx.Local(fx.Get("a")))) is None


def test_a_process_without_a_site_is_told_that_it_is_away(
    make_driver: Callable[..., Driver],
) -> None:
    """Whoever asks can do without it."""
    with pytest.raises(StoreUnavailableError, match="no connection to a site's store"):
        make_driver().run(one(fx.AtSite(fx.Get("a"))))
