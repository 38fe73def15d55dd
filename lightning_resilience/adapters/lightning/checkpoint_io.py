# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How one checkpoint gets into storage: staged, published, and verified.

For Lightning's stock ``TorchCheckpointIO``, which opens an unguarded filesystem of its own on every
call and holds a second copy of the checkpoint in memory, the writing is ours: the same file format,
streamed into a staged file. A user's own ``CheckpointIO`` keeps its format and is called as a
whole; afterwards the storage is asked whether the checkpoint is there.

One object is one save; ``attempt`` is what the guard repeats. A complete staged file is kept for
the next attempt. An attempt that was abandoned may still be running: it works on names of its own,
and its token keeps it from publishing.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, cast

import torch

from lightning_resilience.adapters.staging import Staged, discard, stage
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.staging import StagedWriter
    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["ForeignSave", "StagedSave"]


class StagedSave:
    """A save by our own pipeline, which marks its progress.

    Args:
        storage: Clients of storage.
        url: Where the checkpoint goes.
        checkpoint: What is saved.
        nonce: Makes names for staged files.
    """

    marks_progress = True

    def __init__(
        self, storage: Storage, url: str, checkpoint: object, *, nonce: Callable[[], str]
    ) -> None:
        self.storage = storage
        self._url = url
        self._checkpoint = checkpoint
        self._nonce = nonce
        self._staged: Staged | None = None
        self._names: list[str] = []

    def attempt(self, token: CancelToken) -> Staged:
        """Stage the checkpoint if it is not yet, publish it, and verify its size.

        Raises:
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        place = self.storage.place(self._url)
        staged = self._staged or self._stage(place, token)
        # A rename uses the staged file up, so it is not there for another attempt.
        self._staged = None if place.store.is_local else staged
        try:
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

    def _stage(self, place: Place, token: CancelToken) -> Staged:
        name = place.store.staging_path(place.path, self._nonce())
        if not place.store.is_local:
            # Beside a local target the attempt itself leaves nothing, whatever its end; to ask that
            # filesystem again, on the caller's thread, might never return.
            self._names.append(name)
        return stage(self._write, name, token)

    def _write(self, file: StagedWriter) -> None:
        torch.save(self._checkpoint, cast("IO[bytes]", file))

    def close(self) -> None:
        """Remove all staged files of the spool directory."""
        for name in self._names:
            discard(name)


class ForeignSave:
    """A save by a user's own ``CheckpointIO``, which marks no progress.

    Args:
        storage: Clients of storage, to verify.
        url: Where the checkpoint goes.
        write: Saves the checkpoint.
        verify: Whether it must be there afterwards; not so where it is written later.
    """

    marks_progress = False

    def __init__(
        self, storage: Storage, url: str, write: Callable[[], Any], *, verify: bool
    ) -> None:
        self.storage = storage
        self._url = url
        self._write = write
        self._verify = verify

    def attempt(self, token: CancelToken) -> None:
        """Save the checkpoint and ask the storage whether it is there, and new.

        Raises:
            OSError: It is not, although nothing was raised. That is a failure of the unknown kind:
                it may have been dropped because it is not allowed, and repeating has its limit.
        """
        token.raise_if_cancelled()
        before = self.storage.stamp(self._url, token) if self._verify else None
        self._write()
        if not self._verify:
            return
        after = self.storage.stamp(self._url, token)
        if after is None:
            message = f"the CheckpointIO raised nothing, but {self._url} does not exist"
            raise OSError(message)
        if after and after == before:
            message = f"the CheckpointIO raised nothing, but {self._url} is still the older file"
            raise OSError(message)

    def close(self) -> None:
        """Nothing is left behind here."""
