# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How one checkpoint gets into storage: staged, published, verified, and committed.

For Lightning's stock ``TorchCheckpointIO``, which opens an unguarded filesystem of its own on every
call and holds a second copy of the checkpoint in memory, the writing is ours: the same file format,
streamed into a staged file. A complete staged file is kept for the next attempt.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, cast

import torch

from lightning_resilience.adapters.lightning.commit import Commit, origin_of
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.staging import Staged, discard, stage
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.staging import StagedWriter
    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["StagedSave"]


class StagedSave(Work):
    """A save by our own pipeline, which marks its progress.

    Args:
        storage: Clients of storage.
        url: Where the checkpoint goes.
        checkpoint: What is saved.
        nonce: Makes names for staged files.
    """

    def __init__(
        self, storage: Storage, url: str, checkpoint: object, *, nonce: Callable[[], str]
    ) -> None:
        super().__init__(storage, url)
        self.checkpoint = checkpoint
        self._nonce = nonce
        self._commit = Commit(origin_of(checkpoint, storage), nonce=nonce)
        self._staged: Staged | None = None
        self._verified: Staged | None = None
        self._names: list[str] = []

    def attempt(self, token: CancelToken) -> Staged:
        """Stage, publish and verify the checkpoint if that is not done yet, and commit it.

        Raises:
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        place = self.storage.place(self.url)
        verified = self._verified or self._publish(place, token)
        # One that was abandoned says nothing to its successor, which publishes anew.
        token.raise_if_cancelled()
        self._verified = verified
        self._commit.end(place, {"": (verified.size_bytes, verified.digest)}, token)
        return verified

    def _publish(self, place: Place, token: CancelToken) -> Staged:
        staged = self._staged or self._stage(place, token)
        # A rename uses the staged file up, so it is not there for another attempt.
        self._staged = None if place.store.is_local else staged
        try:
            self._commit.begin(place, token)
            place.store.publish(staged.path, place.path, token)
        except BaseException:
            if place.store.is_local:
                # One copy of a large checkpoint for each attempt would fill the disk.
                discard(staged.path)
            raise
        found = place.store.size(place.path)
        if found != staged.size_bytes:
            there = "nothing is there" if found is None else f"{found} bytes are there"
            message = f"{staged.size_bytes} bytes were written to {place.path}, but {there}"
            raise CheckpointError(message)
        return staged

    def spool(self, path: str, token: CancelToken) -> Staged:
        """Write the checkpoint to ``path`` on this node, whole; storage is asked nothing.

        Raises:
            OSError: What the node's filesystem raised.
        """
        staged, self._staged = self._staged, None
        if staged is None or staged.path not in self._names:
            return stage(self._write, path, token)
        os.replace(staged.path, path)  # noqa: PTH105 - both are names, and no paths of anybody's
        return Staged(path=path, size_bytes=staged.size_bytes, digest=staged.digest)

    def _stage(self, place: Place, token: CancelToken) -> Staged:
        name = place.store.staging_path(place.path, self._nonce())
        if not place.store.is_local:
            # Beside a local target the attempt itself leaves nothing, whatever its end; to ask that
            # filesystem again, on the caller's thread, might never return.
            self._names.append(name)
        return stage(self._write, name, token)

    def _write(self, file: StagedWriter) -> None:
        torch.save(self.checkpoint, cast("IO[bytes]", file))

    def close(self) -> None:
        """Remove all staged files of the spool directory."""
        for name in self._names:
            discard(name)
