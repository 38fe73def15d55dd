# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are mapped while a run is restored from them, and not a step longer.

A mapped checkpoint takes no memory of its own, and what is copied from it into the model is read
once. Some of what is loaded is *not* copied by whoever takes it: an optimizer keeps the tensors of
its state where they are on the right device already, and a user's hook keeps what it likes. So
before the stage runs, what is still in the map is given memory of its own: whatever becomes of the
file then is nobody's problem, and a step of the optimizer does not wait for a disk.

What is mapped is what the kernel says. A map is private: nothing that is written to a tensor
reaches the file.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.serialization import set_default_mmap_options

from lightning_resilience.adapters.contents import DAMAGED
from lightning_resilience.adapters.lightning.namespaces import stage_runner
from lightning_resilience.adapters.staging import filesystem_kind
from lightning_resilience.core.node_cache import may_map


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_resilience.adapters.lightning.patches import Patches

    _Range: TypeAlias = tuple[int, int]


__all__ = ["Mappings", "hook_mappings"]

_MAPS = "/proc/self/maps"

_log = logging.getLogger(__name__)


class Mappings:
    """The files that this rank has mapped for one run."""

    def __init__(self) -> None:
        self._files: set[str] = set()

    def may_map(self, path: str) -> bool:
        """Tell whether a file is mapped, and let go of before the stage runs."""
        return may_map(
            kind=filesystem_kind(path),
            is_plain=_is_plain(path),
            is_let_go=Path(_MAPS).exists(),
        )

    def load(self, path: str, options: Mapping[str, Any]) -> Any:
        """Load a checkpoint whose tensors stay in the file.

        Args:
            path: A file of this node that nobody changes.
            options: Of ``torch.load``.
        """
        self._files.add(str(Path(path).resolve()))
        # A user may have chosen maps that are shared: then training would write to the file.
        with set_default_mmap_options(mmap.MAP_PRIVATE):
            return torch.load(path, mmap=True, **options)

    def let_go(self) -> None:
        """Give what is still in a map memory of its own."""
        ranges = self._ranges()
        if ranges:
            # A checkpoint that nobody has is kept by cycles at times.
            gc.collect()
            _move(ranges)
            ranges = self._ranges()
        if ranges:
            _log.warning(
                "%s stays mapped: something other than a tensor holds a part of it. Do not change "
                "that file while training runs; to remove it does no harm.",
                ", ".join(sorted(self._files)),
            )
        self._files.clear()

    def _ranges(self) -> list[_Range]:
        """Return where in memory the files are now."""
        if not self._files:
            return []
        with Path(_MAPS).open(encoding="utf-8", errors="surrogateescape") as lines:
            found = [_mapped(line) for line in lines]
        return [place for place, name in found if name in self._files]


def _mapped(line: str) -> tuple[_Range, str]:
    # By name: the numbers of a device are not those that stat tells, on some filesystems.
    addresses, *_, name = f"{line.rstrip()} ".split(" ", maxsplit=5)
    first, _, last = addresses.partition("-")
    name = name.strip().removesuffix(" (deleted)")
    return (int(first, 16), int(last, 16)), name


def _is_plain(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return all(item.compress_type == zipfile.ZIP_STORED for item in archive.infolist())
    except DAMAGED:
        return False


def _move(ranges: list[_Range]) -> None:
    """Copy every storage in one of the ranges, once, for all tensors that use it."""
    copies: dict[tuple[int, int], torch.UntypedStorage] = {}
    for tensor in _tensors():
        storage = _storage_of(tensor)
        if storage is None:
            continue
        place = storage.data_ptr(), storage.nbytes()
        if any(first <= place[0] < last for first, last in ranges):
            if place not in copies:
                copies[place] = _copied(storage)
            _use(tensor, copies[place])


def _tensors() -> Iterator[torch.Tensor]:
    for item in gc.get_objects():
        # By its type: some objects that stand for others do work when they are asked for theirs.
        if issubclass(type(item), torch.Tensor):
            yield item


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    # Some kinds have none: sparse ones, and those that only wrap others.
    with contextlib.suppress(NotImplementedError, RuntimeError):
        if tensor.device.type == "cpu":
            return tensor.untyped_storage()
    return None


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy


def _use(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    with torch.no_grad():
        plain = torch.empty(0, dtype=tensor.dtype)
        plain.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = plain


def hook_mappings(trainer: Any, patches: Patches) -> Mappings:
    """Let go of what is mapped when the Trainer has restored everything, and its stage begins.

    Args:
        trainer: The Trainer, which has not begun its stage.
        patches: Remembers what was replaced.
    """
    mappings = Mappings()
    owner, name = stage_runner(trainer)
    patches.replace(owner, name, partial(_run_stage, getattr(owner, name), mappings))
    return mappings


def _run_stage(inner: Callable[[], Any], mappings: Mappings) -> Any:
    mappings.let_go()
    return inner()
