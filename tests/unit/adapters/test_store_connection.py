# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A store connection connects when needed, repeats what it may, and never waits without a bound."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from lightning_resilience.adapters.store_connection import StoreConnection
from lightning_resilience.errors import StoreUnavailableError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Connection = StoreConnection[Any]


HANG_S = 20.0


class World:
    """Hands out numbered clients, and notes how each was asked for."""

    def __init__(self) -> None:
        self.suspects: list[bool] = []
        self.refusals: list[Exception] = []

    def open_client(self, is_suspect: bool) -> Any:  # noqa: FBT001 - as the connection calls it
        """Return the next client, or refuse."""
        self.suspects.append(is_suspect)
        if self.refusals:
            raise self.refusals.pop(0)
        return len(self.suspects)


@pytest.fixture
def world() -> World:
    """A world that refuses nothing."""
    return World()


@pytest.fixture
def connection(world: World) -> Iterator[Connection]:
    """A connection that was not used yet."""
    made = StoreConnection(world.open_client, label="test")

    yield made

    made.close()


def failing(*errors: BaseException) -> Callable[[Any], Any]:
    """An operation that fails with each error in turn, then returns its client."""
    left = list(errors)

    def work(client: Any) -> Any:
        if left:
            raise left.pop(0)
        return client

    return work


def test_nothing_is_opened_before_the_first_operation(world: World, connection: Connection) -> None:
    """Making a connection costs the server nothing; closing an unused one neither."""
    connection.close()

    assert world.suspects == []


def test_one_client_serves_all_operations(connection: Connection) -> None:
    """A connection that works is kept."""
    answers = [connection.run(failing(), patience_s=HANG_S) for _ in range(3)]

    assert answers == [1, 1, 1]


def test_a_broken_client_is_replaced_and_the_operation_repeated(
    world: World, connection: Connection
) -> None:
    """One break is not seen by the caller; the second client is asked for with suspicion."""
    answer = connection.run(failing(DistNetworkError("Broken pipe")), patience_s=HANG_S)

    assert answer == 2
    assert world.suspects == [False, True]


def test_an_operation_is_repeated_once(world: World, connection: Connection) -> None:
    """The second break in a row is the caller's, and the next operation connects first."""
    breaks = [DistNetworkError("one"), DistNetworkError("two")]
    with pytest.raises(DistNetworkError, match="two"):
        connection.run(failing(*breaks), patience_s=HANG_S)

    assert connection.run(failing(), patience_s=HANG_S) == 3
    assert world.suspects == [False, True, True]


def test_what_may_not_be_repeated_is_not(connection: Connection) -> None:
    """The first break is the caller's."""
    with pytest.raises(DistNetworkError):
        connection.run(failing(DistNetworkError("x")), patience_s=HANG_S, repeatable=False)


def test_a_connection_that_is_refused_is_not_tried_twice(
    world: World, connection: Connection
) -> None:
    """Only the caller knows when to come back; until one succeeds, each is made with suspicion."""
    world.refusals = [ConnectionRefusedError("a"), DistNetworkError("b")]
    with pytest.raises(ConnectionRefusedError):
        connection.run(failing(), patience_s=HANG_S)
    with pytest.raises(DistNetworkError):
        connection.run(failing(), patience_s=HANG_S)

    assert connection.run(failing(DistNetworkError("c")), patience_s=HANG_S) == 4
    assert world.suspects == [False, True, True, True]


def test_a_key_that_does_not_come_breaks_nothing(world: World, connection: Connection) -> None:
    """The store's own time-out is an answer: the client is kept and nothing is repeated."""
    with pytest.raises(DistStoreError):
        connection.run(failing(DistStoreError("wait timeout")), patience_s=HANG_S)

    assert connection.run(failing(), patience_s=HANG_S) == 1
    assert world.suspects == [False]


@pytest.mark.parametrize("error", [ValueError("stoll"), SystemExit(3), KeyboardInterrupt()])
def test_other_errors_reach_the_caller_as_they_are(
    connection: Connection, error: BaseException
) -> None:
    """They are raised in the thread that asked, and the connection goes on."""
    with pytest.raises(type(error)) as raised:
        connection.run(failing(error), patience_s=HANG_S)

    assert raised.value is error
    assert connection.run(failing(), patience_s=HANG_S) == 1


def test_a_caller_gives_up_at_its_patience_and_is_forgotten(connection: Connection) -> None:
    """Who waits behind a blocked operation gives up too, and is not executed afterwards."""
    release = threading.Event()
    executed: list[str] = []

    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(
            connection.run, lambda _: release.wait(HANG_S), patience_s=HANG_S * 2
        )
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            connection.run(lambda _: executed.append("late"), patience_s=0.05)
        release.set()
        assert blocked.result(HANG_S)

    connection.run(lambda _: executed.append("next"), patience_s=HANG_S)
    assert executed == ["next"]


def test_threads_that_meet_a_broken_client_reconnect_once(
    world: World, connection: Connection
) -> None:
    """Many callers at once find one new client, not one each."""
    broken = {1}

    def work(client: int) -> int:
        if client in broken:
            text = "Broken pipe"
            raise DistNetworkError(text)
        return client

    with ThreadPoolExecutor(8) as threads:
        runs = [threads.submit(connection.run, work, patience_s=HANG_S) for _ in range(32)]
        answers = {run.result(HANG_S) for run in runs}

    assert answers == {2}
    assert world.suspects == [False, True]


def test_closing_ends_the_thread_and_refuses_what_comes_later(
    connection: Connection,
) -> None:
    """``close`` may be repeated, leaves no thread, and later operations say why they fail."""
    connection.run(failing(), patience_s=HANG_S)
    thread = connection._thread

    connection.close()
    connection.close()

    assert thread is not None
    assert not thread.is_alive()
    with pytest.raises(StoreUnavailableError, match="test is closed"):
        connection.run(failing(), patience_s=HANG_S)


def test_closing_answers_those_who_are_in_the_queue(connection: Connection) -> None:
    """Who waits its turn on a connection that is closed is told, instead of waiting on."""
    release, begun = threading.Event(), threading.Event()

    def block(_: Any) -> None:
        begun.set()
        release.wait(HANG_S)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(connection.run, block, patience_s=HANG_S * 2)
        assert begun.wait(HANG_S)
        second = threads.submit(connection.run, failing(), patience_s=HANG_S * 2)
        closing = threading.Thread(target=connection.close)
        closing.start()
        release.set()

        assert first.result(HANG_S) is None
        with pytest.raises(StoreUnavailableError, match="closed"):
            second.result(HANG_S)

    closing.join(HANG_S)


def test_who_waits_for_a_late_answer_looks_around(world: World) -> None:
    """What the check raises ends the wait, and the check is not asked while answers come."""
    release = threading.Event()

    def check() -> None:
        raise InterruptedError

    connection = StoreConnection(world.open_client, label="test", check=check)

    assert connection.run(lambda _client: "soon", patience_s=HANG_S) == "soon"
    with pytest.raises(InterruptedError):
        connection.run(lambda _client: release.wait(HANG_S), patience_s=HANG_S)

    release.set()
    connection.close()
