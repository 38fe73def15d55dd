# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an upload to S3 asks for: one PutObject, or parts and their completion."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.parted_upload import request
from lightning_resilience.core.receipts import Receipt, tag_of


if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.adapters.sent_file import Span


__all__ = ["S3Requests", "put_object"]

_log = logging.getLogger(__name__)


def put_object(fs: AbstractFileSystem, staged_path: str, path: str, *, landing: Landing) -> Receipt:
    """Send a file as one object; a connection that ends early leaves none.

    Args:
        fs: The client, an ``s3fs.S3FileSystem``.
        staged_path: The file.
        path: Bucket and key.
        landing: Tells whether the caller has given up, and is told when all is sent.

    Returns:
        What the storage calls the object.

    Raises:
        CallTimeoutError: The caller has given up.
        OSError: What the storage raised.
    """
    bucket, key, _ = fs.split_path(path)
    with _Body(staged_path, landing) as body:
        landing.token.raise_if_cancelled()
        # The one of s3fs that can be cancelled.
        asked = fs._call_s3("put_object", Bucket=bucket, Key=key, Body=body)  # noqa: SLF001 - see above
        return _receipt(request(fs.loop, asked, landing))


class S3Requests:
    """The requests of one upload in parts, as ``parted_upload.Requests`` describes them.

    Args:
        fs: The client, an ``s3fs.S3FileSystem``.
        path: Bucket and key.
    """

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        bucket, key, _ = fs.split_path(path)
        self._fs = fs
        self._upload: dict[str, Any] = {"Bucket": bucket, "Key": key}

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the client."""
        loop: asyncio.AbstractEventLoop = self._fs.loop
        return loop

    @property
    def shown(self) -> str:
        """The upload, for whom it is reported to."""
        said = self._upload
        return f"{said['Bucket']}/{said['Key']} (UploadId {said.get('UploadId', 'not known')})"

    async def begin(self) -> None:
        """Begin it."""
        made = await self._call("create_multipart_upload")
        self._upload["UploadId"] = made["UploadId"]

    async def send(self, number: int, body: Span) -> str:
        """Send a part; return its ETag."""
        answer = await self._call("upload_part", PartNumber=number, Body=body)
        return str(answer["ETag"])

    async def complete(self, parts: Sequence[tuple[int, str]]) -> Receipt:
        """Make the object of its parts."""
        listed = [{"PartNumber": number, "ETag": tag} for number, tag in parts]
        answer = await self._call("complete_multipart_upload", MultipartUpload={"Parts": listed})
        return _receipt(answer)

    async def abort(self) -> None:
        """Throw away what was sent."""
        try:
            await self._call("abort_multipart_upload")
        except FileNotFoundError:
            _log.debug("the upload to %s is gone already", self.shown)

    async def _call(self, method: str, **kwargs: Any) -> Any:
        return await self._fs._call_s3(method, **self._upload, **kwargs)  # noqa: SLF001 - the one that can be cancelled


def _receipt(answer: Mapping[str, Any]) -> Receipt:
    return Receipt(tag=tag_of(answer.get("ETag")))


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
