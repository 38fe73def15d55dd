# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks ask of storage to save a checkpoint of ``torch.distributed.checkpoint``.

========  ======  ==============================================================================
step      ranks   what it does
========  ======  ==============================================================================
``write``  all    stages its shards, publishes them, sees them in storage, and tells of them
``save``   rank 0 sees every shard of every rank, then publishes the metadata, and the manifest
========  ======  ==============================================================================

Shards have names that no other save uses. So an older checkpoint in the same directory stays whole
until the new metadata takes the place of the old, in one rename or one put, and what is older is
removed after that. Nothing is ever a mixture of two.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.dcp_staging import (
    StagedFiles,
    entries_of,
    stage_metadata,
    stage_shards,
)
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.manifests import remove_manifest, write_manifest
from lightning_resilience.adapters.object_store import list_files
from lightning_resilience.adapters.staging import is_staging_name
from lightning_resilience.core import shards
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.manifest import manifest_of
from lightning_resilience.core.portions import Portion, encode_portion
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from lightning_resilience.adapters.dcp_thread import CallersThread
    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.manifest import Contents, Manifest, Origin
    from lightning_resilience.ports import CancelToken


__all__ = ["METADATA", "Commit", "ShardWrite"]

METADATA = ".metadata"
"""The file that makes a directory a checkpoint, as torch names it."""


class _Staging(Work):
    """Work that publishes files which torch's writer has staged.

    Args:
        storage: Clients of storage.
        url: The checkpoint's directory.
        nonce: Makes names for staged files.
    """

    def __init__(self, storage: Storage, url: str, *, nonce: Callable[[], str]) -> None:
        super().__init__(storage, url)
        self.nonce = nonce
        self._files: StagedFiles | None = None
        self._made: list[StagedFiles] = []

    def files(self, token: CancelToken) -> StagedFiles:
        """Return where to stage files in an attempt."""
        made = StagedFiles(self._staging_path, token)
        self._made.append(made)
        return made

    def _staging_path(self, name: str) -> str:
        place = self.storage.place(f"{self.url}/{name}")
        return place.store.staging_path(place.path, self.nonce())

    def publish(self, files: StagedFiles, name: str, token: CancelToken) -> None:
        """Give one staged file its name, and see it in storage.

        Raises:
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        place, staged = self.storage.place(f"{self.url}/{name}"), files.files[name]
        token.raise_if_cancelled()
        place.store.publish(staged.path, place.path, token)
        found = place.store.size(place.path)
        if found != staged.size_bytes:
            there = "nothing is there" if found is None else f"{found} bytes are there"
            message = f"{staged.size_bytes} bytes were written to {place.path}, but {there}"
            raise CheckpointError(message)
        token.progress()

    @property
    def is_local(self) -> bool:
        """Whether files are staged beside their target, so that a rename uses them up."""
        return self.storage.place(self.url).store.is_local

    def close(self) -> None:
        """Remove what is staged in the node's spool directory."""
        for made in self._made:
            made.discard()


class ShardWrite(_Staging):
    """Write, publish and verify one rank's shards.

    Args:
        storage: Clients of storage.
        url: The checkpoint's directory.
        nonce: Makes names that nobody else uses.
        rank: This rank.
        plan: What it writes.
        planner: Has the data.
        thread_count: How many files are written at once, ≥ 1.
        caller: The thread that has called.
    """

    def __init__(  # noqa: PLR0913 - torch's two arguments besides
        self,
        storage: Storage,
        url: str,
        *,
        nonce: Callable[[], str],
        rank: int,
        plan: SavePlan,
        planner: SavePlanner,
        thread_count: int,
        caller: CallersThread,
    ) -> None:
        super().__init__(storage, url, nonce=nonce)
        self._rank = rank
        self._prefix = f"__{rank}_{nonce()}_"
        self._caller = caller
        self._write = partial(stage_shards, plan=plan, planner=planner, thread_count=thread_count)
        self._results: Any = ()
        self._published: dict[str, tuple[int, str]] = {}

    def attempt(self, token: CancelToken) -> str:
        """Do what is not done yet.

        Returns:
            What is in storage, for rank 0.

        Raises:
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        files = self._files or self._stage(token)
        # A rename uses a staged file up, so there is nothing for another attempt.
        self._files = None if self.is_local else files
        published = {} if self.is_local else dict(self._published)
        try:
            for name in sorted(files.files.keys() - published.keys()):
                self.publish(files, name, token)
                published[name] = files.files[name].size_bytes, files.files[name].digest
                self._published = dict(published)
        except BaseException:
            if self.is_local:
                files.discard()
            raise
        entries = entries_of(self._results)
        return encode_portion(Portion(rank=self._rank, files=published, entries=entries))

    def _stage(self, token: CancelToken) -> StagedFiles:
        files = self.files(token)
        with self._caller.taken_over():
            results = self._write(files, self._prefix)
        token.raise_if_cancelled()
        self._results = results
        return files


class Commit(_Staging):
    """Make a directory whose shards are there a checkpoint; rank 0's.

    Args:
        storage: Clients of storage.
        url: The checkpoint's directory.
        nonce: Makes names for staged files.
        metadata: What the planner has made; it is completed.
        portions: What every rank has told.
        contents: Size and digest of every shard.
        origin: Where the checkpoint comes from.
        save_id: Names the save in the metadata.
    """

    def __init__(  # noqa: PLR0913 - what a checkpoint is made of
        self,
        storage: Storage,
        url: str,
        *,
        nonce: Callable[[], str],
        metadata: Metadata,
        portions: Sequence[Portion],
        contents: Contents,
        origin: Origin,
        save_id: str,
    ) -> None:
        super().__init__(storage, url, nonce=nonce)
        self._metadata = metadata
        self._portions = portions
        self._contents = contents
        self._origin = origin
        self._save_id = save_id

    def attempt(self, token: CancelToken) -> Manifest:
        """See every shard, publish the metadata, clear up, and say that it is complete.

        Raises:
            CheckpointError: A shard is not there as it was written.
            OSError: What the filesystem or the storage raised.
        """
        place = self.storage.place(self.url)
        found = self._look(place, token)
        files = self._stage(token)
        staged = files.files[METADATA]
        remove_manifest(place, token)
        try:
            self.publish(files, METADATA, token)
        finally:
            files.discard()
        contents = {**self._contents, METADATA: (staged.size_bytes, staged.digest)}
        for name in found:
            if name not in contents and (shards.is_shard(name) or is_staging_name(name)):
                token.raise_if_cancelled()
                place.store.unlink(f"{place.path}/{name}")
                token.progress()
        manifest = manifest_of(self.url, contents, self._origin)
        token.raise_if_cancelled()
        write_manifest(place, manifest, nonce=self.nonce(), token=token)
        return manifest

    def _look(self, place: Place, token: CancelToken) -> dict[str, int | None]:
        token.raise_if_cancelled()
        found = list_files(place.fs, place.path)
        token.progress()
        expected = {name: size for name, (size, _) in self._contents.items()}
        problem = shards.missing(expected, found=found)
        if problem:
            message = f"{redacted(self.url)} was not made complete: {problem}"
            raise CheckpointError(message)
        return found

    def _stage(self, token: CancelToken) -> StagedFiles:
        files = self.files(token)
        stage_metadata(
            files, self.url, self._metadata, portions=self._portions, save_id=self._save_id
        )
        return files
