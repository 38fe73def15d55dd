# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What agents whose workers are well ask of the store, counted on the wire, before its server."""

from __future__ import annotations

import itertools
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.benchmark_files import load_benchmark
from tests.handlers import server


if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from tests.handlers import Handlers


joining = load_benchmark("joining")
NODES = 2
ASKED = 20
LONG_S = 600


@pytest.fixture
def proxy() -> Iterator[Any]:
    """Count what a store's server is asked."""
    store = server()
    counting = joining.CountingProxy(store.port)
    yield counting
    counting.close()
    assert counting.broken == []


def ours(counted: Counter[tuple[str, str]]) -> int:
    """Return how many requests were about a key of ours."""
    return sum(number for (_, key), number in counted.items() if joining.is_ours(key))


def test_an_agent_whose_workers_are_well_asks_once_in_a_keep_alive_interval(
    handlers: Handlers, proxy: Any
) -> None:
    """One request for one key, however often torch's agent asks whether nodes wait."""
    made = [
        handlers.make(proxy.port, nodes=(NODES, NODES), keep_alive_interval=LONG_S)
        for _ in range(NODES)
    ]
    handlers.join(*made)
    before = proxy.counted()

    waiting = [each.num_nodes_waiting() for _ in range(ASKED) for each in made]

    assert set(waiting) == {0}
    assert ours(proxy.counted() - before) == NODES


def test_each_interval_costs_one_more_request(handlers: Handlers, proxy: Any) -> None:
    """Of one key in turn, so that no look is dearer than another."""
    handler = handlers.make(proxy.port, keep_alive_interval=LONG_S)
    handlers.join(handler)
    intervals = itertools.count()
    watching: Any = handler._watching
    watching._clock = SimpleNamespace(now_s=lambda: time.monotonic() + LONG_S * next(intervals))
    costs = []

    for _ in range(ASKED):
        before = proxy.counted()
        assert handler.num_nodes_waiting() == 0
        costs.append(ours(proxy.counted() - before))

    assert costs[1:] == [1] * (ASKED - 1)


def test_the_proxy_knows_every_request_that_a_store_can_be_asked(proxy: Any) -> None:
    """What it cannot take apart it cannot count, so that would be told."""
    client = joining.TCPStore("127.0.0.1", proxy.port, is_master=False, wait_for_workers=False)
    client.set("a", "1")
    client.get("a")
    client.add("n", 1)
    client.check(["a", "n"])
    client.wait(["a"])
    client.num_keys()
    client.append("a", "2")
    client.multi_get(["a", "n"])
    client.compare_set("a", "12", "3")
    client.delete_key("a")

    found = proxy.counted()

    kinds = {kind for kind, _ in found}
    assert {"set", "get", "add", "check", "wait", "num_keys", "append"} < kinds
    assert found["multi_get", "/a"] == found["compare_set", "/a"] == found["delete_key", "/a"] == 1


def test_a_request_that_nobody_knows_is_said_to_be_unknown() -> None:
    """A count that leaves something out would be too good."""
    store = server()
    counting = joining.CountingProxy(store.port)
    with socket.create_connection(("127.0.0.1", counting.port), timeout=20) as client:
        client.sendall(b"\xff")
        assert client.recv(1) == b""
    counting.close()

    [said] = counting.broken
    assert "255" in said
