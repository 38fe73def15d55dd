# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An upload in parts that can be called off, whatever protocol the storage speaks.

Requests run in the client's event loop, and the thread that waits for one looks around meanwhile.
Once its caller has given up, a request that cannot take effect any more is cancelled, and an upload
in parts is aborted, so that a server that never answers keeps neither a connection nor parts. One
that was sent completely is not cancelled: it may be carried out, and only its end says that it was
or was not.

Parts of a file can be sent while the rest of it is still being written. No object comes of them
before the file is whole: only then is the upload completed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from lightning_resilience.adapters.sent_file import Span
from lightning_resilience.runtime.calls import PIECE_S


if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.core.parts import Cut
    from lightning_resilience.core.receipts import Receipt
    from lightning_resilience.ports import CancelToken


__all__ = ["PartedUpload", "Requests", "parted_upload", "request"]

_DRAIN_S: Final = 5.0
"""Requests that were called off end at once; whoever waits for more than that waits for a bug."""

_ABORT_S: Final = 30.0
"""What a storage that is well needs for it is a fraction; one that is ill is not waited for."""

_log = logging.getLogger(__name__)


class Requests(Protocol):
    """What one upload asks of its storage; each runs in the client's event loop.

    Each raises what the storage raised, and can be cancelled.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the client."""

    @property
    def shown(self) -> str:
        """The upload, for whom it is reported to."""

    async def begin(self) -> None:
        """Begin it; nothing else is asked before."""

    async def send(self, number: int, body: Span) -> str:
        """Send a part; return what the storage calls it."""

    async def complete(self, parts: Sequence[tuple[int, str]]) -> Receipt:
        """Make the object of its parts, each by its number and what the storage calls it."""

    async def abort(self) -> None:
        """Throw away what was sent; of an upload that is gone already, nothing."""


@contextlib.contextmanager
def parted_upload(
    requests: Requests, staged_path: str, *, token: CancelToken, plan: Cut
) -> Iterator[PartedUpload]:
    """Send a file in parts within the block, in which it may still be growing.

    Where the block is left before the upload is complete, nothing of it stays: no request is under
    way any more when it is aborted, since a part that arrived after that would stay, and be paid
    for.

    Args:
        requests: What is asked of the storage.
        staged_path: The file. It exists once ``grow`` is called.
        token: The caller's token.
        plan: The parts.
    """
    upload = PartedUpload(requests, staged_path, token=token, plan=plan)
    try:
        yield upload
    finally:
        upload.end()


class PartedUpload:
    """An upload in parts; made by ``parted_upload``.

    A part that fails ends the sending, and is told by ``complete``: whoever writes the file is not
    disturbed, and has it for another attempt. One thread at a time calls; the requests run in the
    client's event loop.
    """

    def __init__(
        self, requests: Requests, staged_path: str, *, token: CancelToken, plan: Cut
    ) -> None:
        self.plan = plan
        self._requests = requests
        self._loop = requests.loop
        self._staged_path = staged_path
        self._token = token
        self._file: IO[bytes] | None = None
        self._ready = 0
        self._sending: concurrent.futures.Future[None] | None = None
        self._is_complete = False
        # What follows belongs to the event loop.
        self._size_bytes = self._taken = 0
        self._is_whole = self._is_there = False
        self._grown = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._tags: dict[int, str] = {}

    def end(self) -> None:
        """Abort what is not complete."""
        try:
            if self._sending is not None and not self._is_complete:
                self._call_off(self._sending)
        finally:
            if self._file is not None:
                self._file.close()

    @property
    def is_begun(self) -> bool:
        """Whether anything was sent."""
        return self._sending is not None

    def grow(self, size_bytes: int) -> None:
        """Say that the file has so many bytes now; the parts that are whole are sent meanwhile."""
        ready = self.plan.ready(size_bytes, is_whole=False)
        if ready > self._ready:
            self._ready = ready
            self._tell(size_bytes, is_whole=False)

    def complete(self, size_bytes: int, landing: Landing) -> Receipt:
        """Send what is left of a file that is whole, and make the object of the parts.

        Returns:
            What the storage calls the object.

        Raises:
            CallTimeoutError: The caller has given up.
            OSError: What the storage raised, also to a part that was sent before.
        """
        self._wait_for(self._tell(size_bytes, is_whole=True))
        landing.send()
        receipt: Receipt = request(
            self._loop, self._requests.complete(sorted(self._tags.items())), landing
        )
        self._is_complete = True
        return receipt

    def _tell(self, size_bytes: int, *, is_whole: bool) -> concurrent.futures.Future[None]:
        if self._sending is None:
            self._file = Path(self._staged_path).open("rb")  # noqa: SIM115 - closed with the block
            self._sending = asyncio.run_coroutine_threadsafe(self._send(), self._loop)
        self._loop.call_soon_threadsafe(self._note, size_bytes, is_whole)
        return self._sending

    def _wait_for(self, sending: concurrent.futures.Future[None]) -> None:
        while not concurrent.futures.wait([sending], timeout=PIECE_S).done:
            self._token.raise_if_cancelled()
        if sending.exception() is not None:
            # A body that breaks off because the caller has given up is an error of the network to
            # the client.
            self._token.raise_if_cancelled()
        sending.result()

    def _call_off(self, sending: concurrent.futures.Future[None]) -> None:
        self._loop.call_soon_threadsafe(self._cancel)
        if not concurrent.futures.wait([sending], timeout=_DRAIN_S).done:
            _log.warning("a part of %s was still under way", self._requests.shown)
        if self._is_there:
            self._abort()

    def _abort(self) -> None:
        # What has failed, or why this was given up, stays what is raised.
        aborting = asyncio.run_coroutine_threadsafe(self._requests.abort(), self._loop)
        try:
            aborting.result(timeout=_ABORT_S)
        except Exception as error:  # noqa: BLE001 - reported; the first error is raised
            aborting.cancel()
            _log.warning(
                "parts of an upload to %s were left behind: %s",
                *(self._requests.shown, str(error) or type(error).__name__),
            )

    def _cancel(self) -> None:
        # Not the future's own cancel, which would not wait for the workers.
        if self._task is not None:
            self._task.cancel()

    def _note(self, size_bytes: int, is_whole: bool) -> None:  # noqa: FBT001 - positional only there
        self._size_bytes, self._is_whole = size_bytes, is_whole
        self._grown.set()

    async def _send(self) -> None:
        self._task = asyncio.current_task()
        await self._requests.begin()
        self._is_there = True
        workers = [asyncio.ensure_future(self._work()) for _ in range(self.plan.in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self) -> None:
        while (number := await self._next()) is not None:
            self._token.raise_if_cancelled()
            body = Span(self._file, *self.plan.span(number, self._size_bytes), token=self._token)
            self._tags[number] = await self._requests.send(number, body)
            self._token.progress(sent=body.size_bytes)

    async def _next(self) -> int | None:
        while self._taken >= self.plan.ready(self._size_bytes, is_whole=self._is_whole):
            if self._is_whole:
                return None
            self._grown.clear()
            await self._grown.wait()
        self._taken += 1
        return self._taken


def request(
    loop: asyncio.AbstractEventLoop, asked: Coroutine[Any, Any, Any], landing: Landing
) -> Any:
    """Wait for one request; cancel it where its caller gives up before it was sent completely.

    Args:
        loop: The event loop of the client.
        asked: The request.
        landing: Tells whether the caller has given up, and whether all is sent.

    Raises:
        CallTimeoutError: The caller has given up.
        OSError: What the storage raised.
    """
    running = asyncio.run_coroutine_threadsafe(asked, loop)
    while not concurrent.futures.wait([running], timeout=PIECE_S).done:
        if landing.token.cancelled and not landing.is_sent:
            running.cancel()
            landing.token.raise_if_cancelled()
    return running.result()
