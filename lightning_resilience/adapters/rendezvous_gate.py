# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent asks of the job's storage at the gate: whether it is well, and what it remembers.

An agent has no options of the user's for storage: it asks with what the environment has. A storage
that says no to that has answered, and is well as far as a restart is concerned.
"""

from __future__ import annotations

import os
import platform
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.adapters.object_store import find_info
from lightning_resilience.adapters.small_objects import put
from lightning_resilience.adapters.staging import spool_directory
from lightning_resilience.adapters.storage import Storage, dependency_of
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.core.quota import RestartRecord
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.restart import StorageRecord, run_of_circuits
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.circuit import Circuit
from lightning_resilience.protocols.effects import Call, Get
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.protocols.restart import Dependency
from lightning_resilience.protocols.restart_record import Mirror
from lightning_resilience.runtime.memory import MemoryStore


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.rendezvous_connection import Connection
    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.quota import Ending
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["dependencies_of", "kept_ending", "kept_runs", "mirror_of"]

_MIRROR_TIMEOUT_S: Final = 10.0
_KEPT: Final = ".restarts.json"
_ANSWERS: Final = frozenset({FailureClass.PERMANENT, FailureClass.AUTH, FailureClass.CAPACITY})
"""Failures with which a storage has answered."""


def dependencies_of(
    options: RendezvousOptions, connection: Connection, keys: Keys
) -> tuple[Dependency, ...]:
    """Return what the job cannot start without: what was named, and what its workers have told.

    Args:
        options: Of this agent.
        connection: Its connection to the job's store, and what it knows of the job's site.
        keys: Names of the job's keys.

    Raises:
        RendezvousConnectionError: The store of the rendezvous is not there.
        StoreUnavailableError: The job's store did not answer.
    """
    store = connection.store()
    told = store.run(_told(keys))
    storage = _storage(store)
    found: dict[str, Dependency] = {}
    circuits = Keys(run_id=run_of_circuits(told, keys.run_id), incarnation="")
    for url in (*options.storage, *told.urls):
        for kind in ("read", "write"):
            name = f"{dependency_of(url)}:{kind}"
            if name not in found:
                found[name] = _dependency(
                    options, storage, store, url=url, kind=kind, keys=circuits
                )
                if store.driver.site is not None:
                    connection.site.put_above(found[name].circuit)
    return tuple(found.values())


def _told(keys: Keys) -> Protocol[StorageRecord]:
    raw: bytes | None = yield Get(keys.storage)
    nothing = StorageRecord(writer="")
    return nothing if raw is None else decode(StorageRecord, raw, key=keys.storage)


def _storage(store: AgentStore) -> Storage:
    spool = partial(spool_directory, None, environ=os.environ, run_id=store.run_id)
    return Storage({}, spool=spool, run_id=store.run_id)


def _dependency(
    options: RendezvousOptions,
    storage: Storage,
    store: AgentStore,
    *,
    url: str,
    kind: str,
    keys: Keys,
) -> Dependency:
    circuit = Circuit(
        f"{dependency_of(url)}:{kind}",
        config=options.breaker,
        keys=keys,
        host=platform.node(),
    )
    probe: Callable[[CancelToken], Any] = partial(storage.probe_read, url)
    if kind == "write":
        nonce = store.driver.dice.nonce()
        probe = partial(storage.probe_write, url, nonce)
    patience = Patience(
        probe=partial(_probe, probe),
        classify=partial(classify, reading=kind == "read"),
        leads=True,
    )
    return Dependency(circuit=circuit, patience=patience)


def _probe(ask: Callable[[CancelToken], Any], token: CancelToken) -> None:
    try:
        ask(token)
    except Exception as error:
        if classify(error).failure not in _ANSWERS:
            raise


def mirror_of(
    options: RendezvousOptions, store: AgentStore, *, is_needed: bool = False
) -> Mirror | None:
    """Return where the record of restarts is kept besides the store; None for nowhere."""
    if options.restarts is None:
        return None
    storage = _storage(store)
    url = f"{options.restarts.rstrip('/')}/{quote(store.run_id, safe='')}{_KEPT}"

    def load(token: CancelToken) -> RestartRecord | None:
        token.raise_if_cancelled()
        place = storage.place(url)
        place.fs.invalidate_cache()
        if find_info(place.fs, place.path) is None:
            return None
        return decode(RestartRecord, place.fs.cat_file(place.path), key=url)

    def save(record: RestartRecord, token: CancelToken) -> None:
        place = storage.place(url)
        put(place.store, place.path, encode(record), nonce=record.writer, token=token)

    return Mirror(load, save, timeout_s=_MIRROR_TIMEOUT_S, is_needed=is_needed)


def kept_runs(url: str, store: AgentStore) -> list[str]:
    """Return the names of the runs whose records are kept in a directory, sorted.

    Args:
        url: The directory; one that does not exist has none.
        store: Of whoever asks.

    Raises:
        Exception: What the storage raised.
    """
    storage = _storage(store)

    def names(token: CancelToken) -> list[str]:
        token.raise_if_cancelled()
        place = storage.place(url.rstrip("/"))
        if find_info(place.fs, place.path) is None:
            return []
        found = (str(item).rpartition("/")[2] for item in place.fs.ls(place.path, detail=False))
        kept = (name.removesuffix(_KEPT) for name in found if name.endswith(_KEPT))
        return sorted(map(unquote, kept))

    return store.run(_called(names))


def _called(work: Callable[[CancelToken], list[str]]) -> Protocol[list[str]]:
    found: list[str] = yield Call(work, timeout_s=_MIRROR_TIMEOUT_S)
    return found


def kept_ending(options: RendezvousOptions, *, run_id: str) -> Ending | None:
    """Return how a job has ended that a person has to release, as shared storage has kept it.

    Args:
        options: Of this agent.
        run_id: Name of the run.
    """
    if options.restarts is None:
        return None
    store = AgentStore(MemoryStore(), run_id=run_id)
    try:
        return store.run(restart_record.kept(mirror_of(options, store)))
    finally:
        store.close()
