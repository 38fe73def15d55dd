# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What can be seen of checkpoints in a simulated storage: by the package, and in truth.

The package sees names, sizes, manifests, and digests of local files. The truth is what each file
holds. What is made of it is shipped: ``core.manifest``, ``core.shards``, ``core.set_aside`` and
``core.fallback``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.candidates import Candidate
from lightning_resilience.core.fallback import Choice, choosing, judging
from lightning_resilience.core.manifest import (
    DIRECTORY,
    Contents,
    Manifest,
    Origin,
    decode_manifest,
    difference,
    encode_manifest,
    manifest_of,
    manifest_path,
)
from lightning_resilience.core.pipeline import Step, carry_out
from lightning_resilience.core.resolution import (
    Found,
    Inspection,
    Search,
    described,
    last_name,
    may_describe,
    sort_names,
)
from lightning_resilience.core.set_aside import mark_of
from lightning_resilience.core.shards import UNFINISHED, Form, form_of
from lightning_resilience.drill.save_storage import FOLDER, Blob, SaveStorage, below
from lightning_resilience.errors import CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.core.pipeline import Steps


__all__ = ["Format", "Looks", "contents_of", "manifest_blob", "number_of_digest", "parts_of"]

_BYTES: Final = 1000
_UNDIGESTED: Final = "xxh3-128:"


class Format(str, Enum):
    """What a checkpoint is made of."""

    FILE = "file"
    """One file in Lightning's format."""
    FOREIGN = "foreign"
    """One file in a format of the user's: nobody can look into it."""
    TREE = "tree"
    """A directory in a format of the user's."""
    SHARDS = "shards"
    """A directory in which ranks have written shards, and rank 0 the metadata."""


_TRAINING: Final = "the training"
"""Every start of a world goes on from the last checkpoint."""

_NAMES: Final = {
    Format.FILE: ("",),
    Format.FOREIGN: ("",),
    Format.TREE: ("weights", "index"),
    Format.SHARDS: ("0.distcp", "1.distcp", ".metadata", "meta.pt"),
}


def contents_of(form: Format, number: int) -> dict[str, tuple[int, str]]:
    """Return size and digest of each file of a checkpoint, in the order in which they are sent."""
    return {
        name: (_BYTES + number, f"{_UNDIGESTED}{number:016x}{at:016x}")
        for at, name in enumerate(_NAMES[form], start=1)
    }


def number_of_digest(digest: str) -> int:
    """Return the training steps of the checkpoint that has a file of this digest."""
    return int(digest.removeprefix(_UNDIGESTED)[:16], 16)


def parts_of(form: Format, number: int) -> dict[str, Blob]:
    """Return the files of a checkpoint."""
    return {
        name: Blob(number=number, digest=digest, size_bytes=size_bytes)
        for name, (size_bytes, digest) in contents_of(form, number).items()
    }


def manifest_blob(path: str, contents: Contents, number: int) -> Blob:
    """Return the file that is the manifest of a checkpoint."""
    data = encode_manifest(manifest_of(path, contents, Origin(step=number)))
    return Blob(data=data, size_bytes=len(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Whoever looks at a storage.

    Args:
        storage: The storage.
        form: What its checkpoints are made of.
        is_local: Whether a candidate is one file on a filesystem.
        is_doubted: Whether a load has found damage in it.
    """

    storage: SaveStorage
    form: Format
    is_local: bool
    is_doubted: bool = False

    @property
    def digests(self) -> bool:
        """Whether a candidate is read through where it is."""
        return self.is_local or self.is_doubted

    # In truth -------------------------------------------------------------------------------------

    def number_of(self, path: str) -> int | None:
        """Return the training steps of what is there; None where that is no whole checkpoint."""
        tree = self.storage.tree(self.storage.real(path))
        numbers = {blob.number for blob in tree.values()}
        is_whole = tree.keys() == set(_NAMES[self.form]) and len(numbers) == 1
        if not is_whole or any(blob.is_damaged for blob in tree.values()):
            return None
        return next(iter(numbers))

    def manifest_error(self, path: str) -> str:
        """Return how what is there differs from its manifest; empty where it does not."""
        manifest = self.manifest(path)
        return "" if manifest is None else difference(manifest, self._found(path, digests=True))

    def manifest(self, path: str) -> Manifest | None:
        """Return the manifest of the checkpoint of that name, None where it has none."""
        raw = self._raw_manifest(path)
        return decode_manifest(raw, path=path) if raw else None

    def checkpoints(self) -> list[str]:
        """Return every name under which a checkpoint could be."""
        return sorted(self.storage.listed())

    # By the package -------------------------------------------------------------------------------

    def listed(self, number: int = 0) -> Found:
        """List the directory, as a search for the last checkpoint does."""
        del number
        items = [self._candidate(path, float(at)) for path, at in self.storage.listed().items()]
        return sort_names(items, pattern=last_name("last{step}", ".ckpt"), extension=".ckpt")

    def _candidate(self, path: str, at_s: float) -> Candidate:
        try:
            manifest = self.manifest(path)
        except CorruptCheckpointError:
            return Candidate(url=path, modified_s=at_s, is_marked=True)
        if manifest is None:
            return Candidate(url=path, modified_s=at_s)
        return Candidate(
            url=path, modified_s=at_s, is_marked=True, step=manifest.step, training=_TRAINING
        )

    def inspect(self, path: str) -> Inspection:
        """Look at a candidate; its manifest may stand for what is inside.

        Raises:
            FileNotFoundError: Nothing is there.
        """
        tree = self.storage.tree(self.storage.real(path))
        if not tree and path in self.storage.links:
            return Inspection(path=path, rejected="it is a link, and nothing is there")
        if not tree:
            raise FileNotFoundError(path)
        if self.form is Format.SHARDS:
            is_complete = form_of("directory", tree) is Form.SHARDS
            rejected = "" if is_complete else UNFINISHED
            return Inspection(path=path, rejected=rejected, is_resumable=is_complete)
        if self.form is Format.TREE:
            return Inspection(path=path, doubt="nobody can look into it")
        if self.form is Format.FOREIGN:
            return Inspection(path=path)
        blob = tree[""]
        if may_describe(is_local=self.is_local, is_doubted=self.is_doubted):
            seen = described(path, self._readable(path), size_bytes=blob.size_bytes)
            if seen is not None:
                return seen
        # A change of length is seen in the table of contents, one of a bit is not.
        is_cut = blob.size_bytes != _BYTES + blob.number
        return Inspection(
            path=path,
            size_bytes=blob.size_bytes,
            digest=blob.digest,
            rejected="it was not written to its end" if is_cut else "",
            is_resumable=True,
        )

    def _readable(self, path: str) -> Manifest | None:
        try:
            return self.manifest(path)
        except CorruptCheckpointError:
            return None

    def compare(self, path: str) -> str | None:
        """Tell why it is not what its manifest says; None where it has none."""
        try:
            manifest = self.manifest(path)
        except CorruptCheckpointError as error:
            return str(error)
        if manifest is None:
            return None
        return difference(manifest, self._found(path, digests=self.digests))

    def identify(self, path: str) -> str:
        """Return the mark of what is there now; empty for what is never set aside."""
        tree = self.storage.tree(path)
        if path in self.storage.links or not tree:
            return ""
        raw = self._raw_manifest(path).decode()
        if "" in tree:
            return mark_of(f"{tree[''].modified}", raw)
        return mark_of("directory", raw) if raw else ""

    def judging(self, path: str) -> tuple[Steps[Inspection], dict[Step, Callable[[Any], Any]]]:
        """Return the steps of looking at a candidate, and what answers them."""
        return judging(), {
            Step.INSPECT: lambda _: self.inspect(path),
            Step.COMPARE: lambda _: self.compare(path),
            Step.IDENTIFY: lambda _: self.identify(path),
        }

    def judged(self, path: str) -> Inspection:
        """Return what is thought of a candidate now."""
        return carry_out(*self.judging(path))

    def start(self) -> Choice:
        """Return what a run would start from now; nothing is changed.

        Raises:
            CheckpointError: Something is there, and none of it can be loaded.
            FileNotFoundError: What was listed is not there.
        """
        hands: Mapping[Step, Callable[[Any], Any]] = {
            Step.LIST: self.listed,
            Step.JUDGE: self.judged,
            Step.LEAVE: lambda _: None,
        }
        return carry_out(choosing(Search.LAST, 1, allow_fresh_start=False), hands)

    def _raw_manifest(self, path: str) -> bytes:
        blob = self.storage.files.get(manifest_path(path))
        return b"" if blob is None else blob.data

    def _found(self, path: str, *, digests: bool) -> dict[str, tuple[int, str | None]]:
        return {
            name: (blob.size_bytes, blob.digest if digests else None)
            for name, blob in self.storage.tree(self.storage.real(path)).items()
        }


def is_manifest(path: str) -> bool:
    """Tell whether a path is that of a manifest."""
    folder, _, name = path.rpartition("/")
    return folder == f"{FOLDER}/{DIRECTORY}" and bool(name)


def marked(storage: SaveStorage) -> list[str]:
    """Return the names of all checkpoints that have a manifest."""
    suffix = len(".json")
    return [
        below(FOLDER, path.rpartition("/")[2][:-suffix])
        for path in storage.files
        if is_manifest(path)
    ]
