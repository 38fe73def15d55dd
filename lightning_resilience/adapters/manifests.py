# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Manifests in storage: written after the checkpoint is verified, removed before it is touched.

``core.manifest`` has what they hold. A save removes the older one of that name first and writes its
own last, so that at any instant a manifest stands beside what it describes, or there is none.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_resilience.adapters.object_store import find_info
from lightning_resilience.adapters.small_objects import check_size, put
from lightning_resilience.adapters.trees import digest_of_file, files_below
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.manifest import (
    decode_manifest,
    difference,
    encode_manifest,
    manifest_path,
)
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import CheckpointError, CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_resilience.adapters.storage import Place
    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.ports import CancelToken


__all__ = [
    "check_contents",
    "check_in_place",
    "raw_manifest",
    "read_manifest",
    "remove_manifest",
    "write_manifest",
]

_log = logging.getLogger(__name__)


def write_manifest(place: Place, manifest: Manifest, *, nonce: str, token: CancelToken) -> None:
    """Commit the checkpoint at ``place``: the last step of a save, after it was verified.

    Args:
        place: Where the checkpoint is.
        manifest: What it is.
        nonce: For the name of a staged file.
        token: Of the call.

    Raises:
        CheckpointError: The storage reports another size than was written, or nothing.
        OSError: What the filesystem or the storage raised.
    """
    path = manifest_path(place.path)
    data = encode_manifest(manifest)
    put(place.store, path, data, nonce=nonce, token=token)
    check_size(place.store, path, len(data))


def remove_manifest(place: Place, token: CancelToken) -> None:
    """Remove the manifest of the checkpoint at ``place``, so that this may be changed.

    Where that is not allowed, the one that is written after the change replaces it all the same.

    Raises:
        OSError: What the filesystem or the storage raised.
    """
    token.raise_if_cancelled()
    path = manifest_path(place.path)
    try:
        place.store.unlink(path, token)
    except Exception as error:
        if not _is_refused(error):
            raise
        _log.debug("%s cannot be removed: %s", redacted(path), error)


def read_manifest(place: Place, token: CancelToken) -> Manifest | None:
    """Return the manifest of the checkpoint at ``place``, None where it has none.

    Raises:
        ConfigError: A later version of this package has written it.
        CorruptCheckpointError: It is no manifest.
        OSError: What the filesystem or the storage raised: it cannot be told whether there is one.
    """
    raw = raw_manifest(place, token)
    if raw is None:
        return None
    return decode_manifest(raw, path=redacted(manifest_path(place.path)))


def raw_manifest(place: Place, token: CancelToken) -> bytes | None:
    """Return the bytes of the manifest of the checkpoint at ``place``, None where it has none.

    Raises:
        OSError: What the filesystem or the storage raised: it cannot be told whether there is one.
    """
    token.raise_if_cancelled()
    path = manifest_path(place.path)
    try:
        return bytes(place.fs.cat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        if not _is_refused(error):
            raise
        # Object storage answers so where a role may not list, and there is none.
        _log.warning("%s cannot be read, so the checkpoint is not verified: %s", path, error)
        return None


def _is_refused(error: Exception) -> bool:
    return classify(error).failure is FailureClass.PERMANENT


def check_contents(
    place: Place,
    manifest: Manifest,
    found: Mapping[str, tuple[int, str | None]],
    *,
    token: CancelToken,
) -> None:
    """Refuse a checkpoint that is not what its manifest says.

    Args:
        place: Where it is.
        manifest: What was saved.
        found: Size and digest of each file; a digest of None is not compared.
        token: Of the call.

    Raises:
        CorruptCheckpointError: It differs.
        CheckpointError: It differs, and its manifest has changed: it is being written again.
    """
    what = difference(manifest, found)
    if not what:
        return
    shown = redacted(place.path)
    if read_manifest(place, token) != manifest:
        message = f"{shown} was written again while it was read"
        raise CheckpointError(message)
    message = (
        f"{shown} is not what was saved: {what}. It is damaged, or was written since by a program "
        f"that knows of no manifests. Name another checkpoint as ckpt_path, or move this one out "
        f"of its directory and start again; if it is good, remove "
        f"{redacted(manifest_path(place.path))}."
    )
    raise CorruptCheckpointError(message)


def check_in_place(place: Place, token: CancelToken, *, digests: bool) -> Manifest | None:
    """Check a checkpoint where it is, as far as it has a manifest.

    Args:
        place: Where it is.
        token: Of the call; told of progress.
        digests: Whether to read it through; for local files, which are read twice then. Otherwise
            only sizes are compared, and only of a checkpoint that is one file.

    Returns:
        Its manifest, None where it has none.

    Raises:
        CorruptCheckpointError: It differs.
        OSError: What the filesystem or the storage raised.
    """
    manifest = read_manifest(place, token)
    if manifest is None:
        return None
    if digests:
        check_contents(place, manifest, _read_through(place.path, token), token=token)
    elif not manifest.files:
        found = find_info(place.fs, place.path)
        sizes = {} if found is None or found.get("size") is None else {"": (found["size"], None)}
        if sizes:
            check_contents(place, manifest, sizes, token=token)
    return manifest


def _read_through(path: str, token: CancelToken) -> dict[str, tuple[int, str | None]]:
    return {
        name: (item.stat().st_size, digest_of_file(item, token))
        for name, item in files_below(Path(path)).items()
    }
