# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads to S3 that can be called off: one PutObject, or parts and their completion.

Requests run in the client's event loop, and the thread that waits for one looks around meanwhile.
Once its caller has given up, a request that cannot take effect any more is cancelled, and an upload
in parts is aborted, so that a server that never answers keeps neither a connection nor parts. One
that was sent completely is not cancelled: it may be carried out, and only its end says that it was
or was not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.parts import cut
from lightning_resilience.runtime.calls import PIECE_S


if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.core.parts import Cut
    from lightning_resilience.ports import CancelToken


__all__ = ["put_object", "put_parts"]

_DRAIN_S: Final = 5.0
"""Requests that were called off end at once; whoever waits for more than that waits for a bug."""

_log = logging.getLogger(__name__)


def put_object(fs: AbstractFileSystem, staged_path: str, path: str, *, landing: Landing) -> None:
    """Send a file as one object; a connection that ends early leaves none.

    Args:
        fs: The client, an ``s3fs.S3FileSystem``.
        staged_path: The file.
        path: Bucket and key.
        landing: Tells whether the caller has given up, and is told when all is sent.

    Raises:
        CallTimeoutError: The caller has given up.
        OSError: What the storage raised.
    """
    bucket, key, _ = fs.split_path(path)
    with _Body(staged_path, landing) as body:
        landing.token.raise_if_cancelled()
        _request(fs, "put_object", landing, Bucket=bucket, Key=key, Body=body)


def put_parts(
    fs: AbstractFileSystem, staged_path: str, path: str, *, landing: Landing, part_bytes: int
) -> None:
    """Send a file in parts, several at once, and complete them; on any error abort the upload.

    Args:
        fs: The client, an ``s3fs.S3FileSystem``.
        staged_path: The file.
        path: Bucket and key.
        landing: As for ``put_object``.
        part_bytes: Length of a part; longer where there would be too many, see ``core.parts``.

    Raises:
        CallTimeoutError: The caller has given up.
        OSError: What the storage raised.
    """
    bucket, key, _ = fs.split_path(path)
    landing.token.raise_if_cancelled()
    made = _request(fs, "create_multipart_upload", landing, Bucket=bucket, Key=key)
    upload = {"Bucket": bucket, "Key": key, "UploadId": made["UploadId"]}
    try:
        with Path(staged_path).open("rb") as file:
            plan = cut(os.fstat(file.fileno()).st_size, part_bytes=part_bytes)
            parts = _Parts(fs, file.fileno(), upload, plan=plan, landing=landing).sent()
        landing.send()
        listed = {"Parts": parts}
        _request(fs, "complete_multipart_upload", landing, **upload, MultipartUpload=listed)
    except BaseException:
        _abort(fs, upload)
        raise


class _Parts:
    """The parts of one upload, sent in the client's event loop by a few workers.

    Whatever happens, no request is under way any more when this is over: a part that arrived after
    the abort would stay, and be paid for.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        fd: int,
        upload: dict[str, Any],
        *,
        plan: Cut,
        landing: Landing,
    ) -> None:
        self._fs = fs
        self._fd = fd
        self._upload = upload
        self._plan = plan
        self._token = landing.token
        self._numbers = iter(range(1, plan.count + 1))
        self._tags: dict[int, str] = {}
        self._task: asyncio.Task[Any] | None = None

    def sent(self) -> list[dict[str, Any]]:
        """Send all parts; return what completes the upload."""
        sending = asyncio.run_coroutine_threadsafe(self._send(), self._fs.loop)
        try:
            while not concurrent.futures.wait([sending], timeout=PIECE_S).done:
                self._token.raise_if_cancelled()
        except BaseException:
            self._fs.loop.call_soon_threadsafe(self._call_off)
            if not concurrent.futures.wait([sending], timeout=_DRAIN_S).done:
                _log.warning("a part of %s was still under way", self._upload["Key"])
            raise
        if sending.exception() is not None:
            # A body that breaks off because the caller has given up is an error of the network to
            # the client.
            self._token.raise_if_cancelled()
        sending.result()
        return [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]

    def _call_off(self) -> None:
        # Not the future's own cancel, which would not wait for the workers.
        if self._task is not None:
            self._task.cancel()

    async def _send(self) -> None:
        self._task = asyncio.current_task()
        workers = [asyncio.ensure_future(self._work()) for _ in range(self._plan.in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self) -> None:
        for number in self._numbers:
            self._token.raise_if_cancelled()
            offset = (number - 1) * self._plan.part_bytes
            body = _Part(self._fd, offset, self._plan.part_bytes, token=self._token)
            answer = await self._fs._call_s3(  # noqa: SLF001 - the one that can be cancelled
                "upload_part", **self._upload, PartNumber=number, Body=body
            )
            self._tags[number] = answer["ETag"]
            self._token.progress()


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


class _Part(io.RawIOBase):
    """A part of an open file, which is read as it is sent and never whole in memory.

    Args:
        fd: The file.
        offset: Where the part begins.
        limit: How long it is at most; the last one ends with the file.
        token: Told of each piece that is read.
    """

    def __init__(self, fd: int, offset: int, limit: int, *, token: CancelToken) -> None:
        super().__init__()
        self._fd = fd
        self._offset = offset
        self._size_bytes = min(limit, os.fstat(fd).st_size - offset)
        self._token = token
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = (0, self._position, self._size_bytes)[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        self._token.raise_if_cancelled()
        left = max(0, self._size_bytes - self._position)
        data = os.pread(self._fd, min(left, len(buffer)), self._offset + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        self._token.progress()
        return len(data)


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
