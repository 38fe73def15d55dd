# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The two storages that take files in parts, and what their clients ask of them, under one name.

``side`` is a fixture of ``conftest.py``: a test that takes it runs once with each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.http_server import Answer
from tests.s3_server import denying_server


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

    from tests.gcs_server import GcsServer
    from tests.http_server import Request
    from tests.s3_server import FailingServer, S3Server


PART_BYTES = 5 * 2**20
"""The smallest that both protocols allow."""

BEGIN, PART, COMPLETE, ABORT = "begin", "part", "complete", "abort"
PUT = "put"
"""An object by one request."""
REMOVE = "remove"
"""An object goes."""


class Side(Protocol):
    """One storage, with a bucket in it."""

    scheme: str
    options: dict[str, Any]
    bucket: str

    def uploads(self) -> list[str]:
        """Return the keys of the uploads in parts that are neither complete nor aborted."""

    def read(self, key: str) -> bytes | None:
        """Return what is stored, past every client of ours; None where nothing is."""

    def buckets(self) -> list[str]:
        """Return the names of all buckets."""

    def url(self, key: str) -> str:
        """Return the URL of an object."""

    def write(self, key: str, data: bytes) -> None:
        """Make an object past every client of ours."""

    def forgetful(
        self, forgets: Callable[[str, str], bool]
    ) -> AbstractContextManager[FailingServer]:
        """Run a server before this one that answers some writes as if it had carried them out."""

    def options_at(self, url: str) -> dict[str, Any]:
        """Return the options of a client of a server that stands before this one."""


class S3Side:
    """``s3://``."""

    scheme = "s3"

    def __init__(self, server: S3Server) -> None:
        self.options, self.bucket = server.storage_options, server.new_bucket()
        self._client, self._server = server.client(), server

    def uploads(self) -> list[str]:
        """Return the keys of what is unfinished."""
        found = self._client.list_multipart_uploads(Bucket=self.bucket)
        return sorted(upload["Key"] for upload in found.get("Uploads", []))

    def read(self, key: str) -> bytes | None:
        """Return what is stored."""
        try:
            answer = self._client.get_object(Bucket=self.bucket, Key=key)
        except self._client.exceptions.NoSuchKey:
            return None
        return bytes(answer["Body"].read())

    def buckets(self) -> list[str]:
        """Return the names of all buckets."""
        return [found["Name"] for found in self._client.list_buckets()["Buckets"]]

    def begin(self, key: str) -> None:
        """Begin an upload and never end it."""
        self._client.create_multipart_upload(Bucket=self.bucket, Key=key)

    def names(self) -> list[str]:
        """Return the names of all objects."""
        found = self._client.list_objects_v2(Bucket=self.bucket)
        return sorted(item["Key"] for item in found.get("Contents", ()))

    def url(self, key: str) -> str:
        """Return the URL of an object."""
        return f"s3://{self.bucket}/{key}"

    def write(self, key: str, data: bytes) -> None:
        """Make an object."""
        self._client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def forgetful(
        self, forgets: Callable[[str, str], bool]
    ) -> AbstractContextManager[FailingServer]:
        """Run a server that forgets."""
        return denying_server(self._server, forgets=forgets)

    def options_at(self, url: str) -> dict[str, Any]:
        """Return the options of a client of another server."""
        return {**self.options, "endpoint_url": url}


class GoogleSide:
    """``gs://``."""

    scheme = "gs"

    def __init__(self, server: GcsServer, bucket: str) -> None:
        self.options, self.bucket, self._server = server.storage_options, bucket, server

    def uploads(self) -> list[str]:
        """Return the keys of what is unfinished."""
        return self._server.parts.keys(self.bucket)

    def read(self, key: str) -> bytes | None:
        """Return what is stored."""
        return self._server.read(self.url(key))

    def buckets(self) -> list[str]:
        """Return the names of all buckets."""
        return self._server.buckets()

    def url(self, key: str) -> str:
        """Return the URL of an object."""
        return f"gs://{self.bucket}/{key}"

    def write(self, key: str, data: bytes) -> None:
        """Make an object."""
        self._server.write(self.url(key), data)

    def forgetful(
        self, forgets: Callable[[str, str], bool]
    ) -> AbstractContextManager[FailingServer]:
        """Run a server that forgets."""
        return denying_server(self._server, forgets=forgets, acknowledgement=google_acknowledgement)

    def options_at(self, url: str) -> dict[str, Any]:
        """Return the options of a client of another server."""
        return {**self.options, "endpoint_url": url}


def google_acknowledgement(request: Request) -> Answer:
    """Return what says that an object is there, under a generation that nobody has seen."""
    if "uploadType=media" in request.path:
        return Answer(body=json.dumps({"generation": "1"}).encode())
    body = b"<CompleteMultipartUploadResult/>"
    return Answer(body=body, headers={"x-goog-generation": "1"})


@pytest.fixture(params=["s3", "gs"])
def side(
    request: pytest.FixtureRequest, s3_server: S3Server, gcs_server_if_any: GcsServer | None
) -> Side:
    """Run the test with each storage that takes files in parts."""
    # Both servers are named here: one that was made in the middle of a test would be its thread.
    del gcs_server_if_any
    pytest.importorskip({"s3": "s3fs", "gs": "gcsfs"}[request.param])
    if request.param == "s3":
        return S3Side(s3_server)
    bucket = request.getfixturevalue("gcs_bucket")
    return GoogleSide(request.getfixturevalue("gcs_server"), bucket)


@dataclass
class Asked:
    """One request of a client.

    Args:
        what: One of the words above; empty for any other.
        body: The name of the argument that brings its body.
        where: The method and whatever else is not named in the call.
        arguments: What is.
    """

    what: str
    body: str
    where: tuple[Any, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Of a part."""
        return int(self.arguments.get("PartNumber") or self.arguments["partNumber"])

    def take_body(self) -> None:
        """Read the whole body: the request is sent."""
        self.arguments[self.body] = self.arguments[self.body].read()


S3_WORDS = {
    "create_multipart_upload": BEGIN,
    "upload_part": PART,
    "complete_multipart_upload": COMPLETE,
    "abort_multipart_upload": ABORT,
    "put_object": PUT,
    "delete_object": REMOVE,
}


def google_word(where: tuple[Any, ...], arguments: dict[str, Any]) -> str:
    """Return what a request of gcsfs is about."""
    method, path = where or (arguments["method"], arguments["path"])
    if "uploadId" in arguments:
        return {"PUT": PART, "POST": COMPLETE, "DELETE": ABORT}[method]
    if method == "POST":
        is_begin = path.endswith("?uploads")
        return BEGIN if is_begin else PUT if arguments.get("uploadType") == "media" else ""
    return REMOVE if method == "DELETE" else ""


def watch(fs: Any, hook: Callable[[Asked, Callable[[], Awaitable[Any]]], Awaitable[Any]]) -> None:
    """Let every request of a client pass through the test.

    Args:
        fs: The client.
        hook: Is given the request, and what makes it.
    """
    is_s3 = hasattr(fs, "_call_s3")
    name = "_call_s3" if is_s3 else "_call"
    inner = getattr(fs, name)

    async def call(*args: Any, **kwargs: Any) -> Any:
        word = S3_WORDS.get(args[0], "") if is_s3 else google_word(args[:2], kwargs)
        asked = Asked(word, "Body" if is_s3 else "data", args, kwargs)
        return await hook(asked, lambda: inner(*args, **asked.arguments))

    setattr(fs, name, call)


async def abort(fs: Any, asked: Asked) -> Any:
    """Abort the upload that a request is about, past what watches the client."""
    if asked.where[0] in S3_WORDS:
        names = {name: asked.arguments[name] for name in ("Bucket", "Key", "UploadId")}
        return await type(fs)._call_s3(fs, "abort_multipart_upload", **names)
    url, name = asked.where[1], asked.arguments["uploadId"]
    return await type(fs)._call(fs, "DELETE", url, uploadId=name)
