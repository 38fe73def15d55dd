# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Join a rendezvous where nothing is wrong: torch's ``c10d``, and ours around it, side by side.

Each node is a process with torch imported, which makes a handler and joins, as torch's agent does
when it starts. Before each join all of them meet at a barrier; it has taken as long as the slowest
took. Kinds take turns, so that both meet the same neighbours, and all meet one store's server, in a
process of its own. Torch lets each node wait for up to 0.3 s by chance before it joins the first
time, and those that have come look once a second whether all are there: in one round, both kinds
draw the same waits, so what counts is the median of the differences.

Then the joined agents do what torch's agent does while its workers are well, which is to ask
``num_nodes_waiting`` every 0.1 s, and a proxy before the store's server takes every request apart
and counts it: torch's own by any key, and ours by the names of our keys.

Run it::

    python benchmarks/joining.py --rounds 60 --nodes 2 3

It prints medians and counts, and ends with 1 where joining takes too much longer, or a healthy
agent asks for more than one thing per ``keep_alive_interval``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lightning_resilience.adapters.rendezvous import BACKEND, create_handler


if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier
    from typing import BinaryIO

    from torch.distributed.elastic.rendezvous import RendezvousHandler

THEIRS, OURS = "c10d", BACKEND
MOST_MS: Final = 50.0
MILLISECONDS: Final = 1e3
MONITOR_S: Final = 0.1
HANG_S: Final = 120.0
KEEP_ALIVE_S: Final = 1.0


# --- what reaches the store -----------------------------------------------------------------------

TEXT, LIST, NUMBER, NONCE = "text", "list", "number", "nonce"
REQUESTS: Final[dict[int, tuple[str, tuple[str, ...]]]] = {
    0: ("validate", (NONCE,)),
    1: ("set", (TEXT, TEXT)),
    2: ("compare_set", (TEXT, TEXT, TEXT)),
    3: ("get", (TEXT,)),
    4: ("add", (TEXT, NUMBER)),
    5: ("check", (LIST,)),
    6: ("wait", (LIST,)),
    7: ("num_keys", ()),
    8: ("delete_key", (TEXT,)),
    9: ("append", (TEXT, TEXT)),
    10: ("multi_get", (LIST,)),
    12: ("cancel_wait", ()),
    13: ("ping", (NONCE,)),
}
"""What a client of torch's ``TCPStore`` sends: a byte, and these parts."""


def read_request(source: BinaryIO) -> tuple[str, str, bytes] | None:
    """Read one request of a ``TCPStore`` client.

    Args:
        source: What the client sends.

    Returns:
        Its kind, its first key (empty without one), and its bytes; None at the end.

    Raises:
        ValueError: This version of torch sends something that is not known here.
    """
    taken: list[bytes] = []

    def take(count: int) -> bytes:
        piece = source.read(count)
        taken.append(piece)
        return piece

    def text() -> bytes:
        return take(struct.unpack("=Q", take(8))[0])

    first = take(1)
    if not first:
        return None
    if first[0] not in REQUESTS:
        message = f"a request of kind {first[0]} is not known here; {sorted(REQUESTS)} are"
        raise ValueError(message)
    kind, parts = REQUESTS[first[0]]
    texts: list[bytes] = []
    for part in parts:
        if part is TEXT:
            texts.append(text())
        elif part is LIST:
            texts += [text() for _ in range(struct.unpack("=Q", take(8))[0])]
        else:
            take(8 if part is NUMBER else 4)
    return kind, texts[0].decode() if texts else "", b"".join(taken)


def is_ours(key: str) -> bool:
    """Tell whether a key is one of our records'."""
    return "/lr/" in key


class CountingProxy:
    """Stands before a store's server, and counts what it is asked. Loopback, a free port.

    Args:
        port: Of the server.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._lock = threading.Lock()
        self._counted: Counter[tuple[str, str]] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.broken: list[str] = []
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def counted(self) -> Counter[tuple[str, str]]:
        """Return how many requests of each kind have come for each key."""
        with self._lock:
            return self._counted.copy()

    def close(self) -> None:
        """Let all connections go, and take no more."""
        _end(self._listener)
        self._accepting.join()
        for each in self._connections:
            _end(each)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._connections):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self._connections.append(client)
                server = socket.create_connection(("127.0.0.1", self._target))
                self._connections.append(server)
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for way, ends in ((self._ask, (client, server)), (self._answer, (server, client))):
                    self._threads.append(threading.Thread(target=way, args=ends, daemon=True))
                    self._threads[-1].start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        try:
            with client.makefile("rb") as source:
                while (request := read_request(source)) is not None:
                    kind, key, sent = request
                    with self._lock:
                        self._counted[kind, key] += 1
                    server.sendall(sent)
        except ValueError as error:
            self.broken.append(str(error))
        except (OSError, struct.error):
            # A client that goes in the middle of a request; nobody counts on it.
            pass
        finally:
            _end(server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while piece := server.recv(65536):
                client.sendall(piece)
        _end(client)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# --- nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a node is told to do.

    Args:
        kind: Backend.
        port: Of the store.
        run_id: A name that no other rendezvous has.
        nodes: How many join.
        seed: For torch's chance.
        watch_s: For how long to be well afterwards, in seconds.
    """

    kind: str
    port: int
    run_id: str
    nodes: int
    seed: str = ""
    watch_s: float = 0.0


def make_handler(order: Order) -> RendezvousHandler:
    """Make a handler as torch's launcher does."""
    parameters = RendezvousParameters(
        order.kind,
        f"127.0.0.1:{order.port}",
        order.run_id,
        order.nodes,
        order.nodes,
        "127.0.0.1",
        is_host=0,
        keep_alive_interval=KEEP_ALIVE_S,
        # A busy machine may keep a thread from its heartbeat for seconds.
        keep_alive_max_attempt=30,
    )
    return create_handler(parameters) if order.kind == OURS else get_rendezvous_handler(parameters)


def be_node(orders: Connection, barriers: dict[int, Barrier]) -> None:
    """Carry out orders until there are no more.

    The answer is how long joining took, and another one once the node has watched and left.
    """
    while (order := orders.recv()) is not None:
        barrier = barriers[order.nodes]
        random.seed(order.seed)
        barrier.wait(HANG_S)
        started_s = time.perf_counter()
        handler = make_handler(order)
        handler.next_rendezvous()
        orders.send(time.perf_counter() - started_s)
        barrier.wait(HANG_S)
        if order.watch_s:
            watch(handler, order.watch_s)
            barrier.wait(HANG_S)
        handler.shutdown()
        if order.watch_s:
            orders.send(order.watch_s)


def watch(handler: RendezvousHandler, watch_s: float) -> None:
    """Ask what torch's agent asks while its workers are well."""
    ends_at_s = time.monotonic() + watch_s
    while time.monotonic() < ends_at_s:
        handler.num_nodes_waiting()
        time.sleep(MONITOR_S)


def be_server(answer: Connection) -> None:
    """Host the store until the process is ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer.send(store.port)
    threading.Event().wait()


@dataclass
class Bench:
    """A store's server, and as many nodes as are needed at most."""

    nodes: Sequence[int]
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    port: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork")
        barriers = {count: context.Barrier(count) for count in self.nodes}
        ours, theirs = context.Pipe(duplex=False)
        children = [context.Process(target=be_server, args=(theirs,), daemon=True)]
        self.orders: list[Connection] = []
        for _ in range(max(self.nodes)):
            here, there = context.Pipe()
            self.orders.append(here)
            child = context.Process(target=be_node, args=(there, barriers), daemon=True)
            children.append(child)
        for child in children:
            child.start()
        self.children = children
        self.port = ours.recv()

    def tell(self, kind: str, nodes: int, *, port: int | None = None, watch_s: float = 0.0) -> None:
        """Let some nodes join together."""
        self.number += 1
        for node, each in enumerate(self.orders[:nodes]):
            each.send(
                Order(
                    kind=kind,
                    port=port or self.port,
                    run_id=f"job{self.number}",
                    nodes=nodes,
                    seed=f"{len(self.seconds.get((kind, nodes), []))} {node}",
                    watch_s=watch_s,
                )
            )

    def joined(self, nodes: int) -> float:
        """Return the largest answer of the nodes: how long the slowest took, in seconds."""
        return max(self._answer(each) for each in self.orders[:nodes])

    def measure(self, kind: str, nodes: int) -> None:
        """Let them join once, and note it."""
        self.tell(kind, nodes)
        self.seconds.setdefault((kind, nodes), []).append(self.joined(nodes))

    def traffic(self, kind: str, nodes: int, intervals: int) -> Counter[tuple[str, str]]:
        """Return what healthy agents ask for in some intervals.

        Raises:
            RuntimeError: Something was asked for that cannot be counted.
        """
        proxy = CountingProxy(self.port)
        window_s = intervals * KEEP_ALIVE_S
        self.tell(kind, nodes, port=proxy.port, watch_s=window_s + 2 * KEEP_ALIVE_S)
        self.joined(nodes)
        # The first look is at once; a window in the middle has what goes on for ever.
        time.sleep(1.5 * KEEP_ALIVE_S)
        before, started_s = proxy.counted(), time.monotonic()
        time.sleep(max(0.0, started_s + window_s - time.monotonic()))
        found = proxy.counted() - before
        # Order: the nodes leave first, by way of the proxy.
        self.joined(nodes)
        proxy.close()
        if proxy.broken:
            raise RuntimeError(proxy.broken[0])
        return found

    def close(self) -> None:
        """End all processes."""
        for each in self.orders:
            each.send(None)
        for child in self.children[1:]:
            child.join(HANG_S)
        self.children[0].terminate()

    def _answer(self, orders: Connection) -> float:
        if not orders.poll(HANG_S):
            message = f"a node has not joined within {HANG_S:g} s"
            raise RuntimeError(message)
        answer: float = orders.recv()
        return answer


# --- what is said of it ---------------------------------------------------------------------------


def quarters(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    first, second, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, second, third


def compare(theirs: Sequence[float], ours: Sequence[float]) -> tuple[list[float], float]:
    """Return by how many milliseconds ours took longer in each round, and the ratio of medians."""
    more_ms = [(our - their) * MILLISECONDS for their, our in zip(theirs, ours, strict=True)]
    return more_ms, statistics.median(ours) / statistics.median(theirs)


def rates(counted: Counter[tuple[str, str]], *, nodes: int, intervals: int) -> tuple[float, float]:
    """Return torch's requests and ours, of one agent in one interval."""
    ours = sum(number for (_, key), number in counted.items() if is_ours(key))
    per = nodes * intervals
    return (counted.total() - ours) / per, ours / per


def show_joining(bench: Bench, nodes: int) -> list[str]:
    """Print how long joining took; return what is too much."""
    for kind in (THEIRS, OURS):
        all_ms = [each * MILLISECONDS for each in bench.seconds[kind, nodes]]
        first, median, third = quarters(all_ms)
        print(f"{nodes} nodes  {kind:10s} {median:7.1f} ms   ({first:.1f} to {third:.1f})")
    more_ms, ratio = compare(bench.seconds[THEIRS, nodes], bench.seconds[OURS, nodes])
    first, median, third = quarters(more_ms)
    print(
        f"{nodes} nodes  longer by  {median:7.1f} ms   ({first:.1f} to {third:.1f}), × {ratio:.3f}"
    )
    return [f"{nodes} nodes: {median:.1f} ms > {MOST_MS:g} ms"] if median > MOST_MS else []


def show_traffic(bench: Bench, nodes: int, intervals: int) -> list[str]:
    """Count and print what healthy agents ask for; return what is too much."""
    missed = []
    for kind in (THEIRS, OURS):
        counted = bench.traffic(kind, nodes, intervals)
        torchs, ours = rates(counted, nodes=nodes, intervals=intervals)
        print(f"{nodes} nodes  {kind:10s} {torchs:6.2f} requests of torch's, {ours:.2f} of ours")
        for (request, key), number in sorted(counted.items()):
            if is_ours(key):
                print(f"         {number:4d} × {request} {key}")
        if ours > 1:
            missed.append(f"{nodes} nodes: {ours:.2f} requests an interval > 1")
    return missed


def main() -> int:
    """Measure in turn, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--intervals", type=int, default=10)
    arguments = parser.parse_args()
    bench = Bench(nodes=arguments.nodes)
    load = os.getloadavg()[0]
    try:
        for _ in range(arguments.rounds):
            for nodes in arguments.nodes:
                for kind in (THEIRS, OURS):
                    bench.measure(kind, nodes)
        missed: list[str] = []
        print(f"joining, median and quartiles of {arguments.rounds} rounds (load {load:.1f}):")
        for nodes in arguments.nodes:
            missed += show_joining(bench, nodes)
        print(f"at the store, by one healthy agent in {KEEP_ALIVE_S:g} s (keep_alive_interval):")
        for nodes in arguments.nodes:
            missed += show_traffic(bench, nodes, arguments.intervals)
    finally:
        bench.close()
    print("\n".join(missed) or "within all limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
