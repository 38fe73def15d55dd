# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Real S3-protocol servers on loopback: one that works, and one that only ever fails.

``s3_server`` and ``bucket`` are fixtures of ``conftest.py``: one server for the whole session, one
bucket per test. ``failing_server`` is a context manager for a single test, and so is
``denying_server``, which stands before the working one, and denies some requests
or forgets them.
"""

from __future__ import annotations

import contextlib
import http.client
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.http_server import Answer, s3_error, serving


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.http_server import Request, Serving


REGION = "us-east-1"


class Located(Protocol):
    """Any server."""

    @property
    def url(self) -> str:
        """Where it is."""


@dataclass(frozen=True)
class S3Server:
    """Where a server is, and how to log in."""

    url: str

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for s3fs."""
        return {
            "key": "testing",
            "secret": "testing",
            "endpoint_url": self.url,
            "client_kwargs": {"region_name": REGION},
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same for processes that are configured by their environment."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.url,
        }

    def client(self) -> Any:
        """A client of another library, which shares no cache with what is tested."""
        return pytest.importorskip("boto3").client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    def new_bucket(self) -> str:
        """Make a bucket that no other test uses."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Run one working server for the session."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - only tests of S3 pay for it

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(url=f"http://{host}:{port}")
    server.stop()


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """Give the test a bucket of its own."""
    return s3_server.new_bucket()


@dataclass(frozen=True)
class FailingServer:
    """A server that refuses, and keeps what it was asked.

    Args:
        serving: The server under it.
    """

    serving: Serving

    @property
    def requests(self) -> list[str]:
        """Method and path of every request."""
        return [str(request) for request in self.serving.requests]

    @property
    def url(self) -> str:
        """Where it is."""
        return self.serving.url

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for s3fs."""
        return S3Server(url=self.url).storage_options


ERRORS: dict[str, Answer | None] = {
    "503": s3_error(503, "SlowDown", Retry_After="7"),
    "500": s3_error(500, "InternalError"),
    "403": s3_error(403, "AccessDenied"),
    "expired": s3_error(400, "ExpiredToken"),
    "reset": None,
}
"""What a failing server can answer."""


@contextlib.contextmanager
def failing_server(mode: str) -> Iterator[FailingServer]:
    """Run a server that answers with one of ``ERRORS``."""
    with serving(lambda _: ERRORS[mode]) as refusing:
        yield FailingServer(refusing)


def _never(method: str, path: str) -> bool:
    del method, path
    return False


def _acknowledgement(request: Request) -> Answer:
    """Return what says that a write was carried out, or an upload completed."""
    result = "CompleteMultipartUploadResult"
    completed = f"<{result}><ETag>&quot;new-2&quot;</ETag></{result}>"
    body = completed.encode() if request.method == "POST" else b""
    return Answer(status=200, body=body, headers={"ETag": '"new"'})


@contextlib.contextmanager
def denying_server(
    server: Located,
    denies: Callable[[str, str], bool] = _never,
    *,
    forgets: Callable[[str, str], bool] = _never,
    acknowledgement: Callable[[Request], Answer] = _acknowledgement,
) -> Iterator[FailingServer]:
    """Run a server that passes requests on to ``server``, and answers some by itself.

    Args:
        server: The server that works.
        denies: Tells by method, and path with its query, whether a request is denied.
        forgets: Tells whether a write is answered as if it had been carried out.
        acknowledgement: Makes that answer.
    """

    def answer(request: Request) -> Answer | None:
        if forgets(request.method, request.path):
            return acknowledgement(request)
        return ERRORS["403"] if denies(request.method, request.path) else pass_on(request, server)

    with serving(answer) as denying:
        yield FailingServer(denying)


def pass_on(request: Request, server: Located) -> Answer:
    """Return what another server answers to a request."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        connection.request(request.method, request.path, request.body, dict(request.headers))
        found = connection.getresponse()
        body = found.read()
    finally:
        connection.close()
    # What our own connection says of itself, and the length of what a HEAD is about.
    own = {"connection", "date", "server", "transfer-encoding"}
    if request.method != "HEAD":
        own.add("content-length")
    headers = {name: value for name, value in found.getheaders() if name.lower() not in own}
    return Answer(status=found.status, body=body, headers=headers)
