# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads to S3 that can be called off: one PutObject, or parts and their completion.

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
import io
import logging
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from lightning_resilience.core.receipts import tag_of
from lightning_resilience.runtime.calls import PIECE_S


if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.core.parts import Cut
    from lightning_resilience.ports import CancelToken


__all__ = ["PartedUpload", "parted_upload", "put_object"]

_DRAIN_S: Final = 5.0
"""Requests that were called off end at once; whoever waits for more than that waits for a bug."""

_PIECE_BYTES: Final = 2**20
"""How much of a part is read at once where the client does not say: as it does over TLS."""

_log = logging.getLogger(__name__)


def put_object(fs: AbstractFileSystem, staged_path: str, path: str, *, landing: Landing) -> str:
    """Send a file as one object; a connection that ends early leaves none.

    Args:
        fs: The client, an ``s3fs.S3FileSystem``.
        staged_path: The file.
        path: Bucket and key.
        landing: Tells whether the caller has given up, and is told when all is sent.

    Returns:
        The ETag of the object; empty where the storage tells none.

    Raises:
        CallTimeoutError: The caller has given up.
        OSError: What the storage raised.
    """
    bucket, key, _ = fs.split_path(path)
    with _Body(staged_path, landing) as body:
        landing.token.raise_if_cancelled()
        answer = _request(fs, "put_object", landing, Bucket=bucket, Key=key, Body=body)
    return tag_of(answer.get("ETag"))


@contextlib.contextmanager
def parted_upload(
    fs: AbstractFileSystem, staged_path: str, path: str, *, token: CancelToken, plan: Cut
) -> Iterator[PartedUpload]:
    """Send a file in parts within the block, in which it may still be growing.

    Where the block is left before the upload is complete, nothing of it stays: no request is under
    way any more when it is aborted, since a part that arrived after that would stay, and be paid
    for.

    Args:
        fs: The client, an ``s3fs.S3FileSystem``.
        staged_path: The file. It exists once ``grow`` is called.
        path: Bucket and key.
        token: The caller's token.
        plan: The parts.
    """
    upload = PartedUpload(fs, staged_path, path, token=token, plan=plan)
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
        self, fs: AbstractFileSystem, staged_path: str, path: str, *, token: CancelToken, plan: Cut
    ) -> None:
        self.plan = plan
        bucket, key, _ = fs.split_path(path)
        self._fs = fs
        self._staged_path = staged_path
        self._token = token
        self._upload: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self._file: IO[bytes] | None = None
        self._ready = 0
        self._sending: concurrent.futures.Future[None] | None = None
        self._is_complete = False
        # What follows belongs to the event loop.
        self._size_bytes = self._taken = 0
        self._is_whole = False
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

    def complete(self, size_bytes: int, landing: Landing) -> str:
        """Send what is left of a file that is whole, and make the object of the parts.

        Returns:
            The ETag of the object; empty where the storage tells none.

        Raises:
            CallTimeoutError: The caller has given up.
            OSError: What the storage raised, also to a part that was sent before.
        """
        self._wait_for(self._tell(size_bytes, is_whole=True))
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        landing.send()
        listed = {"Parts": parts}
        answer = _request(
            *(self._fs, "complete_multipart_upload", landing),
            **self._upload,
            MultipartUpload=listed,
        )
        self._is_complete = True
        return tag_of(answer.get("ETag"))

    def _tell(self, size_bytes: int, *, is_whole: bool) -> concurrent.futures.Future[None]:
        if self._sending is None:
            self._file = Path(self._staged_path).open("rb")  # noqa: SIM115 - closed with the block
            self._sending = asyncio.run_coroutine_threadsafe(self._send(), self._fs.loop)
        self._fs.loop.call_soon_threadsafe(self._note, size_bytes, is_whole)
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
        self._fs.loop.call_soon_threadsafe(self._cancel)
        if not concurrent.futures.wait([sending], timeout=_DRAIN_S).done:
            _log.warning("a part of %s was still under way", self._upload["Key"])
        if "UploadId" in self._upload:
            _abort(self._fs, self._upload)

    def _cancel(self) -> None:
        # Not the future's own cancel, which would not wait for the workers.
        if self._task is not None:
            self._task.cancel()

    def _note(self, size_bytes: int, is_whole: bool) -> None:  # noqa: FBT001 - positional only there
        self._size_bytes, self._is_whole = size_bytes, is_whole
        self._grown.set()

    async def _send(self) -> None:
        self._task = asyncio.current_task()
        made = await self._call("create_multipart_upload")
        self._upload["UploadId"] = made["UploadId"]
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
            body = _Part(self._file, self.plan.span(number, self._size_bytes), token=self._token)
            answer = await self._call("upload_part", PartNumber=number, Body=body)
            self._tags[number] = answer["ETag"]
            self._token.progress(sent=self.plan.span(number, self._size_bytes)[1])

    async def _next(self) -> int | None:
        while self._taken >= self.plan.ready(self._size_bytes, is_whole=self._is_whole):
            if self._is_whole:
                return None
            self._grown.clear()
            await self._grown.wait()
        self._taken += 1
        return self._taken

    async def _call(self, method: str, **kwargs: Any) -> Any:
        return await self._fs._call_s3(method, **self._upload, **kwargs)  # noqa: SLF001 - the one that can be cancelled


def _abort(fs: AbstractFileSystem, upload: dict[str, Any]) -> None:
    # What has failed, or why this was given up, stays what is raised.
    try:
        _start(fs, "abort_multipart_upload", **upload).result()
    except FileNotFoundError:
        _log.debug("the upload to %s/%s is gone already", upload["Bucket"], upload["Key"])
    except Exception as error:  # noqa: BLE001 - reported; the first error is raised
        _log.warning(
            "parts of an upload to %s/%s were left behind (UploadId %s): %s",
            *(upload["Bucket"], upload["Key"], upload["UploadId"], error),
        )


def _request(fs: AbstractFileSystem, method: str, landing: Landing, **kwargs: Any) -> Any:
    request = _start(fs, method, **kwargs)
    while not concurrent.futures.wait([request], timeout=PIECE_S).done:
        if landing.token.cancelled and not landing.is_sent:
            request.cancel()
            landing.token.raise_if_cancelled()
    return request.result()


def _start(fs: AbstractFileSystem, method: str, **kwargs: Any) -> concurrent.futures.Future[Any]:
    call = fs._call_s3(method, **kwargs)  # noqa: SLF001 - the one that can be cancelled
    return asyncio.run_coroutine_threadsafe(call, fs.loop)


class _Part:
    """A part of an open file, which is read as it is sent and never whole in memory.

    To aiohttp it is no file: that would be read in pieces of 64 KiB, each in a thread, and wait for
    the thread each time. What was just staged is read from memory, as botocore does for checksums.

    Args:
        file: The file.
        span: Where the part begins, and how long it is.
        token: Told of each piece that is read.
    """

    def __init__(self, file: Any, span: tuple[int, int], *, token: CancelToken) -> None:
        self._file = file
        self._offset, self._size_bytes = span
        self._token = token
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = (0, self._position, self._size_bytes)[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = None, /) -> bytes:
        self._token.raise_if_cancelled()
        left = max(0, self._size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(left, size)
        data = os.pread(self._file.fileno(), wanted, self._offset + self._position)
        self._position += len(data)
        self._token.progress()
        return data

    def __aiter__(self) -> _Part:
        return self

    async def __anext__(self) -> bytes:
        data = self.read(_PIECE_BYTES)
        if not data:
            raise StopAsyncIteration
        return data


class _Body(io.FileIO):
    """A file that tells of each piece read, and refuses to go on once the caller has given up."""

    def __init__(self, path: str, landing: Landing) -> None:
        super().__init__(path, "rb")
        self._landing = landing
        self._size_bytes = Path(path).stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        self._landing.token.raise_if_cancelled()
        data = super().read(-1 if size is None else size)
        if self.tell() == self._size_bytes:
            self._landing.send()
        self._landing.token.progress()
        return data or b""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        # Who has read it for a checksum, or is to send it once more, begins anew.
        position = super().seek(offset, whence)
        if position < self._size_bytes:
            self._landing.take_back()
        return position
