# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads in parts that were neither completed nor aborted: which there are, and the end of one.

S3 and Google tell the same of them, through different clients. A role that may not list them on
Google has no rights to make them either, as often as not, so that is no failure.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.google_xml import ask, parsed, text_of
from lightning_resilience.adapters.listings import modified_s
from lightning_resilience.adapters.protocol_names import protocols
from lightning_resilience.core.evidence import one_line
from lightning_resilience.core.refused_parts import refuses_parts


if TYPE_CHECKING:
    from collections.abc import Iterator
    from xml.etree import ElementTree as ET

    from fsspec import AbstractFileSystem

    from lightning_resilience.ports import CancelToken


__all__ = ["Unfinished", "UnfinishedUploads"]

# What is on later pages is found by the next start.
_PAGES_MAX: Final = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An upload that was begun.

    Args:
        key: Of the object that it would make.
        upload_id: What the storage calls it.
        begun_s: When, by the storage's clock, in seconds.
    """

    key: str
    upload_id: str
    begun_s: float


class UnfinishedUploads:
    """Those of a bucket.

    Args:
        fs: Its client.
        bucket: Its name.
    """

    def __init__(self, fs: AbstractFileSystem, bucket: str) -> None:
        self._fs = fs
        self._bucket = bucket
        self._is_s3 = "s3" in protocols(fs)

    @staticmethod
    def are_known_to(fs: AbstractFileSystem) -> bool:
        """Tell whether a storage has such uploads, and its client a way to ask for them."""
        return not {"s3", "gs"}.isdisjoint(protocols(fs))

    def below(self, prefix: str, token: CancelToken) -> list[Unfinished]:
        """Return those whose keys begin with a prefix; none where nobody may list them.

        Raises:
            CallTimeoutError: The caller has given up.
            Exception: What the storage raised.
        """
        found: list[Unfinished] = []
        marker: dict[str, str] | None = {}
        for _ in range(_PAGES_MAX):
            token.raise_if_cancelled()
            if marker is None:
                break
            page, marker = self._page(prefix, marker)
            token.progress()
            found += page
        return found

    def abort(self, upload: Unfinished) -> None:
        """Throw its parts away; one that is gone already has none.

        Raises:
            Exception: What the storage raised.
        """
        try:
            if self._is_s3:
                named = {"Bucket": self._bucket, "Key": upload.key, "UploadId": upload.upload_id}
                self._s3("abort_multipart_upload", **named)
            else:
                self._google("DELETE", upload.key, uploadId=upload.upload_id)
        except FileNotFoundError:
            _log.debug("the upload to %s/%s was ended by somebody else", self._bucket, upload.key)

    def _page(
        self, prefix: str, marker: dict[str, str]
    ) -> tuple[list[Unfinished], dict[str, str] | None]:
        return self._s3_page(prefix, marker) if self._is_s3 else self._google_page(prefix, marker)

    def _s3_page(
        self, prefix: str, marker: dict[str, str]
    ) -> tuple[list[Unfinished], dict[str, str] | None]:
        asked = {"Bucket": self._bucket, "Prefix": prefix, **marker}
        page = self._s3("list_multipart_uploads", **asked)
        found = [
            Unfinished(
                key=item["Key"],
                upload_id=item["UploadId"],
                begun_s=item["Initiated"].timestamp(),
            )
            for item in page.get("Uploads", ())
        ]
        if not page.get("IsTruncated"):
            return found, None
        names = ("KeyMarker", "UploadIdMarker")
        return found, {name: page[f"Next{name}"] for name in names}

    def _google_page(
        self, prefix: str, marker: dict[str, str]
    ) -> tuple[list[Unfinished], dict[str, str] | None]:
        try:
            page = parsed(self._google("GET", "", flag="uploads", prefix=prefix, **marker))
        except Exception as error:
            if not refuses_parts(error):
                raise
            _log.debug("unfinished uploads to %s are not told: %s", self._bucket, one_line(error))
            return [], None
        if page is None:
            return [], None
        found = list(_uploads_in(page))
        if text_of(page, "IsTruncated") != "true":
            return found, None
        return found, {
            "key-marker": text_of(page, "NextKeyMarker"),
            "upload-id-marker": text_of(page, "NextUploadIdMarker"),
        }

    def _s3(self, method: str, **asked: Any) -> Any:
        call = self._fs._call_s3(method, **asked)  # noqa: SLF001 - s3fs has no public name for these
        return asyncio.run_coroutine_threadsafe(call, self._fs.loop).result()

    def _google(self, method: str, key: str, **asked: Any) -> bytes:
        call = ask(self._fs, method, (self._bucket, key), **asked)
        return asyncio.run_coroutine_threadsafe(call, self._fs.loop).result()[1]


def _uploads_in(page: ET.Element) -> Iterator[Unfinished]:
    for item in page.iterfind("{*}Upload"):
        begun_s = modified_s({"modified": text_of(item, "Initiated")})
        # Of what has no age nobody can say that it is old.
        if begun_s is not None:
            key, upload_id = text_of(item, "Key"), text_of(item, "UploadId")
            yield Unfinished(key=key, upload_id=upload_id, begun_s=begun_s)
