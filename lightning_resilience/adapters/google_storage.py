# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What Google Cloud Storage knows and gcsfs does not say: is the content right, is there a bucket?

A length that is right does not say that the content is. The storage has made a checksum of it, and
s3fs, but not gcsfs, sends one along with each request. The package that makes this one comes with
gcsfs; without it nothing is compared here, and a damaged object is found by the digest in its
manifest when it is loaded.

Of a missing object and of a missing bucket gcsfs makes the same error, and throws away what the
storage has said. So the bucket is asked for by itself, and its absence has the code that S3 has for
it.
"""

from __future__ import annotations

import base64
import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsspec import AbstractFileSystem
    from fsspec.callbacks import Callback

    from lightning_resilience.ports import CancelToken


__all__ = ["NoSuchBucketError", "compare_crc32c", "put_file", "raise_if_no_bucket"]

_PIECE_BYTES: Final = 2**20
_SENT_BYTES: Final = 8 * 2**20
"""What one request carries: gcsfs holds it whole, and progress is marked at its end. Its own 50 MiB
would take a slow link for one that stands still."""


class NoSuchBucketError(FileNotFoundError):
    """There is no such bucket: a mistake, and nothing that passes."""

    error_code = "NoSuchBucket"


def put_file(fs: AbstractFileSystem, staged_path: str, path: str, *, progress: Callback) -> None:
    """Send a file.

    Args:
        fs: The client, a ``gcsfs.GCSFileSystem``.
        staged_path: The file.
        path: Bucket and key.
        progress: Told of what is sent.

    Raises:
        NoSuchBucketError: There is no such bucket.
        OSError: What the storage raised.
    """
    try:
        fs.put_file(staged_path, path, callback=progress, chunksize=_SENT_BYTES)
    except FileNotFoundError:
        raise_if_no_bucket(fs, path)
        raise


def compare_crc32c(found: Mapping[str, Any] | None, staged_path: str, token: CancelToken) -> None:
    """Raise unless an object has the CRC32C of the file that was sent.

    Args:
        found: What the storage says of the object; None where it says that there is none, which is
            for others to say.
        staged_path: The file.
        token: Told of each piece that is read.

    Raises:
        CheckpointError: They differ.
        CallTimeoutError: The caller has given up.
        OSError: The file cannot be read.
    """
    told = (found or {}).get("crc32c")
    try:
        import google_crc32c  # noqa: PLC0415 - optional
    except ImportError:
        return
    if not told:
        return
    checksum: Any = google_crc32c.Checksum()  # type: ignore[no-untyped-call] # it has no types
    with Path(staged_path).open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            token.raise_if_cancelled()
            checksum.update(piece)
            token.progress()
    sent = base64.b64encode(checksum.digest()).decode()
    if sent != told:
        message = (
            f"what was sent from {staged_path} has CRC32C {sent}, but the storage has {told}: "
            "it was damaged on the way, and is sent again"
        )
        raise CheckpointError(message)


def raise_if_no_bucket(fs: AbstractFileSystem, path: str) -> None:
    """Raise unless the bucket of an object that is not there exists.

    Args:
        fs: The client, a ``gcsfs.GCSFileSystem``.
        path: Bucket and key.

    Raises:
        NoSuchBucketError: There is none.
        OSError: It cannot be told.
    """
    bucket = fs.split_path(path)[0]
    try:
        # Not by ``info``, to which an empty bucket is missing where only its objects may be asked
        # for; and no more than one name of what may be many.
        fs.call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
    except FileNotFoundError as error:
        raise NoSuchBucketError(errno.ENOENT, f"there is no bucket {bucket}", path) from error
