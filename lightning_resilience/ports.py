# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What the runtime needs from the world: six small protocols.

Core and protocols never see these; the driver turns effects into calls of them. Every
implementation passes the abstract contract test of its port (``tests/contracts``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.core.events import Event


__all__ = ["CancelToken", "Clock", "Dice", "EventSink", "ObjectStore", "SharedStore"]


class Clock(Protocol):
    """A monotonic clock of this process and a way to let time pass on it."""

    def now_s(self) -> float:
        """Seconds on this process's monotonic clock; never comparable with another host's."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Let ``duration_s`` seconds pass. Signal handlers of Python run in between."""
        ...


class Dice(Protocol):
    """A private source of chance; never the module-level ``random``."""

    def draw(self) -> float:
        """A uniform number in [0, 1)."""
        ...

    def nonce(self) -> str:
        """A text that no other writer uses, in this or any other process."""
        ...


@runtime_checkable
class SharedStore(Protocol):
    """A small key-value store that all ranks share, with compare-and-set.

    Keys are text, values are bytes. An operation that cannot be answered raises
    ``StoreUnavailableError``, and may have been executed all the same. Any thread may call; one
    connection is used, and no operation but ``wait_for`` blocks for longer than the store's
    timeout.
    """

    def get(self, key: str) -> bytes | None:
        """The value, or None where the key does not exist."""
        ...

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all ``keys`` in order, None for each that does not exist."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``. Idempotent: repeated when its answer is lost."""
        ...

    def delete(self, key: str) -> bool:
        """Delete the key; True if it existed (a repeat after a lost answer says False)."""
        ...

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``, and return what tells the outcome.

        The four cases, which every backend has in common:

        * the key is missing and ``expected`` is empty: created, ``desired`` is returned;
        * the key is missing and ``expected`` is not empty: nothing is written and **``expected``
          is returned**, which means "gone", never "unchanged";
        * the value is ``expected``: written, ``desired`` is returned;
        * the value is another: nothing is written and the value is returned.

        Only a ``desired`` with a fresh writer nonce makes ``returned == desired`` mean "I won", and
        makes a repeat after a lost answer safe.
        """
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it. **Never repeated**: a lost answer may have counted."""
        ...

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """Block until the key exists, at most ``timeout_s``; True if it exists.

        Blocks this connection: call it on ``watcher()`` only, never on the connection that other
        operations use.
        """
        ...

    def watcher(self) -> SharedStore:
        """A second connection to the same store, for ``wait_for`` on a helper thread."""
        ...

    def close(self) -> None:
        """Drop the connection. Idempotent; operations after it raise ``StoreUnavailableError``."""
        ...


class CancelToken(Protocol):
    """How a caller tells an abandoned call to stop, and a call tells its caller that it moves."""

    @property
    def cancelled(self) -> bool:
        """True once the caller has abandoned the call. Check it before anything that publishes."""
        ...

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Say that a part of the work is done: the stall timeout starts anew.

        Args:
            written: Bytes that this part has written to files; ``core.moved`` says what counts.
            sent: Bytes that storage has taken.
            read: Bytes that came from files or from storage.
        """
        ...

    def raise_if_cancelled(self) -> None:
        """Raise ``CallTimeoutError`` once the caller has abandoned the call."""
        ...


class ObjectStore(Protocol):
    """Storage for whole checkpoint files: staged, published at once, and verified."""

    def staging_path(self, path: str, nonce: str) -> str:
        """A local file name to stage ``path`` under: beside it, or in the spool directory."""
        ...

    def publish(self, staged_path: str, path: str, token: CancelToken) -> None:
        """Make the staged file appear under ``path``, whole or not at all."""
        ...

    def size(self, path: str) -> int | None:
        """Size in bytes that the storage itself reports now, past every cache.

        None only where the storage says that the object does not exist; "cannot tell" raises.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove the object. Idempotent: absent is success."""
        ...


class EventSink(Protocol):
    """Where events go. Never raises, never blocks for long."""

    def emit(self, event: Event) -> None:
        """Take one past-tense fact."""
        ...
