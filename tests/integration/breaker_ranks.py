# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own, on one real store, before one dependency that counts.

The dependency is a small server in the test's process. It knows who is in it at any time, also when
a caller is killed, and is well or ill as the test says. Ranks are forked from one process that has
torch loaded already, so that eight of them start in less than the time of one import.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import socket
import socketserver
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.events import BreakerChanged, Event
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.protocols.circuit import Circuit, begin, refresh
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.protocols.shared_cell import update
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from lightning_resilience.core.breaker import BreakerView
    from lightning_resilience.ports import CancelToken


HANG_S = 40.0
KEYS = Keys(run_id="run", incarnation="1")
# Small, and within the relations that BreakerConfig asks for.
CONFIG = BreakerConfig(
    trip_failures=2,
    view_max_age_s=0.5,
    open_for_s=2.6,
    max_open_for_s=2.6,
    probe_timeout_s=0.5,
    probe_lease_s=2.5,
)
POLICY = RetryPolicy(
    base_delay_s=0.05,
    max_delay_s=0.2,
    throttle_base_delay_s=0.1,
    max_attempts=20,
    deadline_s=HANG_S,
    stall_timeout_s=10.0,
)
START = multiprocessing.get_context("forkserver")
# All that ranks need, once: what is missing here each of them imports for itself.
START.set_forkserver_preload(["torch", "torch.distributed", "tests.integration.promise_ranks"])


# --- the dependency --------------------------------------------------------------------------


@dataclass
class Request:
    """One request that reached the dependency."""

    kind: str
    pid: int
    began_at_s: float
    at_once: int
    ended_at_s: float = float("inf")


@dataclass
class Dependency:
    """What all ranks need. Counts who is in it; ill until it is healed."""

    well: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)
    on_probe: Callable[[Request], None] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def probes(self) -> list[Request]:
        """All probes so far."""
        return [request for request in self.requests if request.kind == "probe"]

    def await_probes(self, number: int) -> None:
        """Wait until so many probes have reached it."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.probes()) >= number, HANG_S)

    def serve(self, connection: socket.socket) -> None:
        """Answer one request."""
        kind, pid = connection.recv(64).decode().split()
        with self.changed:
            inside = [r for r in self.requests if r.kind == kind and r.ended_at_s > 1e300]
            request = Request(kind, int(pid), time.monotonic(), len(inside) + 1)
            self.requests.append(request)
            self.changed.notify_all()
        if kind == "probe" and self.on_probe is not None:
            self.on_probe(request)
        # A request lasts a little, or until its caller is gone.
        select.select([connection], [], [], 0.02)
        with contextlib.suppress(OSError):
            connection.sendall(b"well" if self.well.is_set() else b"ill")
        request.ended_at_s = time.monotonic()


class DependencyServer(socketserver.ThreadingTCPServer):
    """The dependency on a port of loopback."""

    daemon_threads = False
    block_on_close = True
    # All ranks may come in one instant. Where the queue is full the kernel drops a connection's
    # first packet, which is sent again a second later: a call that was let through in time would
    # be seen long after the trip.
    request_queue_size = 64

    def __init__(self, dependency: Dependency) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                dependency.serve(self.request)

        super().__init__(("127.0.0.1", 0), Handler)


# --- a rank ----------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a rank tells the test."""

    rank: int
    value: Any = None
    error: str = ""
    events: list[tuple[float, Event]] = field(default_factory=list)
    seen: tuple[tuple[int, str], ...] = ()

    def emitted(self, kind: type[Event]) -> list[Any]:
        """Its events of one kind."""
        return [event for _, event in self.events if isinstance(event, kind)]

    def trips(self) -> list[int]:
        """Epochs of the trips that this rank has caused."""
        return [
            event.epoch
            for event in self.emitted(BreakerChanged)
            if (event.previous, event.state) == ("closed", "open")
        ]


class Recorder:
    """An event sink that keeps events with their instant."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append((time.monotonic(), event))


def ask(port: int, kind: str) -> None:
    """Send one request to the dependency; raises where it is ill."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.sendall(f"{kind} {os.getpid()}".encode())
        if connection.recv(64) != b"well":
            raise ConnectionResetError("the dependency is ill")


class Rank:
    """One rank, in its own process: it does what it is told, and says what came of it."""

    def __init__(self, rank: int, ports: tuple[int, int], *, hosts: int) -> None:
        self.rank = rank
        self.port = ports[1]
        self.recorder = Recorder()
        self.store = TorchStore.connect("127.0.0.1", ports[0])
        self.driver = Driver(
            store=self.store, clock=SystemClock(), dice=SystemDice(rank=rank), sink=self.recorder
        )
        self.circuit = Circuit("dep:write", config=CONFIG, keys=KEYS, host=f"h{rank}", hosts=hosts)
        self.driver.run(begin(self.circuit, new_incarnation=False))

    def save(self) -> Any:
        """One guarded call."""

        def probe(_token: CancelToken) -> None:
            ask(self.port, "probe")

        def work(_token: CancelToken) -> str:
            ask(self.port, "call")
            return "saved"

        patience = Patience(probe=probe, classify=classify, chunk_s=5.0, voice_s=5.0, spread_s=0.1)
        call = GuardedCall(
            work=work, operation="save", target="a", policy=POLICY, patience=patience
        )
        return self.driver.run(guard(self.circuit, call)).value

    def history(self) -> Any:
        """The breaker's history, read anew."""
        view: BreakerView = self.driver.run(refresh(self.circuit))
        return [(entry.epoch, entry.state) for entry in view.record.history]

    def write(self, key: str, expected: bytes, state: str) -> Any:
        """Write a state that the others write as well, from bytes that all have read."""

        def change(raw: bytes, nonce: str) -> bytes | None:
            return f"{state} {nonce}".encode() if raw == expected else None

        written = self.driver.run(update(key, expected, change))
        return written.won, written.gone, written.raw

    def close(self) -> None:
        """Leave the store."""
        self.driver.close()
        self.store.close()


def live(connection: Connection, rank: int, ports: tuple[int, int], hosts: int) -> None:
    """Be a rank until told to leave."""
    me = Rank(rank, ports, hosts=hosts)
    connection.send("ready")
    while True:
        name, arguments = connection.recv()
        report = Seen(rank=rank)
        try:
            report.value = getattr(me, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            report.error = repr(error)
        report.events, report.seen = me.recorder.events, me.circuit.seen
        connection.send(report)
        if name == "close":
            return


def hear_one(pipe: Connection) -> list[Seen]:
    """What one rank has to say; nothing where it is dead."""
    try:
        assert pipe.poll(HANG_S), "a rank is stuck"
        return [pipe.recv()]
    except (EOFError, ConnectionError):
        return []


class Job:
    """All ranks of a job, as the test sees them.

    Args:
        ranks: How many.
        ports: Of the store and of the dependency.
    """

    def __init__(self, ranks: int, ports: tuple[int, int]) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            mine, its = START.Pipe()
            process = START.Process(target=live, args=(its, rank, ports, ranks), daemon=True)
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(HANG_S)
            assert pipe.recv() == "ready"

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell all ranks that live to do something, at once."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send((name, arguments))

    def hear(self) -> list[Seen]:
        """Wait for what came of it, from all ranks that live."""
        heard = [report for pipe in self.pipes for report in hear_one(pipe)]
        assert all(report.error == "" for report in heard), [report.error for report in heard]
        return heard

    def do(self, name: str, *arguments: Any) -> list[Seen]:
        """Tell, and hear."""
        self.tell(name, *arguments)
        return self.hear()

    def end(self) -> None:
        """Let all ranks leave; kill who does not."""
        try:
            self.do("close")
        finally:
            for process, pipe in zip(self.processes, self.pipes, strict=True):
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join(5.0)
                pipe.close()
                process.close()
