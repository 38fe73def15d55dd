# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""With which status an agent leaves, where the store cannot say how the job has ended."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.adapters.worker_environment import STORE
from lightning_resilience.core.joining import Joining
from lightning_resilience.core.quota import Ending, RestartRecord, ended
from lightning_resilience.core.records import encode
from lightning_resilience.core.worker_exits import incident_of_exit
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.incident import publish_incident
from lightning_resilience.protocols.restart_record import Memory
from tests.handlers import WITHIN_S, server, status_of
from tests.ports import free_port


if TYPE_CHECKING:
    from pathlib import Path

    from lightning_resilience.adapters.rendezvous import ResilientHandler
    from tests.handlers import Handlers


CACHED_S = 1.1
"""Torch's handler answers from memory for a second."""


def shut_down_after(error: Exception, handler: ResilientHandler) -> bool:
    """Do what torch's launcher does when its agent has raised."""
    try:
        raise error
    except type(error):
        return handler.shutdown()


def interrupted() -> None:
    """Do what torch's handler of signals does."""
    message = "told to stop"
    raise SignalException(message, signal.SIGTERM)


def test_an_agent_that_has_failed_and_cannot_ask_may_be_started_again(handlers: Handlers) -> None:
    """The store has gone, and its workers have failed: nobody knows whether that would help."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    del store

    assert status_of(lambda: shut_down_after(ValueError("bad"), handler)) == 160


def test_an_agent_that_has_failed_alone_says_so_itself(handlers: Handlers) -> None:
    """Where the store can be asked, and the job has not ended, the launcher's own status stands."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)

    assert shut_down_after(ValueError("bad"), handler)
    assert store.port


def test_an_agent_that_waited_for_another_in_vain_says_so(handlers: Handlers) -> None:
    """Torch gives ranks with all agents of a round; one that has gone then is an outage."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)

    assert status_of(lambda: shut_down_after(DistStoreError("wait timeout"), handler)) == 160
    assert store.port


def test_a_node_that_goes_when_a_round_is_complete_has_it_made_anew(handlers: Handlers) -> None:
    """Nobody goes on to give ranks before all nodes of the round were seen in it."""
    store = server()
    one, other = (
        handlers.make(store.port, nodes=(1, 2), keep_alive_max_attempt=3, last_call_timeout=5)
        for _ in range(2)
    )

    def go() -> int:
        joined = other._connection.join()
        other._connection.drop()
        return joined.world_size

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go)
        [info] = handlers.join(one)

    assert going.result(WITHIN_S) == 2
    assert info.world_size == 1
    assert one._round is not None
    assert one._round.nodes == 1


def test_an_agent_whose_workers_have_ended_well_leaves_the_others_to_begin_anew(
    handlers: Handlers,
) -> None:
    """It was in torch's exit barrier when another node failed: the job has not ended."""
    store = server()
    one, other = handlers.make(store.port, nodes=(2, 2)), handlers.make(store.port, nodes=(2, 2))
    handlers.join(one, other)
    assert other._memory is not None
    failed = incident_of_exit(rank=1, status=1, message="", writer="w")
    other._connection.store().run(publish_incident(other._memory.keys, failed))

    assert one.shutdown()

    time.sleep(CACHED_S)
    assert not other.is_closed()


def test_a_signal_is_never_taken_for_a_store_that_does_not_answer(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's handler of signals raises wherever the agent is: it must come back to torch."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    inner = handler._connection.handler()

    for name in ("num_nodes_waiting", "is_closed", "set_closed"):
        monkeypatch.setattr(inner, name, interrupted)
        with pytest.raises(SignalException):
            getattr(handler, name)()


@pytest.mark.parametrize(("ended", "status"), [(86, 86), (None, 143)])
def test_a_signal_on_the_way_out_changes_no_status(
    handlers: Handlers, *, ended: int | None, status: int
) -> None:
    """Torch asks for the run's id when it records the signal; until then that is only a name."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    assert handler.get_run_id() == "job"
    if ended is not None:
        handler._left = Ending(code=ended, reason="tried in vain")

    def stopped() -> None:
        try:
            interrupted()
        except SignalException:
            handler.get_run_id()

    assert status_of(stopped) == status


def test_a_connection_that_was_dropped_is_no_loss_of_nodes(handlers: Handlers) -> None:
    """The handler that is made anew has not looked yet, and takes nobody for gone."""
    store = server()
    first, second = handlers.make(store.port, nodes=(2, 2)), handlers.make(store.port, nodes=(2, 2))
    handlers.join(first, second)
    first._is_called = True
    first._connection.drop()

    first._pass_gate()

    client = AgentStore.at("127.0.0.1", store.port, run_id="job")
    record = client.run(restart_record.read(Memory(client.keys(""))))
    client.close()
    assert (record.restarts, record.charges) == (0, ())


@pytest.mark.parametrize(("kept", "status"), [(86, 86), (160, 160), (None, 160)])
def test_an_agent_that_finds_no_store_heeds_what_storage_has_kept(
    kept: int | None, status: int, handlers: Handlers, tmp_path: Path
) -> None:
    """Whoever hosts the store has left with what a person has to release; so do the others."""
    record = RestartRecord(restarts=4, writer="w")
    if kept is not None:
        record = ended(record, Ending(code=kept, reason="ValueError: bad."), writer="v")
    (tmp_path / "job.restarts.json").write_bytes(encode(record))
    reason = tmp_path / "reason.json"
    handler = handlers.make(
        free_port(), restarts=str(tmp_path), join_timeout=1, read_timeout=1, termination_log=reason
    )

    assert status_of(handler.next_rendezvous) == status
    assert not handler.shutdown()
    text = json.loads(reason.read_text(encoding="utf-8"))["reason"]
    assert ("ValueError: bad." in text) is (status == 86)


def record_in(port: int) -> RestartRecord:
    """Return the record of restarts in a store."""
    client = AgentStore.at("127.0.0.1", port, run_id="job")
    try:
        return client.run(restart_record.read(Memory(client.keys(""))))
    finally:
        client.close()


def acknowledgements(port: int, incarnation: str, nodes: int) -> list[bytes | None]:
    """Return what the nodes of a start have said of how the job has ended."""
    client = AgentStore.at("127.0.0.1", port, run_id="job")
    keys = client.keys(incarnation)
    try:
        return client.driver.store.multi_get(
            tuple(keys.joint("acknowledged", node) for node in range(nodes))
        )
    finally:
        client.close()


@pytest.mark.parametrize("code", [160, 79])
def test_an_agent_that_waits_to_join_ends_no_job_of_others(code: int, handlers: Handlers) -> None:
    """Whatever has kept it from joining: it leaves with its own status, and closes nothing."""
    store = server()
    healthy, other = (handlers.make(store.port, nodes=(1, 2)) for _ in range(2))
    handlers.join(healthy)
    other._begin()

    assert status_of(lambda: other._end(Ending(code=code, reason="not in time"))) == code
    assert not other.shutdown()

    assert record_in(store.port).ending is None
    time.sleep(CACHED_S)
    assert not healthy.is_closed()
    assert healthy.num_nodes_waiting() == 0


def test_a_newcomer_acknowledges_no_ending_in_the_place_of_node_0(handlers: Handlers) -> None:
    """Node 0 has still to read it, and the store must not go before that."""
    store = server()
    node, newcomer = (handlers.make(store.port, nodes=(1, 2)) for _ in range(2))
    handlers.join(node)
    assert node._memory is not None
    found = Ending(code=86, reason="tried in vain")
    node._connection.store().run(restart_record.end(node._memory, found))
    incarnation = node._memory.keys.incarnation

    assert status_of(newcomer._begin) == 86
    assert acknowledgements(store.port, incarnation, 1) == [None]

    assert status_of(lambda: node._leave(found)) == 86
    assert acknowledgements(store.port, incarnation, 1) == [b"1"]


def test_another_jobs_store_is_refused_where_our_records_are_elsewhere(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store that outlives jobs has the records; the rendezvous has taken part in another's."""
    others, served = server(), server()
    other = AgentStore.at("127.0.0.1", others.port, run_id="first")
    other.owner(is_host=True)
    other.close()
    monkeypatch.setenv(STORE, f"tcp://127.0.0.1:{served.port}")
    reason = tmp_path / "reason"
    handler = handlers.make(others.port, join_timeout=1, termination_log=reason)

    assert status_of(handler.next_rendezvous) == 64
    assert "run 'first'" in reason.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"restart_qouta": 5}, "restart_quota"), ({"is_host": "maybe"}, "is_host")],
    ids=["ours", "torch's"],
)
def test_a_wrong_option_is_a_reason_too(
    wrong: dict[str, Any], said: str, handlers: Handlers, tmp_path: Path
) -> None:
    """A scheduler that shows the file of the agent shows what has to be mended."""
    reason = tmp_path / "reason"

    def begin() -> None:
        handlers.make(free_port(), termination_log=reason, **wrong).next_rendezvous()

    assert status_of(begin) == 64
    told = json.loads(reason.read_text(encoding="utf-8"))
    assert (told["code"], told["name"], told["run_id"]) == (64, "usage", "job")
    assert said in told["reason"]


@pytest.mark.parametrize(("kept", "status"), [(86, 86), (None, 79)])
def test_a_closed_rendezvous_whose_host_has_gone_has_a_status_of_its_own(
    kept: int | None, status: int, handlers: Handlers, tmp_path: Path
) -> None:
    """Where an agent that has never joined cannot read any more how the job has ended."""
    store = server()
    handler = handlers.make(store.port, restarts=str(tmp_path), read_timeout=1)
    handler._begin()
    if kept is not None:
        record = RestartRecord(restarts=4, writer="w")
        record = ended(record, Ending(code=kept, reason="ValueError: bad."), writer="v")
        (tmp_path / "job.restarts.json").write_bytes(encode(record))
    del store
    closed = RendezvousClosedError("closed")

    assert status_of(lambda: handler._pause(Joining(join_s=9, started_at_s=0), closed)) == status
    assert not handler.shutdown()


def test_who_fails_at_its_last_step_into_a_start_tells_nothing_of_that_start(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers were those of the start before; but its number is already the new one."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    before = handler._round
    silence = StoreUnavailableError("no answer")
    monkeypatch.setattr(handler, "_remember", lambda _: (_ for _ in ()).throw(silence))

    with pytest.raises(StoreUnavailableError):
        handler._enter(handler._connection.join())

    assert handler._round == before
    assert handler._part is not None
    assert handler._part.start != before
    assert store.port
