# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A real store server dies, freezes, and comes back empty, under stores that were using it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from lightning_resilience.adapters.torch_store import TorchStore, _Target
from lightning_resilience.errors import StoreUnavailableError
from tests.integration.store_server import HANG_S, Server
from tests.integration.test_split_store import Cable


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


pytestmark = [pytest.mark.multiprocess]

WRITER = """
import os, sys
from lightning_resilience.adapters.torch_store import TorchStore
store = TorchStore.connect("127.0.0.1", int(sys.argv[1]))
store.set("ready" + sys.argv[2], b"")
assert store.wait_for("go", 20)
won = []
for turn in range(300):
    desired = b"open, by " + os.urandom(8)
    if store.compare_and_set(f"k{turn}", b"", desired) == desired:
        won.append(turn)
print(*won)
"""
FORKING = """
import os, sys
import torch.distributed as dist
from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.errors import StoreUnavailableError
store = TorchStore.connect("127.0.0.1", int(sys.argv[1]))
local = TorchStore.wrap(dist.HashStore())
store.set("parent", b"before")
local.set("k", b"1")
child = os.fork()
if child == 0:
    for turn in range(50):
        store.set("child", b"%d" % turn)
        assert store.get("parent") is not None
    try:
        local.get("k")
    except StoreUnavailableError as error:
        assert "tcp://host:port" in str(error), error
        os._exit(42)
    os._exit(1)
for turn in range(50):
    store.set("parent", b"%d" % turn)
    assert store.get("parent") == b"%d" % turn
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.get("child"), local.get("k"))
"""
EXITING = """
import sys, threading
from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.errors import StoreUnavailableError
watcher = TorchStore.connect("127.0.0.1", int(sys.argv[1]))
def wait():
    try:
        watcher.wait_for("never", 60)
    except StoreUnavailableError:
        print("ended", flush=True)
watcher.get("never")
threading.Thread(target=wait, daemon=True).start()
"""


@pytest.fixture
def server() -> Iterator[Server]:
    """A running server."""
    running = Server()

    yield running

    running.kill()


@pytest.fixture
def store(server: Server) -> Iterator[TorchStore]:
    """A store that has already been used."""
    opened = TorchStore.connect("127.0.0.1", server.port, timeout_s=HANG_S)
    opened.set("k", b"before")

    yield opened

    opened.close()


@contextlib.contextmanager
def python(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def operations(store: TorchStore) -> list[Callable[[], object]]:
    """Every operation of the port once."""
    return [
        lambda: store.get("k"),
        lambda: store.multi_get(["k", "l"]),
        lambda: store.set("k", b"v"),
        lambda: store.delete("k"),
        lambda: store.compare_and_set("k", b"", b"v"),
        lambda: store.add("n", 1),
        lambda: store.wait_for("k", HANG_S * 3),
    ]


def test_a_dead_server_is_noticed_long_before_the_timeout(
    server: Server, store: TorchStore
) -> None:
    """Every operation raises ``StoreUnavailableError`` with the address, and does not wait."""
    server.kill()

    started_s = time.monotonic()
    errors = []
    for operation in operations(store):
        with pytest.raises(StoreUnavailableError) as raised:
            operation()
        errors.append(raised.value)

    assert time.monotonic() - started_s < HANG_S
    assert all(f"tcp://127.0.0.1:{server.port}" in str(error) for error in errors)
    assert all("timeout 20 s" in str(error) for error in errors)
    assert all(error.__cause__ is not None for error in errors)
    assert "may have counted" in str(errors[5])
    server.start()


def test_the_same_store_works_again_when_the_server_is_back(
    server: Server, store: TorchStore
) -> None:
    """A new server on the same port is found by the same object, and it is empty."""
    server.kill()
    with pytest.raises(StoreUnavailableError):
        store.get("k")

    server.start()

    assert store.get("k") is None
    assert store.compare_and_set("k", b"before", b"after") == b"before"
    assert store.get("k") is None
    assert store.compare_and_set("k", b"", b"rebuilt") == b"rebuilt"


def test_a_restart_between_two_operations_is_not_even_noticed(
    server: Server, store: TorchStore
) -> None:
    """What may be repeated is repeated once on a fresh connection."""
    server.kill()
    server.start()

    assert store.compare_and_set("k", b"before", b"after") == b"before"


def test_adding_is_not_repeated_after_a_restart(server: Server, store: TorchStore) -> None:
    """The first ``add`` on a broken connection raises, the next one connects anew and counts."""
    server.kill()
    server.start()

    with pytest.raises(StoreUnavailableError, match="may have counted"):
        store.add("n", 1)

    assert store.add("n", 1) == 1


def test_a_lost_answer_to_add_counts_once() -> None:
    """An ``add`` that was executed and whose answer was lost is not executed again."""
    real = dist.HashStore()

    class Lossy:
        """Executes, then loses the answer."""

        def add(self, key: str, amount: int) -> int:
            real.add(key, amount)
            text = "Connection reset by peer"
            raise dist.DistNetworkError(text)

        def set_timeout(self, timeout: object) -> None:
            """Nothing here waits."""

    target = _Target(label="lossy", open_client=lambda _: Lossy())  # type: ignore[return-value, arg-type]
    store = TorchStore(target, timeout_s=HANG_S)

    with pytest.raises(StoreUnavailableError, match="may have counted"):
        store.add("n", 1)

    assert real.get("n") == b"1"
    store.close()


def test_a_waiter_learns_that_the_server_died(server: Server, store: TorchStore) -> None:
    """A wait whose server dies ends with an error, not with False and not at its timeout."""
    watcher = store.watcher()
    watcher.get("k")

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(watcher.wait_for, "never", HANG_S * 3)
        server.kill()

        with pytest.raises(StoreUnavailableError, match="wait_for"):
            waiting.result(HANG_S)

    server.start()
    watcher.close()


def test_a_frozen_server_blocks_nobody_for_longer_than_the_timeout(server: Server) -> None:
    """A server that says nothing costs each caller its timeout, and no thread more."""
    store = TorchStore.connect("127.0.0.1", server.port, timeout_s=0.5)
    store.set("untouched", b"before")
    server.freeze()

    threads_before = threading.active_count()
    for operation in operations(store)[:-1]:
        with pytest.raises(StoreUnavailableError, match="failed"):
            operation()
    threads_after = threading.active_count()
    server.thaw()

    assert threads_after == threads_before
    assert _patiently(lambda: store.get("untouched")) == b"before"
    store.close()


def _patiently(read: Callable[[], bytes | None]) -> bytes | None:
    """Read again where the server is still busy with what it was sent while it was frozen."""
    for _ in range(20):
        with contextlib.suppress(StoreUnavailableError):
            return read()
    pytest.fail("the store did not come back")


def test_a_port_that_answers_nothing_is_bounded_too() -> None:
    """A listener that is no store costs the timeout, although torch would wait for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        store = TorchStore.connect("127.0.0.1", listener.getsockname()[1], timeout_s=0.3)

        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.3 s"):
                store.get("k")

    store.close()


def test_a_signal_interrupts_an_operation_on_a_frozen_server(
    server: Server, store: TorchStore
) -> None:
    """What a signal handler raises comes out of the operation at once, and the store goes on."""

    class InterruptionError(BaseException):
        """What the handler raises."""

    def interrupt(*_: object) -> None:
        raise InterruptionError

    previous = signal.signal(signal.SIGUSR1, interrupt)
    server.freeze()
    started_s = time.monotonic()
    try:
        timer = threading.Timer(
            0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)
        )
        timer.start()
        with pytest.raises(InterruptionError):
            store.get("k")
    finally:
        signal.signal(signal.SIGUSR1, previous)
        server.thaw()

    assert time.monotonic() - started_s < HANG_S
    assert store.get("k") == b"before"


def test_of_two_processes_writing_equal_states_one_wins(server: Server, store: TorchStore) -> None:
    """Each of 300 keys is won by exactly one process, because each value carries a nonce."""
    with python(WRITER, server.port, 0) as first, python(WRITER, server.port, 1) as second:
        # Both are connected before either starts.
        assert store.wait_for("ready0", HANG_S)
        assert store.wait_for("ready1", HANG_S)
        store.set("go", b"")
        won = [process.communicate(timeout=HANG_S * 2)[0].split() for process in (first, second)]

    assert sorted(won[0] + won[1], key=int) == [str(turn) for turn in range(300)]


def test_a_forked_child_has_its_own_connection(server: Server) -> None:
    """Parent and child use the same object at once; a store of one process refuses the child."""
    with python(FORKING, server.port) as process:
        output, _ = process.communicate(timeout=HANG_S * 2)

    assert output.split() == ["42", "b'49'", "b'1'"]


def test_a_process_ends_well_while_a_watcher_waits(server: Server) -> None:
    """The end of the interpreter ends the wait first: a thread inside torch could abort it."""
    with python(EXITING, server.port) as process:
        process.communicate(timeout=HANG_S * 2)

    assert process.returncode == 0


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_a_server_that_is_gone_is_told_from_one_that_is_silent(*, is_killed: bool) -> None:
    """Only a refusal by its host says that no server is there."""
    server = Server()
    store = TorchStore.connect("127.0.0.1", server.port, timeout_s=0.5)
    store.set("k", b"1")

    if is_killed:
        server.kill()
    else:
        server.freeze()
    try:
        with pytest.raises(StoreUnavailableError) as caught:
            store.get("k")
    finally:
        store.close()
        if not is_killed:
            server.kill()

    assert caught.value.is_refused is is_killed


def test_a_write_that_was_lost_on_its_way_is_no_success(server: Server) -> None:
    """The server answers nothing to it, so it is asked something else before anybody relies on it.

    A rank whose arrival was lost with its connection waited for the others, and they for it.
    """
    cable = Cable(server.port)
    store = TorchStore.connect("127.0.0.1", cable.port, timeout_s=1.0)
    try:
        store.set("k", b"before")
        cable.cut()
        with pytest.raises(StoreUnavailableError):
            store.set("k", b"lost")
    finally:
        store.close()
        cable.close()


def test_a_write_into_a_connection_that_was_closed_gets_there(server: Server) -> None:
    """The connection is made anew, and the write repeated."""
    cable = Cable(server.port)
    store = TorchStore.connect("127.0.0.1", cable.port, timeout_s=HANG_S)
    watcher = TorchStore.connect("127.0.0.1", server.port, timeout_s=HANG_S)
    try:
        for turn in range(20):
            store.set("k", b"before")
            cable.close()
            cable.open()
            store.set("k", b"%d" % turn)
            assert watcher.get("k") == b"%d" % turn
    finally:
        store.close()
        watcher.close()
        cable.close()
