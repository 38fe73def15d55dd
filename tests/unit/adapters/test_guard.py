# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``Guard``: what a call costs, how it ends, what may be guarded, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import itertools
import logging
import os
import pickle
import re
import threading
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience import (
    AdmissionConfig,
    BreakerConfig,
    BudgetConfig,
    BudgetExhaustedError,
    CircuitOpenError,
    ConfigError,
    Guard,
    RetriesExhaustedError,
    RetryPolicy,
    StoreUnavailableError,
)
from lightning_resilience.adapters import guarded_function
from lightning_resilience.adapters.standalone import close_connections
from lightning_resilience.core.fast_path import NO_PASSAGE, Passage
from lightning_resilience.core.records import BreakerRecord, decode
from tests.counted_store import CountedStore


if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


FAST = {
    "base_delay_s": 0.001,
    "throttle_base_delay_s": 0.001,
    "max_delay_s": 0.002,
    "deadline_s": 10.0,
}
SHORT = {
    "probe_timeout_s": 0.01,
    "probe_lease_s": 1.8,
    "open_for_s": 1.81,
    "max_open_for_s": 1.81,
    "view_max_age_s": 1.0,
}
"""The shortest open wait that the relations between the options allow."""
BOUND_S = 20.0


@pytest.fixture(autouse=True)
def _own_connections() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture
def store() -> CountedStore:
    """An empty store."""
    return CountedStore()


class Told:
    """Fails with each of ``errors`` in turn, then returns ``value``; counts its calls."""

    def __init__(self, *errors: BaseException, value: Any = "done") -> None:
        self.errors = list(errors)
        self.value = value
        self.calls = 0

    def __call__(self) -> Any:
        """Fail or return."""
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.value


def guard_of(store: Any = None, **options: Any) -> Guard:
    """Return a guard with short delays for a run of its own."""
    retry = {**FAST, **options.pop("retry", {})}
    return Guard(
        options.pop("dependency", "https://models.example"),
        retry=retry,
        store=store or CountedStore(),
        run_id=options.pop("run_id", uuid.uuid4().hex),
        **options,
    )


def resets(count: int) -> list[ConnectionResetError]:
    """Return failures that pass."""
    return [ConnectionResetError(f"reset {number}") for number in range(count)]


def trip(guard: Guard) -> None:
    """Open the circuit: the default policy trips on three failures in a row."""
    work = Told(*resets(3))
    with pytest.raises((CircuitOpenError, RetriesExhaustedError)):
        guard.call(work)
    assert work.calls == 3


# The closed path -------------------------------------------------------------------------------


def test_calls_under_a_fresh_view_ask_the_store_nothing(store: CountedStore) -> None:
    """The first call reads; a thousand after it, called and decorated, do no store operation."""
    guard = guard_of(store)
    decorated = guard(len)
    guard.call(len, "ab")
    before = len(store.operations)

    results = {guard.call(len, "abc") for _ in range(500)} | {decorated("ab") for _ in range(500)}

    assert results == {2, 3}
    assert len(store.operations) == before
    assert guard._shortcut.calls == 1000


def test_calls_under_a_stale_view_read_once_each(store: CountedStore) -> None:
    """Where the view is too old a call costs one read, and nothing else."""
    guard = guard_of(store, breaker={"view_max_age_s": 1e-6})
    guard.call(len, "ab")
    del store.operations[:]

    for _ in range(5):
        guard.call(len, "ab")

    assert store.operations == ["get"] * 5


def test_a_failure_on_the_closed_path_is_the_first_attempt_of_a_series() -> None:
    """It is counted and not made twice: one failure and one success are two calls."""
    guard = guard_of()
    guard.call(len, "ab")
    work = Told(*resets(1))

    assert guard.call(work) == "done"
    assert work.calls == 2


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "closed path"])
@pytest.mark.parametrize("decorated", [False, True], ids=["call", "decorator"])
def test_a_series_that_is_given_up_has_as_many_attempts_as_allowed(
    *, warm: bool, decorated: bool
) -> None:
    """Whichever way the first attempt went, it is one of those that the policy allows."""
    retry = {"max_attempts": 9, "unknown_max_attempts": 4}
    guard = guard_of(retry=retry, breaker={"trip_failures": 8}, budget={"retry_floor": 56})
    if warm:
        guard.call(len, "ab")
    errors = [ValueError(f"odd {number}") for number in range(9)]
    work = Told(*errors)

    with pytest.raises(RetriesExhaustedError, match="after 4 attempts") as caught:
        guard(work)() if decorated else guard.call(work)

    assert work.calls == 4
    assert caught.value.attempts == 4
    assert caught.value.__cause__ is errors[3]


def test_after_a_failure_calls_ask_at_the_gate_until_one_succeeds(store: CountedStore) -> None:
    """A failure in a row with others is forgotten by a success only if that is reported."""
    guard = guard_of(store, retry={"unknown_max_attempts": 2})
    guard.call(len, "ab")
    with pytest.raises(RetriesExhaustedError):
        guard.call(Told(ValueError("odd"), ValueError("odd")))
    del store.operations[:]

    guard.call(len, "ab")
    after_failure = list(store.operations)
    guard.call(len, "ab")

    assert after_failure == ["get"]
    assert store.operations == after_failure


def test_while_a_failure_is_repeated_no_call_goes_straight(store: CountedStore) -> None:
    """The success of another call would end a row of failures, so it must be reported."""
    guard, other = (guard_of(store, run_id="run") for _ in range(2))
    guard.call(len, "ab")
    other.call(len, "ab")
    errors = resets(1)

    def work() -> Passage:
        if errors:
            raise errors.pop()
        return other._shortcut.passage

    assert guard.call(work) is NO_PASSAGE
    assert other._shortcut.passage is not NO_PASSAGE


def test_an_answer_leaves_the_closed_path_open(store: CountedStore) -> None:
    """A missing file says nothing against the storage: the next calls cost no store operation."""
    guard = guard_of(store)
    guard.call(len, "ab")
    with pytest.raises(FileNotFoundError):
        guard.call(Told(FileNotFoundError("x")))
    before = len(store.operations)

    guard.call(len, "ab")

    assert len(store.operations) == before


def test_a_slow_failure_belongs_to_the_epoch_that_let_it_through(store: CountedStore) -> None:
    """A call that outlasted an outage and then failed is no failure of the recovery."""
    options: dict[str, Any] = {"run_id": "run", "breaker": SHORT}
    guard = guard_of(store, **options, retry={"unknown_max_attempts": 1})
    guard.call(len, "ab")
    began, may_end = threading.Event(), threading.Event()

    def outlast() -> None:
        began.set()
        assert may_end.wait(BOUND_S)
        raise ValueError("odd")

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(guard.call, outlast)
        assert began.wait(BOUND_S)
        guard.call(Told(*resets(3)))
        recovering = record_of(store)
        may_end.set()
        with pytest.raises(RetriesExhaustedError, match="after 1 attempt "):
            call.result(BOUND_S)

    assert (recovering.state, recovering.generation) == ("recovering", 1)
    assert record_of(store) == recovering


def record_of(store: CountedStore) -> BreakerRecord:
    """Return the only breaker's record."""
    cells = store._inner._shared.cells.values
    (key,) = (key for key in cells if "/breaker/" in key)
    return decode(BreakerRecord, cells[key], key=key)


def test_two_guards_of_one_dependency_share_one_breaker(store: CountedStore) -> None:
    """What one sees fail, the other stays away from at once, although its view was fresh."""
    first, second = (guard_of(store, run_id="run", when_open="raise") for _ in range(2))
    second.call(len, "ab")

    trip(first)

    with pytest.raises(CircuitOpenError, match="open"):
        second.call(len, "ab")


@pytest.mark.parametrize(
    "other",
    [{"operation": "write"}, {"dependency": "https://others.example"}, {"run_id": "another"}],
    ids=["operation", "dependency", "run"],
)
def test_breakers_are_apart(store: CountedStore, other: dict[str, Any]) -> None:
    """Another operation class, dependency or run has a breaker of its own."""
    options: dict[str, Any] = {"run_id": "run", "when_open": "raise"}

    trip(guard_of(store, **options))

    assert guard_of(store, **{**options, **other}).call(len, "ab") == 2


# How calls end ---------------------------------------------------------------------------------


def test_arguments_and_the_result_are_the_functions_own() -> None:
    """Positional and keyword arguments arrive, also one named like ours, and any result returns."""
    guard = guard_of()

    def work(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    for _ in range(2):
        given = guard.call(work, 1, function=2, self=3)
        assert given == ((1,), {"function": 2, "self": 3})
        assert guard(work)(1, function=2, self=3) == given


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "closed path"])
@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("x"), PermissionError("x"), TypeError("x"), OSError(28, "disk full")],
    ids=lambda error: type(error).__name__,
)
def test_an_answer_is_raised_as_itself(error: Exception, *, warm: bool) -> None:
    """What repeating cannot help takes one attempt, and is raised itself, with a clean context."""
    guard = guard_of()
    if warm:
        guard.call(len, "ab")
    work = Told(error)

    with pytest.raises(type(error)) as caught:
        guard.call(work)

    assert caught.value is error
    assert (error.__context__, error.__cause__) == (None, None)
    assert work.calls == 1


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "closed path"])
def test_the_users_own_cause_and_context_stay(*, warm: bool) -> None:
    """An exception that was raised from another still is."""
    guard = guard_of()
    if warm:
        guard.call(len, "ab")

    def work() -> None:
        try:
            _ = os.environ["NO_SUCH_VARIABLE"]
        except KeyError as inner:
            raise FileNotFoundError("outer") from inner

    with pytest.raises(FileNotFoundError) as caught:
        guard.call(work)

    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__context__ is caught.value.__cause__
    assert "work" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "closed path"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_a_request_to_stop_passes_at_once(kind: type[BaseException], *, warm: bool) -> None:
    """It is raised itself, after one attempt, and says nothing about the dependency."""
    guard = guard_of()
    if warm:
        guard.call(len, "ab")
    work = Told(kind())

    with pytest.raises(kind) as caught:
        guard.call(work)

    assert caught.value.__context__ is None
    assert work.calls == 1
    assert guard.call(len, "ab") == 2


def test_an_exception_is_freed_with_its_last_reference() -> None:
    """What a failed call held (a batch on a GPU) does not wait for the garbage collector."""
    guard = guard_of()

    class Batch:
        pass

    def work() -> None:
        batch = Batch()
        seen.append(weakref.ref(batch))
        raise FileNotFoundError

    seen: list[weakref.ref[Batch]] = []
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                guard.call(work)
    finally:
        gc.enable()

    assert [batch() for batch in seen] == [None, None]


def test_the_circuit_opens_and_calls_are_refused() -> None:
    """Under ``raise``, calls of an ill dependency fail without touching it, and say why."""
    guard = guard_of(when_open="raise")

    trip(guard)

    work = Told()
    with pytest.raises(CircuitOpenError, match=r"https://models\.example:read is open") as caught:
        guard.call(work)
    assert work.calls == 0
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= BreakerConfig().open_for_s


def test_waiting_for_an_ill_dependency_ends_at_the_deadline() -> None:
    """Under ``wait``, a call waits for the circuit up to ``deadline_s``, and then says so."""
    guard = guard_of(retry={"deadline_s": 0.3})

    work = Told(*resets(9))
    with pytest.raises(CircuitOpenError, match="of waiting") as caught:
        guard.call(work)

    assert work.calls == 3
    assert isinstance(caught.value.__cause__, ConnectionResetError)


def test_the_probe_finds_out_that_it_is_well_again(store: CountedStore) -> None:
    """After the open wait the probe is called, and not the function; then calls pass."""
    probe = Told()
    options: dict[str, Any] = {"run_id": "run", "breaker": dict(SHORT)}
    guard = guard_of(store, **options, probe=probe)

    assert guard.call(Told(*resets(3))) == "done"

    assert probe.calls == 1
    assert record_of(store).state in {"recovering", "closed"}


def test_a_classifier_decides() -> None:
    """It sees the exception, and what it says counts: here that a value error may pass."""
    seen: list[BaseException] = []

    def classify(error: BaseException) -> str | None:
        seen.append(error)
        return "transient" if isinstance(error, ValueError) else None

    error = ValueError("gateway page")
    work = Told(error, error)

    assert guard_of(classify=classify).call(work) == "done"
    assert seen == [error] * 2


def test_a_missing_file_is_an_answer_to_a_read_and_not_to_a_write() -> None:
    """A write may find its folder gone and made again, so it is repeated."""
    read, write = Told(FileNotFoundError("x")), Told(FileNotFoundError("x"))

    with pytest.raises(FileNotFoundError):
        guard_of().call(read)
    assert guard_of(operation="write").call(write) == "done"

    assert (read.calls, write.calls) == (1, 2)


@pytest.mark.parametrize(("straight", "denied"), [(0, 18), (400, 63)])
def test_the_budget_denies_where_nobody_waits(straight: int, denied: int) -> None:
    """Under ``raise``, a retry beyond sixteen and a tenth of all calls ends with its failure."""
    guard = guard_of(when_open="raise", budget={"retry_floor": 16, "retry_ratio": 0.1})
    for _ in range(straight):
        guard.call(len, "ab")
    calls = itertools.count(1)

    def use_up() -> None:
        while next(calls) < 1000:
            guard.call(Told(*resets(1)))

    with pytest.raises(BudgetExhaustedError) as caught:
        use_up()

    assert next(calls) - 1 == denied
    assert isinstance(caught.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize("limit", [1, 3])
def test_collective_calls_share_the_slots(limit: int) -> None:
    """Of eight callers at the same time no more than ``max_concurrent`` are in flight."""
    guard = guard_of(collective=True, breaker={"max_concurrent": limit})
    lock = threading.Lock()
    flying: list[int] = [0]
    seen: list[int] = []

    def work() -> None:
        with lock:
            flying[0] += 1
            seen.append(flying[0])
        threading.Event().wait(0.01)
        with lock:
            flying[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        for call in [pool.submit(guard.call, work) for _ in range(8)]:
            call.result(BOUND_S)

    assert len(seen) == 8
    assert max(seen) <= limit


def test_collective_calls_never_go_straight(store: CountedStore) -> None:
    """Each takes a slot and gives it back, also while all is well."""
    guard = guard_of(store, collective=True)
    guard.call(len, "ab")
    del store.operations[:]

    guard.call(len, "ab")

    assert store.operations.count("compare_and_set") == 2
    assert len(store.operations) <= 4


@pytest.mark.parametrize(("hosts", "expected"), [(1, "open"), (100, "closed")])
def test_a_quorum_of_the_declared_hosts_opens_the_circuit(
    store: CountedStore, hosts: int, expected: str
) -> None:
    """One host of a hundred cannot open it by its vote, one host alone can."""
    guard = guard_of(store, hosts=hosts, when_open="raise", retry={"max_attempts": 4})

    with pytest.raises((CircuitOpenError, RetriesExhaustedError)):
        guard.call(Told(*resets(9)))

    assert record_of(store).state == expected


# Threads ---------------------------------------------------------------------------------------


def test_sixteen_threads_get_their_own_results_and_errors(store: CountedStore) -> None:
    """Every call ends as its function did: no result is mixed up, and no error is ours."""
    retry = {"max_attempts": 1000, "deadline_s": BOUND_S}
    guard = guard_of(
        store, retry=retry, breaker={"trip_failures": 999}, budget={"retry_floor": 10**6}
    )
    start = threading.Barrier(16)

    def hammer(number: int) -> list[object]:
        start.wait(BOUND_S)
        ends: list[object] = []
        for turn in range(30):
            wrong = FileNotFoundError(f"{number}/{turn}")
            work = Told(*([wrong] if turn % 3 == 0 else resets(turn % 3)), value=(number, turn))
            try:
                ends.append(guard.call(work) == (number, turn))
            except FileNotFoundError as error:
                ends.append(error is wrong)
        return ends

    with ThreadPoolExecutor(16) as pool:
        ends = [end for ends in pool.map(hammer, range(16)) for end in ends]

    assert ends == [True] * 480
    assert record_of(store).state == "closed"


def test_threads_that_all_fail_open_the_circuit(store: CountedStore) -> None:
    """Sixteen threads with failures only: the circuit is open, and nobody calls after that."""
    guard = guard_of(store, when_open="raise")
    guard.call(len, "ab")
    start = threading.Barrier(16)

    def fail() -> str:
        start.wait(BOUND_S)
        try:
            guard.call(Told(*resets(99)))
        except Exception as error:  # noqa: BLE001 - its name is the result
            return type(error).__name__
        return "nothing"

    with ThreadPoolExecutor(16) as pool:
        ends = {call.result(BOUND_S) for call in [pool.submit(fail) for _ in range(16)]}

    assert ends <= {"CircuitOpenError", "RetriesExhaustedError", "BudgetExhaustedError"}
    assert record_of(store).state == "open"


# What may be guarded ---------------------------------------------------------------------------


def test_the_decorator_keeps_name_doc_and_signature() -> None:
    """Whoever inspects the decorated function sees the function."""

    def fetch(name: str, *, revision: int = 1) -> str:
        """Fetch it."""
        return f"{name}@{revision}"

    decorated = guard_of()(fetch)

    assert decorated.__name__ == "fetch"
    assert decorated.__doc__ == "Fetch it."
    assert inspect.signature(decorated) == inspect.signature(fetch)
    assert decorated("x", revision=2) == "x@2"


class Client:
    """Has methods of every kind."""

    guard = Guard("https://client.example")

    def __init__(self, name: str = "client") -> None:
        self.name = name

    @guard
    def fetch(self, item: str) -> str:
        """Fetch."""
        return f"{self.name}: {item}"

    @staticmethod
    @guard
    def ping() -> str:
        """Ping."""
        return "pong"

    @classmethod
    @guard
    def make(cls) -> Client:
        """Make one."""
        return cls("made")

    def __call__(self, item: str) -> str:
        """Fetch as well."""
        return f"{self.name}! {item}"


def test_methods_may_be_decorated() -> None:
    """Methods, static methods and class methods are bound as ever."""
    for _ in range(2):
        assert Client().fetch("x") == "client: x"
        assert Client.ping() == "pong"
        assert Client.make().name == "made"


@pytest.mark.parametrize("decorated", [False, True], ids=["call", "decorator"])
@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (len, ("ab",), 2),
        (int, ("12",), 12),
        (Client("c"), ("x",), "c! x"),
        (Client("c").fetch, ("x",), "c: x"),
        (functools.partial(pow, 2), (10,), 1024),
        ("ab".upper, (), "AB"),
        (functools.partial(Client("c"), "x"), (), "c! x"),
    ],
    ids=["builtin", "class", "object", "method", "partial", "builtin method", "partial of object"],
)
def test_whatever_can_be_called_may_be_guarded(
    function: Callable[..., Any], arguments: tuple[Any, ...], expected: Any, *, decorated: bool
) -> None:
    """Builtins, classes, objects, methods and partials work, at first and on the closed path."""
    guard = guard_of()
    call = guard(function) if decorated else functools.partial(guard.call, function)

    assert [call(*arguments), call(*arguments)] == [expected, expected]


async def coroutine() -> int:
    """Do nothing, later."""
    return 1


def generator() -> Iterator[int]:
    """Yield one."""
    yield 1


async def asynchronous_generator() -> AsyncIterator[int]:
    """Yield one, later."""
    yield 1


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function that passes calls on and looks like ``function``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Late:
    """An object and a method whose calls return before the work is done."""

    async def __call__(self) -> int:
        """Return one, later."""
        return 1

    async def fetch(self) -> int:
        """Return one, later."""
        return 1


LATE = [coroutine, generator, asynchronous_generator, Late(), Late().fetch]


@pytest.mark.parametrize("function", LATE, ids=["async", "gen", "async gen", "object", "method"])
@pytest.mark.parametrize(
    "dress",
    [
        lambda function: function,
        functools.partial,
        wrapped,
        lambda function: functools.partial(wrapped(functools.partial(function))),
    ],
    ids=["plain", "partial", "wraps", "both"],
)
def test_what_works_after_its_call_is_refused(
    function: Callable[..., Any], dress: Callable[..., Any]
) -> None:
    """A coroutine or generator function is refused: decorated, called first, and called later."""
    dressed = dress(function)
    cold, warm = guard_of(), guard_of()
    warm.call(len, "ab")

    for use in (cold, cold.call, warm.call):
        with pytest.raises(ConfigError, match="before the work is done"):
            use(dressed)


def test_a_coroutine_that_a_function_hands_back_is_refused() -> None:
    """Also a plain function may return work that is not done; nobody is warned of it twice."""
    guard = guard_of()

    def hand_back() -> object:
        return coroutine()

    decorated = guard(hand_back)

    for _ in range(2):
        with pytest.raises(ConfigError, match="has returned a coroutine"):
            guard.call(hand_back)
        with pytest.raises(ConfigError, match="has returned a coroutine"):
            decorated()
        guard.call(len, "ab")


def test_a_generator_that_a_function_hands_back_is_its_result() -> None:
    """A function may do its work and return an iterator over it."""
    guard = guard_of()

    for _ in range(2):
        assert list(guard.call(lambda: (letter for letter in "ab"))) == ["a", "b"]


@pytest.mark.parametrize("given", [5, "text", None], ids=repr)
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "closed path"])
def test_what_cannot_be_called_is_refused(given: Any, *, warm: bool) -> None:
    """Whoever passes a result instead of the function is told how to pass it."""
    guard = guard_of()
    if warm:
        guard.call(len, "ab")

    for use in (guard, guard.call):
        with pytest.raises(ConfigError, match=rf"{type(given).__name__} is none.*guard\.call"):
            use(given)


# A guard as a value ----------------------------------------------------------------------------


def test_a_guard_may_be_pickled() -> None:
    """It travels with its options, and begins anew with what the other process has."""
    guard = guard_of("tcp://127.0.0.1:9", probe=len, collective=True, hosts=3, classify=repr)

    twin = pickle.loads(pickle.dumps(guard))

    assert twin._options == guard._options


def test_a_guard_with_a_store_of_this_process_does_not_travel() -> None:
    """The error says how to name a store that another process can reach."""
    with pytest.raises(ConfigError, match=r"store is .*a guard .*tcp://HOST:PORT"):
        pickle.dumps(guard_of(CountedStore()))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_shares_the_breaker(duplicate: Callable[[Guard], Guard]) -> None:
    """A module that holds a guard may be copied, also with a store that cannot."""
    guard = guard_of(when_open="raise")
    guard.call(len, "ab")

    twin = duplicate(guard)
    trip(guard)

    with pytest.raises(CircuitOpenError):
        twin.call(len, "ab")


def test_off_calls_straight_through(monkeypatch: pytest.MonkeyPatch, store: CountedStore) -> None:
    """With ``LIGHTNING_RESILIENCE=off`` nothing is asked, counted or repeated."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")
    guard = guard_of(store)
    work = Told(*resets(3))

    for _ in range(3):
        with pytest.raises(ConnectionResetError) as caught:
            guard.call(work)
        assert caught.value.__context__ is None

    assert guard.call(work) == guard(work)() == "done"
    assert store.operations == []


def test_off_holds_for_what_began_before(
    monkeypatch: pytest.MonkeyPatch, store: CountedStore
) -> None:
    """Switched off later, a failure on the closed path is raised as it is."""
    guard = guard_of(store)
    guard.call(len, "ab")
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")
    before = len(store.operations)

    with pytest.raises(ConnectionResetError):
        guard.call(Told(*resets(1)))

    assert len(store.operations) == before


# Options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dependency": ""}, "dependency=''"),
        ({"dependency": "  "}, "dependency='  '"),
        ({"dependency": 5}, "dependency=5"),
        ({"dependency": None}, "dependency=None"),
        ({"operation": "load"}, "operation='load'.*'read', 'write'"),
        ({"operation": None}, "operation=None"),
        ({"operation": ["read"]}, r"operation=\['read'\]"),
        ({"retry": 5}, "retry=5 of type int.*RetryPolicy"),
        ({"retry": BreakerConfig()}, "retry=… of type BreakerConfig.*RetryPolicy"),
        ({"retry": {"max_atempts": 5}}, "'max_atempts'.*'max_attempts'"),
        ({"retry": {"max_attempts": 0}}, "max_attempts=0"),
        ({"retry": {"deadline_s": -1}}, "deadline_s=-1"),
        ({"budget": "x"}, "budget=….*BudgetConfig"),
        ({"budget": {"retry_ratio": 2}}, "retry_ratio=2"),
        ({"budget": {"retry_floor": 1}}, "retry_floor=1.*trip_failures=3"),
        ({"breaker": []}, "breaker=….*BreakerConfig"),
        ({"breaker": {"open_for_s": float("nan")}}, "open_for_s=nan"),
        ({"breaker": {"trip_failures": 5}}, "trip_failures=5.*max_attempts=5"),
        ({"breaker": {"view_max_age_s": 10}}, "view_max_age_s=10.*open_for_s=10"),
        ({"admission": 1.5}, "admission=….*AdmissionConfig"),
        ({"admission": {"slot_lease_s": 1}}, "slot_lease_s=1"),
        ({"store": 5}, "store=5 of type int"),
        ({"store": object()}, "store=… of type object"),
        ({"store": "host:1"}, "store='host:1'.*tcp://HOST:PORT"),
        ({"store": "tcp://host:0"}, "store='tcp://host:0'"),
        ({"run_id": ""}, "run_id=''"),
        ({"run_id": 7}, "run_id=7"),
        ({"classify": "transient"}, "classify=… of type str"),
        ({"when_open": "fail"}, "when_open='fail'.*'wait', 'raise'"),
        ({"strict": "yes"}, "strict=… of type str"),
        ({"strict": 1}, "strict=1 of type int"),
        ({"collective": 1}, "collective=1 of type int"),
        ({"probe": "ping"}, "probe=… of type str"),
        ({"hosts": 0}, "hosts=0"),
        ({"hosts": 1.5}, r"hosts=1\.5"),
        ({"hosts": True}, "hosts=True"),
        ({"retrys": {}}, "Guard has no option 'retrys'.*'retry'"),
        ({"max_attempts": 3}, "'max_attempts'.*an option of RetryPolicy"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], expected: str) -> None:
    """The error names the option, its value and what is allowed, before anything is called."""
    given = {"dependency": "x", **options}

    with pytest.raises(ConfigError, match=re.compile(expected, re.DOTALL)):
        Guard(given.pop("dependency"), **given)


def test_every_option_has_its_bad_values() -> None:
    """No option is missing from the table above."""
    marks: list[pytest.Mark] = vars(test_a_bad_option_is_refused)["pytestmark"]
    tried = {name for mark in marks for row in mark.args[1] for name in row[0]}

    assert set(inspect.signature(Guard).parameters) - {"unknown"} <= tried


def test_config_objects_are_taken_as_they_are() -> None:
    """An option is a mapping or the config itself."""
    configs: dict[str, Any] = {
        "retry": RetryPolicy(max_attempts=7),
        "budget": BudgetConfig(retry_floor=30),
        "breaker": BreakerConfig(trip_failures=2),
        "admission": AdmissionConfig(slot_lease_s=60),
    }

    common = Guard("x", **configs)._options.common

    assert {name: getattr(common, name) for name in configs} == configs


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LIGHTNING_RESILIENCE_STORE"])
def test_garbage_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first call says which variable is wrong; nothing was called before."""
    monkeypatch.setenv(name, "garbage")
    work = Told()

    with pytest.raises(ConfigError, match=f"{name}='garbage'"):
        guard_of().call(work)

    assert work.calls == 0


SECRETS = ("hunter2", "s3cr", "tok3n")


@pytest.mark.parametrize(
    ("dependency", "name"),
    [
        ("https://user:hunter2@models.example/x", "https://models.example/x"),
        ("https://user:hunter2@s3cr@models.example", "https://models.example"),
        ("s3://AKIA:hunter2/s3cr+x@bucket", "s3://bucket"),
        ("https://hunter2@models.example", "https://models.example"),
        ("https://models.example:8080/a@b", "https://models.example:8080/a@b"),
        ("https://models.example/x?token=tok3n", "https://models.example/x?token=***"),
        ("models", "models"),
    ],
)
def test_credentials_stay_out_of_keys_events_and_errors(
    store: CountedStore, caplog: pytest.LogCaptureFixture, dependency: str, name: str
) -> None:
    """A user name and password in the dependency, or in a failure, are seen nowhere."""
    caplog.set_level(logging.DEBUG, "lightning_resilience")
    guard = guard_of(store, dependency=dependency, when_open="raise")
    error = ConnectionResetError(f"{dependency} has hung up")

    with pytest.raises((CircuitOpenError, RetriesExhaustedError)):
        guard.call(Told(*[error] * 9))
    with pytest.raises(CircuitOpenError) as refused:
        guard.call(len, "ab")

    said = "\n".join([store.text(), caplog.text, str(refused.value), repr(vars(refused.value))])
    assert refused.value.dependency == f"{name}:read"
    assert f"{name}:read" in store.text()
    assert f"{name}:read" in caplog.text
    if "hunter2/" not in dependency:
        assert [secret for secret in SECRETS if secret in said] == []


# The store -------------------------------------------------------------------------------------


def test_a_call_survives_one_store_error(store: CountedStore) -> None:
    """One operation that is not answered is done again, wherever it comes."""
    for number in range(3):
        guard = guard_of(store, run_id=f"run {number}")
        store.outage.failing = 0
        if number:
            guard.call(len, "ab")
        store.outage.failing = 1

        assert guard.call(Told(*resets(number))) == "done"


def test_strict_calls_fail_where_the_store_is_away(
    store: CountedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``strict``, the function is not called without the store's word."""
    monkeypatch.setattr(guarded_function, "STORE_PATIENCE_S", 0.1)
    store.outage.failing = 10**6
    work = Told()

    with pytest.raises(StoreUnavailableError, match="nobody answers"):
        guard_of(store, strict=True).call(work)

    assert work.calls == 0


def test_calls_go_on_without_the_store_and_come_back_to_it(
    store: CountedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is away is said once, calls go on alone, and its return is said as well."""
    monkeypatch.setattr(guarded_function, "STORE_PATIENCE_S", 0.1)
    caplog.set_level(logging.INFO, "lightning_resilience")
    guard = guard_of(store)
    store.outage.failing = 10**6

    alone = [guard.call(Told(*resets(number))) for number in (0, 1, 2)]
    store.outage.failing = 0
    ended = threading.Event()
    for _ in range(400):
        guard.call(len, "ab")
        if "follows the shared circuit" in caplog.text:
            ended.set()
            break
        threading.Event().wait(0.05)

    assert alone == ["done"] * 3
    assert ended.is_set()
    assert caplog.text.count("decides alone about https://models.example:read") == 1
    assert "/breaker/https://models.example:read" in store.text()
