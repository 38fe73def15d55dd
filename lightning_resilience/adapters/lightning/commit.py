# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a save says that it is complete: by a manifest, with what the checkpoint says of itself."""

from __future__ import annotations

import contextlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience.adapters.contents import TRAINING_STATE
from lightning_resilience.adapters.manifests import remove_manifest, write_manifest
from lightning_resilience.core.manifest import Origin, manifest_of


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.manifest import Contents
    from lightning_resilience.ports import CancelToken


__all__ = ["Commit", "origin_of"]

_LIGHTNINGS_VERSION = "pytorch-lightning_version"


class Commit:
    """The manifest of one save.

    Args:
        origin: Where the checkpoint comes from.
        nonce: Makes names for staged files.
    """

    def __init__(self, origin: Origin, *, nonce: Callable[[], str]) -> None:
        self._origin = origin
        self._nonce = nonce

    def begin(self, place: Place, token: CancelToken) -> None:
        """Take an older manifest away, before what it describes is touched."""
        remove_manifest(place, token)

    def end(self, place: Place, contents: Contents, token: CancelToken) -> None:
        """Write the manifest, after all of the checkpoint was verified."""
        manifest = manifest_of(place.path, contents, self._origin)
        token.raise_if_cancelled()
        write_manifest(place, manifest, nonce=self._nonce(), token=token)


def origin_of(checkpoint: object, storage: Storage) -> Origin:
    """Return where a checkpoint comes from, as far as it says so."""
    said: Mapping[str, Any] = checkpoint if isinstance(checkpoint, dict) else {}
    versions = {"torch": str(torch.__version__)}
    if isinstance(said.get(_LIGHTNINGS_VERSION), str):
        versions["lightning"] = said[_LIGHTNINGS_VERSION]
    # Run from a source tree, this package has no version.
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["lightning-resilience"] = metadata.version("lightning-resilience")
    step = _count(said.get("global_step"))
    return Origin(
        step=step,
        epoch=_count(said.get("epoch")),
        run=storage.run_id,
        training="" if step is None or TRAINING_STATE not in said else storage.training,
        versions=versions,
    )


def _count(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None  # type: ignore[return-value] # it is an int
