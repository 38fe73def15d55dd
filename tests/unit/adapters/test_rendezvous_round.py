# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A round of the rendezvous that some nodes have not come to: nobody waits for long, or loses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
from lightning_resilience.adapters.rendezvous_round import learn_name
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.restart_record import Memory
from tests.handlers import WITHIN_S, server
from tests.ports import free_port


if TYPE_CHECKING:
    from concurrent.futures import Future

    from tests.handlers import Handlers


def named(port: int, rank: int, *, waits_s: int) -> Any:
    """Name a round of three nodes, or learn its name, as the agent of one of them."""
    options = RendezvousOptions.read({"keep_alive_interval": 1, "keep_alive_max_attempt": waits_s})
    store, names = (AgentStore.at("127.0.0.1", port, run_id="job") for _ in range(2))
    info: Any = SimpleNamespace(rank=rank, world_size=3)
    try:
        return learn_name(info, store, names, options=options, before="")
    finally:
        store.close()


def has_none(found: Future[Any]) -> bool:
    """Tell whether an agent has learnt in time that the round has no name."""
    return isinstance(found.exception(WITHIN_S), StoreUnavailableError)


def joins_and_goes(handler: Any) -> int:
    """Have part in a round until it is complete; return how many nodes it has."""
    joined = handler._connection.join()
    handler._connection.drop()
    size: int = joined.world_size
    return size


@pytest.mark.parametrize(
    ("gives_up", "waits"), [(0, 1), (1, 2)], ids=["node_0_comes", "node_0_is_late"]
)
def test_whoever_waits_for_a_name_learns_that_there_will_be_none(gives_up: int, waits: int) -> None:
    """Another has waited for long enough: nobody waits for as long again."""
    store = server()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(named, store.port, waits, waits_s=10 * int(WITHIN_S))
        giving_up = pool.submit(named, store.port, gives_up, waits_s=1)

        assert has_none(giving_up)
        assert has_none(waiting)


@pytest.mark.parametrize("late", [0, 2])
def test_whoever_comes_to_a_round_too_late_waits_for_nobody(late: int) -> None:
    """The others have given it up; one that named it now would be alone in it."""
    store = server()
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(named, store.port, rank, waits_s=1) for rank in {0, 1, 2} - {late}]
        assert all(has_none(each) for each in first)

        assert has_none(pool.submit(named, store.port, late, waits_s=10 * int(WITHIN_S)))


def test_a_round_that_is_made_anew_takes_the_store_from_nobody(handlers: Handlers) -> None:
    """The agent that hosts it keeps it, and its place in the rendezvous, whoever is missed."""
    port = free_port()
    host = handlers.make(port, nodes=(1, 2), is_host=1, keep_alive_max_attempt=3)
    inner = host._connection.handler()
    client = AgentStore.at("127.0.0.1", port, run_id="job")
    client.driver.store.set("kept", b"1")
    other = handlers.make(port, nodes=(1, 2), keep_alive_max_attempt=3, last_call_timeout=5)

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(joins_and_goes, other)
        [info] = handlers.join(host)

    assert (going.result(WITHIN_S), info.world_size) == (2, 1)
    assert client.driver.store.get("kept") == b"1"
    assert host._connection.handler() is inner
    client.close()


def test_a_newcomer_that_goes_when_a_round_is_complete_is_no_loss_of_nodes(
    handlers: Handlers,
) -> None:
    """All nodes of the start before are there, so nobody pays for the round that is given up."""
    store = server()
    conf: dict[str, Any] = {"keep_alive_max_attempt": 3, "last_call_timeout": 5}
    one, other = (
        handlers.make(store.port, nodes=(1, 2), host=host, **conf)
        for host in ("127.0.0.1", "127.0.0.2")
    )
    handlers.join(one)
    one._is_called = True

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(joins_and_goes, other)
        [info] = handlers.join(one)

    client = AgentStore.at("127.0.0.1", store.port, run_id="job")
    record = client.run(restart_record.read(Memory(client.keys(""))))
    client.close()
    assert (going.result(WITHIN_S), info.world_size) == (2, 1)
    assert (record.restarts, record.charges) == (0, ())


def test_a_client_that_has_broken_takes_the_store_from_nobody(handlers: Handlers) -> None:
    """The agent that hosts it asks with a new client, of the server that there was."""
    port = free_port()
    host = handlers.make(port, is_host=1)
    handlers.join(host)
    client = AgentStore.at("127.0.0.1", port, run_id="job")
    client.driver.store.set("kept", b"1")

    host._connection.failed(RuntimeError("recv timed out"))

    assert host._connection.handler() is not None
    assert host._connection.hosts_store
    assert client.driver.store.get("kept") == b"1"
    client.close()
    assert host.shutdown()
    assert not host._connection.hosts_store


def test_an_agent_of_an_older_round_is_none_of_the_present_one(handlers: Handlers) -> None:
    """After a loss of the store rounds begin at 0 again: it would be taken for who is missed.

    Torch then waits for that one when it gives the workers their ranks, and the job ends.
    """
    store = server()
    connection = handlers.make(store.port)._connection

    def entered(rank: int, *, workers_port: int, waits_s: int) -> Any:
        options = RendezvousOptions.read(
            {"keep_alive_interval": 1, "keep_alive_max_attempt": waits_s}
        )
        info: Any = SimpleNamespace(
            rank=rank,
            world_size=2,
            store=PrefixStore("torch.rendezvous.job.0", store),
            bootstrap_store_info=RendezvousStoreInfo("127.0.0.1", workers_port),
        )
        job = AgentStore.at("127.0.0.1", store.port, run_id="job")
        names = connection.names(info, before="")
        try:
            return learn_name(info, job, names, options=options, before="")
        finally:
            job.close()

    with ThreadPoolExecutor(2) as pool:
        older = pool.submit(entered, 1, workers_port=1001, waits_s=2)
        present = pool.submit(entered, 0, workers_port=1002, waits_s=2)

        assert has_none(present)
        assert has_none(older)

        both = [pool.submit(entered, rank, workers_port=1003, waits_s=50) for rank in (0, 1)]
        assert len({each.result(WITHIN_S).incarnation for each in both}) == 1


def test_a_static_rendezvous_names_each_start_anew(handlers: Handlers) -> None:
    """All its rounds have one store, in which the first one's name still is."""
    port = free_port()
    dynamic = ("keep_alive_interval", "keep_alive_max_attempt", "last_call_timeout", "is_host")
    conf: dict[str, Any] = {**dict.fromkeys((*dynamic, "read_timeout")), "timeout": 20}
    agents = [
        handlers.make(port, nodes=(2, 2), inner="static", rank=rank, **conf) for rank in (0, 1)
    ]

    def names() -> list[str]:
        handlers.join(*agents)
        return [each._round.incarnation for each in agents if each._round is not None]

    first, second, third = names(), names(), names()

    assert [len(set(each)) for each in (first, second, third)] == [1, 1, 1]
    assert len({*first, *second, *third}) == 3
