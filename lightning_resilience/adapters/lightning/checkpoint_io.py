# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How one checkpoint gets into storage: staged, published, verified, and committed.

For Lightning's stock ``TorchCheckpointIO``, which opens an unguarded filesystem of its own on every
call and holds a second copy of the checkpoint in memory, the writing is ours: the same file format,
streamed into a staged file. A complete staged file is kept for the next attempt.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from lightning_resilience.adapters.lightning.commit import Commit, origin_of
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.staging import Staged, discard, stage, synchronise
from lightning_resilience.core.pipeline import Progress, Step, carry_out, save
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning_resilience.adapters.parted_upload import PartedUpload
    from lightning_resilience.adapters.staging import StagedWriter
    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["StagedSave", "verify_size"]

_log = logging.getLogger(__name__)


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
        self.origin = origin_of(checkpoint, storage)
        self._nonce = nonce
        self.step = self.origin.step
        self._commit = Commit(self.origin, nonce=nonce)
        self._known: Progress[Staged] = Progress()
        self._names: list[str] = []

    def attempt(self, token: CancelToken) -> Staged:
        """Stage, publish and verify the checkpoint if that is not done yet, and commit it.

        Raises:
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        place = self.storage.place(self.url)
        steps = save(self._known, keeps_staged=not place.store.is_local)
        with contextlib.ExitStack() as sending:
            return carry_out(steps, self._hands(place, token, sending))

    def _hands(
        self, place: Place, token: CancelToken, sending: contextlib.ExitStack
    ) -> dict[Step, Callable[[Any], object]]:
        commit, early = self._commit, _Early(sending)
        return {
            Step.ASK: lambda _: token.raise_if_cancelled(),
            Step.STAGE: lambda _: self._stage(place, token, early),
            Step.UNMARK: lambda _: commit.begin(place, token),
            Step.PUBLISH: lambda staged: place.store.publish(
                staged.path, place.path, token, upload=early.upload
            ),
            Step.DISCARD: lambda staged: discard(staged.path),
            Step.VERIFY: lambda staged: verify_size(place, staged),
            Step.MARK: lambda staged: commit.end(
                place, {"": (staged.size_bytes, staged.digest)}, token
            ),
        }

    def size_bytes(self) -> tuple[int, int]:
        """Return about how long it will be, and how much of that is on this node already."""
        staged = self._known.staged
        if staged is None or staged.path not in self._names:
            return _tensor_bytes(self.checkpoint), 0
        return staged.size_bytes, staged.size_bytes

    def spool(self, path: str, token: CancelToken) -> Staged:
        """Write the checkpoint to ``path`` on this node, whole; storage is asked nothing.

        Raises:
            OSError: What the node's filesystem raised.
        """
        staged, self._known.staged = self._known.staged, None
        if staged is None or staged.path not in self._names:
            return stage(self._write, path, token)
        os.replace(staged.path, path)  # noqa: PTH105 - both are names, and no paths of anybody's
        # It was to be sent at once, and is to outlast this process now.
        synchronise(path)
        return Staged(path=path, size_bytes=staged.size_bytes, digest=staged.digest)

    def _stage(self, place: Place, token: CancelToken, early: _Early) -> Staged:
        name = self._name(place)
        upload = early.open(
            place.store.upload(
                name, place.path, token, expected_bytes=_tensor_bytes(self.checkpoint)
            )
        )
        return stage(
            *(self._write, name, token),
            # What is sent from here on goes with this process.
            durable=place.store.is_local,
            on_growth=None if upload is None else upload.grow,
        )

    def _name(self, place: Place) -> str:
        name = place.store.staging_path(place.path, self._nonce())
        if not place.store.is_local:
            # Beside a local target the attempt itself leaves nothing, whatever its end; to ask that
            # filesystem again, on the caller's thread, might never return.
            self._names.append(name)
        return name

    def _write(self, file: StagedWriter) -> None:
        torch.save(self.checkpoint, cast("IO[bytes]", file))

    def close(self) -> None:
        """Remove all staged files of the spool directory, as far as that can be done."""
        for name in self._names:
            _discard_or_say(name)


def _discard_or_say(name: str) -> None:
    try:
        discard(name)
    except OSError as error:
        # How the save has ended is known to all ranks, and this one must not leave by itself.
        _log.warning("the staged file %s is left on this node: %s", name, error)


class _Early:
    """An upload that begins while its file is still written, in one attempt.

    Args:
        sending: Ends it with the attempt.
    """

    def __init__(self, sending: contextlib.ExitStack) -> None:
        self.upload: PartedUpload | None = None
        self._sending = sending

    def open(self, upload: AbstractContextManager[PartedUpload | None]) -> PartedUpload | None:
        """Begin it, where the storage takes files in parts."""
        self.upload = self._sending.enter_context(upload)
        return self.upload


def verify_size(place: Place, staged: Staged) -> None:
    """Refuse what was published where the storage reports another size.

    Args:
        place: Where it is.
        staged: What was published.

    Raises:
        CheckpointError: It is longer or shorter, or nothing is there.
        OSError: What the filesystem or the storage raised.
    """
    found = place.store.size(place.path)
    if found != staged.size_bytes:
        there = "nothing is there" if found is None else f"{found} bytes are there"
        message = f"{staged.size_bytes} bytes were written to {place.path}, but {there}"
        raise CheckpointError(message)


def _tensor_bytes(checkpoint: object) -> int:
    """Return about how long the file will be: the bytes of all tensors in its containers."""
    size_bytes = 0
    seen: set[int] = set()
    left = [checkpoint]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            size_bytes += value.element_size() * value.numel()
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)
    return size_bytes
