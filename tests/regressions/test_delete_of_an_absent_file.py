# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C68: deleting an already deleted checkpoint failed, and storage options had no way in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem


if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3_server import S3Server


def test_removing_a_checkpoint_twice_succeeds_locally(tmp_path: Path) -> None:
    """Absent is success, also where the folder is absent too."""
    fs, path = private_filesystem(str(tmp_path / "run" / "x.ckpt"))
    store = FsspecObjectStore(fs)

    store.remove(path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x.ckpt").touch()
    store.remove(path)
    store.remove(path)

    assert list((tmp_path / "run").iterdir()) == []


def test_removing_a_checkpoint_twice_succeeds_with_the_users_storage_options(
    s3_server: S3Server, bucket: str
) -> None:
    """Endpoint and credentials come from ``storage_options`` alone, and reach the server."""
    pytest.importorskip("s3fs")
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="run/x.ckpt", Body=b"x")
    fs, path = private_filesystem(f"s3://{bucket}/run/x.ckpt", s3_server.storage_options)
    store = FsspecObjectStore(fs)

    store.remove(path)
    store.remove(path)

    assert fs.endpoint_url == s3_server.url
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
