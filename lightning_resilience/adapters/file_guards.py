# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The guard behind a filesystem that is used alone, without a Trainer.

A :class:`FileGuard` holds options only. What it works with belongs to the *process*, and is made
when it is first needed there: one driver for each shared store, and one breaker for each storage
and operation class, whichever filesystem it is that uses them. So a guard may be pickled, and a
forked child begins with connections of its own.

The shared store is the first of: the one that the options or the environment name, the server
behind the process group's default store, this process's memory. torch is loaded only for the first,
and the second is looked for only where torch is loaded already. While a store does not answer,
calls go on with what this process knows by itself, unless ``strict``.
"""

from __future__ import annotations

import os
import platform
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fsspec.core import has_magic

from lightning_resilience.adapters.guarded_call import working_for
from lightning_resilience.adapters.guarded_open import object_store
from lightning_resilience.adapters.object_store import find_info, protocols, strip_protocol
from lightning_resilience.adapters.private_filesystem import plain_url, renew_client
from lightning_resilience.adapters.storage import (
    Place,
    dependency_of,
    parent_of,
    probe_by_writing,
    probe_path,
)
from lightning_resilience.adapters.telemetry import LoggingSink
from lightning_resilience.config import read_environment
from lightning_resilience.core.events import StoreLost
from lightning_resilience.core.outcome import operation_class, with_user_classifier
from lightning_resilience.core.records import Keys
from lightning_resilience.core.retry import failure_to_raise
from lightning_resilience.core.waiting import VOICE_S
from lightning_resilience.errors import (
    ConfigError,
    RetriesExhaustedError,
    StoreUnavailableError,
)
from lightning_resilience.ports import SharedStore
from lightning_resilience.protocols.circuit import Circuit
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.guard_options import GuardOptions
    from lightning_resilience.ports import CancelToken


__all__ = ["FileGuard", "close_connections"]

T = TypeVar("T")

# A store operation is a round trip of less than a millisecond; longer than this it is lost.
_STORE_TIMEOUT_S: Final = 5.0
# Ranks that share a store are one run, unless somebody has named it.
_RUN_ID: Final = "files"


class FileGuard:
    """Runs the operations of filesystems; a ``Runner``. Any thread.

    Args:
        options: How to retry, break and classify.
    """

    travels = True

    def __init__(self, options: GuardOptions) -> None:
        self.options = options
        self._classify = partial(with_user_classifier(options.classify), reading=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the options along; the guard works with what the other process has."""
        if not isinstance(self.options.store, str | None):
            message = (
                f"store is {self.options.store!r}, which belongs to this process; a filesystem "
                "that is sent to another names its store by a URL tcp://HOST:PORT."
            )
            raise ConfigError(message)
        return FileGuard, (self.options,)

    def __call__(  # noqa: PLR0917 - a Runner
        self, fs: AbstractFileSystem, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        """Run one operation: see ``run``."""
        return self.run(fs, operation, path, work)

    def run(  # noqa: PLR0917 - a Runner
        self, fs: AbstractFileSystem, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        """Run one operation under the breaker of its storage and the retry policy.

        Args:
            fs: The filesystem, guarded by this.
            operation: Its name, as fsspec has it.
            path: What it is about.
            work: One attempt.

        Returns:
            What ``work`` returned.

        Raises:
            RetriesExhaustedError: A series of attempts was given up; its cause is the last failure.
            CircuitOpenError: The circuit is open, and ``when_open`` is ``raise`` or the deadline
                has passed.
            StoreUnavailableError: The shared store did not answer, under ``strict``.
            BaseException: The filesystem's own, where repeating is no option: a missing file, a
                denial, a full disk.
        """
        home = _home()
        kept = _Kept(work)
        url = plain_url(path)
        if "file" not in protocols(fs):
            url = str(fs.unstrip_protocol(url))
        kind = operation_class(operation)
        call = GuardedCall(
            work=kept,
            operation=operation,
            target=url,
            policy=self.options.retry,
            patience=self._patience(fs, url, kind),
            rebuild=lambda: _renew(fs),
            drop_caches=fs.invalidate_cache,
        )
        name = f"{dependency_of(url)}:{kind}"
        driver = home.driver(self.options.store)
        is_lost = home.is_lost(driver, for_s=self.options.breaker.open_for_s)
        if self.options.strict or not is_lost:
            try:
                shared: T = self._guarded(driver, home.circuit(driver, name, self.options), call)
            except StoreUnavailableError as error:
                if self.options.strict:
                    raise
                home.lose(driver, operation, error)
            else:
                return shared
        value: T = self._guarded(home.alone, home.circuit(home.alone, name, self.options), call)
        return value

    @staticmethod
    def _guarded(driver: Driver, circuit: Circuit, call: GuardedCall) -> Any:
        try:
            done = driver.run(guard(circuit, call))
        except RetriesExhaustedError as error:
            failure = failure_to_raise(error)
        else:
            return done.value
        # Outside the handler, which would make its own error this one's context.
        raise failure

    def _patience(self, fs: AbstractFileSystem, url: str, kind: str) -> Patience:
        return Patience(
            probe=partial(_ask if kind == "read" else _write, fs, url),
            # Here a missing file is an answer to a write as well: only a save makes its folder
            # anew with each attempt.
            classify=self._classify,
            when_open=self.options.when_open,
            voice_s=VOICE_S,
        )


class _Kept:
    """Work that is not done again once it has succeeded, though nobody could be told of it."""

    def __init__(self, work: Callable[[CancelToken], Any]) -> None:
        self._work = work
        self._values: list[Any] = []

    def __call__(self, token: CancelToken) -> Any:
        if not self._values:
            value = self._work(token)
            token.raise_if_cancelled()
            self._values.append(value)
        return self._values[0]


class _Home:
    """What one process has: its connections, and what it remembers of each breaker. Any thread."""

    def __init__(self) -> None:
        self.environment = read_environment()
        self.dice = SystemDice()
        self.alone = self._driver_of(MemoryStore())
        self._drivers: dict[Hashable, tuple[object, Driver]] = {}
        self._circuits: dict[Hashable, Circuit] = {}
        self._lost_at_s: dict[Driver, float] = {}

    def _driver_of(self, store: SharedStore) -> Driver:
        sink = LoggingSink(rank=_rank())
        return Driver(store=store, clock=SystemClock(), dice=self.dice, sink=sink)

    def driver(self, named: object) -> Driver:
        """Return the driver on the store that ``named`` leads to."""
        store = named or self.environment.store
        if store is None and not _is_distributed():
            return self.alone
        key = store if isinstance(store, str | None) else id(store)
        found = self._drivers.get(key)
        if found is None:
            # No lock, which a fork might leave locked for ever: who comes second takes the first's.
            found = self._drivers.setdefault(key, (store, self._driver_of(_open(store))))
        return found[1]

    def circuit(self, driver: Driver, name: str, options: GuardOptions) -> Circuit:
        """Return what this process remembers of the breaker ``name``."""
        run_id = options.run_id or self.environment.run_id or _RUN_ID
        key = (driver, run_id, name, options.breaker)
        found = self._circuits.get(key)
        if found is None:
            circuit = Circuit(
                name,
                config=options.breaker,
                keys=Keys(run_id=run_id, incarnation=self.dice.nonce()),
                host=platform.node(),
            )
            found = self._circuits.setdefault(key, circuit)
        return found

    def close(self) -> None:
        """Close every connection, and this thread's helper."""
        for driver in [self.alone, *(driver for _, driver in self._drivers.values())]:
            driver.close()
            driver.store.close()

    def lose(self, driver: Driver, operation: str, error: StoreUnavailableError) -> None:
        """Take note that a store does not answer."""
        self._lost_at_s[driver] = driver.clock.now_s()
        driver.sink.emit(StoreLost(op=operation, error=str(error)))

    def is_lost(self, driver: Driver, *, for_s: float) -> bool:
        """Tell whether a store has not answered within the last ``for_s`` seconds."""
        lost_at_s = self._lost_at_s.get(driver)
        return lost_at_s is not None and driver.clock.now_s() - lost_at_s < for_s


_homes: dict[int, _Home] = {}


def _home() -> _Home:
    pid = os.getpid()
    return _homes.get(pid) or _homes.setdefault(pid, _Home())


def close_connections() -> None:
    """Let go of what this process's guards hold, in this thread and in the stores. Idempotent.

    The next operation begins anew, as in a process that has just started.
    """
    home = _homes.pop(os.getpid(), None)
    if home is not None:
        home.close()


def _is_distributed() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)
    return is_initialized is not None and distributed.is_available() and is_initialized()


def _rank() -> int:
    return int(sys.modules["torch.distributed"].get_rank()) if _is_distributed() else 0


def _open(store: Any) -> SharedStore:
    if isinstance(store, SharedStore):
        # A handle of our own: who closes it must not close the user's.
        return store.watcher()
    from lightning_resilience.adapters.store_discovery import (  # noqa: PLC0415 - loads torch
        open_store,
    )

    return open_store(store, world_size=1, timeout_s=_STORE_TIMEOUT_S)


def _renew(fs: AbstractFileSystem) -> None:
    renew_client(fs)


def _ask(fs: AbstractFileSystem, url: str, token: CancelToken) -> None:
    with working_for(token):
        find_info(fs, url)


def _write(fs: AbstractFileSystem, url: str, token: CancelToken) -> None:
    nonce = _home().dice.nonce()
    # A pattern is no place; what is before it is.
    known = url if not has_magic(url) else url[: url.index(next(filter(has_magic, url)))]
    path = strip_protocol(fs, probe_path(parent_of(known), nonce))
    with working_for(token):
        probe_by_writing(Place(store=object_store(fs), fs=fs, path=path), nonce, token)
