# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A few bytes of our own in storage: staged, published as a whole, and measured.

Manifests, notes and probes go the way of a checkpoint, and are believed like one: once the storage
reports their size, past every cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.adapters.staging import discard, stage
from lightning_resilience.core.evidence import redacted
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from lightning_resilience.adapters.object_store import FsspecObjectStore
    from lightning_resilience.ports import CancelToken


__all__ = ["check_size", "put"]


def put(
    store: FsspecObjectStore, path: str, data: bytes, *, nonce: str, token: CancelToken
) -> None:
    """Write a small object as a whole, over an older one of its name; it is not measured yet.

    Args:
        store: Where.
        path: Its path there.
        data: What is written.
        nonce: For the name of a staged file, which is gone afterwards.
        token: Of the call.

    Raises:
        OSError: What the filesystem or the storage raised.
    """
    staged_path = store.staging_path(path, nonce)
    try:
        staged = stage(lambda file: file.write(data), staged_path, token)
        store.publish(staged.path, path, token)
    finally:
        discard(staged_path)


def check_size(store: FsspecObjectStore, path: str, size_bytes: int | None) -> None:
    """Ask the storage whether all is there.

    Args:
        store: Where.
        path: The object's path there.
        size_bytes: What was written; None where nothing was.

    Raises:
        CheckpointError: It reports another size, or nothing.
        OSError: What the filesystem or the storage raised.
    """
    found = store.size(path)
    if found != size_bytes:
        there = "nothing is there" if found is None else f"{found} bytes are there"
        message = f"{size_bytes} bytes were written to {redacted(path)}, but {there}"
        raise CheckpointError(message)
