# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An S3-protocol server on loopback that can be ill, and counts what reaches it then."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import fsspec
from job import STRIKE
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"""


class Quiet(WSGIRequestHandler):
    """Writes no line for each request."""

    def log(self, *_: object) -> None:
        """Say nothing: the storage counts, and the driver tells."""


class Storage:
    """The server. Used as a context manager; any thread may ask.

    Attributes:
        struck_at_s: When it has fallen ill; 0 while it has not.
        outage_s: For how long it is ill then, in seconds.
        refused: Requests that it has refused.
    """

    def __init__(self) -> None:
        self.struck_at_s = 0.0
        self.outage_s = math.inf
        self.refused = 0
        self._lock = threading.Lock()
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def well_at_s(self) -> float:
        """When it is well again."""
        return self.struck_at_s + self.outage_s

    def reset(self, bucket: str, *, outage_s: float) -> None:
        """Be well until the next strike, and have an empty bucket."""
        self.struck_at_s, self.outage_s, self.refused = 0.0, outage_s, 0
        fsspec.filesystem("s3", endpoint_url=self.url, skip_instance_cache=True).mkdir(bucket)

    def __call__(self, request: dict[str, Any], answer: Callable[..., Any]) -> Iterable[bytes]:
        """Serve one request, as WSGI has it."""
        if request["PATH_INFO"] == STRIKE:
            with self._lock:
                self.struck_at_s = self.struck_at_s or time.monotonic()
            answer("204 No Content", [])
            return []
        if not self._is_ill():
            served: Iterable[bytes] = self._application(request, answer)
            return served
        with self._lock:
            self.refused += 1
        request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(SLOW_DOWN)))]
        answer("503 Slow Down", headers)
        return [b"" if request["REQUEST_METHOD"] == "HEAD" else SLOW_DOWN]

    def _is_ill(self) -> bool:
        return bool(self.struck_at_s) and time.monotonic() < self.well_at_s
