# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are mapped while a run is restored from them, and not a step longer.

A mapped checkpoint takes no memory of its own, and what is copied from it into the model is read
once. Some of what is loaded is *not* copied by whoever takes it: an optimizer keeps the tensors of
its state where they are on the right device already, and a user's hook keeps what it likes. So
before the stage runs, what is still in use gets memory of its own: whatever becomes of the file
then is nobody's problem, and a step of the optimizer does not wait for a disk.

It gets that memory *at the same address*: a copy takes the place of the map. A tensor could be
given other storage instead, but not the array, or the code in C++, that has its address. Pages of
which nothing is in use are left empty.

What is mapped is what the kernel says. A map is private: nothing that is written to a tensor
reaches the file.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.serialization import set_default_mmap_options

from lightning_resilience.adapters.contents import DAMAGED
from lightning_resilience.adapters.lightning.namespaces import stage_runner
from lightning_resilience.adapters.mounts import filesystem_kind
from lightning_resilience.core.node_cache import may_map, pages_of


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.adapters.lightning.patches import Patches

    _Range: TypeAlias = tuple[int, int]


__all__ = ["Mappings", "hook_mappings"]

_MAPS: Final = "/proc/self/maps"
# Flags of mremap(2): move it, and to this very place.
_MAYMOVE, _FIXED = 1, 2
_FAILED: Final = ctypes.c_void_p(-1).value

# It has no types.
_weakly: Final[Any] = StorageWeakRef

_log = logging.getLogger(__name__)


class Mappings:
    """The files that this rank has mapped for one run."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._storages: list[tuple[_Range, Any]] = []

    def may_map(self, path: str, options: Mapping[str, Any]) -> bool:
        """Tell whether a file is mapped, and let go of before the stage runs.

        Args:
            path: A file of this node that nobody changes.
            options: Of ``torch.load``.
        """
        can_note = callable(options["map_location"])
        return may_map(
            kind=filesystem_kind(path),
            is_plain=_is_plain(path),
            is_let_go=can_note and Path(_MAPS).exists(),
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
            return torch.load(
                path,
                mmap=True,
                **{**options, "map_location": partial(self._note, options["map_location"])},
            )

    def _note(self, inner: Callable[..., Any], storage: Any, location: str) -> Any:
        placed = inner(storage, location)
        first = storage.data_ptr()
        self._storages.append(((first, first + storage.nbytes()), _weakly(storage)))
        return placed

    def let_go(self) -> None:
        """Give what is in use of a map memory of its own, in its place."""
        if self._ranges():
            # A checkpoint that nobody has is kept by cycles at times.
            gc.collect()
        used = [place for place, storage in self._storages if not storage.expired()]
        for place in self._ranges():
            # Without anything of ours in use it is not our map, but one that a user has made.
            pages = pages_of(place, used=used, page_bytes=mmap.PAGESIZE)
            if pages and not _replace(place, pages):
                _log.warning(
                    "%s stays mapped while training runs, because the kernel would not move it. "
                    "Do not write to that file; to remove it does no harm.",
                    ", ".join(sorted(self._files)),
                )
        self._files.clear()
        self._storages.clear()

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


def _replace(place: _Range, pages: list[_Range]) -> bool:
    """Put a copy of some pages where a map is now, with nothing between them."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    first, size = place[0], place[1] - place[0]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = library.mmap(
        None,
        ctypes.c_size_t(size),
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags,
        -1,
        ctypes.c_size_t(0),
    )
    if copy == _FAILED:
        return False
    for start, end in pages:
        ctypes.memmove(copy + start - first, start, end - start)
    moved = library.mremap(
        ctypes.c_void_p(copy),
        ctypes.c_size_t(size),
        ctypes.c_size_t(size),
        _MAYMOVE | _FIXED,
        ctypes.c_void_p(first),
    )
    if moved == _FAILED:
        library.munmap(ctypes.c_void_p(copy), ctypes.c_size_t(size))
    return bool(moved == first)


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
