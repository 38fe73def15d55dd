# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A server of Google Cloud Storage on loopback: its JSON protocol, and the uploads in parts of XML.

``gcs_server`` and ``gcs_bucket`` are fixtures of ``conftest.py``: one server for the whole session,
one bucket per test.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from tests.gcs_parts import GcsParts


if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class GcsServer:
    """Where a server is, and how to reach it."""

    url: str
    parts: GcsParts

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for gcsfs."""
        return {"endpoint_url": self.url, "token": "anon", "project": "testing"}

    def new_bucket(self) -> str:
        """Make a bucket that no other test uses."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._ask("POST", "storage/v1/b?project=testing", json.dumps({"name": name}).encode())
        return name

    def read(self, path: str) -> bytes | None:
        """Return an object's content past every client, None where there is none."""
        bucket, _, key = path.removeprefix("gs://").partition("/")
        name = f"download/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media"
        with contextlib.suppress(urllib.error.HTTPError):
            return self._ask("GET", name)
        return None

    def write(self, path: str, data: bytes) -> None:
        """Make an object past every client."""
        bucket, _, key = path.removeprefix("gs://").partition("/")
        query = f"uploadType=media&name={quote(key, safe='')}"
        self._ask("POST", f"upload/storage/v1/b/{bucket}/o?{query}", data)

    def names(self, bucket: str) -> list[str]:
        """Return the names of all objects of a bucket."""
        found = json.loads(self._ask("GET", f"storage/v1/b/{bucket}/o"))
        return sorted(item["name"] for item in found.get("items", []))

    def buckets(self) -> list[str]:
        """Return the names of all buckets."""
        found = json.loads(self._ask("GET", "storage/v1/b?project=testing"))
        return [item["name"] for item in found.get("items", [])]

    def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"} if path.startswith("storage") else {}
        headers.setdefault("Content-Type", "application/octet-stream")
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{self.url}/{path}", data=data, method=method, headers=headers
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - loopback
            return bytes(answer.read())


@pytest.fixture(scope="session")
def gcs_server(gcs_server_if_any: GcsServer | None) -> GcsServer:
    """Run one server for the session."""
    return gcs_server_if_any or pytest.skip("there is no emulator of Google Cloud Storage")


@pytest.fixture(scope="session")
def gcs_server_if_any() -> Iterator[GcsServer | None]:
    """Run it, for who can do without."""
    try:
        emulator: Any = importlib.import_module("gcp_storage_emulator.server")
    except ImportError:
        yield None
        return
    parts = GcsParts(emulator)
    _take_what_is_empty()
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    # gcsfs asks for an object and for a folder at once, and hangs up on the later answer.
    server._api._httpd.handle_error = lambda *_: None
    host, port = server._api._httpd.server_address
    yield GcsServer(url=f"http://{host}:{port}", parts=parts)
    server.stop()


def _take_what_is_empty() -> None:
    # The emulator has None for a body without a byte.
    objects: Any = importlib.import_module("gcp_storage_emulator.handlers.objects")
    media_upload = objects._media_upload

    def upload(request: Any, response: Any, storage: Any) -> Any:
        request._data = request.data or b""
        return media_upload(request, response, storage)

    objects._media_upload = upload


@pytest.fixture
def gcs_bucket(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the test a bucket of its own, and the class of gcsfs that asks nothing by gRPC.

    The other one asks of which kind a bucket is by a protocol that this server does not speak.
    """
    core = pytest.importorskip("gcsfs.core")
    # The package has an attribute of the module's name.
    registry = importlib.import_module("fsspec.registry")
    for name in ("gs", "gcs"):
        monkeypatch.setitem(registry._registry, name, core.GCSFileSystem)
    return gcs_server.new_bucket()
