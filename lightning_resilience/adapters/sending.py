# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a file is sent to a storage: by requests of ours where we know them, else by ``put_file``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_resilience.adapters import google_storage, google_upload, s3_upload
from lightning_resilience.adapters.landings import Progress
from lightning_resilience.adapters.protocol_names import is_google, protocols
from lightning_resilience.core.receipts import Receipt


if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.adapters.parted_upload import Requests


__all__ = ["put_file", "requests_of", "send_at_once"]

# What they send is one request where it is small enough, and they tell of it afterwards.
_SENDING_AT_ONCE: Final = frozenset({"gs", "gcs", "abfs", "abfss", "az", "adl"})


def requests_of(fs: AbstractFileSystem, path: str) -> Requests | None:
    """Return what an upload in parts asks for; None where nothing is known of such.

    Args:
        fs: The client.
        path: Where the file is to appear.
    """
    if "s3" in protocols(fs):
        return s3_upload.S3Requests(fs, path)
    if is_google(fs) and google_upload.takes_parts(fs, path):
        return google_upload.GoogleRequests(fs, path)
    return None


def send_at_once(
    fs: AbstractFileSystem, staged_path: str, path: str, *, landing: Landing
) -> Receipt:
    """Send a short file by one request; return what the storage calls it, if anything.

    Args:
        fs: The client.
        staged_path: The file.
        path: Where it is to appear.
        landing: Of the publication.

    Raises:
        CallTimeoutError: The caller has given up.
        NotTakenError: It is to go by ``put_file``.
        OSError: What the filesystem or the storage raised.
    """
    if "s3" in protocols(fs):
        return s3_upload.put_object(fs, staged_path, path, landing=landing)
    if is_google(fs):
        return google_upload.put_object(fs, staged_path, path, landing=landing)
    return put_file(fs, staged_path, path, landing=landing)


def put_file(fs: AbstractFileSystem, staged_path: str, path: str, *, landing: Landing) -> Receipt:
    """Send a file as its filesystem does by itself; as ``send_at_once`` otherwise."""
    landing.token.raise_if_cancelled()
    if "memory" in protocols(fs):
        data = Path(staged_path).read_bytes()
        landing.send()
        fs.pipe_file(path, data)
        return Receipt()
    if not _SENDING_AT_ONCE.isdisjoint(protocols(fs)):
        landing.send()
    progress = Progress(landing, size_bytes=Path(staged_path).stat().st_size)
    if is_google(fs):
        google_storage.put_file(fs, staged_path, path, progress=progress)
    else:
        fs.put_file(staged_path, path, callback=progress)
    return Receipt()
