# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A shared store that counts what it is asked, and that may be away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.runtime.memory import MemoryStore


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.ports import SharedStore


__all__ = ["CountedStore", "Outage"]


class Outage:
    """How many of the next operations are not answered, and what was asked.

    Attributes:
        operations: Names of all operations, in order, those that failed included.
        failing: Operations that fail from now on.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.failing = 0

    def note(self, operation: str) -> None:
        """Count an operation, and fail it where that is its lot."""
        self.operations.append(operation)
        if self.failing > 0:
            self.failing -= 1
            text = f"{operation}: nobody answers"
            raise StoreUnavailableError(text)


class CountedStore:
    """A ``SharedStore``; its watchers count and fail with it.

    Args:
        inner: Where the data are; an empty store in memory by default.
        outage: What counts and fails.
    """

    def __init__(self, inner: SharedStore | None = None, outage: Outage | None = None) -> None:
        self._inner: Any = inner or MemoryStore()
        self.outage = outage or Outage()

    @property
    def operations(self) -> list[str]:
        """Names of all operations, in order."""
        return self.outage.operations

    def get(self, key: str) -> bytes | None:
        """See the port."""
        self.outage.note("get")
        return cast("bytes | None", self._inner.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See the port."""
        self.outage.note("multi_get")
        return cast("list[bytes | None]", self._inner.multi_get(keys))

    def set(self, key: str, value: bytes) -> None:
        """See the port."""
        self.outage.note("set")
        self._inner.set(key, value)

    def delete(self, key: str) -> bool:
        """See the port."""
        self.outage.note("delete")
        return bool(self._inner.delete(key))

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See the port."""
        self.outage.note("compare_and_set")
        return bytes(self._inner.compare_and_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        """See the port."""
        self.outage.note("add")
        return int(self._inner.add(key, amount))

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """See the port."""
        self.outage.note("wait_for")
        return bool(self._inner.wait_for(key, timeout_s))

    def watcher(self) -> CountedStore:
        """See the port."""
        return CountedStore(self._inner.watcher(), self.outage)

    def close(self) -> None:
        """See the port."""
        self._inner.close()

    def text(self) -> str:
        """Return every key and value, as text."""
        cells = self._inner._shared.cells.values
        return "\n".join(f"{key}={value!r}" for key, value in cells.items())
