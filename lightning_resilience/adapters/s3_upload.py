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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.runtime.calls import PIECE_S


if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.landings import Landing


__all__ = ["put_object", "put_parts"]

_PARTS_MAX: Final = 10_000

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
    """Send a file in parts, one after the other, and complete them; on any error abort the upload.

    Args:
        fs: The client, an ``s3fs.S3FileSystem``.
        staged_path: The file.
        path: Bucket and key.
        landing: As for ``put_object``.
        part_bytes: Length of a part, of which one is in memory; more where there were too many.

    Raises:
        CallTimeoutError: The caller has given up.
        OSError: What the storage raised.
    """
    bucket, key, _ = fs.split_path(path)
    landing.token.raise_if_cancelled()
    made = _request(fs, "create_multipart_upload", landing, Bucket=bucket, Key=key)
    upload = {"Bucket": bucket, "Key": key, "UploadId": made["UploadId"]}
    try:
        parts = _send(fs, staged_path, upload, landing=landing, part_bytes=part_bytes)
        landing.send()
        listed = {"Parts": parts}
        _request(fs, "complete_multipart_upload", landing, **upload, MultipartUpload=listed)
    except BaseException:
        _abort(fs, upload)
        raise


def _send(
    fs: AbstractFileSystem,
    staged_path: str,
    upload: dict[str, Any],
    *,
    landing: Landing,
    part_bytes: int,
) -> list[dict[str, Any]]:
    size_bytes = max(part_bytes, -(-Path(staged_path).stat().st_size // _PARTS_MAX))
    parts: list[dict[str, Any]] = []
    with Path(staged_path).open("rb") as file:
        while data := file.read(size_bytes):
            landing.token.raise_if_cancelled()
            number = len(parts) + 1
            sent = _request(fs, "upload_part", landing, **upload, PartNumber=number, Body=data)
            parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            landing.token.progress()
    return parts


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
