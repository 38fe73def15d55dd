# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A directory of an etcd behind the port ``SharedStore``: version 2 of its API.

Where etcd differs from the port, and what is done about it:

* A condition that is not met is answered without the value that stood in its way, so that is read
  afterwards. What is read by then may be what was expected: then the write is tried again.
* There are no counters: one is read, and written where nobody has written it since.
* A server that refuses connections is not gone for good, as that of a ``TCPStore`` is: etcd comes
  back with what it held. So nobody is told that it was refused, and nothing is deferred.
* What has once answered as etcd is one. If anything else answers in its place later, such as a
  proxy that has lost it, or its certificate cannot be read for a moment, it is away.
* Etcd outlives the job. The directory has a time to live, which every handle that is used renews
  once in a while: what a job has left goes away some time after its last process.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from lightning_resilience.adapters.etcd_client import EtcdClient, Written
from lightning_resilience.adapters.process_connections import ProcessConnections
from lightning_resilience.adapters.store_connection import StoreConnection, no_check
from lightning_resilience.errors import ConfigError, CorruptRecordError, StoreUnavailableError
from lightning_resilience.runtime.system import SystemClock


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning_resilience.core.store_address import EtcdAddress


__all__ = ["KEEP_S", "EtcdStore"]

KEEP_S: Final = 86400.0
"""How long a directory is kept after its last use, in seconds: a day, in which a job that a person
has to release is still known for one."""

_CLIENT_SHARE: Final = 0.4
"""Part of the timeout that one answer may take: an operation may need a second request, and may be
repeated on a fresh connection."""

_RENEWALS: Final = 24
"""How often a directory's time to live is renewed within it."""

_FEW: Final = 4
"""So many keys are read one by one; for more the whole directory is one request."""

_CLOCK: Final = SystemClock()

_ANSWERED: Final[set[EtcdAddress]] = set()
"""Etcds that have answered this process, by address and certificates, whichever store has asked.
Only ever added to."""

T = TypeVar("T")


class EtcdStore:
    """A ``SharedStore`` in a directory of an etcd, with a connection of its own.

    Nothing is sent before the first operation. After a failure the next operation connects anew. In
    a forked child the same object opens the child's own connection.

    Every failure of the store is a ``StoreUnavailableError``. ``get``, ``multi_get``, ``set``,
    ``delete`` and ``compare_and_set`` are repeated once on a fresh connection when theirs turns out
    to be broken; ``add`` and ``wait_for`` never are.

    Args:
        address: Where, and which directory.
        timeout_s: Seconds that an operation may take.
        prefix: Put before every key.
        keep_s: How long the directory is kept after its last use, in seconds; a day by default.
        check: Called several times a second while an answer is late; what it raises ends the wait.
            Not called by watchers.

    Raises:
        ConfigError: ``timeout_s`` is not above 0.

    Note:
        Any thread may call; operations run one after the other, so ``wait_for`` belongs on a
        ``watcher()``.
    """

    def __init__(
        self,
        address: EtcdAddress,
        *,
        timeout_s: float = 5.0,
        prefix: str = "",
        keep_s: float = KEEP_S,
        check: Callable[[], None] = no_check,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            text = f"timeout_s is {timeout_s!r}; allowed: seconds above 0"
            raise ConfigError(text)
        self._address = address
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._keep_s = keep_s
        self._renewed_at_s = -math.inf
        make = partial(
            StoreConnection[EtcdClient],
            partial(_open, address, timeout_s * _CLIENT_SHARE),
            label=address.url,
            check=check,
            cut=EtcdClient.cut,
        )
        self._connections = ProcessConnections(self, make)

    def get(self, key: str) -> bytes | None:
        """The value, or None where the key does not exist. One round trip."""
        name = self._prefix + key
        return self._run("get", key, lambda client: client.read(name).value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all ``keys`` in order; more than a few are one round trip together."""
        wanted = [self._prefix + key for key in keys]
        if not wanted:
            return []

        def work(client: EtcdClient) -> list[bytes | None]:
            if len(wanted) <= _FEW:
                return [client.read(name).value for name in wanted]
            found = client.read_all()
            return [found.get(name) for name in wanted]

        return self._run("multi_get", ", ".join(keys), work)

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        name = self._prefix + key
        self._run("set", key, lambda client: client.write(name, value))

    def delete(self, key: str) -> bool:
        """Delete the key; True if it existed (a repeat after a lost answer says False)."""
        name = self._prefix + key
        return self._run("delete", key, lambda client: client.delete(name))

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``; the four cases are the port's."""
        work = partial(_compare_and_set, key=self._prefix + key, expected=expected, desired=desired)
        return self._run("compare_and_set", key, work)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it. Never repeated.

        Raises:
            StoreUnavailableError: No answer; it may have counted.
            CorruptRecordError: The key holds something that is not a number.
        """
        # Order: a connection that broke while it was idle is found here, where it does no harm.
        self.get(key)
        work = partial(_add, key=self._prefix + key, amount=amount)
        try:
            return self._run("add", key, work, repeatable=False)
        except ValueError as error:
            text = f"cannot add {amount} to {key!r} on {self._address.url}: it holds no number"
            raise CorruptRecordError(text, key=key) from error

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """Block until the key exists, at most ``timeout_s`` seconds; True if it exists.

        Raises:
            StoreUnavailableError: The connection broke, or was closed meanwhile.
        """
        patience_s = max(0.0, timeout_s)
        work = partial(_wait, key=self._prefix + key, timeout_s=patience_s)
        return self._run("wait_for", key, work, extra_s=patience_s, repeatable=False)

    def lease(self) -> None:
        """Let the directory be kept for its time from now on, and make it where it is not there.

        Raises:
            StoreUnavailableError: Etcd does not answer.
            ConfigError: What answers has no v2 API, and never had for this process.
        """
        self._renewed_at_s = -math.inf
        self._run("lease", self._address.directory, lambda _: None)

    def watcher(self) -> EtcdStore:
        """A second connection to the same store, opened at its first operation."""
        return EtcdStore(
            self._address, timeout_s=self._timeout_s, prefix=self._prefix, keep_s=self._keep_s
        )

    def close(self) -> None:
        """Drop the connection; operations in progress and later ones raise. Idempotent."""
        self._connections.here().close()

    def _run(
        self,
        operation: str,
        key: str,
        work: Callable[[EtcdClient], T],
        *,
        extra_s: float = 0.0,
        repeatable: bool = True,
    ) -> T:
        try:
            self._renew()
            return self._connections.here().run(
                work, patience_s=self._timeout_s + extra_s, repeatable=repeatable
            )
        except (RuntimeError, OSError, ConfigError) as error:
            if isinstance(error, ConfigError) and self._address.within("") not in _ANSWERED:
                raise
            advice = (
                "It may have counted, so it is not repeated."
                if operation == "add"
                else "Is etcd up and reachable? The next operation connects anew."
            )
            reason = str(error).rstrip(".")
            text = (
                f"{operation} of {key!r} on {self._address.url} failed (timeout "
                f"{self._timeout_s:g} s): {type(error).__name__}: {reason}. {advice}"
            )
            # Never ``is_refused``, even where it was: that lets a rank conclude that the store is
            # gone with what it held. Etcd comes back with it.
            raise StoreUnavailableError(text) from error

    def _renew(self) -> None:
        now_s = _CLOCK.now_s()
        if now_s - self._renewed_at_s < self._keep_s / _RENEWALS:
            return
        self._connections.here().run(
            lambda client: client.lease(self._keep_s), patience_s=self._timeout_s
        )
        _ANSWERED.add(self._address.within(""))
        # Order: only once it has been renewed. Who comes at the same time does it as well.
        self._renewed_at_s = now_s


def _open(address: EtcdAddress, timeout_s: float, is_suspect: bool) -> EtcdClient:  # noqa: FBT001 - called by position
    del is_suspect
    return EtcdClient(address, timeout_s=timeout_s)


def _compare_and_set(client: EtcdClient, *, key: str, expected: bytes, desired: bytes) -> bytes:
    while True:
        written = _write_if(client, key, expected=expected, desired=desired)
        if written is Written.DONE:
            return desired
        if written is Written.MISSING:
            return expected
        found = client.read(key).value
        if found is None and expected:
            return expected
        if found is not None and found != expected:
            return found
        # What was in the way has gone. Bounded: the caller's patience cuts the connection.


def _write_if(client: EtcdClient, key: str, *, expected: bytes, desired: bytes) -> Written:
    if expected:
        return client.replace(key, desired, expected=expected)
    created = client.create(key, desired)
    if created is Written.DONE:
        return created
    # An empty value is a value: it matches an empty expectation.
    replaced = client.replace(key, desired, expected=expected)
    return Written.DIFFERS if replaced is Written.MISSING else replaced


def _add(client: EtcdClient, *, key: str, amount: int) -> int:
    while True:
        node = client.read(key)
        total = amount + (0 if node.value is None else int(node.value))
        desired = str(total).encode("ascii")
        if node.value is None:
            written = client.create(key, desired)
        else:
            written = client.replace_at(key, desired, index=node.index)
        if written is Written.DONE:
            return total


def _wait(client: EtcdClient, *, key: str, timeout_s: float) -> bool:
    ends_at_s = _CLOCK.now_s() + timeout_s
    while True:
        node = client.read(key)
        rest_s = ends_at_s - _CLOCK.now_s()
        if node.value is not None or rest_s <= 0:
            return node.value is not None
        client.wait(key, after=node.seen_at, timeout_s=rest_s)
