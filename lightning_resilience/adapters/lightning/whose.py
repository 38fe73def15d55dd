# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whose ``CheckpointIO`` is it, and what is done for it?

==============================  ===========================  =======================================
the ``CheckpointIO``            a save                       a load
==============================  ===========================  =======================================
Lightning's stock one, or none  our own pipeline             our own pipeline
of the user's, staged           it writes a path on this     it reads the path itself where that is
                                node, which we publish       local, else what we have fetched
of the user's, not staged       it is called as a whole      it is called as a whole
==============================  ===========================  =======================================

A save of the first two may wait on this node while storage is ill; the third waits for storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.lightning.commit import origin_of
from lightning_resilience.adapters.lightning.foreign_io import (
    FetchedLoad,
    LocalSave,
    WholeLoad,
    WholeSave,
)
from lightning_resilience.adapters.lightning.loading import TorchLoad, on_cpu
from lightning_resilience.adapters.lightning.namespaces import (
    default_weights_only,
    is_stock_io,
)
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.manifests import remove_manifest
from lightning_resilience.adapters.storage import is_local
from lightning_resilience.core.pipeline import Step, carry_out, removal


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["Format"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Who writes and reads the bytes of a checkpoint, and how that is called.

    Args:
        owner: The ``CheckpointIO`` whose format it is; None for Lightning's own format.
        staging: Whether it is called with paths on this node.
    """

    owner: Any = None
    staging: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether our own pipeline does it, in the format of ``torch.save``."""
        return self.owner is None or is_stock_io(self.owner)

    @property
    def can_be_asked(self) -> bool:
        """Whether what reaches storage is written and read by us, so that trying it says much."""
        return self.is_ours or self.staging

    def save(
        self,
        storage: Storage,
        url: str,
        checkpoint: Mapping[str, Any],
        *,
        nonce: Callable[[], str],
        storage_options: Any = None,
    ) -> Work:
        """Return what saves a checkpoint."""
        if self.is_ours:
            return StagedSave(storage.with_options(storage_options), url, checkpoint, nonce=nonce)

        def write(path: str) -> None:
            self.owner.save_checkpoint(checkpoint, path, storage_options=storage_options)

        if self.staging:
            origin = origin_of(checkpoint, storage)
            return LocalSave(storage, url, nonce=nonce, call=write, origin=origin)
        return WholeSave(storage, url, partial(write, url))

    def load(
        self,
        storage: Storage,
        url: str,
        *,
        nonce: Callable[[], str],
        options: Mapping[str, Any],
        **shared: Any,
    ) -> Work:
        """Return what loads a checkpoint.

        Args:
            storage: Clients of storage.
            url: The checkpoint.
            nonce: Makes names for what is fetched.
            options: What the caller has said.
            shared: What this rank has in common with others, where our own pipeline reads it; see
                ``TorchLoad``.
        """
        if self.is_ours:
            said = {"map_location": on_cpu, "weights_only": None, **options}
            if said["weights_only"] is None:
                said["weights_only"] = default_weights_only(self.owner)
            return TorchLoad(storage, url, nonce=nonce, options=said, **shared)
        read = partial(self.owner.load_checkpoint, **options)
        if self.staging and not is_local(url):
            return FetchedLoad(storage, url, nonce=nonce, call=read)
        return WholeLoad(storage, url, partial(read, url))

    def remove(self, storage: Storage, url: str) -> Work:
        """Return what removes a checkpoint; absent is success where it is ours to remove."""
        if self.is_ours or (self.staging and not is_local(url)):
            return Asked(storage, url, partial(storage.remove, url))

        def remove(token: CancelToken) -> None:
            hands: dict[Step, Callable[[Any], object]] = {
                Step.ASK: lambda _: token.raise_if_cancelled(),
                Step.UNMARK: lambda _: remove_manifest(storage.place(url), token),
                Step.REMOVE: lambda _: self.owner.remove_checkpoint(url),
                Step.TIDY: lambda _: None,
            }
            carry_out(removal(), hands)

        return Asked(storage, url, remove)
