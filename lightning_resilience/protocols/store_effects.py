# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Perform store effects on something that has the operations of a store.

Every driver needs this table, for the shared store and for a process's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lightning_resilience.protocols.effects import Add, CompareAndSet, Delete, Get, MultiGet, Set


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["STORE_OPERATIONS", "StoreOperations", "store_performers"]

STORE_OPERATIONS = (Get, MultiGet, Set, Delete, CompareAndSet, Add)
"""The effects that a store answers at once; ``WaitFor`` takes its time."""


class StoreOperations(Protocol):
    """What a store can do without waiting; see ``ports.SharedStore``."""

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        ...

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return several values."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        ...

    def delete(self, key: str) -> bool:
        """Delete a key."""
        ...

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write a value if another one is there."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        ...


def store_performers(store: StoreOperations) -> dict[type, Callable[[Any], Any]]:
    """Return what performs each of ``STORE_OPERATIONS`` on a store."""
    return {
        Get: lambda effect: store.get(effect.key),
        MultiGet: lambda effect: store.multi_get(effect.keys),
        Set: lambda effect: store.set(effect.key, effect.value),
        Delete: lambda effect: store.delete(effect.key),
        CompareAndSet: lambda effect: store.compare_and_set(
            effect.key, effect.expected, effect.desired
        ),
        Add: lambda effect: store.add(effect.key, effect.amount),
    }
