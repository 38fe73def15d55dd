# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Uploads to Google Cloud Storage: where it takes no parts, who pays, and where nobody answers."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters import object_store, parted_upload
from lightning_resilience.adapters.google_upload import GoogleRequests
from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.adapters.sent_file import Span
from lightning_resilience.adapters.staging import stage
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.core.parts import Lengths
from lightning_resilience.errors import CallTimeoutError
from tests.http_server import Answer, serving
from tests.tokens import RecordingToken
from tests.uploads import BEGIN, COMPLETE, PART, PART_BYTES, PUT, GoogleSide, S3Side, watch


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.gcs_server import GcsServer
    from tests.http_server import Request
    from tests.s3_server import S3Server
    from tests.uploads import Asked


pytest.importorskip("gcsfs")

# aiohttp says so of what gcsfs gives it.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

HANG_S = 30.0
LONG = b"x" * (2 * PART_BYTES + 1)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = Lengths(single_bytes=PART_BYTES, shortest_bytes=PART_BYTES, longest_bytes=PART_BYTES)
    monkeypatch.setattr(object_store, "_LENGTHS", lengths)


@pytest.fixture
def side(gcs_server: GcsServer, gcs_bucket: str) -> GoogleSide:
    """A bucket."""
    return GoogleSide(gcs_server, gcs_bucket)


class Client:
    """A store, and the requests that its client has made.

    Args:
        options: Of the filesystem.
        spool: Where files are staged.
    """

    def __init__(self, options: dict[str, Any], spool: Path) -> None:
        fs, _ = private_filesystem("gs://", options)
        self.fs: Any = fs
        self.store = FsspecObjectStore(fs, spool_directory=str(spool), patience_s=0.2)
        self.asked: list[Asked] = []
        watch(fs, self._note)

    async def _note(self, asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        self.asked.append(asked)
        return await go()

    @property
    def words(self) -> list[str]:
        """What was asked."""
        return [asked.what for asked in self.asked]

    def publish(self, url: str, data: bytes, token: RecordingToken | None = None) -> None:
        """Stage and publish."""
        name = self.store.staging_path(url, uuid.uuid4().hex)
        staged = stage(lambda file: file.write(data), name, RecordingToken())
        self.store.publish(staged.path, url, token or RecordingToken())


@pytest.fixture
def client(side: GoogleSide, tmp_path: Path) -> Client:
    """A client of the bucket."""
    return Client(side.options, tmp_path)


@pytest.mark.parametrize("status", [400, 403, 404, 405, 501])
def test_a_bucket_that_takes_no_parts_is_sent_the_file_whole(
    status: int,
    client: Client,
    side: GoogleSide,
    gcs_server: GcsServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is asked once, and whoever runs the job is told once what to grant."""
    gcs_server.parts.refusing[side.bucket] = HTTPStatus(status)

    for name in ("a.ckpt", "b.ckpt"):
        client.publish(side.url(name), LONG)
        assert side.read(name) == LONG
        assert client.store.size(side.url(name)) == len(LONG)

    said = [line for line in caplog.messages if "takes no uploads in parts" in line]
    assert client.words.count(BEGIN) == 1
    assert len(said) == 1
    assert f"gs://{side.bucket}" in said[0]
    assert "storage.multipartUploads.create" in said[0]


def test_another_client_asks_again(
    client: Client, side: GoogleSide, gcs_server: GcsServer, tmp_path: Path
) -> None:
    """Its rights may be others, and so may another bucket's."""
    gcs_server.parts.refusing[side.bucket] = HTTPStatus.FORBIDDEN
    client.publish(side.url("a.ckpt"), LONG)
    other = gcs_server.new_bucket()
    del gcs_server.parts.refusing[side.bucket]

    client.publish(f"gs://{other}/a.ckpt", LONG)
    second = Client(side.options, tmp_path)
    second.publish(side.url("a.ckpt"), LONG)

    assert client.words.count(COMPLETE) == 1
    assert second.words.count(COMPLETE) == 1


@pytest.mark.parametrize("status", [401, 408, 429, 500, 503])
def test_a_storage_that_is_ill_is_no_bucket_that_takes_no_parts(
    status: int, client: Client, side: GoogleSide, gcs_server: GcsServer
) -> None:
    """The attempt fails, and the next one asks again."""
    gcs_server.parts.refusing[side.bucket] = HTTPStatus(status)

    expected = {401: FailureClass.AUTH, 429: FailureClass.THROTTLE, 503: FailureClass.THROTTLE}
    for _ in range(2):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - gcsfs's own HttpError
            client.publish(side.url("a.ckpt"), LONG)
        outcome = classify(caught.value)
        assert outcome.failure is expected.get(status, FailureClass.TRANSIENT)

    assert client.words.count(BEGIN) == 2
    assert side.read("a.ckpt") is None


def test_an_endpoint_without_the_xml_protocol_is_sent_the_file_whole(
    client: Client, side: GoogleSide
) -> None:
    """It may answer anything, only no name of an upload."""

    async def answer(asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        return ({}, b"hello") if asked.what == BEGIN else await go()

    watch(client.fs, answer)

    client.publish(side.url("a.ckpt"), LONG)

    assert side.read("a.ckpt") == LONG


def test_a_file_that_was_to_be_sent_while_it_grows_is_sent_whole(
    client: Client, side: GoogleSide, gcs_server: GcsServer, tmp_path: Path
) -> None:
    """Its writer is not disturbed, and the next file is not begun early."""
    gcs_server.parts.refusing[side.bucket] = HTTPStatus.FORBIDDEN
    url, token = side.url("a.ckpt"), RecordingToken()

    for is_first in (True, False):
        name = str(tmp_path / f"staged-{is_first}")
        with client.store.upload(name, url, token, expected_bytes=len(LONG)) as upload:
            assert (upload is not None) == is_first
            on_growth = upload.grow if upload is not None else None
            staged = stage(lambda file: file.write(LONG), name, token, on_growth=on_growth)
            client.store.publish(staged.path, url, token, upload=upload)

    assert side.read("a.ckpt") == LONG
    assert client.words.count(BEGIN) == 1


@pytest.mark.parametrize("data", [b"short", LONG], ids=["one request", "parts"])
def test_a_zonal_bucket_is_left_to_gcsfs(client: Client, side: GoogleSide, data: bytes) -> None:
    """It is written by another protocol, which gcsfs speaks; here it goes on with this one."""

    async def is_zonal(bucket: str) -> bool:
        return bucket == side.bucket

    client.fs._is_zonal_bucket = is_zonal

    client.publish(side.url("a.ckpt"), data)

    assert side.read("a.ckpt") == data
    assert not {BEGIN, PUT} & set(client.words)


def test_who_pays_is_said_in_each_request(side: GoogleSide, tmp_path: Path) -> None:
    """In the header that the XML protocol has for it."""
    client = Client({**side.options, "requester_pays": "payer"}, tmp_path)

    client.publish(side.url("a.ckpt"), LONG)

    parts = [asked for asked in client.asked if asked.what in {BEGIN, PART, COMPLETE}]
    payers = {asked.arguments["headers"]["x-goog-user-project"] for asked in parts}
    assert payers == {"payer"}


def test_an_error_that_comes_with_the_status_of_a_success_is_one(
    client: Client, side: GoogleSide
) -> None:
    """A completion takes long, and servers of this protocol may answer before they know."""

    async def answer(asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        if asked.what != COMPLETE:
            return await go()
        return {}, b"<Error><Code>InternalError</Code><Message>no</Message></Error>"

    watch(client.fs, answer)

    with pytest.raises(OSError, match="InternalError") as caught:
        client.publish(side.url("a.ckpt"), LONG)

    assert classify(caught.value).failure is FailureClass.TRANSIENT
    assert side.read("a.ckpt") is None
    assert side.uploads() == []


def test_a_body_is_read_piece_by_piece_and_its_length_is_said(
    side: GoogleSide, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part is whole in memory, and none is sent in chunks of unknown number."""
    longest = 0
    read = Span.read

    def noted(span: Span, size: int | None = None, /) -> bytes:
        nonlocal longest
        data = read(span, size)
        longest = max(longest, len(data))
        return data

    monkeypatch.setattr(Span, "read", noted)

    for data in (b"y" * PART_BYTES, LONG):
        client.publish(side.url("a.ckpt"), data)

    assert longest == 2**20
    lengths = [
        int(asked.arguments["headers"]["Content-Length"])
        for asked in client.asked
        if asked.what in {PART, PUT}
    ]
    assert sorted(lengths) == [1, PART_BYTES, PART_BYTES, PART_BYTES]


@pytest.mark.usefixtures("gcs_bucket")
def test_a_server_that_never_answers_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither while parts hang, nor when they are thrown away; what may be left is told."""
    monkeypatch.setattr(parted_upload, "_ABORT_S", 0.2)
    released, hanging = threading.Event(), threading.Event()
    token = RecordingToken()

    def answer(request: Request) -> Answer:
        if request.method == "POST" and request.path.endswith("?uploads"):
            return Answer(body=b"<Result><UploadId>1</UploadId></Result>")
        if request.method in {"PUT", "DELETE"}:
            hanging.set()
            released.wait(HANG_S)
        return Answer(status=404)

    with serving(answer, at_once=True) as server:
        options = {"endpoint_url": server.url, "token": "anon"}
        client = Client(options, tmp_path)
        monkeypatch.setattr(object_store, "find_info", lambda *_: None)

        def give_up() -> None:
            hanging.wait(HANG_S)
            token.cancelled = True

        helper = threading.Thread(target=give_up)
        helper.start()
        begun_s = time.monotonic()
        with pytest.raises(CallTimeoutError):
            client.publish("gs://bucket/a.ckpt", LONG, token)
        took_s = time.monotonic() - begun_s
        released.set()
        helper.join()

    assert took_s < HANG_S / 2
    assert "were left behind" in caplog.text
    assert "still under way" not in caplog.text


@pytest.mark.usefixtures("gcs_bucket")
def test_parts_reach_a_server_that_others_have_made(s3_server: S3Server, tmp_path: Path) -> None:
    """The protocol is that of S3, so a server of that takes the same requests."""
    theirs = S3Side(s3_server)
    options = {"endpoint_url": s3_server.url, "token": "anon"}
    fs: Any = private_filesystem("gs://", options)[0]
    file = tmp_path / "file"
    file.write_bytes(LONG)

    def ask(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, fs.loop).result(HANG_S)

    with file.open("rb") as opened:
        for key in ("run/{a} b.ckpt", "run/aborted.ckpt"):
            requests = GoogleRequests(fs, f"{theirs.bucket}/{key}")
            ask(requests.begin())
            tags = []
            for number, (offset, size) in enumerate(
                [(0, PART_BYTES), (PART_BYTES, PART_BYTES), (2 * PART_BYTES, 1)], start=1
            ):
                body = Span(opened, offset, size, token=RecordingToken())
                tags.append((number, ask(requests.send(number, body))))
            if key == "run/aborted.ckpt":
                assert theirs.uploads() == [key]
                ask(requests.abort())
            else:
                ask(requests.complete(tags))

    assert theirs.read("run/{a} b.ckpt") == LONG
    assert theirs.read("run/aborted.ckpt") is None
    assert theirs.uploads() == []
