# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The store of the rendezvous is frozen: it accepts, and answers nobody. No agent hangs with it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from lightning_resilience.adapters import rendezvous_inner as within, rendezvous_options
from lightning_resilience.adapters.rendezvous_held import HeldHandler
from tests.handlers import WITHIN_S, status_of
from tests.integration.store_server import Server


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.handlers import Handlers


pytestmark = [pytest.mark.multiprocess]

SHORT_S = 0.6
"""What the bounds are scaled down to."""
CACHED_S = 1.1
"""Torch's handler answers from memory for a second."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server in a process of its own."""
    server = Server()
    yield server
    server.kill()


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """It goes on when a test is over, and whatever has waited for it ends."""
    yield shared
    shared.thaw()
    # A handler whose test has failed tells that it is there until nobody has it any more.
    gc.collect()
    await_end("lightning-resilience-call", "RendezvousKeepAliveTimer")


def await_end(*names: str) -> None:
    """Wait until no thread of these names is there any more."""
    for thread in threading.enumerate():
        if thread.name.startswith(names):
            thread.join(WITHIN_S)
            assert not thread.is_alive(), thread


def held(server: Server, run_id: str, *, nodes: int = 1, silent_s: float = WITHIN_S) -> HeldHandler:
    """Make a handler for one node, as an agent has it."""
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{server.port}", run_id, nodes, nodes, "127.0.0.1"
    )
    options = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 60}
    inner = within.make_inner(parameters, "c10d", {**options, "is_host": "0"})
    return HeldHandler(inner, silent_s=silent_s, asked_s=SHORT_S, closed_s=SHORT_S)


def in_time(function: Callable[[], Any]) -> Any:
    """Call it in another thread; what blocks for ever fails the test instead."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(function())
        except RendezvousConnectionError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WITHIN_S)
    assert found, "it is still blocked"
    return found[0]


def test_questions_have_a_bound_and_a_store_that_goes_on_is_found_again(server: Server) -> None:
    """The agent watches its workers meanwhile, and keeps its place in the round."""
    mine = held(server, "asked")
    mine.join()
    server.freeze()
    # Invariant: the heartbeat, of every second, is under way, and has the handler's lock.
    time.sleep(2 * CACHED_S)

    answers = [in_time(mine.num_nodes_waiting), in_time(mine.is_closed)]
    renewed = [in_time(mine.renew), in_time(mine.renew)]
    attempts = [each for each in threading.enumerate() if each.name == "lightning-resilience-call"]
    server.thaw()
    until_s = time.monotonic() + WITHIN_S
    while not mine.renew():
        assert time.monotonic() < until_s
        time.sleep(0.05)

    assert [type(each) for each in answers] == [RendezvousConnectionError] * 2
    assert renewed == [False, False]
    assert len(attempts) <= 1
    assert mine.num_nodes_waiting() == 0
    assert within.participants(mine.handler) == 1
    mine.let_go()


@pytest.mark.parametrize("can_cut", [True, False])
def test_nothing_is_closed_late(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, can_cut: bool
) -> None:
    """Closing is given up, and a store that goes on hears no more of it."""
    run_id = f"closed {can_cut}"
    mine, other = held(server, run_id), held(server, run_id)
    if not can_cut:
        monkeypatch.setattr(within, "cut_client", lambda _client: None)
    server.freeze()

    error = in_time(mine.set_closed)
    server.thaw()
    await_end("lightning-resilience-call")

    assert isinstance(error, RendezvousConnectionError)
    assert not other.is_closed()
    assert isinstance(in_time(mine.is_closed), RendezvousConnectionError)
    assert not mine.renew()


def told(_number: int, _frame: object) -> NoReturn:
    """Do what torch's handler of signals does."""
    message = "told to stop"
    raise SignalException(message, signal.SIGTERM)


@pytest.fixture
def stopped_soon() -> Iterator[None]:
    """A signal comes while the test's main thread waits."""
    before = signal.signal(signal.SIGUSR1, told)
    timer = threading.Timer(SHORT_S, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    yield
    timer.join(WITHIN_S)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("stopped_soon")
def test_a_signal_ends_joining_and_nobody_joins_late(server: Server) -> None:
    """Torch's client is blocked in C++, where no signal handler runs."""
    mine, other = held(server, "told", nodes=2), held(server, "told", nodes=2)
    server.freeze()

    with pytest.raises(SignalException):
        mine.join()
    server.thaw()
    await_end("lightning-resilience-call")

    other.is_closed()
    assert within.participants(other.handler) == 0


def test_joining_a_store_that_does_not_answer_ends_by_a_bound(server: Server) -> None:
    """Torch has a bound for other nodes only, not for the store."""
    mine = held(server, "bounded", silent_s=SHORT_S)
    server.freeze()

    assert isinstance(in_time(mine.join), RendezvousConnectionError)


def test_other_nodes_are_waited_for_longer_than_the_store(server: Server) -> None:
    """Torch reads the state as long as it waits: that is an answer each time."""
    bound_s = 3 * CACHED_S
    first, second = (held(server, "late", nodes=2, silent_s=bound_s) for _ in range(2))
    joined: list[Any] = []
    waiting = threading.Thread(target=lambda: joined.append(first.join()))
    waiting.start()
    time.sleep(bound_s + CACHED_S)

    info = second.join()
    waiting.join(WITHIN_S)

    assert {info.rank, joined[0].rank} == {0, 1}
    first.let_go()
    second.let_go()


def test_a_sign_of_life_that_has_no_answer_holds_up_nobody_who_leaves(server: Server) -> None:
    """Torch waits for its heartbeat before it lets go."""
    mine = held(server, "left")
    mine.join()
    server.freeze()
    # Invariant: the heartbeat, of every second, is under way.
    time.sleep(2 * CACHED_S)

    in_time(mine.let_go)

    await_end("RendezvousKeepAliveTimer")


@contextlib.contextmanager
def silent_listener() -> Iterator[int]:
    """Accept every connection, and say nothing."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listening.accept()[0])

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join(WITHIN_S)
    for each in accepted:
        each.close()


def test_an_agent_that_finds_a_silent_store_ends_within_its_time_to_join(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new client of torch's waits for the first answer for ever."""
    monkeypatch.setattr(rendezvous_options, "_SLACK_S", 0.0)
    with silent_listener() as port:
        agent = handlers.make(port, join_timeout=1, read_timeout=1)

        status = in_time(lambda: status_of(agent.next_rendezvous))

    assert status == 160
    await_end("lightning-resilience-call")
