# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's own rendezvous handler within ours, and every private name of it that we use.

====================================  ==============================================================
private name                          where a version of torch has it no more
====================================  ==============================================================
``_state_holder.state.participants``  lost nodes are noticed when their workers' peers fail
``_state_holder._last_sync_time``     a state that was not read yet counts as one without nodes, and
                                      joining ends after a while even if others are waited for
``_state_holder._sanitize``           a node lives as torch judges it: by the clocks of two hosts
``_store``                            our records have to have a store of their own
``_backend._store``                   a broken connection is a lost store: all join anew
``_backend._client``                  over etcd all runs keep what agents tell each other together,
                                      and a call that is left behind goes on
``_rdzv_impl.client``                 the same, with the older backend over etcd
``_stop_heartbeats``                  a node that has left counts as present for some seconds more
``_bootstrap_store_info``             a node that comes later waits for an address in vain, as ever
====================================  ==============================================================
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import socket
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from lightning_resilience.adapters.rendezvous_calls import ASKED_S, call
from lightning_resilience.adapters.store_connection import cut_client, no_check
from lightning_resilience.adapters.torch_store import innermost_store
from lightning_resilience.core import lease
from lightning_resilience.core.joining import may_host


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from lightning_resilience.core.lease import Sighting


__all__ = [
    "address_of",
    "cut",
    "hosts_store",
    "judge_by_own_sight",
    "make_inner",
    "members",
    "new_client",
    "own_rounds",
    "participants",
    "read_at_s",
    "renew_workers_store",
    "sever",
    "stop",
    "store_of",
    "use_client",
    "with_own_client",
]

_NO_SERVER: Final = "server=<nullptr>"
_CONNECT_S: Final = 1.0
_AGENTS_S: Final = 60.0
"""How long agents wait for each other's keys, in seconds; as long as for an answer of c10d."""
_LONG_PAST: Final = dt.timedelta(days=1)


class _Severed:
    """What a handler has in place of a client once it must not ask any more."""

    def __getattr__(self, name: str) -> NoReturn:
        message = f"{name}: this rendezvous was let go of, and asks nobody any more"
        raise RendezvousConnectionError(message)


def make_inner(
    parameters: RendezvousParameters,
    name: str,
    options: Mapping[str, Any],
    *,
    check: Callable[[], None] = no_check,
) -> RendezvousHandler:
    """Make torch's own handler.

    Args:
        parameters: What the launcher was given.
        name: Name of torch's backend.
        options: Its options.
        check: Called before a server is made; raises where nobody wants it any more.

    Raises:
        RendezvousError: The store does not answer.
        ValueError: An option is one that torch does not take.
    """
    is_own = may_host(options, backend=name) and _is_own(parameters.endpoint)
    # A name that was slow to resolve: a server that comes then is one that nobody knows of.
    check()
    if is_own:
        # Torch compares names, and an alias is another one. Whoever comes second is a client.
        with contextlib.suppress(RendezvousConnectionError):
            return _made(parameters, name, {**options, "is_host": True})
        return _made(parameters, name, {**options, "is_host": False})
    return _made(parameters, name, options)


def _is_own(endpoint: str) -> bool:
    """Tell whether an endpoint leads to an address of this machine: only such can be bound."""
    host, port = parse_rendezvous_endpoint(endpoint, default_port=0)
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((address[0], 0))
                return True
    return False


def _made(
    parameters: RendezvousParameters, name: str, options: Mapping[str, Any]
) -> RendezvousHandler:
    inner = RendezvousParameters(
        name,
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        **options,
    )
    return rendezvous_handler_registry.create_handler(inner)


def participants(handler: RendezvousHandler) -> int | None:
    """Return how many nodes have part in the present round, as was read last; None if unknown."""
    holder = getattr(handler, "_state_holder", None)
    found = getattr(getattr(holder, "state", None), "participants", None)
    # A state that was never read is as empty as one that says that nobody is there.
    has_looked = getattr(holder, "_last_sync_time", 0) >= 0
    return len(found) if found is not None and has_looked else None


def members(handler: RendezvousHandler) -> frozenset[tuple[str, int]]:
    """Return host and process of the nodes of the present round; nothing if unknown."""
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    return frozenset((node.addr, node.pid) for node in getattr(state, "participants", ()))


def renew_workers_store(handler: RendezvousHandler) -> None:
    """Let node 0 of the next round make a store for its workers, and tell all nodes where it is.

    Torch does that in a handler's first round only. A node that comes later then waits for an
    address that nobody writes, until it and the others run out of time; and one that is node 0 no
    more keeps to the store that it has made itself. In the store itself, process groups that are
    gone have left where their ranks could be reached, under names that the new ones use again.
    """
    for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
        if hasattr(handler, name):
            setattr(handler, name, None)


def with_own_client(info: RendezvousInfo) -> RendezvousInfo:
    """Give torch's agent a client of its own for a round.

    It waits for the other agents with the client that its heartbeat uses, which then has to wait
    as well: an agent whose workers end well before the others' would be missed by these.
    """
    found: Any = info
    # Missing in earlier versions of torch.
    clone = getattr(info.store, "clone", None)
    if clone is None or not isinstance(innermost_store(info.store), TCPStore):
        return info
    return RendezvousInfo(clone(), info.rank, info.world_size, found.bootstrap_store_info)


def store_of(handler: RendezvousHandler) -> Store | None:
    """Return the store that the handler uses; None where it has none yet."""
    return getattr(handler, "_store", None)


def _tcp_store(handler: RendezvousHandler) -> TCPStore | None:
    store = store_of(handler)
    inner = None if store is None else innermost_store(store)
    return inner if isinstance(inner, TCPStore) else None


def address_of(handler: RendezvousHandler) -> tuple[str, int] | None:
    """Return host and port of the store that the handler uses; None where it has no server."""
    store = _tcp_store(handler)
    return None if store is None else (store.host, store.port)


def hosts_store(handler: RendezvousHandler) -> bool:
    """Tell whether the store's server is in this process, as far as torch says so."""
    store = _tcp_store(handler)
    return store is not None and _NO_SERVER not in repr(store)


def new_client(handler: RendezvousHandler) -> Callable[[], TCPStore] | None:
    """Return what makes a new client of the server that a handler uses; None where it has none.

    It may block for ever, and raises what a socket or torch raises.
    """
    store = _tcp_store(handler)
    known = getattr(_backend(handler), "_store", None)
    if store is None or known is None or isinstance(known, _Severed) or hosts_store(handler):
        return None
    address, timeout = (store.host, store.port), _timeout_of(store)

    def connect() -> TCPStore:
        # Torch takes twice its timeout to notice that nobody listens, a plain socket no time.
        with socket.create_connection(address, _CONNECT_S):
            pass
        return TCPStore(*address, is_master=False, timeout=timeout)

    return connect


def use_client(handler: RendezvousHandler, fresh: TCPStore) -> None:
    """Let a handler use a client from now on.

    The node keeps its place in the round: what the handler knows of it is not in the client.
    """
    handler._store = _backend(handler)._store = fresh  # type: ignore[attr-defined]


def cut(handler: RendezvousHandler) -> None:
    """End what waits for an answer on a handler's client, which is broken then.

    Not where the server is in this process: no other client ever takes the place of that one.
    """
    store = _tcp_store(handler)
    if store is not None and not hosts_store(handler):
        cut_client(store)


def sever(handler: RendezvousHandler) -> None:
    """Let a handler ask nobody any more, from whatever thread: what is under way fails.

    A request that was sent already cannot be called back. No other one follows it, also not where
    the server comes back after hours: nothing is joined, closed or reported late.
    """
    places = (
        (_backend(handler), "_store"),
        (_backend(handler), "_client"),
        (getattr(handler, "_rdzv_impl", None), "client"),
    )
    for holder, name in places:
        if hasattr(holder, name):
            setattr(holder, name, _Severed())
    cut(handler)


def _backend(handler: RendezvousHandler) -> Any:
    return getattr(getattr(handler, "_state_holder", None), "_backend", None)


def read_at_s(handler: RendezvousHandler) -> float:
    """Return when the handler has read the state of the rendezvous last; 0 where unknown."""
    return float(getattr(getattr(handler, "_state_holder", None), "_last_sync_time", 0))


def _timeout_of(store: TCPStore) -> dt.timedelta:
    # Missing in the stub only.
    found: dt.timedelta = store.timeout  # type: ignore[attr-defined]
    return found


def own_rounds(handler: RendezvousHandler, directory: str) -> None:
    """Give the agents of a run a directory of their own for torch's store over etcd.

    Torch has one for all runs. It reads the whole of that for each key, and removes nothing in it.

    Args:
        handler: Torch's handler.
        directory: Path of the directory.
    """
    client = getattr(_backend(handler), "_client", None)
    if client is None:
        return
    # Not at the top: it imports torch's client for etcd, which not everybody has.
    kind = importlib.import_module("torch.distributed.elastic.rendezvous.etcd_store").EtcdStore
    store = kind(client, directory, timeout=dt.timedelta(seconds=_AGENTS_S))
    handler._store = store  # type: ignore[attr-defined]


def stop(handler: RendezvousHandler) -> None:
    """Let a handler tell no longer that its node is there.

    Torch waits for the sign of life that is under way.

    Raises:
        RendezvousConnectionError: That has no answer; no other one follows it.
    """
    halt: Callable[[], None] | None = getattr(handler, "_stop_heartbeats", None)
    if halt is not None:
        call(lambda _token: halt(), within_s=ASKED_S)


def judge_by_own_sight(
    handler: RendezvousHandler, *, grace_s: float, now_s: Callable[[], float] = time.monotonic
) -> None:
    """Let a handler take a node for gone when *it* has seen no sign of it for long enough.

    Nodes write the time of their own clock as a sign of life, and torch compares that with the
    reader's: a clock that is off by more than ``grace_s`` makes a node look dead for ever. Whether
    the sign has *changed* says as much, and needs one clock only.

    Args:
        handler: Torch's handler.
        grace_s: For how long a node may be silent, in seconds.
        now_s: This process's monotonic clock.
    """
    holder: Any = getattr(handler, "_state_holder", None)
    if not hasattr(holder, "_sanitize"):
        return
    inner = holder._sanitize
    sightings: dict[Any, Sighting] = {}

    def sanitize() -> None:
        now = now_s()
        signs = holder._state.last_heartbeats
        for node, sign in signs.items():
            sightings[node] = lease.observe(sightings.get(node), (str(sign),), now_s=now)
        for node in [each for each in sightings if each not in signs]:
            del sightings[node]
        silent = {
            node
            for node, sighting in sightings.items()
            if lease.is_expired(sighting, lease_s=grace_s, now_s=now)
        }
        _expire(holder, inner, silent)

    holder._sanitize = sanitize


def _expire(holder: Any, sanitize: Callable[[], None], silent: set[Any]) -> None:
    """Let torch's own method remove exactly these nodes: their signs say that they are long past.

    Every other node has a sign of now for as long as the method runs, on this host's clock.
    """
    state = holder._state
    signs = dict(state.last_heartbeats)
    now = dt.datetime.now(dt.timezone.utc)
    for node in signs:
        state.last_heartbeats[node] = now - _LONG_PAST if node in silent else now
    try:
        sanitize()
    finally:
        for node in state.last_heartbeats:
            state.last_heartbeats[node] = signs[node]
