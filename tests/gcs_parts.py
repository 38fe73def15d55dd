# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads in parts for the emulator of Google Cloud Storage, which knows only its JSON protocol.

The requests and answers are those that Google documents for its XML protocol;
``test_gcs_parts`` lets Google's own client use them.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET


if TYPE_CHECKING:
    from collections.abc import Callable


NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
SHORTEST_BYTES = 5 * 2**20
"""No part but the last may be shorter."""


class RefusedError(Exception):
    """What the storage says no with."""

    def __init__(self, status: HTTPStatus, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass
class Upload:
    """One that is neither complete nor aborted."""

    bucket: str
    key: str
    content_type: str
    begun: datetime
    parts: dict[int, bytes] = field(default_factory=dict)


class GcsParts:
    """The uploads of one server.

    Args:
        emulator: The module ``gcp_storage_emulator.server``.
    """

    def __init__(self, emulator: Any) -> None:
        self._objects = importlib.import_module("gcp_storage_emulator.handlers.objects")
        self._plain = {name: emulator.HANDLERS[-1][1][name] for name in ("GET", "PUT")}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.uploads: dict[str, Upload] = {}
        self.page = 1000
        """How many uploads one answer lists."""
        self.refusing: dict[str, HTTPStatus] = {}
        """Statuses that buckets answer with to what begins or lists uploads."""
        target = r"^/(?P<bucket_name>[-.\w]+)/(?P<object_id>.*[^/]+)$"
        methods = dict.fromkeys(("GET", "PUT", "POST", "DELETE"), self._on_object)
        routes = ((r"^/(?P<bucket_name>[-.\w]+)$", {"GET": self._on_bucket}), (target, methods))
        # The last one is the plain PUT and GET of the same protocol, which it replaces.
        emulator.HANDLERS = (*emulator.HANDLERS[:-1], *routes)

    def keys(self, bucket: str) -> list[str]:
        """Return whose uploads there are."""
        return sorted(each.key for each in self.uploads.values() if each.bucket == bucket)

    def begin(self, bucket: str, key: str, *, begun: datetime | None = None) -> str:
        """Begin an upload, long ago where the test says so."""
        name = f"upload-{next(self._numbers)}_{'x' * 20}"
        begun = begun or datetime.now(timezone.utc)
        self.uploads[name] = Upload(bucket, key, "application/octet-stream", begun)
        return name

    def _on_bucket(self, request: Any, response: Any, storage: Any) -> None:
        self._answer(request, response, lambda: self._listed(request, storage))

    def _on_object(self, request: Any, response: Any, storage: Any) -> None:
        steps: dict[tuple[str, bool], Callable[[], Any]] = {
            ("POST", False): lambda: self._begun(request, storage),
            ("PUT", True): lambda: self._sent(request, response),
            ("POST", True): lambda: self._completed(request, response, storage),
            ("DELETE", True): lambda: self._aborted(request, response),
        }
        step = steps.get((request.method, "uploadId" in request.query))
        if step is None:
            self._plain[request.method](request, response, storage)
        else:
            # Who does not take its body off the connection breaks it.
            _ = request.data
            self._answer(request, response, step)

    def _answer(self, request: Any, response: Any, step: Callable[[], ET.Element | None]) -> None:
        try:
            with self._lock:
                root = step()
        except RefusedError as refusal:
            response.status = refusal.status
            root = element("Error", Code=refusal.code, Message=request.path)
        if root is not None:
            response.write_file(ET.tostring(root), "application/xml")

    def _begun(self, request: Any, storage: Any) -> ET.Element:
        bucket, key = request.params["bucket_name"], request.params["object_id"]
        if request._parsed_url.query.partition("=")[0] != "uploads":
            raise RefusedError(HTTPStatus.BAD_REQUEST, "InvalidArgument")
        self._admit(bucket, storage)
        name = self.begin(bucket, key)
        self.uploads[name].content_type = request.get_header("Content-Type", "")
        return element("InitiateMultipartUploadResult", Bucket=bucket, Key=key, UploadId=name)

    def _sent(self, request: Any, response: Any) -> None:
        number = int(request.query["partNumber"][0])
        data = request.data or b""
        if request.get_header("Content-Length") is None:
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "MissingContentLength")
        self._upload(request)[1].parts[number] = data
        response["ETag"] = f'"{self._objects._md5(data)}"'
        crc32c, md5 = self._objects._crc32c(data), self._objects._md5(data)
        response["x-goog-hash"] = f"crc32c={crc32c},md5={md5}"

    def _completed(self, request: Any, response: Any, storage: Any) -> ET.Element:
        name, upload = self._upload(request)
        data = b"".join(self._listed_parts(request.data, upload, self._objects._md5))
        made = self._objects._make_object_resource(
            request.base_url, upload.bucket, upload.key, upload.content_type, str(len(data))
        )
        made = {**self._objects._checksums(data, made), "etag": f"{name}-etag"}
        made["md5Hash"] = None
        storage.create_file(upload.bucket, upload.key, data, made)
        del self.uploads[name]
        response["x-goog-generation"] = made["generation"]
        response["x-goog-hash"] = f"crc32c={made['crc32c']}"
        said = {"Bucket": upload.bucket, "Key": upload.key, "ETag": f'"{name}-{len(upload.parts)}"'}
        return element("CompleteMultipartUploadResult", **said)

    @staticmethod
    def _listed_parts(document: bytes, upload: Upload, md5: Callable[[bytes], str]) -> list[bytes]:
        asked = [
            (int(part.findtext("PartNumber", "0")), part.findtext("ETag", ""))
            for part in ET.fromstring(document)  # noqa: S314 - loopback
        ]
        if [number for number, _ in asked] != sorted(number for number, _ in asked):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "InvalidPartOrder")
        for number, tag in asked:
            if tag.strip('"') != md5(upload.parts.get(number, b"")):
                raise RefusedError(HTTPStatus.BAD_REQUEST, "InvalidPart")
        found = [upload.parts[number] for number, _ in asked]
        if any(len(part) < SHORTEST_BYTES for part in found[:-1]):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "EntityTooSmall")
        return found

    def _aborted(self, request: Any, response: Any) -> None:
        del self.uploads[self._upload(request)[0]]
        response.status = HTTPStatus.NO_CONTENT

    def _listed(self, request: Any, storage: Any) -> ET.Element:
        bucket = request.params["bucket_name"]
        self._admit(bucket, storage)
        prefix, after = (request.query.get(n, [""])[0] for n in ("prefix", "key-marker"))
        last = request.query.get("upload-id-marker", [""])[0]
        found = sorted(
            (each.key, name)
            for name, each in self.uploads.items()
            if each.bucket == bucket
            and each.key.startswith(prefix)
            and ((each.key, name) > (after, last) if last else each.key > after or not after)
        )
        root = element("ListMultipartUploadsResult", Bucket=bucket)
        is_cut = len(found) > self.page
        ET.SubElement(root, "IsTruncated").text = str(is_cut).lower()
        if is_cut:
            ET.SubElement(root, "NextKeyMarker").text = found[self.page - 1][0]
            ET.SubElement(root, "NextUploadIdMarker").text = found[self.page - 1][1]
        for key, name in found[: self.page]:
            begun = self.uploads[name].begun.strftime("%Y-%m-%dT%H:%M:%S.000Z")
            root.append(element("Upload", Key=key, UploadId=name, Initiated=begun))
        return root

    def _admit(self, bucket: str, storage: Any) -> None:
        if bucket not in storage.buckets:
            raise RefusedError(HTTPStatus.NOT_FOUND, "NoSuchBucket")
        if bucket in self.refusing:
            raise RefusedError(self.refusing[bucket], "Refused")

    def _upload(self, request: Any) -> tuple[str, Upload]:
        name = request.query["uploadId"][0]
        found = self.uploads.get(name)
        where = (request.params["bucket_name"], request.params["object_id"])
        if found is None or (found.bucket, found.key) != where:
            raise RefusedError(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        return name, found


def element(tag: str, **children: str) -> ET.Element:
    """Make an element of an answer, and its children."""
    is_root = tag.endswith("Result")
    root = ET.Element(tag, {"xmlns": NAMESPACE} if is_root else {})
    for name, text in children.items():
        ET.SubElement(root, name).text = text
    return root
