# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an upload to Google Cloud Storage asks for: one media upload, or parts and their completion.

gcsfs's own ``put_file`` sends pieces that follow one another, each whole in memory, and cannot be
called off. It stays for buckets that take nothing else: where a request that begins an upload in
parts is refused, and in zonal buckets, which are written by another protocol.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from xml.etree import ElementTree as ET

from lightning_resilience.adapters.google_storage import raise_if_no_bucket
from lightning_resilience.adapters.google_xml import BINARY, ask, parsed, text_of
from lightning_resilience.adapters.parted_upload import request
from lightning_resilience.adapters.sent_file import Whole
from lightning_resilience.core.evidence import one_line
from lightning_resilience.core.receipts import Receipt
from lightning_resilience.core.refused_parts import refuses_parts


if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.adapters.sent_file import Span


__all__ = ["GoogleRequests", "NotTakenError", "note_refusal", "put_object", "takes_parts"]

# On the client, which may be made anew with other rights.
_REFUSED: Final = "_lightning_resilience_refused"

_log = logging.getLogger(__name__)


class NotTakenError(OSError):
    """The bucket takes no upload of this kind, and the file has to go by ``put_file``."""


class _NoSuchUploadError(FileNotFoundError):
    """There is no such upload, or no such bucket."""

    error_code = "NoSuchUpload"


def put_object(fs: AbstractFileSystem, staged_path: str, path: str, *, landing: Landing) -> Receipt:
    """Send a file as one object; a connection that ends early leaves none.

    Args:
        fs: The client, a ``gcsfs.GCSFileSystem``.
        staged_path: The file.
        path: Bucket and key.
        landing: Tells whether the caller has given up, and is told when all is sent.

    Returns:
        What the storage calls the object.

    Raises:
        CallTimeoutError: The caller has given up.
        NotTakenError: It takes none of these.
        NoSuchBucketError: There is no such bucket.
        OSError: What the storage raised.
    """
    bucket, key, _ = fs.split_path(path)
    with Path(staged_path).open("rb") as file:
        landing.token.raise_if_cancelled()
        body = Whole(file, Path(staged_path).stat().st_size, landing=landing)
        try:
            answer = request(fs.loop, _put(fs, (bucket, key), body), landing)
        except FileNotFoundError:
            raise_if_no_bucket(fs, path)
            raise
    return Receipt(generation=str(answer.get("generation", "")))


def takes_parts(fs: AbstractFileSystem, path: str) -> bool:
    """Tell whether nobody has been refused to begin an upload in parts with this client.

    Args:
        fs: The client.
        path: Bucket and key.
    """
    return fs.split_path(path)[0] not in getattr(fs, _REFUSED, ())


def note_refusal(fs: AbstractFileSystem, path: str, error: NotTakenError) -> None:
    """Keep in mind that a bucket takes no uploads in parts, and say so once.

    Args:
        fs: The client.
        path: Bucket and key. The bucket is there: it was asked for the object before.
        error: The refusal.
    """
    if not takes_parts(fs, path):
        return
    bucket = fs.split_path(path)[0]
    setattr(fs, _REFUSED, {*getattr(fs, _REFUSED, ()), bucket})
    _log.warning(
        "gs://%s takes no uploads in parts (%s). gcsfs sends checkpoints there by itself, in one "
        "stream that cannot be called off. Where it is a matter of rights, grant "
        "storage.multipartUploads.create, .abort, .list and .listParts.",
        *(bucket, one_line(error.__cause__ or error)),
    )


class GoogleRequests:
    """The requests of one upload in parts, as ``parted_upload.Requests`` describes them.

    Args:
        fs: The client, a ``gcsfs.GCSFileSystem``.
        path: Bucket and key.
    """

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        bucket, key, _ = fs.split_path(path)
        self._fs = fs
        self._where: tuple[str, str] = (bucket, key)
        self._upload_id = ""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the client."""
        loop: asyncio.AbstractEventLoop = self._fs.loop
        return loop

    @property
    def shown(self) -> str:
        """The upload, for whom it is reported to."""
        return f"{'/'.join(self._where)} (UploadId {self._upload_id or 'not known'})"

    async def begin(self) -> None:
        """Begin it.

        Raises:
            NotTakenError: The bucket takes no uploads in parts.
            OSError: What the storage raised.
        """
        await _refuse_zonal(self._fs, self._where[0])
        try:
            _, content = await self._ask("POST", flag="uploads", headers={"Content-Type": BINARY})
        except Exception as error:
            if refuses_parts(error):
                raise NotTakenError(str(error)) from error
            raise
        self._upload_id = text_of(parsed(content), "UploadId")
        if not self._upload_id:
            message = "the answer names no upload"
            raise NotTakenError(message)

    async def send(self, number: int, body: Span) -> str:
        """Send a part; return its ETag."""
        said, _ = await self._ask(
            "PUT",
            headers={"Content-Length": str(body.size_bytes), "Content-Type": BINARY},
            body=body,
            partNumber=number,
            uploadId=self._upload_id,
        )
        return str(said["ETag"])

    async def complete(self, parts: Sequence[tuple[int, str]]) -> Receipt:
        """Make the object of its parts.

        Raises:
            FileNotFoundError: The upload is gone, with the code that S3 has for it.
            OSError: What the storage raised.
        """
        try:
            said, content = await self._ask(
                "POST",
                headers={"Content-Type": "application/xml"},
                body=_listed(parts),
                uploadId=self._upload_id,
            )
        except FileNotFoundError as error:
            raise _NoSuchUploadError(*error.args) from None
        parsed(content)
        return Receipt(generation=said.get("x-goog-generation", ""))

    async def abort(self) -> None:
        """Throw away what was sent."""
        try:
            await self._ask("DELETE", uploadId=self._upload_id)
        except FileNotFoundError:
            _log.debug("the upload to %s is gone already", self.shown)

    async def _ask(self, method: str, **parts: Any) -> Any:
        return await ask(self._fs, method, self._where, **parts)


def _listed(parts: Sequence[tuple[int, str]]) -> bytes:
    root = ET.Element("CompleteMultipartUpload")
    for number, tag in parts:
        part = ET.SubElement(root, "Part")
        ET.SubElement(part, "PartNumber").text = str(number)
        ET.SubElement(part, "ETag").text = tag
    return ET.tostring(root)


async def _put(fs: AbstractFileSystem, where: tuple[str, str], body: Whole) -> Any:
    bucket, key = where
    await _refuse_zonal(fs, bucket)
    call = fs._call  # noqa: SLF001 - the one that can be cancelled
    return await call(
        "POST",
        f"{fs._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o",  # noqa: SLF001 - gcsfs has no public name for it
        uploadType="media",
        name=key,
        headers={"Content-Length": str(body.size_bytes), "Content-Type": BINARY},
        data=body,
        json_out=True,
    )


async def _refuse_zonal(fs: AbstractFileSystem, bucket: str) -> None:
    is_zonal = getattr(fs, "_is_zonal_bucket", None)
    if is_zonal is not None and await is_zonal(bucket):
        message = "it is a zonal bucket"
        raise NotTakenError(message)
