# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's own handler, as ours sees it: who is there, and whose clock says so."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from lightning_resilience.adapters import rendezvous_inner as within


if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.at_s


@pytest.fixture
def server() -> TCPStore:
    """A server of a store, in this process."""
    return TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)


def handler(port: int, run_id: str = "job", **options: Any) -> RendezvousHandler:
    """Make a handler for one node."""
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", run_id, 1, 2, "127.0.0.1")
    settings = {
        "last_call_timeout": 1,
        "keep_alive_interval": 1,
        # A busy machine may keep a thread from its heartbeat for seconds.
        "keep_alive_max_attempt": 60,
        **options,
    }
    return within.make_inner(parameters, "c10d", {"is_host": "0", **settings})


@pytest.fixture
def joined(server: TCPStore) -> Iterator[RendezvousHandler]:
    """A handler that has joined a round."""
    inner = handler(server.port)
    inner.next_rendezvous()
    yield inner
    inner.shutdown()


def test_it_is_known_who_is_there(joined: RendezvousHandler) -> None:
    """From what the handler has read last."""
    assert joined.num_nodes_waiting() == 0
    assert within.participants(joined) == 1


def test_nobody_is_known_before_the_first_look(server: TCPStore, joined: RendezvousHandler) -> None:
    """A handler that was made anew has not asked yet: that is not to know that all have gone."""
    fresh = handler(server.port)

    assert within.participants(fresh) is None
    assert not fresh.is_closed()
    assert within.participants(fresh) == within.participants(joined) == 1


def test_it_is_known_where_the_store_is(server: TCPStore, joined: RendezvousHandler) -> None:
    """And that its server is not in the handler's own process, as far as torch says."""
    assert within.address_of(joined) == ("127.0.0.1", server.port)
    assert not within.hosts_store(joined)


def test_a_handler_that_makes_the_server_hosts_it() -> None:
    """On a port that nobody else has."""
    free = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    inner = handler(port, is_host="1")

    assert within.hosts_store(inner)


def test_a_store_that_does_not_answer_is_an_error() -> None:
    """The one that is told from all others."""
    free = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free

    with pytest.raises(RendezvousConnectionError):
        handler(port, read_timeout=1)


@pytest.mark.parametrize("off_s", [-3600.0, -30.0, 0.0, 30.0, 3600.0])
def test_a_node_whose_clock_is_wrong_is_not_gone(joined: Any, off_s: float) -> None:
    """As long as its sign of life changes, whatever that says."""
    clock = Clock()
    within.judge_by_own_sight(joined, grace_s=3.0, now_s=clock)
    holder, other = joined._state_holder, "other node"
    for tick in range(20):
        sign = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=off_s + tick)
        holder._state.participants[other] = 1
        holder._state.last_heartbeats[other] = sign
        holder._sanitize()
        clock.at_s += 1.0
        assert holder._state.last_heartbeats[other] == sign

    assert other in holder._state.participants


def test_a_node_that_gives_no_sign_is_gone_in_time(joined: Any) -> None:
    """However far in the future its last one is."""
    clock = Clock()
    within.judge_by_own_sight(joined, grace_s=3.0, now_s=clock)
    holder, other = joined._state_holder, "other node"
    sign = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=5)
    there: list[bool] = []
    for _ in range(6):
        mine = next(node for node in holder._state.participants if node != other)
        holder._state.last_heartbeats[mine] += dt.timedelta(seconds=1)
        if not there or there[-1]:
            holder._state.participants[other] = 1
            holder._state.last_heartbeats[other] = sign
        holder._sanitize()
        there.append(other in holder._state.participants)
        clock.at_s += 1.0

    assert there == [True, True, True, False, False, False]
    assert within.participants(joined) == 1


def test_a_round_has_a_client_of_its_own(joined: Any) -> None:
    """It is in the same round of the same server, and the heartbeat does not wait for it."""
    [node] = within.members(joined)
    info = RendezvousInfo(joined._get_store(), 0, 1, joined._bootstrap_store_info)

    found = within.with_own_client(info)
    info.store.set("said", "1")

    assert found.store is not info.store
    assert found.store.get("said") == b"1"
    assert found.bootstrap_store_info is info.bootstrap_store_info
    assert node[0] == "127.0.0.1"


def test_a_store_without_a_server_stays_as_it_is() -> None:
    """There is no connection that could be waited for."""
    info = RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 7))

    assert within.with_own_client(info) is info


def test_each_round_tells_where_its_workers_meet(joined: Any) -> None:
    """Or a node that has not been there before waits for that in vain."""
    before = joined._bootstrap_store_info
    assert before is not None

    within.renew_workers_store(joined)
    joined.next_rendezvous()

    assert joined._bootstrap_store_info.master_port != before.master_port


def test_a_handler_whose_connection_broke_keeps_its_place(server: TCPStore, joined: Any) -> None:
    """It has a new client of the same server, and is still in its round."""
    assert server.port
    before = joined._store

    connect = within.new_client(joined)
    assert connect is not None
    within.use_client(joined, connect())

    assert joined._store is not before
    assert joined.num_nodes_waiting() == 0
    assert within.participants(joined) == 1


def test_a_handler_without_a_server_has_no_new_client() -> None:
    """Nobody listens, and it does not take long to see that."""
    host = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    inner = handler(host.port)
    del host
    connect = within.new_client(inner)
    assert connect is not None

    with pytest.raises(ConnectionRefusedError):
        connect()


def test_process_groups_of_two_rounds_do_not_share_a_store(joined: Any) -> None:
    """Where ranks of the first could be reached is not what the second one finds."""
    before = joined._bootstrap_store_info.master_port
    assert joined.next_rendezvous().bootstrap_store_info.master_port == before

    within.renew_workers_store(joined)
    after = joined.next_rendezvous().bootstrap_store_info

    assert after.master_port != before
