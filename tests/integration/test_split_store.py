# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One of four ranks loses its link to the shared store in the middle of a joint operation."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import OutcomeRecord
from lightning_resilience.errors import JointUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import Circuit, begin
from lightning_resilience.protocols.joint import Joint, Member, Part, perform
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.integration.store_server import HANG_S, Server


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.core.events import Event
    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.protocols.effects import Protocol


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

RANKS = 4
CUT_OFF = 3
TIMEOUT_S = 2.0
BEAT_S = 0.25
KEYS = Keys(run_id="split", incarnation="1")


class Cable:
    """A way to a server that can be cut: nothing passes any more, and nobody is told.

    It can be closed as well, which everybody is told who comes, and opened again.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._is_cut = threading.Event()
        self.port = 0
        self.open()

    def open(self) -> None:
        """Let everything through, at the same address as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Let nothing through from now on."""
        self._is_cut.set()

    def close(self) -> None:
        """End all threads; whoever comes is refused."""
        # A listener that is only closed goes on accepting in the thread that is in it.
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(HANG_S)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._ends += [near, far]
            for ends in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=ends, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._is_cut.is_set():
                    target.sendall(data)


class Sink:
    """Drops events."""

    def emit(self, event: Event) -> None:
        """Drop it."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A store server in a process of its own."""
    made = Server()
    yield made
    made.kill()


@pytest.fixture
def cable(server: Server) -> Iterator[Cable]:
    """The way on which one rank reaches it."""
    made = Cable(server.port)
    yield made
    made.close()


class Rank:
    """One rank, in a thread, with a connection of its own."""

    def __init__(self, rank: int, port: int) -> None:
        self.member = Member(
            keys=KEYS,
            rank=rank,
            world_size=RANKS,
            timeout_s=TIMEOUT_S,
            beat_s=BEAT_S,
            on_outage="wait",
            store_patience_s=TIMEOUT_S,
        )
        self.store = TorchStore.connect("127.0.0.1", port, timeout_s=0.5)
        self.driver = Driver(
            store=self.store, clock=SystemClock(), dice=SystemDice(rank=rank), sink=Sink()
        )
        self.circuit = Circuit(
            "s3://bucket:read", config=BreakerConfig(), keys=KEYS, host=f"host{rank}", hosts=RANKS
        )

    def load(self, work_s: float) -> tuple[FinalRecord | JointUnavailableError, float]:
        """Take part in a load; return its verdict, or why there is none here, and how long."""
        self.driver.run(begin(self.circuit, new_incarnation=False))
        joint = Joint(
            op="load",
            seq=1,
            digest="",
            subject="s3://bucket/a.ckpt",
            workers=tuple(range(RANKS)),
            circuit=self.circuit,
            patience=Patience(probe=lambda _token: None, classify=classify),
            deadline_s=60.0,
        )

        def work(_started_at_s: float) -> Protocol[Any]:
            yield fx.Call(lambda _token: time.sleep(work_s), timeout_s=30.0)

        def outcome(error: BaseException) -> OutcomeRecord:
            return OutcomeRecord(rank=self.member.rank, failure="unknown", error=repr(error))

        part = Part(run=work, detail=lambda _value: "", outcome=outcome)
        started_at_s = time.monotonic()
        try:
            found: Any = self.driver.run(perform(self.member, joint, part)).final
        except JointUnavailableError as error:
            found = error
        took_s = time.monotonic() - started_at_s
        self.driver.close()
        self.store.close()
        return found, took_s


def test_the_rank_that_is_cut_off_raises_and_the_others_name_it(
    server: Server, cable: Cable
) -> None:
    """It makes no verdict up, and leaves in bounded time; the others have one, and it names it."""
    ports = [cable.port if rank == CUT_OFF else server.port for rank in range(RANKS)]
    ranks = [Rank(rank, port) for rank, port in enumerate(ports)]
    timer = threading.Timer(0.5, cable.cut)
    timer.start()

    with ThreadPoolExecutor(RANKS) as pool:
        results = list(pool.map(lambda rank: rank.load(1.0), ranks))
    timer.join()

    *others, (alone, alone_took_s) = results
    assert isinstance(alone, JointUnavailableError)
    assert alone.lost_ranks == (CUT_OFF,)
    assert f"Rank {CUT_OFF}" in str(alone)
    finals = {final for final, _took_s in others}
    assert len(finals) == 1
    final = finals.pop()
    assert not isinstance(final, JointUnavailableError)
    assert (final.failure, final.lost_ranks) == ("lost", (CUT_OFF,))
    # A second of work, then the silence or the patience, with a look and a store's timeout more.
    assert max(alone_took_s, *(took_s for _, took_s in others)) < 1.0 + 3 * TIMEOUT_S + HANG_S / 4
