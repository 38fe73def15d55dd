# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The stand-in for Google's uploads in parts, used by clients that nobody here has made."""

from __future__ import annotations

import http.client
import os
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from tests.gcs_parts import NAMESPACE, SHORTEST_BYTES


if TYPE_CHECKING:
    from pathlib import Path

    from tests.gcs_server import GcsServer


storage = pytest.importorskip("google.cloud.storage")
requests = pytest.importorskip("requests")

DATA = os.urandom(SHORTEST_BYTES) * 2 + b"the end"


@pytest.fixture
def bucket(gcs_server: GcsServer, gcs_bucket: str) -> Any:
    """A bucket of Google's client."""
    credentials = pytest.importorskip("google.auth.credentials").AnonymousCredentials()
    client = storage.Client(
        project="testing",
        credentials=credentials,
        client_options={"api_endpoint": gcs_server.url},
    )
    return client.bucket(gcs_bucket)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two parts and a short one."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


def test_googles_client_uploads_parts_at_once(
    gcs_server: GcsServer, bucket: Any, file: Path
) -> None:
    """It compares a checksum of each part, and finds an object with one of the whole."""
    manager = pytest.importorskip("google.cloud.storage.transfer_manager")
    blob = bucket.blob("a folder/{0} ü+~.ckpt")

    manager.upload_chunks_concurrently(
        str(file), blob, chunk_size=SHORTEST_BYTES, worker_type=manager.THREAD
    )

    blob.reload()
    assert gcs_server.read(f"gs://{bucket.name}/{blob.name}") == DATA
    assert blob.crc32c
    assert blob.md5_hash is None
    assert gcs_server.parts.keys(bucket.name) == []


def test_googles_client_aborts(gcs_server: GcsServer, bucket: Any, file: Path) -> None:
    """An upload with a part in it goes, and nothing comes of it."""
    uploads = pytest.importorskip("google.cloud.storage._media.requests")
    url = f"{gcs_server.url}/{bucket.name}/a.ckpt"
    container = uploads.XMLMPUContainer(url, str(file))
    session = requests.Session()

    container.initiate(session, "application/octet-stream")
    part = uploads.XMLMPUPart(url, container.upload_id, str(file), 0, SHORTEST_BYTES, 1)
    part.upload(session)
    before = gcs_server.parts.keys(bucket.name)
    container.cancel(session)

    assert before == ["a.ckpt"]
    assert gcs_server.parts.keys(bucket.name) == []
    assert gcs_server.names(bucket.name) == []
    with pytest.raises(Exception, match="404"):
        container.cancel(session)


def test_a_part_that_was_not_sent_is_no_part_of_an_object(
    gcs_server: GcsServer, bucket: Any, file: Path
) -> None:
    """Neither is one under another name, nor one that is too short."""
    uploads = pytest.importorskip("google.cloud.storage._media.requests")
    url = f"{gcs_server.url}/{bucket.name}/a.ckpt"
    container = uploads.XMLMPUContainer(url, str(file))
    session = requests.Session()
    container.initiate(session, "application/octet-stream")
    for number in (1, 2):
        part = uploads.XMLMPUPart(url, container.upload_id, str(file), 0, 10, number)
        part.upload(session)
        container.register_part(number, part.etag)

    with pytest.raises(Exception, match="400"):
        container.finalize(session)
    container.register_part(2, '"another"')
    with pytest.raises(Exception, match="400"):
        container.finalize(session)

    assert gcs_server.names(bucket.name) == []


def test_uploads_are_listed_page_by_page(
    gcs_server: GcsServer, gcs_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their keys, and those of one key in that of their names."""
    monkeypatch.setattr(gcs_server.parts, "page", 2)
    keys = ["run/a", "run/b", "run/b", "run/c", "runs/d"]
    for key in reversed(keys):
        gcs_server.parts.begin(gcs_bucket, key)
    found, marker = [], ""
    after: list[str | None] = []

    for _ in range(2):
        host = gcs_server.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("GET", f"/{gcs_bucket}?uploads&prefix=run/{marker}")
        page = ET.fromstring(connection.getresponse().read())  # noqa: S314 - loopback
        connection.close()
        found += [key.text or "" for key in page.iterfind(f"{{{NAMESPACE}}}Upload/{{*}}Key")]
        after = [page.findtext(f"{{*}}Next{name}Marker") for name in ("Key", "UploadId")]
        marker = f"&key-marker={after[0]}&upload-id-marker={after[1]}"

    assert found == keys[:-1]
    assert after == [None, None]
