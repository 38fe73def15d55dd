# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The shared store and the object store of one process, without a server.

``MemoryStore`` is what a job of one process uses when nothing else is named, and what users' tests
and ours use in place of a server. Threads share it through their own handles. It keeps exactly the
semantics that ``ports.SharedStore`` states, including those that look odd, because code that works
here must work on the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_resilience.core.cells import Cells
from lightning_resilience.errors import StoreUnavailableError


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_resilience.ports import CancelToken


__all__ = ["MemoryObjectStore", "MemoryStore"]


class _Shared:
    """What all handles of one store share; ``changed`` guards it and tells of every new key."""

    def __init__(self) -> None:
        self.cells = Cells()
        self.changed = threading.Condition()


class MemoryStore:
    """A ``SharedStore`` in this process's memory.

    Every instance is a store of its own; ``watcher()`` makes another handle to the same one. The
    data live as long as any handle. Nothing reaches another process: not even a forked child, which
    gets a copy that goes its own way.

    Note:
        Any thread may call. No operation but ``wait_for`` blocks.

    Example:
        >>> store = MemoryStore()
        >>> store.compare_and_set("key", b"", b"first")
        b'first'
        >>> store.watcher().get("key")
        b'first'
    """

    def __init__(self) -> None:
        self._shared = _Shared()
        self._closed = False

    def get(self, key: str) -> bytes | None:
        """The value, or None where the key does not exist."""
        with self._open("get", key) as cells:
            return cells.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all ``keys`` as of one moment, None for each that does not exist."""
        with self._open("multi_get", ", ".join(keys)) as cells:
            return cells.multi_get(keys)

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        with self._open("set", key) as cells:
            cells.set(key, value)
            self._shared.changed.notify_all()

    def delete(self, key: str) -> bool:
        """Delete the key; True if it existed."""
        with self._open("delete", key) as cells:
            return cells.delete(key)

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``; the four cases are the port's."""
        with self._open("compare_and_set", key) as cells:
            returned = cells.compare_and_set(key, expected, desired)
            self._shared.changed.notify_all()
            return returned

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, kept as decimal text, and return it.

        Raises:
            CorruptRecordError: The key holds something that is not a number.
        """
        with self._open("add", key) as cells:
            total = cells.add(key, amount)
            self._shared.changed.notify_all()
            return total

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """Block until the key exists, at most ``timeout_s`` seconds; True if it exists.

        Raises:
            StoreUnavailableError: This handle is closed, or was closed while it waited.
        """
        with self._shared.changed:
            self._shared.changed.wait_for(
                lambda: self._closed or key in self._shared.cells.values,
                timeout=max(0.0, timeout_s),
            )
            self._require_open("wait_for", key)
            return key in self._shared.cells.values

    def watcher(self) -> MemoryStore:
        """Another handle to the same data, with its own ``close``."""
        handle = MemoryStore()
        handle._shared = self._shared
        return handle

    def close(self) -> None:
        """Close this handle, and wake whoever waits on it. Other handles go on."""
        with self._shared.changed:
            self._closed = True
            self._shared.changed.notify_all()

    @contextlib.contextmanager
    def _open(self, operation: str, key: str) -> Iterator[Cells]:
        with self._shared.changed:
            self._require_open(operation, key)
            yield self._shared.cells

    def _require_open(self, operation: str, key: str) -> None:
        if self._closed:
            text = f"{operation} of {key!r}: this handle of the in-memory store is closed"
            raise StoreUnavailableError(text)


class MemoryObjectStore:
    """An ``ObjectStore`` that keeps what is published in this process's memory.

    Staging is a real temporary directory, because whoever stages writes with ordinary file calls.
    It goes when the object store goes.

    Note:
        Any thread may call.
    """

    def __init__(self) -> None:
        self._staging = tempfile.mkdtemp(prefix="lightning-resilience-")
        weakref.finalize(self, shutil.rmtree, self._staging, ignore_errors=True)
        self._objects: dict[str, bytes] = {}

    def staging_path(self, path: str, nonce: str) -> str:
        """A file name in the temporary directory, different for each nonce."""
        return str(Path(self._staging) / f"{nonce}-{os.path.basename(path)}")  # noqa: PTH119 - a URL

    def publish(self, staged_path: str, path: str, token: CancelToken) -> None:
        """Make the staged file's content appear under ``path`` at once; the staged file goes.

        Raises:
            CallTimeoutError: The caller has abandoned this call; nothing was published.
            FileNotFoundError: Nothing was staged there.
        """
        content = Path(staged_path).read_bytes()
        token.raise_if_cancelled()
        self._objects[path] = content
        Path(staged_path).unlink(missing_ok=True)

    def size(self, path: str) -> int | None:
        """Size in bytes of what is published under ``path``, None if nothing is."""
        content = self._objects.get(path)
        return None if content is None else len(content)

    def remove(self, path: str) -> None:
        """Remove the object; absent is success."""
        self._objects.pop(path, None)

    def read(self, path: str) -> bytes:
        """The content published under ``path``.

        Raises:
            FileNotFoundError: Nothing is published there.
        """
        try:
            return self._objects[path]
        except KeyError:
            text = f"nothing is published under {path!r}; known: {sorted(self._objects)}"
            raise FileNotFoundError(text) from None
