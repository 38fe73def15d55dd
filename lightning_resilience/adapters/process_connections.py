# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One connection of a store for each process that uses it: a forked child never has its parent's.

What a parent has opened is a socket that both would write to, and a thread that the child has not.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.store_connection import StoreConnection


__all__ = ["ProcessConnections"]

C = TypeVar("C")


class ProcessConnections(Generic[C]):
    """The connections of one store, by process.

    Args:
        owner: The store: when it is collected, and at the interpreter's exit, this process's
            connection is closed. A thread inside torch at the shutdown can abort the process.
        make: Makes a connection. It must not refer to the owner, nor may what it makes: its thread
            lives as long as it is open, and the owner would never be collected.
    """

    def __init__(self, owner: object, make: Callable[[], StoreConnection[C]]) -> None:
        self._make = make
        self._by_pid: dict[int, StoreConnection[C]] = {}
        weakref.finalize(owner, _close_own, self._by_pid)

    def here(self) -> StoreConnection[C]:
        """Return this process's connection. Any thread."""
        pid = os.getpid()
        connection = self._by_pid.get(pid)
        if connection is None:
            # setdefault is atomic: two threads that come first both get one of the two.
            connection = self._by_pid.setdefault(pid, self._make())
        return connection


def _close_own(connections: dict[int, StoreConnection[C]]) -> None:
    connection = connections.get(os.getpid())
    if connection is not None:
        connection.close()
