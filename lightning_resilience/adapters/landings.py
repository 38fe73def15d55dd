# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that this process has made of storage and that have not ended, by the name in question.

One list for the whole process, because a call that was abandoned outlives the ``fit`` that made it.
``core.landings`` says which of them is waited for. What another process has sent is not known here:
the manifest tells what counts.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from fsspec.callbacks import Callback

from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.landings import BEFORE_SENDING, Act, Request, blocks, refusal
from lightning_resilience.errors import CheckpointError
from lightning_resilience.runtime.calls import PIECE_S, Token
from lightning_resilience.runtime.system import SystemClock


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.ports import CancelToken


__all__ = ["Landing", "Progress", "landing", "removing"]


class Landing:
    """One request that has not ended. Any thread.

    Args:
        key: The name that it is about.
        token: Of the call that makes it.
        is_removal: Whether it removes.
    """

    def __init__(self, key: str, token: CancelToken, *, is_removal: bool = False) -> None:
        self.token = token
        self.is_sent = is_removal
        self._key = key
        self._is_removal = is_removal

    def send(self) -> None:
        """Say that from here on it may be carried out, whatever becomes of the caller.

        Raises:
            CallTimeoutError: The caller has given up, so it must not be sent.
        """
        for act in BEFORE_SENDING:
            if act is Act.ASK:
                self.token.raise_if_cancelled()
            else:
                self.is_sent = True

    def take_back(self) -> None:
        """Say that nothing of it was sent after all: it begins once more."""
        self.is_sent = self._is_removal

    @property
    def request(self) -> Request:
        """What it is now."""
        return Request(
            key=self._key,
            is_removal=self._is_removal,
            is_sent=self.is_sent,
            is_abandoned=self.token.cancelled,
        )


class Progress(Callback):  # type: ignore[misc] # fsspec has no types
    """Passes progress of a foreign upload on, and breaks it off once the caller has given up.

    Args:
        landing: Of the upload.
        size_bytes: Length of the file.
    """

    def __init__(self, landing: Landing, *, size_bytes: int) -> None:
        super().__init__()
        self._landing = landing
        self._size_bytes = size_bytes

    def relative_update(self, inc: int = 1) -> None:
        """Say that so many more bytes were sent."""
        super().relative_update(inc)
        self._landing.token.progress(sent=inc)
        if self.value >= self._size_bytes:
            # What makes the object appear comes next.
            self._landing.send()
        self._landing.token.raise_if_cancelled()


class _Pending:
    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.landings: list[Landing] = []


# By process: in a forked child none of the parent's threads goes on, and its lock may be taken.
_pending: dict[int, _Pending] = {}


@contextlib.contextmanager
def landing(key: str, token: CancelToken, *, patience_s: float) -> Iterator[Landing]:
    """Write something: wait for what must end first, and be waited for until the block is left.

    Args:
        key: The name that is written.
        token: Of the call.
        patience_s: For how long to wait, in seconds.

    Raises:
        CheckpointError: What was waited for has not ended; the text names ``key``.
        CallTimeoutError: The caller has given up.
    """
    with _entered(Landing(key, token), patience_s=patience_s) as entered:
        yield entered


@contextlib.contextmanager
def removing(key: str, token: CancelToken | None = None, *, patience_s: float) -> Iterator[None]:
    """Remove something; as ``landing`` otherwise.

    Args:
        key: The name that is removed.
        token: Of the call; None for one that is not abandoned.
        patience_s: For how long to wait, in seconds.
    """
    mine = Landing(key, token or Token(), is_removal=True)
    with _entered(mine, patience_s=patience_s) as entered:
        # Whoever was abandoned while it waited would remove what its successor has written.
        entered.send()
        yield


@contextlib.contextmanager
def _entered(mine: Landing, *, patience_s: float) -> Iterator[Landing]:
    pending = _pending.setdefault(os.getpid(), _Pending())
    with pending.condition:
        _wait(pending, mine, patience_s=patience_s)
        pending.landings.append(mine)
    try:
        yield mine
    finally:
        with pending.condition:
            pending.landings.remove(mine)
            pending.condition.notify_all()


def _wait(pending: _Pending, mine: Landing, *, patience_s: float) -> None:
    clock = SystemClock()
    ends_at_s = clock.now_s() + patience_s
    while True:
        mine.token.raise_if_cancelled()
        first = _first_before(pending, mine)
        if first is None:
            return
        remaining_s = ends_at_s - clock.now_s()
        if remaining_s <= 0:
            shown = redacted(mine.request.key)
            raise CheckpointError(refusal(first, shown=shown, waited_s=patience_s))
        # In pieces: nobody rings where a call is abandoned.
        pending.condition.wait(min(remaining_s, PIECE_S))


def _first_before(pending: _Pending, mine: Landing) -> Request | None:
    earlier = (item.request for item in pending.landings)
    return next((request for request in earlier if blocks(request, mine.request)), None)
