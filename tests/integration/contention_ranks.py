# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own that crowd one dependency, and a dependency that counts them.

The dependency is a server in the test's process: it knows which requests are in it at any time,
also those of callers that are stopped or killed. A request counts from when it was read until just
before it is answered, which lies within the time that its caller is inside; so what is counted here
is never more than what there was.

The ranks live for a whole test file and are given one part after another. Their stores count
operations, note when the shared records changed, and lose answers where a part says so.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import socketserver
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.circuit import Circuit, begin
from lightning_resilience.protocols.circuit_memory import Limits, Link, give_detour
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.http_server import in_background
from tests.integration.breaker_ranks import HANG_S, KEYS, START, Recorder


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken, SharedStore


# Small, and within the relations that BreakerConfig asks for.
CONFIG = BreakerConfig(
    trip_failures=2,
    view_max_age_s=0.2,
    open_for_s=1.9,
    max_open_for_s=1.9,
    probe_timeout_s=0.05,
    probe_lease_s=1.85,
    max_concurrent=4,
)
POLICY = RetryPolicy(
    base_delay_s=0.02,
    max_delay_s=0.1,
    throttle_base_delay_s=0.1,
    max_attempts=40,
    deadline_s=HANG_S,
    stall_timeout_s=HANG_S,
)

LOST_SHARE = 0.05


# --- the dependency --------------------------------------------------------------------------


@dataclass
class Request:
    """One request that reached the dependency."""

    kind: str
    rank: int
    phase: str
    began_at_s: float
    at_once: int
    is_well: bool = False
    ended_at_s: float = float("inf")


class Dependency(socketserver.ThreadingTCPServer):
    """What all ranks need, on a port of loopback.

    Attributes:
        phase: Name that requests are counted under.
        lasts_s: How long a request takes.
        judge: Tells whether a request goes well.
        gate: Requests stay until it is set.
    """

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.changed = threading.Condition()
        self.phase = ""
        self.lasts_s = 0.01
        self.judge: Callable[[Request], bool] = lambda _: True
        self.gate = threading.Event()
        self.gate.set()
        dependency = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                dependency.serve(self.request)

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def port(self) -> int:
        """Its port."""
        port: int = self.server_address[1]
        return port

    def serve(self, connection: socket.socket) -> None:
        """Answer one request."""
        kind, rank = connection.recv(64).decode().split()
        request = self._let_in(kind, int(rank))
        # It lasts its time, and until the gate is open, or until its caller is gone.
        is_gone = bool(select.select([connection], [], [], self.lasts_s)[0])
        while not (is_gone or kind != "call" or self.gate.is_set()):
            is_gone = bool(select.select([connection], [], [], 0.01)[0])
        with self.changed:
            request.is_well = self.judge(request)
            request.ended_at_s = time.monotonic()
            self.changed.notify_all()
        with contextlib.suppress(OSError):
            connection.sendall(b"well" if request.is_well else b"ill")

    def _let_in(self, kind: str, rank: int) -> Request:
        with self.changed:
            request = Request(kind, rank, self.phase, time.monotonic(), len(self.inside(kind)) + 1)
            self.requests.append(request)
            self.changed.notify_all()
            return request

    def inside(self, kind: str = "call") -> list[Request]:
        """Requests that are in it now."""
        return [r for r in self.requests if r.kind == kind and r.ended_at_s > 1e300]

    def of(self, kind: str, phase: str | None = None) -> list[Request]:
        """Requests of one kind so far, in one phase or in all."""
        return [r for r in self.requests if r.kind == kind and phase in {None, r.phase}]

    def peak(self, phase: str) -> int:
        """Most calls at once in a phase."""
        return max((request.at_once for request in self.of("call", phase)), default=0)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait until something about the requests is true."""
        with self.changed:
            assert self.changed.wait_for(true, HANG_S), f"in vain; {len(self.requests)} requests"


@contextlib.contextmanager
def serving() -> Iterator[Dependency]:
    """Run a dependency."""
    with Dependency() as dependency, in_background(dependency, poll_s=0.02):
        try:
            yield dependency
        finally:
            dependency.gate.set()


def ask(port: int, kind: str, rank: int) -> None:
    """Send one request to the dependency; raises where it is ill."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.sendall(f"{kind} {rank}".encode())
        if connection.recv(64) != b"well":
            raise ConnectionResetError("the dependency is ill")


# --- the shared store ------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A compare-and-set, and whether its bytes were there after it."""

    key: str
    sent_at_s: float
    answered_at_s: float
    raw: bytes
    has_won: bool


class WatchedStore:
    """A store that notes what is done, and loses answers of one operation: its first, and a share.

    An answer is lost after the operation was executed.
    """

    def __init__(self, inner: SharedStore, *, lost: str, seed: int) -> None:
        self.inner = inner
        self.operations: Counter[str] = Counter()
        self.losses = 0
        self.changes: list[Change] = []
        self.is_lossy = False
        self._lost = lost
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _answer(self, operation: str, value: Any) -> Any:
        with self._lock:
            self.operations[operation] += 1
            is_lost = (
                self.is_lossy
                and operation == self._lost
                and (self.losses == 0 or self._random.random() < LOST_SHARE)
            )
            self.losses += is_lost
        if is_lost:
            raise StoreUnavailableError(f"the answer to {operation} was lost")
        return value

    def get(self, key: str) -> bytes | None:
        """As the port."""
        value: bytes | None = self._answer("get", self.inner.get(key))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """As the port."""
        values: list[bytes | None] = self._answer("multi_get", self.inner.multi_get(keys))
        return values

    def set(self, key: str, value: bytes) -> None:
        """As the port."""
        self.inner.set(key, value)
        self._answer("set", None)

    def delete(self, key: str) -> bool:
        """As the port."""
        existed: bool = self._answer("delete", self.inner.delete(key))
        return existed

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As the port."""
        sent_at_s = time.monotonic()
        returned = self.inner.compare_and_set(key, expected, desired)
        change = Change(key, sent_at_s, time.monotonic(), desired, has_won=returned == desired)
        self.changes.append(change)
        value: bytes = self._answer("compare_and_set", returned)
        return value

    def add(self, key: str, amount: int) -> int:
        """As the port."""
        total: int = self._answer("add", self.inner.add(key, amount))
        return total

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """As the port; the wait counts where it is made, on the watcher."""
        return self.inner.wait_for(key, timeout_s)

    def watcher(self) -> SharedStore:
        """As the port."""
        return self.inner.watcher()

    def close(self) -> None:
        """As the port."""
        self.inner.close()


def _serve_store(connection: Connection, port: int) -> None:
    store = dist.TCPStore(
        "127.0.0.1", port, None, True, timedelta(seconds=HANG_S), wait_for_workers=False
    )  # fmt: skip
    connection.send(store.port)
    # Until the test ends it, or has ended itself.
    with contextlib.suppress(EOFError):
        connection.recv()


class StoreServer:
    """A ``TCPStore`` server in a process of its own, to be killed and begun anew."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, empty; the second time on the same port."""
        self._pipe, its = START.Pipe()
        self._process = START.Process(target=_serve_store, args=(its, self.port), daemon=True)
        self._process.start()
        its.close()
        assert self._pipe.poll(HANG_S)
        self.port = self._pipe.recv()

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.join(HANG_S)
        self._process.close()
        self._pipe.close()


# --- the ranks -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the ranks are to be in a scene.

    Args:
        dependency: Its name; every scene has its own, and so a fresh record.
        store_port: The store's.
        port: The dependency's.
        config: The breaker's.
        limits: Slots and budget.
        policy: The retry policy.
        collective: Whether calls pass admission also while the circuit is closed.
        when_open: Whether calls wait.
        hosts: Hosts that there are; each rank is one.
        store_patience_s: How long the store may be away.
        processes: Processes that share the limits where calls may go alone; 0 where they may not.
        lost: Operation whose answers get lost, one in twenty.
    """

    dependency: str
    store_port: int
    port: int
    config: BreakerConfig = CONFIG
    limits: Limits = field(default_factory=Limits)
    policy: RetryPolicy = POLICY
    collective: bool = True
    when_open: str = "wait"
    hosts: int = 8
    store_patience_s: float | None = 5.0
    processes: int = 0
    lost: str = ""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one call of a rank ended."""

    attempts: int = 0
    error: str = ""
    text: str = ""
    cause: str = ""


@dataclass
class Report:
    """What a rank tells the test: how its latest calls ended, and all that was since its part."""

    rank: int
    calls: list[Ended] = field(default_factory=list)
    error: str = ""
    events: list[tuple[float, Event]] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    losses: int = 0
    changes: list[Change] = field(default_factory=list)

    def emitted(self, kind: type[Event]) -> list[Any]:
        """Its events of one kind."""
        return [event for _, event in self.events if isinstance(event, kind)]


class Rank:
    """One rank, in its own process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def begin(self, part: Part) -> list[Ended]:
        """Take a part, with nothing left of the one before."""
        self.end()
        self.part = part
        self.recorder = Recorder()
        inner = TorchStore.connect("127.0.0.1", part.store_port, timeout_s=2.0)
        self.store = WatchedStore(inner, lost=part.lost, seed=self.rank)
        self.driver = Driver(
            store=self.store,
            clock=SystemClock(),
            dice=SystemDice(rank=self.rank),
            sink=self.recorder,
        )
        self.circuit = Circuit(
            part.dependency,
            config=part.config,
            keys=KEYS,
            host=f"h{self.rank}",
            hosts=part.hosts,
            limits=part.limits,
        )
        if part.processes:
            give_detour(self.circuit, link=Link(), processes=part.processes)
        self.driver.run(begin(self.circuit, new_incarnation=False))
        self.store.operations.clear()
        self.store.is_lossy = True
        return []

    def calls(self, number: int) -> list[Ended]:
        """Make so many guarded calls."""
        return [self._call() for _ in range(number)]

    def calls_until(self, event: str) -> list[Ended]:
        """Make guarded calls until an event of this name has come."""
        ended = []
        until_s = time.monotonic() + HANG_S
        while all(type(seen).__name__ != event for _, seen in self.recorder.events):
            assert time.monotonic() < until_s, f"{event} never came"
            ended.append(self._call())
            time.sleep(0.02)
        return ended

    def _call(self) -> Ended:
        part, rank = self.part, self.rank

        def probe(_token: CancelToken) -> None:
            ask(part.port, "probe", rank)

        def work(_token: CancelToken) -> None:
            ask(part.port, "call", rank)

        patience = Patience(
            probe=probe,
            classify=classify,
            when_open=part.when_open,
            chunk_s=2.0,
            voice_s=5.0,
            spread_s=0.05,
        )
        call = GuardedCall(
            work=work,
            operation="save",
            target="a",
            policy=part.policy,
            patience=patience,
            collective=part.collective,
            may_go_alone=part.processes > 0,
            store_patience_s=part.store_patience_s,
        )
        try:
            return Ended(attempts=self.driver.run(guard(self.circuit, call)).attempts)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            cause = type(error.__cause__).__name__
            return Ended(error=type(error).__name__, text=str(error), cause=cause)

    def report(self) -> Report:
        """What is known so far."""
        if not hasattr(self, "store"):
            return Report(rank=self.rank)
        return Report(
            rank=self.rank,
            events=list(self.recorder.events),
            operations=self.store.operations,
            losses=self.store.losses,
            changes=self.store.changes,
        )

    def end(self) -> list[Ended]:
        """Leave the store."""
        if hasattr(self, "store"):
            self.driver.close()
            self.store.close()
        return []


def _live(connection: Connection, rank: int) -> None:
    # Torch prints a stack for every connection that breaks; what matters here is reported.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    me = Rank(rank)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        calls, error = [], ""
        try:
            calls = getattr(me, name)(*arguments)
        except Exception as raised:  # noqa: BLE001 - the test looks at it
            error = repr(raised)
        connection.send(replace(me.report(), calls=calls, error=error))


class Crew:
    """All ranks, as the tests see them.

    Args:
        ranks: How many.
        live: What each does in its process, with its end of the pipe and its number.
    """

    def __init__(self, ranks: int, live: Callable[[Connection, int], None] = _live) -> None:
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        self._live = live
        for rank in range(ranks):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start a rank."""
        self.pipes[rank], its = START.Pipe()
        self.processes[rank] = START.Process(target=self._live, args=(its, rank), daemon=True)
        self.processes[rank].start()
        its.close()

    def tell(self, name: str, *arguments: Any, ranks: Iterable[int] | None = None) -> None:
        """Tell some ranks, or all, to do something at once."""
        for rank in self.pipes if ranks is None else ranks:
            self.pipes[rank].send((name, arguments))

    def hear(self, ranks: Iterable[int] | None = None) -> list[Report]:
        """Wait for what came of it."""
        reports = []
        for rank in self.pipes if ranks is None else ranks:
            assert self.pipes[rank].poll(HANG_S), f"rank {rank} is stuck"
            reports.append(self.pipes[rank].recv())
        assert all(report.error == "" for report in reports), [r.error for r in reports]
        return reports

    def do(self, name: str, *arguments: Any, ranks: Iterable[int] | None = None) -> list[Report]:
        """Tell, and hear."""
        chosen = list(self.pipes if ranks is None else ranks)
        self.tell(name, *arguments, ranks=chosen)
        return self.hear(chosen)

    def stop(self, rank: int) -> None:
        """Let a rank stand still, as if its host did."""
        pid = self.processes[rank].pid
        os.kill(pid, signal.SIGSTOP)
        # It is no child of this process, so its state is all there is to see.
        until_s = time.monotonic() + HANG_S
        while Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split(")")[1].split()[0] != "T":
            assert time.monotonic() < until_s, f"rank {rank} does not stop"
            time.sleep(0.005)

    def go_on(self, rank: int) -> None:
        """Let it go on."""
        os.kill(self.processes[rank].pid, signal.SIGCONT)

    def kill(self, rank: int) -> None:
        """End a rank without a word."""
        self.processes[rank].kill()
        self.processes[rank].join(HANG_S)

    def renew(self, rank: int) -> None:
        """Put another process in the place of a rank."""
        self.kill(rank)
        self.pipes[rank].close()
        self.start(rank)

    def end(self) -> None:
        """Let all ranks leave; kill who does not."""
        for rank, process in self.processes.items():
            self.pipes[rank].close()
            process.join(1.0)
            process.kill()
            process.join(HANG_S)
