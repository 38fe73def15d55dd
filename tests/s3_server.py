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
import http.server
import socket
import struct
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


REGION = "us-east-1"


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


@dataclass
class FailingServer:
    """A server that answers every request with the same failure, and counts them."""

    url: str
    requests: list[str] = field(default_factory=list)

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for s3fs."""
        return S3Server(url=self.url).storage_options


ERRORS = {
    "503": (503, "SlowDown", {"Retry-After": "7"}),
    "500": (500, "InternalError", {}),
    "403": (403, "AccessDenied", {}),
    "expired": (400, "ExpiredToken", {}),
}
"""What a failing server can answer, besides ``reset``: status, code, headers."""


@contextlib.contextmanager
def failing_server(mode: str) -> Iterator[FailingServer]:
    """Run a server that answers with one of ``ERRORS``, or resets every connection (``reset``)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        # Clients of HTTP/1.0 servers wait in vain for "100 Continue".
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            failing.requests.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            # No thread waits for a next request on this connection when the test ends.
            self.close_connection = True
            if mode == "reset":
                # Linger 0: close sends RST instead of FIN.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return
            status, code, headers = ERRORS[mode]
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(status)
            for name, value in {
                **headers,
                "Content-Length": str(len(body)),
                "Connection": "close",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            """Keep the test's output clean."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    failing = FailingServer(url=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield failing
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _never(method: str, path: str) -> bool:
    del method, path
    return False


def _own_answer(
    method: str,
    path: str,
    *,
    denies: Callable[[str, str], bool],
    forgets: Callable[[str, str], bool],
) -> tuple[int, dict[str, str], bytes] | None:
    """Return status, headers and body, None where the working server is to answer."""
    if denies(method, path):
        return 403, {}, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    if not forgets(method, path):
        return None
    result = "CompleteMultipartUploadResult"
    body = f"<{result}><ETag>&quot;new-2&quot;</ETag></{result}>" if method == "POST" else ""
    return 200, {"ETag": '"new"'}, body.encode()


@contextlib.contextmanager
def denying_server(
    server: S3Server,
    denies: Callable[[str, str], bool] = _never,
    *,
    forgets: Callable[[str, str], bool] = _never,
) -> Iterator[FailingServer]:
    """Run a server that passes requests on to ``server``, and answers some by itself.

    Args:
        server: The server that works.
        denies: Tells by method, and path with its query, whether a request is denied.
        forgets: Tells whether a write is answered as if it had been carried out.
    """
    upstream = server.url.removeprefix("http://")

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            denying.requests.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.close_connection = True
            own = _own_answer(self.command, self.path, denies=denies, forgets=forgets)
            if own is not None:
                self.answer(*own)
                return
            connection = http.client.HTTPConnection(upstream, timeout=30)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                found = connection.getresponse()
                self.answer(found.status, dict(found.getheaders()), found.read())
            finally:
                connection.close()

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            own = {"content-length", "connection", "date", "server", "transfer-encoding"}
            for name, value in headers.items():
                if name.lower() not in own:
                    self.send_header(name, value)
            # The length of what a HEAD is about, which has no body.
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(body)
            self.send_header("Content-Length", str(length))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            """Keep the test's output clean."""

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    denying = FailingServer(url=f"http://127.0.0.1:{proxy.server_address[1]}")
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield denying
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
