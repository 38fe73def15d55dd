# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback whose answers are a function of the test's.

It notes each request with the instant at which it arrived, because what reaches the storage, and
when, is what tests of retries are about.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import socketserver
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it arrived.

    Args:
        method: ``PUT`` and the like.
        path: Path with query.
        headers: Its headers.
        body: What it brought.
        at_s: When it arrived, on the monotonic clock that all processes of a host share.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    at_s: float

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is sent back."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Serving:
    """A server under way, and what has reached it."""

    url: str
    requests: list[Request] = field(default_factory=list)


def s3_error(status: int, code: str, **headers: str) -> Answer:
    """The answer of an S3 server that refuses."""
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status=status, body=body, headers=named)


@contextlib.contextmanager
def in_background(server: socketserver.BaseServer, *, poll_s: float = 0.05) -> Iterator[None]:
    """Let a server answer in a thread, until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(poll_s,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def serving(
    answer: Callable[[Request], Answer | None], *, at_once: bool = False
) -> Iterator[Serving]:
    """Run a server; where ``answer`` returns None, the connection is reset.

    It is called for one request at a time, or ``at_once`` for all that there are.
    """
    lock: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if at_once else threading.Lock()
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        # Clients of HTTP/1.0 servers wait in vain for "100 Continue".
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            request = Request(
                method=self.command,
                path=self.path,
                headers=dict(self.headers.items()),
                body=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
                at_s=time.monotonic(),
            )
            # No thread waits for a next request on this connection when the test ends.
            self.close_connection = True
            with lock:
                found = answer(request)
                state.requests.append(request)
            if found is None:
                # Linger 0: close sends RST instead of FIN.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                self.send(found)

        def send(self, found: Answer) -> None:
            self.send_response(found.status)
            length = {"Content-Length": str(len(found.body)), "Connection": "close"}
            for name, value in {**length, **found.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found.body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            """Keep the test's output clean."""

    class Server(http.server.ThreadingHTTPServer):
        # Many ranks come in the same instant; none of them is to be refused by the kernel.
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        state = Serving(url=f"http://127.0.0.1:{server.server_address[1]}")
        with in_background(server):
            yield state
