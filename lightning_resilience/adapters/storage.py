# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""From a URL to the client of its storage: one private client per dependency, made anew when asked.

Each attempt asks for the client again, so that an attempt after ``rebuild`` (expired credentials)
gets a fresh one. Nothing here decides or repeats anything.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning_resilience.adapters.manifests import remove_manifest
from lightning_resilience.adapters.mounts import mount_point_by_name
from lightning_resilience.adapters.object_store import FsspecObjectStore, find_info, protocols
from lightning_resilience.adapters.private_filesystem import (
    plain_url,
    private_filesystem,
    renew_client,
)
from lightning_resilience.adapters.small_objects import check_size, put
from lightning_resilience.core.landings import patience_s
from lightning_resilience.core.manifest import DIRECTORY, manifest_path
from lightning_resilience.core.pipeline import Step, carry_out, removal
from lightning_resilience.core.retry import RetryPolicy


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fsspec import AbstractFileSystem

    from lightning_resilience.ports import CancelToken


__all__ = [
    "Place",
    "Storage",
    "dependency_of",
    "is_local",
    "parent_of",
    "probe_by_writing",
    "probe_path",
]

# The default of the option, for who has no policy.
_STALL_TIMEOUT_S = RetryPolicy().stall_timeout_s
# What filesystems call the things that a new version of a file does not share with the old one.
_STAMPS = (
    *("ETag", "etag", "md5", "md5Hash", "content_md5", "generation", "VersionId", "version_id"),
    *("LastModified", "last_modified", "updated", "mtime", "modified", "created", "ino"),
)


def is_local(url: str) -> bool:
    """Tell whether ``url`` is a file's path, by its name alone; a shared mount is local as well."""
    url = plain_url(url)
    return "://" not in url or urlsplit(url).scheme in {"file", "local"}


def dependency_of(url: str) -> str:
    """Return the name of the storage that ``url`` is on, without credentials.

    Asks nobody, because the storage may be ill: a file's mount point is looked up in the kernel's
    list, by name, and no client is made.

    Returns:
        ``file://<mount point>`` or ``<protocol>://<bucket or host>``.
    """
    url = plain_url(url)
    parts = urlsplit(url)
    if is_local(url):
        return f"file://{mount_point_by_name(parts.path if '://' in url else url)}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def parent_of(url: str) -> str:
    """Return the folder that ``url`` is in, or that it is itself where it ends with a slash."""
    if url.endswith("/"):
        # A folder itself. What is above it may be no place at all: a bucket has no parent.
        return url[:-1]
    scheme, separator, rest = url.rpartition("://")
    if separator and "/" not in rest:
        # A bucket, or an object of a filesystem that has none.
        return url
    return f"{scheme}{separator}{PurePosixPath(rest).parent}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A URL with the client that reaches it now.

    Args:
        store: Whole files on this storage.
        fs: The private filesystem under it.
        path: The path as that filesystem wants it.
    """

    store: FsspecObjectStore
    fs: AbstractFileSystem
    path: str


def _in_spool(spool_directory: str) -> str:
    return str(Path(spool_directory, "node-cache"))


class Storage:
    """Clients of storage, by URL.

    Args:
        options: The user's options of the filesystem; merged with ours, not replaced.
        spool: Makes the node's own directory for staged files, when it is first needed.
        run_id: Name of the run, for manifests.
        stall_timeout_s: When an attempt that shows no progress is abandoned, in seconds.
        cache: Names the node's cache of checkpoints, given the spool directory; in that by default.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        spool: Callable[[], str],
        run_id: str = "",
        stall_timeout_s: float = _STALL_TIMEOUT_S,
        cache: Callable[[str], str] = _in_spool,
    ) -> None:
        self.run_id = run_id
        self.training = ""
        """What is trained, for manifests (``core.candidates``); empty where nobody says."""
        self.patience_s = patience_s(stall_timeout_s)
        self._stall_timeout_s = stall_timeout_s
        self._options = dict(options)
        self._spool = spool
        self._cache = cache
        self._clients: dict[str, AbstractFileSystem] = {}

    @cached_property
    def spool_directory(self) -> str:
        """The node's own directory for staged files, made when it is first asked for."""
        return self._spool()

    @property
    def cache_directory(self) -> str:
        """The node's cache of checkpoints; whoever uses it makes it."""
        return self._cache(self.spool_directory)

    def with_options(self, options: Mapping[str, Any] | None) -> Storage:
        """Return clients for one call that brings options of its own; this where it has none."""
        if not options:
            return self
        return Storage(
            {**self._options, **options},
            spool=self._spool,
            run_id=self.run_id,
            stall_timeout_s=self._stall_timeout_s,
            cache=self._cache,
        )

    def place(self, url: str) -> Place:
        """Return where ``url`` is now."""
        root = self._root(url)
        fs = self._clients.get(root)
        if fs is None:
            fs, _ = private_filesystem(url, self._options)
            self._clients[root] = fs
        path = str(fs._strip_protocol(url))  # noqa: SLF001 - fsspec has no public name for it
        spool = "" if "file" in protocols(fs) else self.spool_directory
        store = FsspecObjectStore(fs, spool_directory=spool, patience_s=self.patience_s)
        return Place(store=store, fs=fs, path=path)

    def rebuild(self, url: str) -> None:
        """Let the client of ``url`` read its credentials anew; forget it where it cannot.

        Raises:
            Exception: What the library raised. The client is forgotten then, too.
        """
        root = self._root(url)
        # Order: off the list first, so that a rebuild that never ends holds up no later attempt.
        fs = self._clients.pop(root, None)
        if fs is not None and renew_client(fs):
            self._clients[root] = fs

    def drop_caches(self, url: str) -> None:
        """Forget what the client of ``url`` has cached."""
        self.place(url).fs.invalidate_cache()

    @staticmethod
    def _root(url: str) -> str:
        # A client that was found by a prefixed URL takes prefixed paths, and no other does.
        prefix, plain = url.removesuffix(plain_url(url)), plain_url(url)
        parts = urlsplit(plain)
        return f"{prefix}{parts.scheme}://{parts.netloc}" if "://" in plain else prefix

    def exists(self, url: str, token: CancelToken) -> bool:
        """Tell whether ``url`` exists, file or directory; raises where that cannot be told."""
        token.raise_if_cancelled()
        place = self.place(url)
        return find_info(place.fs, place.path) is not None

    def names_in(self, url: str, token: CancelToken) -> list[str]:
        """Return the paths of what is in the directory ``url``; of one that is not there, none."""
        token.raise_if_cancelled()
        place = self.place(url)
        try:
            return [str(path) for path in place.fs.ls(place.path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def stamp(self, url: str, token: CancelToken) -> str | None:
        """Return a text that differs once ``url`` has been written again.

        Returns:
            None where nothing is there; empty where the storage tells nothing that would differ.
        """
        token.raise_if_cancelled()
        place = self.place(url)
        found = find_info(place.fs, place.path)
        if found is None:
            return None
        if found["type"] == "directory":
            return ""
        return ", ".join(f"{key}={found[key]}" for key in _STAMPS if found.get(key) is not None)

    def remove(self, url: str, token: CancelToken) -> None:
        """Remove ``url``, its manifest first; absent is success."""
        carry_out(removal(), self.removing(self.place(url), token))

    @staticmethod
    def removing(place: Place, token: CancelToken) -> dict[Step, Callable[[Any], object]]:
        """Return what carries out the steps of a removal."""
        return {
            Step.ASK: lambda _: token.raise_if_cancelled(),
            Step.UNMARK: lambda _: remove_manifest(place, token),
            Step.REMOVE: lambda _: place.store.remove(place.path, token),
            Step.TIDY: lambda _: _tidy(place),
        }

    def probe_read(self, directory: str, token: CancelToken) -> None:
        """Ask the storage about ``directory``, past every cache; any answer will do."""
        self.exists(directory, token)

    def probe_write(self, directory: str, nonce: str, token: CancelToken) -> None:
        """Write, verify and remove a small object below ``directory``."""
        probe_by_writing(self.place(probe_path(directory, nonce)), nonce, token)


def probe_path(directory: str, nonce: str) -> str:
    """Return where below ``directory`` a write probe works."""
    return f"{directory.rstrip('/')}/{DIRECTORY}/probe/{nonce}"


def probe_by_writing(place: Place, nonce: str, token: CancelToken) -> None:
    """Write, verify and remove a small object, and leave nothing behind.

    Args:
        place: Where, from ``probe_path``.
        nonce: What is written, and the name of the staged file.
        token: Of the call.

    Raises:
        CheckpointError: It is not what was written.
        Exception: What the storage raised.
    """
    data = nonce.encode()
    try:
        put(place.store, place.path, data, nonce=nonce, token=token)
        check_size(place.store, place.path, len(data))
        token.raise_if_cancelled()
        place.store.remove(place.path)
    finally:
        if place.store.is_local:
            probes = Path(place.path).parent
            _remove_if_empty(probes, probes.parent)


def _tidy(place: Place) -> None:
    if place.store.is_local:
        _remove_if_empty(Path(manifest_path(place.path)).parent)


def _remove_if_empty(*directories: Path) -> None:
    # Another probe may be there, or another of our files: then the directories stay.
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()
