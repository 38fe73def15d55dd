# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Any ``torch.distributed`` store behind the port ``SharedStore``.

Where torch's stores differ from the port, or from each other, and what is done about it (seen with
torch 2.13):

* ``get`` and ``multi_get`` of a key that does not exist block until a timeout. One key is read by a
  ``compare_set`` whose expectation no value ever has: it never blocks, never writes, and is one
  round trip. Several are read by ``check`` and then ``multi_get``.
* ``compare_set`` has the port's four cases on all of them.
* ``set`` of a ``TCPStore`` has no answer: into a connection that has just broken it is lost, and
  says nothing. So something is asked after it (``store_requests``).
* ``delete_key`` of a ``FileStore`` says True also for a key that never existed.
* ``wait`` takes 0 (and whatever rounds to 0 milliseconds) for "for ever" on ``HashStore`` and
  ``FileStore``, and ``FileStore`` counts whole seconds.
* ``add`` to a value that is not a number raises ``ValueError``; a ``TCPStore`` server drops the
  connection instead.
* A ``HashStore`` lives in one process, so a forked child is told so instead of being given a copy.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from torch.distributed import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from lightning_resilience.adapters.knocking import knock
from lightning_resilience.adapters.process_connections import ProcessConnections
from lightning_resilience.adapters.store_connection import StoreClient, StoreConnection, no_check
from lightning_resilience.adapters.store_requests import read, read_all, wait, wait_in_file, write
from lightning_resilience.errors import ConfigError, CorruptRecordError, StoreUnavailableError


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["TorchStore", "innermost_store"]

_CLIENT_SHARE = 0.4
"""Part of the timeout that torch is given: making a client of a dead server takes twice its timeout
and a little, and a blocked ``multi_get`` must end in time for the keys to be read one by one."""

_LOCAL_SLICE_S = 0.5
"""Longest single wait on a store that cannot be interrupted: how long ``close`` may take."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """How to reach a store again, from any process that may.

    Args:
        label: Its name in errors.
        open_client: Makes a client; its argument bounds the connecting, where it can.
        address: Host and port where it has a server.
        is_file: Whether it is a ``FileStore``.
        home_pid: The one process that may use it, where it is not shared.
    """

    label: str
    open_client: Callable[[timedelta], Store]
    address: tuple[str, int] | None = None
    is_file: bool = False
    home_pid: int | None = None


class TorchStore:
    """A ``SharedStore`` on a ``torch.distributed`` store, with a connection of its own.

    Made by ``connect`` or ``wrap``. Nothing is sent before the first operation, so a server that is
    away now may be back by then; after a failure the next operation connects anew. In a forked
    child the same object opens the child's own connection, and never touches its parent's.

    Every failure of the store, whatever torch raises for it, is a ``StoreUnavailableError``.
    ``get``, ``multi_get``, ``set``, ``delete`` and ``compare_and_set`` are repeated once on a fresh
    connection when theirs turns out to be broken. ``add`` is never repeated, nor is ``wait_for``:
    a server that came back may have come back empty, and then the caller wants to know.

    Note:
        Any thread may call; operations run one after the other, so ``wait_for`` belongs on a
        ``watcher()``. No other operation blocks for longer than the timeout, and signal handlers
        run meanwhile.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = TorchStore.wrap(HashStore())
        >>> store.compare_and_set("key", b"", b"first")
        b'first'
        >>> store.close()
    """

    def __init__(
        self, target: _Target, *, timeout_s: float, check: Callable[[], None] = no_check
    ) -> None:
        if not 0 < timeout_s < math.inf:
            text = f"timeout_s is {timeout_s!r}; allowed: seconds above 0"
            raise ConfigError(text)
        self._target = target
        self._timeout_s = timeout_s
        open_client = partial(_open, target, timeout_s)
        make = partial(StoreConnection[StoreClient], open_client, label=target.label, check=check)
        self._connections = ProcessConnections(self, make)

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        *,
        timeout_s: float = 5.0,
        prefix: str = "",
        check: Callable[[], None] = no_check,
    ) -> TorchStore:
        """A store on the ``TCPStore`` server at ``host`` and ``port``.

        Args:
            host: Name or address, an IPv6 address without brackets.
            port: Its port.
            timeout_s: Seconds that an operation may take. The default bears a slow resolver at the
                server once.
            prefix: Put before every key, as ``PrefixStore`` does; empty for none.
            check: Called several times a second while an answer is late; what it raises ends the
                wait. Not called by watchers.

        Raises:
            ConfigError: ``timeout_s`` is not above 0.
        """

        def open_client(timeout: timedelta) -> Store:
            client: Store = TCPStore(
                host, port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            return PrefixStore(prefix, client) if prefix else client

        target = _Target(
            label=_tcp_label(host, port), open_client=open_client, address=(host, port)
        )
        return cls(target, timeout_s=timeout_s, check=check)

    @classmethod
    def wrap(
        cls, store: Store, *, timeout_s: float = 5.0, check: Callable[[], None] = no_check
    ) -> TorchStore:
        """A store on what ``store`` stands for: the same server, file or memory, the same prefix.

        A ``TCPStore`` or ``FileStore`` is not used itself, but reached by a connection of our own.
        The object is kept, because it may be the server. ``check`` is as for ``connect``.

        Raises:
            ConfigError: It is none of ``TCPStore``, ``FileStore``, ``HashStore`` and
                ``PrefixStore`` over one of these, or ``timeout_s`` is not above 0.
        """
        return cls(_target_of(store), timeout_s=timeout_s, check=check)

    def get(self, key: str) -> bytes | None:
        """The value, or None where the key does not exist. One round trip."""
        return self._run("get", key, lambda client: read(client, key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all ``keys`` in order; two round trips where all exist."""
        wanted = list(keys)
        if not wanted:
            return []
        return self._run("multi_get", ", ".join(wanted), lambda client: read_all(client, wanted))

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``. A request that has no answer, and one for the answer: one round trip."""
        self._run("set", key, lambda client: write(client, key, value))

    def delete(self, key: str) -> bool:
        """Delete the key; True if it existed (a repeat after a lost answer says False)."""
        asks_first = self._target.is_file

        def work(client: StoreClient) -> bool:
            existed = not asks_first or client.check([key])
            return client.delete_key(key) and existed

        return self._run("delete", key, work)

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``; the four cases are the port's."""
        return self._run(
            "compare_and_set", key, lambda client: client.compare_set(key, expected, desired)
        )

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it. Never repeated.

        Raises:
            StoreUnavailableError: No answer; it may have counted.
            CorruptRecordError: The key holds something that is not a number. (A ``TCPStore`` server
                drops the connection instead of saying so: ``StoreUnavailableError``.)
        """
        try:
            return self._run("add", key, lambda client: client.add(key, amount), repeatable=False)
        except ValueError as error:
            text = f"cannot add {amount} to {key!r} on {self._target.label}: it holds no number"
            raise CorruptRecordError(text, key=key) from error

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """Block until the key exists, at most ``timeout_s`` seconds; True if it exists.

        Raises:
            StoreUnavailableError: The connection broke, or was closed meanwhile.
        """
        slice_s = timeout_s if self._target.address is not None else _LOCAL_SLICE_S
        waits = wait_in_file if self._target.is_file else wait
        remaining_s = timeout_s
        while True:
            now_s = min(slice_s, max(0.0, remaining_s))
            if self._run(
                "wait_for",
                key,
                partial(waits, key=key, timeout_s=now_s),
                extra_s=now_s,
                repeatable=False,
            ):
                return True
            remaining_s -= slice_s
            if remaining_s <= 0:
                return False

    def watcher(self) -> TorchStore:
        """A second connection to the same store, opened at its first operation."""
        return TorchStore(self._target, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Drop the connection; operations in progress and later ones raise. Idempotent."""
        self._connections.here().close()

    def _run(
        self,
        operation: str,
        key: str,
        work: Callable[[StoreClient], T],
        *,
        extra_s: float = 0.0,
        repeatable: bool = True,
    ) -> T:
        try:
            return self._connections.here().run(
                work, patience_s=self._timeout_s + extra_s, repeatable=repeatable
            )
        except (RuntimeError, OSError) as error:
            advice = (
                "It may have counted, so it is not repeated."
                if operation == "add"
                else "Is the store's host up and reachable? The next operation connects anew."
            )
            reason = str(error).partition("\n")[0].rstrip(".")
            text = (
                f"{operation} of {key!r} on {self._target.label} failed (timeout "
                f"{self._timeout_s:g} s): {type(error).__name__}: {reason}. {advice}"
            )
            is_refused = isinstance(error, ConnectionRefusedError)
            raise StoreUnavailableError(text, is_refused=is_refused) from error


def _open(target: _Target, timeout_s: float, is_suspect: bool) -> StoreClient:  # noqa: FBT001 - called by position
    if target.home_pid not in {None, os.getpid()}:
        text = (
            f"the {target.label} lives in process {target.home_pid}, and this is its child "
            f"{os.getpid()}: name a store that both reach, tcp://host:port"
        )
        raise StoreUnavailableError(text)
    share_s = timeout_s * _CLIENT_SHARE
    if is_suspect and target.address is not None:
        # Torch takes twice its timeout to notice that nobody listens, a plain socket no time.
        # Not on the first connection: each one costs the server a look-up of the peer's name.
        knock(target.address, share_s)
    client = target.open_client(timedelta(seconds=share_s))
    if target.home_pid is None:
        # A client of ours alone, so nobody else's timeout changes.
        client.set_timeout(timedelta(seconds=share_s))
    return cast("StoreClient", client)


def innermost_store(store: Store) -> Store:
    """The store under all ``PrefixStore`` of ``store``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _tcp_label(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _target_of(store: Store) -> _Target:
    inner = innermost_store(store)
    if isinstance(inner, HashStore):
        return _Target(
            label="in-process HashStore", open_client=lambda _: store, home_pid=os.getpid()
        )
    if isinstance(inner, TCPStore):
        address = inner.host, inner.port
        label = _tcp_label(*address)
        return _Target(label=label, open_client=_opener(store), address=address)
    if isinstance(inner, FileStore):
        label = f"file store {_path_of(inner)}"
        return _Target(label=label, open_client=_opener(store), is_file=True)
    text = (
        f"store is a {type(inner).__module__}.{type(inner).__name__}; allowed: TCPStore, "
        "FileStore, HashStore, PrefixStore over one of these, or a URL tcp://host:port"
    )
    raise ConfigError(text)


def _opener(store: Store) -> Callable[[timedelta], Store]:
    if isinstance(store, FileStore):
        path = _path_of(store)
        # -1: however many we are, we are not among the workers whose last one removes the file.
        return lambda _: FileStore(path, -1)
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    if clone is None:
        text = (
            f"store is a {type(store).__name__}, and this version of torch cannot open a second "
            "connection to it; allowed: FileStore, HashStore, or a URL tcp://host:port"
        )
        raise ConfigError(text)
    return lambda _: clone()


def _path_of(store: FileStore) -> str:
    path: str = store.path  # type: ignore[attr-defined]  # missing in the stub only
    return path
