# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one rank asks of storage to find a checkpoint: a listing past all caches, and a look inside.

Three answers, as everywhere: it is there, it is not there, and an exception where that cannot be
told. Names keep the protocol of the directory that was asked for.
"""

from __future__ import annotations

import contextlib
import errno
import io
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.contents import DAMAGED, contents_digest
from lightning_resilience.adapters.lightning.loading import MarkedFile
from lightning_resilience.adapters.lightning.sharded_work import look
from lightning_resilience.adapters.object_store import find_info
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.resolution import Candidate, Found, Inspection, sort_names
from lightning_resilience.core.shards import UNFINISHED, Form


if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["inspect", "look_for", "search"]

_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def search(
    storage: Storage, token: CancelToken, *, directory: str, pattern: str, extension: str
) -> Found:
    """List a directory.

    Args:
        storage: Clients of storage.
        token: Of the call.
        directory: URL or path; one that does not exist is empty.
        pattern: Names that are looked for.
        extension: What names of other checkpoints end with; empty to overlook them.

    Raises:
        OSError: It cannot be told what is there.
    """
    token.raise_if_cancelled()
    place = storage.place(directory)
    if find_info(place.fs, place.path) is None:
        return Found()
    place.fs.invalidate_cache(place.path)
    token.progress()
    listed = place.fs.ls(place.path, detail=True)
    base = directory.rstrip("/")
    return sort_names(
        [Candidate(url=f"{base}/{_name(item)}", modified_s=_modified_s(item)) for item in listed],
        pattern=pattern,
        extension=extension,
    )


def look_for(storage: Storage, token: CancelToken, *, url: str) -> Found:
    """Ask for one file.

    Raises:
        OSError: It cannot be told whether it is there.
    """
    token.raise_if_cancelled()
    place = storage.place(url)
    item = find_info(place.fs, place.path)
    if item is None:
        return Found()
    return Found(candidates=(Candidate(url=url, modified_s=_modified_s(item)),))


def inspect(storage: Storage, token: CancelToken, *, url: str) -> Inspection:
    """Look at one checkpoint.

    Args:
        storage: Clients of storage.
        token: Of the call.
        url: Where it is.

    Returns:
        What was seen; its size and digest, or why it cannot be loaded.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It cannot be told.
    """
    token.raise_if_cancelled()
    place = storage.place(url)
    item = find_info(place.fs, place.path)
    if item is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", redacted(url))
    size_bytes = item.get("size")
    if item["type"] == "directory":
        return Inspection(path=url, rejected="" if look(place) is Form.SHARDS else UNFINISHED)
    if size_bytes == 0:
        return Inspection(path=url, size_bytes=0, rejected="it is empty")
    token.progress()
    with place.fs.open(place.path, "rb") as file:
        marked = MarkedFile(file, token)
        try:
            digest = contents_digest(io.BufferedReader(marked))
        except DAMAGED as error:
            # A read that failed has shown nothing of the file.
            if marked.error is not None:
                raise marked.error from error
            why = f"it is damaged or was not written to its end ({size_bytes} bytes): {error}"
            return Inspection(path=url, size_bytes=size_bytes, rejected=why)
    return Inspection(path=url, size_bytes=size_bytes, digest=digest)


def _name(item: Mapping[str, Any]) -> str:
    return str(item["name"]).rstrip("/").rpartition("/")[2]


def _modified_s(item: Mapping[str, Any]) -> float | None:
    said = next((item[key] for key in _TIMES if item.get(key) is not None), None)
    if isinstance(said, str):
        # Python 3.10 does not know the letter that stands for UTC.
        with contextlib.suppress(ValueError):
            said = datetime.fromisoformat(said.replace("Z", "+00:00"))
    if isinstance(said, datetime):
        return (said if said.tzinfo else said.replace(tzinfo=timezone.utc)).timestamp()
    return float(said) if isinstance(said, (int, float)) else None
