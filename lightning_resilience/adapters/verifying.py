# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Looks through one directory of checkpoints, on a filesystem or in object storage.

Everything is read past the caches of listings and sizes. A storage that cannot tell raises: that is
no property of a checkpoint. What changes while it is looked at is looked at again, because a job
may be writing and removing there.
"""

from __future__ import annotations

import contextlib
import errno
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_resilience.adapters.archives import examine
from lightning_resilience.adapters.listings import modified_s
from lightning_resilience.adapters.local_files import link_to_nothing
from lightning_resilience.adapters.manifests import read_manifest
from lightning_resilience.adapters.object_store import find_info, list_files
from lightning_resilience.adapters.staging import is_staging_name
from lightning_resilience.adapters.trees import digest_of_open
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.manifest import DIRECTORY, MANIFEST_SUFFIX
from lightning_resilience.core.shards import form_of
from lightning_resilience.core.verification import (
    EXTENSION,
    Finding,
    State,
    newest_first,
    of_described,
    of_undescribed,
    orphan,
    step_of,
)
from lightning_resilience.errors import ConfigError, CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.core.verification import Seen
    from lightning_resilience.ports import CancelToken


__all__ = ["Verification"]

T = TypeVar("T")

_TRIES: Final = 3
# What fsspec calls a pipe, a socket or a device.
_NO_FILE: Final = "other"


class _ChangedError(Exception):
    """What was looked at has changed meanwhile."""


class Verification:
    """A look through one directory; nothing in it is changed.

    Args:
        storage: Clients of storage.
        directory: URL or path; what is below its subdirectories is not looked for.
        token: Of the caller; told of progress.
        is_quick: Whether to compare sizes only, and to read of an archive its table of contents.
        run: Calls a function that asks storage, as often as it sees fit.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        token: CancelToken,
        *,
        is_quick: bool,
        run: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._storage = storage
        is_root = directory.endswith("://")
        self._directory = directory if is_root else directory.rstrip("/") or "/"
        self._token = token
        self._is_quick = is_quick
        self._run = run

    def findings(self) -> list[Finding]:
        """Look at every checkpoint.

        Returns:
            What is known of each, the newest first.

        Raises:
            FileNotFoundError: There is no such directory.
            NotADirectoryError: It is a file.
            OSError: It cannot be told.
        """
        listed, ours = self._run(self._list)
        described = {
            name.removesuffix(MANIFEST_SUFFIX) for name in ours if name.endswith(MANIFEST_SUFFIX)
        }
        names = described | {name for name in listed if name.endswith(EXTENSION)}
        left = {**listed, **{f"{DIRECTORY}/{name}": item for name, item in ours.items()}}
        found = [
            orphan(name, modified_s=modified_s(item))
            for name, item in left.items()
            if is_staging_name(name.rpartition("/")[2])
        ]
        for name in sorted(names):
            item = self._run(partial(self._settled, name))
            found += [] if item is None else [item]
        return newest_first(found)

    def _list(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self._storage.drop_caches(self._directory)
        place = self._storage.place(self._directory)
        found = find_info(place.fs, place.path)
        shown = redacted(self._directory)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", shown)
        if found["type"] != "directory":
            message = "it is a file; give the directory that it is in"
            raise NotADirectoryError(errno.ENOTDIR, message, shown)
        listed = self._names_in(place)
        ours = self._storage.place(f"{self._directory}/{DIRECTORY}")
        return listed, {} if find_info(ours.fs, ours.path) is None else self._names_in(ours)

    def _names_in(self, place: Place) -> dict[str, Any]:
        self._token.raise_if_cancelled()
        listed = place.fs.ls(place.path, detail=True)
        self._token.progress()
        return {str(item["name"]).rstrip("/").rpartition("/")[2]: item for item in listed}

    def _settled(self, name: str) -> Finding | None:
        """Look at one checkpoint until it did not change; None where it is gone."""
        for _ in range(_TRIES):
            with contextlib.suppress(_ChangedError, FileNotFoundError):
                return self._look(self._storage.place(f"{self._directory}/{name}"), name)
        reason = f"it was being written or removed, all {_TRIES} times that it was looked at"
        return Finding(name=name, state=State.UNVERIFIED, reason=reason, step=step_of(name, None))

    def _look(self, place: Place, name: str) -> Finding | None:
        try:
            manifest = read_manifest(place, self._token)
        except (ConfigError, CorruptCheckpointError) as error:
            # What a later version of this package has saved is not damaged.
            is_corrupt = isinstance(error, CorruptCheckpointError)
            state = State.CORRUPT if is_corrupt else State.UNVERIFIED
            return Finding(name=name, state=state, reason=str(error), step=step_of(name, None))
        info = _info(place)
        if info is None:
            return self._absent(place, name, manifest)
        if info["type"] == _NO_FILE:
            # To open a pipe waits for somebody who writes.
            reason = "it is no file that can be read: a pipe, a device, or links in a circle"
            return Finding(
                name=name, state=State.CORRUPT, reason=reason, step=step_of(name, manifest)
            )
        is_file = info["type"] != "directory"
        files = {"": info.get("size")} if is_file else list_files(place.fs, place.path)
        self._token.progress()
        if manifest is None:
            state, reason = self._undescribed(place, info, files)
        else:
            state, reason = self._described(place, manifest, files)
        return Finding(
            name=name,
            state=state,
            reason=reason,
            step=step_of(name, manifest),
            size_bytes=sum(size or 0 for size in files.values()),
            modified_s=modified_s(info),
        )

    def _absent(self, place: Place, name: str, manifest: Manifest | None) -> Finding | None:
        if manifest is not None:
            self._expect(place, manifest)
            return orphan(name, modified_s=None, manifest=manifest)
        reason = link_to_nothing(place.path) if place.store.is_local else ""
        if reason:
            return Finding(name=name, state=State.CORRUPT, reason=reason, step=step_of(name, None))
        return None

    def _described(
        self, place: Place, manifest: Manifest, files: dict[str, int | None]
    ) -> tuple[State, str]:
        found: dict[str, tuple[int, str | None]] = {}
        for name, size in files.items():
            if self._is_quick and size is not None:
                found[name] = (size, None)
                continue
            with place.fs.open(_below(place, name), "rb") as file:
                found[name] = digest_of_open(file, self._token)
        state, reason = of_described(manifest, found)
        if state is State.CORRUPT:
            self._expect(place, manifest)
        return state, reason

    def _expect(self, place: Place, manifest: Manifest) -> None:
        # A save and a removal take the manifest away first.
        if read_manifest(place, self._token) != manifest:
            raise _ChangedError

    def _undescribed(
        self, place: Place, info: dict[str, Any], files: dict[str, int | None]
    ) -> tuple[State, str]:
        names = [name for name in files if "/" not in name]
        form = form_of(str(info["type"]), names)
        seen: dict[str, Seen] = {}
        for name in files:
            with place.fs.open(_below(place, name), "rb") as file:
                seen[name] = examine(file, self._token, is_quick=self._is_quick)
        state, reason = of_undescribed(form, seen)
        if state is State.CORRUPT and find_info(place.fs, place.path) != info:
            raise _ChangedError
        return state, reason


def _info(place: Place) -> dict[str, Any] | None:
    try:
        return find_info(place.fs, place.path)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return {"type": _NO_FILE}


def _below(place: Place, name: str) -> str:
    return f"{place.path.rstrip('/')}/{name}" if name else place.path
