# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one rank asks of storage to find a checkpoint: a listing past all caches, and a look inside.

Three answers, as everywhere: it is there, it is not there, and an exception where that cannot be
told. Names keep the protocol of the directory that was asked for.

A file in object storage is not opened where its manifest agrees with its size: one rank of each
node reads it later, and compares every byte with the manifest that was seen here.
"""

from __future__ import annotations

import errno
import io
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from lightning_resilience.adapters.archives import examine
from lightning_resilience.adapters.contents import (
    DAMAGED,
    contents_digest,
    holds_training_state,
)
from lightning_resilience.adapters.lightning.sharded_work import look
from lightning_resilience.adapters.listings import modified_s
from lightning_resilience.adapters.local_files import link_to_nothing
from lightning_resilience.adapters.manifests import check_contents, read_manifest
from lightning_resilience.adapters.marked_file import MarkedFile
from lightning_resilience.adapters.object_store import find_info, list_files
from lightning_resilience.adapters.set_aside import identify
from lightning_resilience.adapters.trees import below, digest_of_file, digest_of_open
from lightning_resilience.core.candidates import Candidate
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.fallback import judging
from lightning_resilience.core.manifest import difference
from lightning_resilience.core.pipeline import Step, carry_out
from lightning_resilience.core.resolution import (
    Found,
    Inspection,
    described,
    may_describe,
    sort_names,
)
from lightning_resilience.core.shards import UNFINISHED, Form
from lightning_resilience.core.verification import State, of_undescribed
from lightning_resilience.errors import ConfigError, CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.ports import CancelToken


__all__ = ["inspect", "look_for", "search", "verify"]

_UNREADABLE: Final = (ConfigError, CorruptCheckpointError)
"""What a manifest raises that is there and cannot be used."""


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
    found = sort_names(
        [Candidate(url=f"{base}/{_name(item)}", modified_s=modified_s(item)) for item in listed],
        pattern=pattern,
        extension=extension,
    )
    marked = partial(_marked, storage, token)
    return replace(
        found,
        candidates=tuple(map(marked, found.candidates)),
        substitutes=tuple(map(marked, found.substitutes)),
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
    return Found(
        candidates=(_marked(storage, token, Candidate(url=url, modified_s=modified_s(item))),)
    )


def _marked(storage: Storage, token: CancelToken, candidate: Candidate) -> Candidate:
    """Return a candidate with what its manifest says."""
    try:
        manifest = read_manifest(storage.place(candidate.url), token)
    except _UNREADABLE:
        # Why it cannot be loaded is said by whoever looks at it.
        return replace(candidate, is_marked=True)
    token.progress()
    if manifest is None:
        return candidate
    return replace(candidate, is_marked=True, step=manifest.step, training=manifest.training)


def inspect(
    storage: Storage,
    token: CancelToken,
    *,
    url: str,
    also_state: bool = False,
    is_doubted: bool = False,
) -> Inspection:
    """Look at one checkpoint, in our formats: whether it is there, and was written to its end.

    One in object storage that has a manifest of its size is not opened.

    Args:
        storage: Clients of storage.
        token: Of the call.
        url: Where it is.
        also_state: Whether to see as well if it holds more than weights; of a file that is opened,
            the record that says so is read through.
        is_doubted: Whether a load of it has found damage: then it is opened whatever its manifest
            says.

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
        is_complete = look(place) is Form.SHARDS
        rejected = "" if is_complete else UNFINISHED
        return Inspection(path=url, rejected=rejected, is_resumable=is_complete)
    if size_bytes == 0:
        return Inspection(path=url, size_bytes=0, rejected="it is empty")
    token.progress()
    if may_describe(is_local=place.store.is_local, is_doubted=is_doubted):
        seen = described(url, _readable_manifest(place, token), size_bytes=size_bytes)
        if seen is not None:
            return seen
        token.progress()
    return _look_inside(place, token, url, size_bytes=size_bytes, also_state=also_state)


def _look_inside(
    place: Place, token: CancelToken, url: str, *, size_bytes: int | None, also_state: bool
) -> Inspection:
    with place.fs.open(place.path, "rb") as file:
        marked = MarkedFile(file, token)
        buffered = io.BufferedReader(marked)
        try:
            digest = contents_digest(buffered)
        except DAMAGED as error:
            # A read that failed has shown nothing of the file.
            if marked.error is not None:
                raise marked.error from error
            why = f"it is damaged or was not written to its end ({size_bytes} bytes): {error}"
            return Inspection(path=url, size_bytes=size_bytes, rejected=why)
        is_resumable = also_state and bool(digest) and holds_training_state(buffered)
        if marked.error is not None:
            raise marked.error
    return Inspection(path=url, size_bytes=size_bytes, digest=digest, is_resumable=is_resumable)


def verify(
    storage: Storage, token: CancelToken, *, url: str, is_ours: bool, is_doubted: bool = False
) -> Inspection:
    """Look at a candidate as closely as can be done where it is.

    Beside ``inspect``, it is compared with its manifest, or, where it has none, with the checksums
    of its archive: a local file is read through, once, at the speed of its disk; of what is
    elsewhere, and of directories, only sizes are compared, and the rest is checked while it is
    fetched. What is found damaged is looked at again, and has a mark where it was damaged both
    times and has not changed in between.

    Args:
        storage: Clients of storage.
        token: Of the call; told of progress.
        url: Where it is.
        is_ours: Whether it is in a format of ours, which can be looked into.
        is_doubted: Whether a load of it has found damage: it is read through, wherever it is.

    Returns:
        What was seen; its mark where it is known to be damaged and may be set aside.

    Raises:
        FileNotFoundError: It is not there.
        ConfigError: A later version of this package has written its manifest.
        CheckpointError: It is being written again.
        OSError: It cannot be told.
    """
    place = storage.place(url)
    hands: dict[Step, Callable[[None], object]] = {
        Step.INSPECT: lambda _: (
            _inspect_link(place, url)
            or (
                inspect(storage, token, url=url, also_state=True, is_doubted=is_doubted)
                if is_ours
                else _inspect_foreign(place, url)
            )
        ),
        Step.COMPARE: lambda _: _differs(place, token, is_ours=is_ours, is_doubted=is_doubted),
        Step.IDENTIFY: lambda _: identify(storage, url, token),
    }
    return carry_out(judging(), hands)


def _readable_manifest(place: Place, token: CancelToken) -> Manifest | None:
    try:
        return read_manifest(place, token)
    except _UNREADABLE:
        # What is wrong with it is said by whoever compares the checkpoint with it.
        return None


def _inspect_link(place: Place, url: str) -> Inspection | None:
    # What a link points to may have been set aside, or removed by a person, and the link stays.
    nothing = link_to_nothing(place.path) if place.store.is_local else ""
    return Inspection(path=url, rejected=nothing) if nothing else None


def _inspect_foreign(place: Place, url: str) -> Inspection:
    found = find_info(place.fs, place.path)
    is_tree = found is not None and found["type"] == "directory"
    return Inspection(path=url, doubt="nobody can look into its format" if is_tree else "")


def _differs(place: Place, token: CancelToken, *, is_ours: bool, is_doubted: bool) -> str | None:
    if not is_ours and find_info(place.fs, place.path) is None:
        # What stands for a checkpoint in a format of the user's is not known.
        return None
    try:
        manifest = read_manifest(place, token)
    except CorruptCheckpointError as error:
        return str(error)
    if manifest is None:
        reads_through = is_ours and (is_doubted or place.store.is_local)
        return _looks_damaged(place, token) if reads_through else None
    found = _found(place, manifest, token, is_doubted=is_doubted)
    if found is None:
        return ""
    try:
        check_contents(place, manifest, found, token=token)
    except CorruptCheckpointError:
        return f"it is not what its manifest says was saved: {difference(manifest, found)}"
    return ""


def _looks_damaged(place: Place, token: CancelToken) -> str | None:
    """Read through what has no manifest; return why it is damaged, None where it looks whole."""
    item = find_info(place.fs, place.path)
    if item is None or item["type"] == "directory":
        return None
    with place.fs.open(place.path, "rb") as file:
        state, reason = of_undescribed(Form.FILE, {"": examine(file, token)})
    return reason if state is State.CORRUPT else None


def _found(
    place: Place, manifest: Manifest, token: CancelToken, *, is_doubted: bool
) -> dict[str, tuple[int, str | None]] | None:
    """Return what is there of what a manifest lists; None where the storage tells no sizes."""
    item = find_info(place.fs, place.path)
    if item is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", redacted(place.path))
    if item["type"] == "directory":
        sizes = list_files(place.fs, place.path)
        token.progress()
        # What a user has put there besides does not make it damaged.
        there = {name: size for name, size in sizes.items() if name in manifest.contents}
        told: dict[str, tuple[int, str | None]]
        if is_doubted:
            return {name: _read_through(place, name, token) for name in there}
        told = {name: (size, None) for name, size in there.items() if size is not None}
        return told if len(told) == len(there) else None
    if is_doubted:
        return {"": _read_through(place, "", token)}
    if item.get("size") is None:
        return None
    digest = digest_of_file(Path(place.path), token) if place.store.is_local else None
    return {"": (item["size"], digest)}


def _read_through(place: Place, name: str, token: CancelToken) -> tuple[int, str]:
    with place.fs.open(below(place.path, name), "rb") as file:
        return digest_of_open(file, token)


def _name(item: Mapping[str, Any]) -> str:
    return str(item["name"]).rstrip("/").rpartition("/")[2]
