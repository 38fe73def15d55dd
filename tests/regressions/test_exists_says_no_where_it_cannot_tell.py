# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C28: ``exists`` said no when the truth was "cannot tell", and a resumed run began from zero.

``fsspec/s3fs#750``: bad credentials or no route read like an empty folder. Only the storage's word
that there is no such *key* is a no.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import RetriesExhaustedError
from tests.http_server import Answer, Request, Serving, serving
from tests.ports import free_port
from tests.real_guard import Rank
from tests.s3_server import S3Server
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable


s3fs = pytest.importorskip("s3fs")

PLACES = ["bucket", "bucket/folder", "bucket/folder/a.ckpt"]
QUESTIONS = ["exists", "isdir", "isfile"]


def storage_at(url: str) -> Storage:
    """Clients of a server at ``url``."""
    return Storage(S3Server(url=url).storage_options, spool=lambda: "/nowhere")


def ask(server: Serving, url: str = "s3://bucket/folder/a.ckpt") -> Any:
    """Ask under a guard, as discovery does."""
    asking = partial(storage_at(server.url).exists, url)
    return Rank().call(asking, reading=True)


def refusing(*statuses: int) -> Callable[[Request], Answer]:
    """A server that answers with these statuses in turn, and says 404 from then on."""
    left = list(statuses)

    def answer(request: Request) -> Answer:
        if left:
            return Answer(status=left.pop(0))
        # A key that is not there may be a folder: s3fs asks for one, and this listing is empty.
        is_listing = "list-type" in request.path
        body = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
        return Answer(body=body) if is_listing else Answer(status=404)

    return answer


@pytest.fixture(scope="module")
def nobody() -> str:
    """The URL of a port of loopback that nobody listens on."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("place", PLACES)
def test_a_closed_port_is_no_answer(place: str, nobody: str) -> None:
    """Bucket, folder and object: an outage, which counts against the storage."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - botocore's own, and no OSError
        storage_at(nobody).exists(f"s3://{place}", RecordingToken())

    outcome = classify(caught.value, reading=True)
    assert outcome.failure is FailureClass.TRANSIENT
    assert outcome.counts


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_a_guarded_filesystem_does_not_answer_for_a_closed_port(
    question: str, place: str, nobody: str
) -> None:
    """The questions of fsspec that say no to any error raise instead."""
    fs = guarded(s3fs.S3FileSystem, (), S3Server(url=nobody).storage_options, run=None)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - as above
        getattr(fs, question)(place)

    assert classify(caught.value, reading=True).failure is FailureClass.TRANSIENT


def test_an_outage_is_waited_for_before_the_answer() -> None:
    """Two failures, then the storage's word: absent."""
    with serving(refusing(500, 503)) as server:
        done = ask(server)

    assert (done.value, done.attempts) == (False, 3)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/folder/a.ckpt"])
def test_bad_credentials_are_no_answer(url: str) -> None:
    """A refusal is raised after one attempt, and read by nobody as an empty folder."""
    with (
        serving(lambda _request: Answer(status=403)) as server,
        pytest.raises(RetriesExhaustedError) as caught,
    ):
        ask(server, url)

    assert (caught.value.failure, caught.value.attempts) == ("permanent", 1)
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_missing_bucket_is_no_empty_folder(s3_server: S3Server) -> None:
    """The bucket's root says what a key in it says: the bucket is missing, which is a mistake."""
    storage = storage_at(s3_server.url)

    for url in ("s3://no-bucket-of-that-name", "s3://no-bucket-of-that-name/a.ckpt"):
        with pytest.raises(FileNotFoundError) as caught:
            storage.exists(url, RecordingToken())
        assert classify(caught.value, reading=True).failure is FailureClass.PERMANENT


def test_yes_and_no_are_still_said(s3_server: S3Server, bucket: str) -> None:
    """An object, a folder and a bucket exist; a key that is not there does not."""
    s3_server.client().put_object(Bucket=bucket, Key="folder/a.ckpt", Body=b"x")
    storage = storage_at(s3_server.url)

    found = {
        path: storage.exists(f"s3://{bucket}{path}", RecordingToken())
        for path in ("", "/folder", "/folder/a.ckpt", "/folder/b.ckpt", "/other")
    }

    assert [path for path, there in found.items() if not there] == ["/folder/b.ckpt", "/other"]
