# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One connection to a ``torch.distributed`` store: its own thread, bounded, and it reconnects.

Why a thread: a store client blocks in C++. It has no timeout on most operations, so a server that
is frozen or cut off without a reset blocks them for as long as the kernel hopes (a quarter of an
hour), a new client of such a server blocks for ever in its handshake, and Python runs no signal
handler meanwhile. So the client is owned by one daemon thread, and callers wait for it on an event,
with a bound, and interruptible.

* The thread does everything to the client: connect, operate, drop. Nothing happens twice at once.
* A client never reconnects by itself: once its socket broke, every operation fails at once. So a
  broken client is dropped and the next operation connects anew; an operation that may be repeated
  is repeated once.
* A caller who gives up cuts the socket under the thread, if one can be found, which ends the
  blocked operation at once; the same thread then serves the next one. If none can be found, it
  serves again when the kernel lets go. Either way there is one thread a connection, however long
  the outage.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from torch.distributed import DistStoreError

from lightning_resilience.errors import StoreUnavailableError


if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


__all__ = ["StoreClient", "StoreConnection", "cut_client", "no_check"]

_JOIN_S = 1.0
"""How long ``close`` waits for the thread; only a thread stuck in a handshake needs longer."""

_PIECE_S = 0.2
_UNDISTURBED_PIECES = 3
"""An answer takes less than a millisecond: who has waited for this many pieces looks around."""

C = TypeVar("C")
T = TypeVar("T")


def no_check() -> None:
    """Let the wait go on."""


class StoreClient(Protocol):
    """What we use of ``torch.distributed.Store``, with the types that it really takes.

    Torch annotates values as text, but takes bytes as they are; text it would encode.
    """

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        ...

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        ...

    def check(self, keys: list[str]) -> bool:
        """True if all keys exist."""
        ...

    def compare_set(self, key: str, expected_value: bytes, desired_value: bytes) -> bytes:
        """Write if the value is as expected."""
        ...

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        ...

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several keys; blocks until all exist."""
        ...

    def has_extended_api(self) -> bool:
        """True if ``multi_get`` is one round trip."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound the operations that wait for keys."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Block until all keys exist."""
        ...


class _Request:
    """One operation on its way through the thread."""

    __slots__ = ("abandoned", "error", "finished", "repeatable", "value", "work")

    def __init__(self, work: Callable[[Any], Any], *, repeatable: bool) -> None:
        self.work = work
        self.repeatable = repeatable
        self.finished = threading.Event()
        self.abandoned = False
        self.value: Any = None
        self.error: BaseException | None = None


class StoreConnection(Generic[C]):
    """A client of a store, opened at the first operation and again after each failure.

    Args:
        open_client: Makes a client. Its argument is True after a failure, when it is worth asking
            first whether anybody listens.
        label: The store's name in errors.
        check: Called several times a second by whoever waits for an answer for longer than half a
            second; what it raises ends the wait.
        cut: Ends what a client is doing, from another thread; by default as one of torch's can be.

    Note:
        Any thread may call; operations run one after the other.
    """

    def __init__(
        self,
        open_client: Callable[[bool], C],
        *,
        label: str,
        check: Callable[[], None] = no_check,
        cut: Callable[[C], None] | None = None,
    ) -> None:
        self._open_client = open_client
        self._label = label
        self._check = check
        self._cut = cut or cut_client
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        # Reentrant because the garbage collector may close another connection at any allocation.
        self._guard = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy: tuple[_Request, C] | None = None
        self._client: C | None = None
        self._is_suspect = False

    def run(self, work: Callable[[C], T], *, patience_s: float, repeatable: bool = True) -> T:
        """Run ``work`` on the client and return what it returned.

        Args:
            work: The operation.
            patience_s: Seconds after which this caller gives up.
            repeatable: Whether ``work`` may be done again when the connection broke during it.

        Raises:
            TimeoutError: No answer within ``patience_s``; it may still be executed.
            StoreUnavailableError: The connection is closed.
            RuntimeError: What torch raised.
            OSError: Nobody listens at the address.
        """
        request = _Request(work, repeatable=repeatable)
        self._submit(request)
        try:
            is_finished = self._await(request, patience_s)
        finally:
            # Also when a signal handler raises: what nobody waits for must not hold up the next.
            if not request.finished.is_set():
                self._abandon(request)
        if not is_finished:
            text = f"no answer within {patience_s:g} s"
            raise TimeoutError(text)
        if request.error is not None:
            raise request.error
        return cast("T", request.value)

    def close(self) -> None:
        """Drop the client and end the thread; whoever still waits gets an error. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            if self._busy is not None:
                self._cut(self._busy[1])
            thread = self._thread
        self._requests.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _await(self, request: _Request, patience_s: float) -> bool:
        pieces = 0
        while (remaining_s := patience_s - pieces * _PIECE_S) > 0:
            if request.finished.wait(min(_PIECE_S, remaining_s)):
                return True
            pieces += 1
            if pieces >= _UNDISTURBED_PIECES:
                self._check()
        return request.finished.is_set()

    def _submit(self, request: _Request) -> None:
        with self._guard:
            if self._closed:
                raise _closed_error(self._label)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"lightning-resilience {self._label}", daemon=True
                )
                self._thread.start()
            self._requests.put(request)

    def _abandon(self, request: _Request) -> None:
        with self._guard:
            request.abandoned = True
            if self._busy is not None and self._busy[0] is request:
                self._cut(self._busy[1])

    def _serve(self) -> None:
        while True:
            request = self._requests.get()
            if request is None:
                break
            self._answer(request)
            # The loop must not keep the last answer alive until the next request.
            del request
        self._client = None

    def _answer(self, request: _Request) -> None:
        try:
            if not request.abandoned:
                request.value = self._perform(request)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            request.error = error
        finally:
            request.finished.set()

    def _perform(self, request: _Request) -> Any:
        may_repeat = request.repeatable
        while True:
            # Outside the try: a connection that cannot be made is not tried twice.
            client = self._connected()
            try:
                return self._operate(request, client)
            except DistStoreError:
                # A key did not come in time: the connection is well.
                raise
            except RuntimeError:
                self._client = None
                self._is_suspect = True
                if not may_repeat or request.abandoned or self._closed:
                    raise
            may_repeat = False

    def _operate(self, request: _Request, client: C) -> Any:
        with self._guard:
            # Invariant: whoever is abandoned or closed from here on finds something to cut.
            if request.abandoned or self._closed:
                raise _closed_error(self._label)
            self._busy = request, client
        try:
            return request.work(client)
        finally:
            with self._guard:
                self._busy = None

    def _connected(self) -> C:
        if self._closed:
            raise _closed_error(self._label)
        if self._client is None:
            was_suspect, self._is_suspect = self._is_suspect, True
            self._client = self._open_client(was_suspect)
            self._is_suspect = False
        return self._client


def _closed_error(label: str) -> StoreUnavailableError:
    return StoreUnavailableError(f"the connection to {label} is closed; open a new one")


def cut_client(client: object) -> None:
    """Shut down the client's socket, so that the operation blocked on it fails now.

    Torch offers no way to interrupt a client, but names its file descriptor in its ``repr``. A
    version that does not only makes this slower, never wrong. The caller holds the guard and the
    client is in use, so the descriptor cannot have been closed and given to somebody else.
    """
    innermost: Any = client
    while hasattr(innermost, "underlying_store"):
        innermost = innermost.underlying_store
    found = re.search(r"SocketImpl\(fd=(\d+)", repr(innermost))
    if found is None:
        return
    try:
        with socket.socket(fileno=os.dup(int(found[1]))) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        # Already broken: then the operation is failing by itself.
        return
