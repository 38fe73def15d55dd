# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks ask of storage for a checkpoint of many files: clear, publish, commit, look, fetch.

Between these requests, in no collective, stands the strategy's own writing and reading, which knows
nothing but a directory on its own node (``sharded_save``, ``sharded_load``).
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.manifests import (
    check_contents,
    check_in_place,
    remove_manifest,
    write_manifest,
)
from lightning_resilience.adapters.object_store import find_info, list_files
from lightning_resilience.adapters.staging import is_staging_name, staging_name
from lightning_resilience.adapters.storage import is_local, parent_of
from lightning_resilience.adapters.trees import fetch, identity, put_in_place, send
from lightning_resilience.core import shards
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.pipeline import (
    Progress,
    Sent,
    Step,
    assembly,
    carry_out,
    publication,
    removal_of_shards,
)
from lightning_resilience.core.shards import Form
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.ports import CancelToken


__all__ = [
    "Clearing",
    "Commit",
    "Fetched",
    "Leftover",
    "Look",
    "Publishing",
    "Removal",
    "look",
    "own_path",
]


def look(place: Place) -> Form:
    """Tell what is under a name now, past every cache; raises where that cannot be told."""
    found = find_info(place.fs, place.path)
    if found is None or found["type"] != "directory":
        return shards.form_of("" if found is None else "file")
    names = [Path(name).name for name in place.fs.ls(place.path, detail=False)]
    return shards.form_of("directory", names)


def _remove_in_order(storage: Storage, url: str, token: CancelToken) -> None:
    place = storage.place(url)

    def names(_: object) -> list[str] | None:
        found = find_info(place.fs, place.path)
        if found is None or found["type"] != "directory":
            return None if found is None else []
        return [Path(name).name for name in place.fs.ls(place.path, detail=False)]

    def remove(name: str) -> None:
        place.store.remove(f"{place.path}/{name}", token)
        token.progress()

    hands: dict[Step, Callable[[Any], object]] = {
        **storage.removing(place, token),
        Step.NAMES: names,
        Step.REMOVE_FILE: remove,
    }
    carry_out(removal_of_shards(), hands)


class Removal(Work):
    """Remove a checkpoint, what makes it look complete first; absent is success."""

    def attempt(self, token: CancelToken) -> None:
        """Remove it."""
        _remove_in_order(self.storage, self.url, token)


class Leftover(Work):
    """Remove shards whose metadata was never published; a complete checkpoint stays."""

    def attempt(self, token: CancelToken) -> None:
        """Remove them, unless a save has made them complete after all."""
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        if is_staging_name(Path(place.path).name) or look(place) is Form.OTHER:
            _remove_in_order(self.storage, self.url, token)


class Clearing(Work):
    """Make room for a checkpoint, and say where its files go until it is complete.

    Where storage can rename a directory, that is a new directory beside the target, and the older
    checkpoint stays until the newer one takes its place. Elsewhere it is the target itself, from
    which the older one has to go first: a mixture of two would look complete.

    Args:
        storage: Clients of storage.
        url: Where the checkpoint goes.
        nonce: Names the directory beside a local target.
        check: Raises where the checkpoint must not be published at all.
    """

    def __init__(
        self, storage: Storage, url: str, *, nonce: str, check: Callable[[], object]
    ) -> None:
        super().__init__(storage, url)
        self._nonce = nonce
        self._check = check

    def attempt(self, token: CancelToken) -> str:
        """Make room.

        Returns:
            The name of the directory beside the target; empty for the target itself.

        Raises:
            ConfigError: What the ranks have written makes no checkpoint.
            OSError: What the filesystem or the storage raised.
        """
        self._check()
        token.raise_if_cancelled()
        if not is_local(self.url):
            _remove_in_order(self.storage, self.url, token)
            return ""
        name = staging_name(self._nonce)
        place = self.storage.place(f"{parent_of(self.url)}/{name}")
        Path(place.path).mkdir(parents=True, exist_ok=True)
        return name


class Publishing(Work):
    """Publish what one rank has written, all but metadata; an attempt goes on where one ended.

    Args:
        storage: Clients of storage.
        url: The directory in storage.
        folder: The directory on this node.
        sizes: What to publish: length of each file in bytes, by name.
        nonce: Makes names for copies beside a local target.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        folder: Path,
        sizes: Mapping[str, int],
        nonce: Callable[[], str],
    ) -> None:
        super().__init__(storage, url)
        self._folder = folder
        self._sizes = dict(sizes)
        # What was there has been removed before, or this goes to a new directory.
        self._sent = Sent(is_cleared=True)
        self.nonce = nonce

    def attempt(self, token: CancelToken) -> str:
        """Publish and verify one file after the other.

        Raises:
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """

        def publish(name: str) -> None:
            token.raise_if_cancelled()
            send(
                str(self._folder / name),
                self.storage.place(f"{self.url}/{name}"),
                size_bytes=self._sizes[name],
                nonce=self.nonce(),
                token=token,
            )

        # What is sent is verified at once.
        hands = {Step.PUBLISH: publish, Step.VERIFY: lambda _: None}
        carry_out(publication(self._sent, self._sizes, renames=False), hands)
        return ""


class Commit(Work):
    """Make a checkpoint whose shards are published a complete one.

    Args:
        storage: Clients of storage.
        url: Where the checkpoint goes.
        destination: The directory in which its shards are; ``url`` itself where nothing can be
            renamed.
        expected: Size of every shard in bytes, by name.
        metadata: Publishes the metadata there, in its order.
        done: What it is then: its manifest, which is written last.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        destination: str,
        expected: Mapping[str, int],
        metadata: Publishing,
        done: Manifest,
    ) -> None:
        super().__init__(storage, url)
        self._destination = destination
        self._expected = expected
        self._metadata = metadata
        self._done = done
        self.step = done.step
        self._known: Progress[int | None] = Progress()

    def attempt(self, token: CancelToken) -> Manifest:
        """Look whether every shard is there, publish the metadata, give all its name, and say so.

        Raises:
            CheckpointError: A shard is not there as it was written.
            OSError: What the filesystem or the storage raised.
        """
        place = self.storage.place(self.url)
        source = self.storage.place(self._destination).path
        mark = partial(write_manifest, place, nonce=self._metadata.nonce(), token=token)
        hands: dict[Step, Callable[[Any], object]] = {
            Step.ASK: lambda _: token.raise_if_cancelled(),
            Step.VERIFY: lambda _: self._verify(token),
            Step.PUBLISH: lambda _: self._metadata.attempt(token),
            Step.STAMP: lambda _: identity(source),
            Step.IS_THERE: lambda stamp: identity(place.path) == stamp,
            Step.UNMARK: lambda _: remove_manifest(place, token),
            Step.MOVE: lambda stamp: put_in_place(
                source, place, aside=f"{source}.replaced", token=token, stamp=stamp
            ),
            Step.DISCARD: lambda _: _discard(source),
            Step.MARK: mark,
        }
        renames = self._destination != self.url
        return carry_out(assembly(self._known, self._done, renames=renames), hands)

    def _verify(self, token: CancelToken) -> None:
        found = self._sizes(token)
        problem = shards.missing(self._expected, found=found)
        if problem:
            message = f"{redacted(self.url)} was not made complete: {problem}"
            raise CheckpointError(message)

    def _sizes(self, token: CancelToken) -> dict[str, int | None]:
        place = self.storage.place(self._destination)
        token.raise_if_cancelled()
        sizes = list_files(place.fs, place.path)
        token.progress()
        return sizes


def _discard(source: str) -> None:
    for older in (source, f"{source}.replaced"):
        # The older checkpoint, where the two have changed places; maybe one file.
        shutil.rmtree(older, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(older).unlink()


class Look(Work):
    """See what is under a checkpoint's name: rank 0's answer is that of all ranks."""

    def attempt(self, token: CancelToken) -> str:
        """Look.

        Raises:
            FileNotFoundError: Nothing is there, or a directory that no save has made complete.
            OSError: It cannot be told.
        """
        token.raise_if_cancelled()
        form = look(self.storage.place(self.url))
        if form is Form.ABSENT:
            raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", redacted(self.url))
        if form is Form.OTHER:
            message = f"{shards.UNFINISHED}. Choose another checkpoint"
            raise FileNotFoundError(errno.ENOENT, message, redacted(self.url))
        return str(form.value)


class Fetched(Work):
    """Have a checkpoint on this node; what was fetched stays until ``discard``.

    Args:
        storage: Clients of storage.
        url: Where it is.
        nonce: Makes names for directories of this rank's.
    """

    def __init__(self, storage: Storage, url: str, *, nonce: Callable[[], str]) -> None:
        super().__init__(storage, url)
        self._nonce = nonce
        self._folders: list[Path] = []

    def attempt(self, token: CancelToken) -> str:
        """Fetch it.

        Returns:
            Its path on this node. A local one is not fetched, but looked at: every rank has to see
            it before any rank reads it in lock-step with the others.

        Raises:
            FileNotFoundError: It is not there.
            OSError: What the filesystem or the storage raised.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        path: str = place.path.rstrip("/")
        if place.store.is_local:
            if look(place) not in {Form.FILE, Form.SHARDS}:
                message = "rank 0 sees this checkpoint and this rank does not: is it shared?"
                raise FileNotFoundError(errno.ENOENT, message, redacted(self.url))
            return path
        folder = own_path(self.storage, self._nonce)
        self._folders.append(folder)
        try:
            manifest = check_in_place(place, token, digests=False)
            tree = fetch(place, str(folder / Path(path).name), token)
            if manifest is not None:
                check_contents(place, manifest, tree.contents, token=token)
        except BaseException:
            # One part of a large checkpoint for each attempt would fill the disk.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return str(folder / Path(path).name)

    def discard(self) -> None:
        """Remove what was fetched."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def own_path(storage: Storage, nonce: Callable[[], str]) -> Path:
    """Return a new name for a directory of this rank's on this node."""
    return Path(storage.spool_directory, staging_name(nonce()))
