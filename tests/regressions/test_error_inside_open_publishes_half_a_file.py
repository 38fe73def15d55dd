# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C05: an error inside ``with fs.open(...)`` published what was written up to it.

The other half of the case, an upload in parts of which one fails, is tried part by part in
``test_s3_upload`` and ``test_early_upload``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from lightning_resilience.adapters.filesystem import guarded


if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3_server import S3Server


s3fs = pytest.importorskip("s3fs")


def fail_in_the_middle(fs: Any, path: str) -> None:
    """Write ten bytes, then fail."""
    with fs.open(path, "wb") as file:
        file.write(b"x" * 10)
        raise ZeroDivisionError


def test_plain_fsspec_publishes_the_half(s3_server: S3Server, bucket: str) -> None:
    """The symptom, so that this file notices when it is gone upstream."""
    fs = fsspec.filesystem("s3", **s3_server.storage_options, skip_instance_cache=True)

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle(fs, f"{bucket}/x.ckpt")

    assert [found["Size"] for found in contents(s3_server, bucket)] == [10]


def test_a_guarded_file_publishes_nothing(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    """No object, no open upload, no staged file."""
    fs = guarded(s3fs.S3FileSystem, (), s3_server.storage_options, run=None, spool=str(tmp_path))

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle(fs, f"{bucket}/x.ckpt")

    assert contents(s3_server, bucket) == []
    assert "Uploads" not in s3_server.client().list_multipart_uploads(Bucket=bucket)
    assert not list(tmp_path.rglob("*.staged"))


def contents(server: S3Server, bucket: str) -> list[Any]:
    """What is in the bucket."""
    found: list[Any] = server.client().list_objects_v2(Bucket=bucket).get("Contents", [])
    return found
