# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a process needs to guard calls without a Trainer: the store, a driver, and its place.

Guards and filesystems of one process that use the same store and run share one ``Standalone``, and
with it one connection and one opinion on whether the store answers. It belongs to the process that
made it: a forked child makes its own, since neither a connection nor its thread survives a fork.

Where no store is named and torch has no default process group (yet), there is nobody to agree with:
the process decides by itself, on its share of every limit if the launcher says that there are more.
Nothing here loads torch unless a store is named or torch is loaded already.
"""

from __future__ import annotations

import os
import platform
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_resilience.adapters.telemetry import LoggingSink
from lightning_resilience.config import read_environment
from lightning_resilience.core.budget import share
from lightning_resilience.core.detour import own_config
from lightning_resilience.core.fast_path import passage
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.retry import failure_to_raise
from lightning_resilience.errors import RetriesExhaustedError
from lightning_resilience.protocols.circuit import Circuit
from lightning_resilience.protocols.circuit_memory import Limits, Link, give_detour
from lightning_resilience.protocols.detour import guide
from lightning_resilience.protocols.guard import guard
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice
from lightning_resilience.topology import host_name, read_topology


if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from lightning_resilience.adapters.guard_options import GuardOptions
    from lightning_resilience.core.fast_path import Passage
    from lightning_resilience.ports import SharedStore
    from lightning_resilience.protocols.guard import GuardedCall


__all__ = ["STORE_PATIENCE_S", "UNNAMED_RUN", "Standalone", "close_connections", "standalone"]

STORE_PATIENCE_S = 5.0
"""How long a call tries to reach the shared store before the process goes alone, in seconds."""

UNNAMED_RUN = "default"
"""Name of a run that nobody has named; it has to have one where several jobs share a store."""


class Standalone:
    """One process's connection to the shared store of its job, outside a Trainer.

    Args:
        store: A URL, a store, or None to look for one.
        run_id: Name of the run, or None.

    Raises:
        ConfigError: The store or an environment variable is not allowed.

    Note:
        Any thread may use it.
    """

    def __init__(self, store: object, *, run_id: str | None) -> None:
        environment = read_environment()
        self.topology = read_topology()
        named = store if store is not None else environment.store
        self.keys = Keys(run_id=run_id or environment.run_id or UNNAMED_RUN, incarnation="0")
        self.driver = Driver(
            store=_open(named),
            clock=SystemClock(),
            dice=SystemDice(rank=self.topology.rank),
            sink=LoggingSink(rank=self.topology.rank),
        )
        self.link = Link()
        self._circuits: dict[Hashable, Circuit] = {}

    def circuit(self, name: str, options: GuardOptions, *, hosts: int | None = None) -> Circuit:
        """Return this process's memory of a breaker; asks nobody.

        Args:
            name: Name of the dependency with its operation class.
            options: Its limits.
            hosts: Hosts that use it; None takes the launcher's number.
        """
        key = (name, hosts, options.breaker, options.admission, options.budget)
        found = self._circuits.get(key)
        if found is None:
            # No lock, which a fork might leave locked for ever: who comes second takes the first's.
            found = self._circuits.setdefault(key, self._new_circuit(name, options, hosts=hosts))
        return found

    def _new_circuit(self, name: str, options: GuardOptions, *, hosts: int | None) -> Circuit:
        processes = self.topology.world_size
        # A store in this process's memory is shared with nobody: nobody else votes, and all that
        # this process may do is its share.
        alone = isinstance(self.driver.store, MemoryStore)
        budget = share(options.budget, processes=processes) if alone else options.budget
        config = own_config(options.breaker, processes=processes) if alone else options.breaker
        circuit = Circuit(
            name,
            config=config,
            keys=self.keys,
            host=host_name(platform.node(), self.topology),
            hosts=1 if alone else hosts or self.topology.hosts,
            limits=Limits(admission=options.admission, budget=budget),
        )
        give_detour(circuit, link=self.link, processes=1 if alone else processes)
        return circuit

    def run(self, circuit: Circuit, call: GuardedCall) -> Any:
        """Make a guarded call.

        Args:
            circuit: The breaker, of this connection.
            call: The call; whether it may go alone is its own business.

        Returns:
            What the call's work returned.

        Raises:
            BaseException: The work's own, where repeating is no option; otherwise what
                ``protocols.guard.guard`` raises.
        """
        circuit.note_calls(circuit.shortcut.take_calls(), now_s=self.driver.clock.now_s())
        try:
            done = self.driver.run(guard(circuit, call))
        except RetriesExhaustedError as error:
            failure = failure_to_raise(error)
        else:
            return done.value
        finally:
            circuit.shortcut.passage = _passage(circuit)
        try:
            # Outside the handler, which would make its own error this one's context.
            raise failure
        finally:
            # The traceback has this frame, and what the failed call held would outlive it.
            del failure

    def close(self) -> None:
        """Let this thread's helpers and the connection go. Idempotent."""
        self.driver.close()
        self.driver.store.close()


def _passage(circuit: Circuit) -> Passage:
    return passage(
        circuit.view,
        circuit.window,
        circuit.config,
        host=circuit.host,
        is_alone=guide(circuit) is not circuit,
    )


_Key: TypeAlias = tuple[int, str, str | None]
# With each: whether the store that it was made for is gone, so that its place is free.
_known: dict[_Key, tuple[Standalone, Callable[[], bool]]] = {}


def standalone(store: object, *, run_id: str | None) -> Standalone:
    """Return this process's connection for a store and a run, made when it is first asked for.

    Args:
        store: A URL, a store, or None to look for one.
        run_id: Name of the run, or None.

    Raises:
        ConfigError: As ``Standalone``.
    """
    group_store = _default_group_store() if store is None else None
    named = group_store if store is None else store
    name = named if isinstance(named, str) else f"{type(named).__name__} {id(named)}"
    key = os.getpid(), name, run_id
    found = _known.get(key)
    if found is None or found[1]():
        _let_go_of_lost()
        made = Standalone(store, run_id=run_id), _loss_of(store, group_store)
        found = _known.setdefault(key, made)
    return found[0]


def _loss_of(store: object, group_store: object) -> Callable[[], bool]:
    if group_store is None:
        # Kept, so that no other object gets its identity.
        return partial(_never, store)
    # Not kept: the group's server lives as long as its store, and holds the group's port.
    alive = weakref.ref(group_store)
    return lambda: alive() is None


def _never(_kept: object) -> bool:
    return False


def _let_go_of_lost() -> None:
    for key, (_, is_lost) in list(_known.items()):
        if key[0] == os.getpid() and is_lost():
            _close(key)


def _close(key: _Key) -> None:
    found = _known.pop(key, None)
    if found is not None:
        found[0].close()


def close_connections() -> None:
    """Let go of what this process holds, in this thread and in the stores. Idempotent.

    The next call begins anew, as in a process that has just started.
    """
    for key in list(_known):
        if key[0] == os.getpid():
            _close(key)


def _open(named: Any) -> SharedStore:
    if named is None and _default_group_store() is None:
        return MemoryStore()
    from lightning_resilience.adapters.store_discovery import open_store  # noqa: PLC0415 - loads torch

    return open_store(named, world_size=1)


def _default_group_store() -> object | None:
    # Whoever has a process group has loaded this.
    if "torch.distributed" not in sys.modules:
        return None
    from lightning_resilience.adapters.store_discovery import default_store  # noqa: PLC0415 - loads torch

    return default_store()
