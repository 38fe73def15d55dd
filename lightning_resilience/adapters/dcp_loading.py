# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks ask of storage to load a checkpoint of ``torch.distributed.checkpoint``.

============  ======  ==========================================================================
step          ranks   what it does
============  ======  ==========================================================================
``find``      rank 0  sees the metadata, the manifest, and the size of every shard; tells of them
``metadata``  all     reads the metadata, and compares its digest
``fetch``     all     reads every shard that it needs, and compares its digest; what is not local
                      is on this node then
``apply``     all     torch's own reader makes tensors of them
============  ======  ==========================================================================

No tensor is touched on any rank before every rank has what it needs, as it was saved.
"""

from __future__ import annotations

import errno
import pickle
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import xxhash

from lightning_resilience.adapters.dcp_saving import METADATA
from lightning_resilience.adapters.lightning.sharded_work import own_path
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.manifests import check_contents, read_manifest
from lightning_resilience.adapters.object_store import find_info, list_files
from lightning_resilience.adapters.trees import digest_of_file, fetch
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.manifest import decode_manifest, encode_manifest
from lightning_resilience.errors import CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.checkpoint.metadata import Metadata

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.ports import CancelToken


__all__ = ["Find", "ReadMetadata", "ShardFetch", "manifest_told"]


class Find(Work):
    """See whether there is a complete checkpoint; one rank's answer is that of all."""

    def attempt(self, token: CancelToken) -> str:
        """Look.

        Returns:
            Its manifest, as text; empty where it has none.

        Raises:
            FileNotFoundError: There is no checkpoint, or one that no save has made complete.
            CorruptCheckpointError: A file is not there, or has another size than was saved.
            OSError: It cannot be told.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        if find_info(place.fs, f"{place.path}/{METADATA}") is None:
            message = f"there is no checkpoint: no file {METADATA} says that its save has ended"
            raise FileNotFoundError(errno.ENOENT, message, redacted(self.url))
        token.progress()
        manifest = read_manifest(place, token)
        if manifest is None:
            return ""
        sizes = list_files(place.fs, place.path)
        token.progress()
        known = manifest.contents
        # What else is there was left by a save that did not end, and nothing refers to it.
        found = {
            name: (known[name][0] if size is None else size, None)
            for name, size in sizes.items()
            if name in known
        }
        check_contents(place, manifest, found, token=token)
        return encode_manifest(manifest).decode()


def manifest_told(text: str) -> Manifest | None:
    """Return the manifest that ``Find`` has told of; None where there is none."""
    return decode_manifest(text.encode(), path="that rank 0 has read") if text else None


class ReadMetadata(Work):
    """Read what the planner needs to know which rank needs what.

    Args:
        storage: Clients of storage.
        url: The checkpoint's directory.
        manifest: What was saved, where that is known.

    Attributes:
        metadata: What was read.
    """

    def __init__(self, storage: Storage, url: str, *, manifest: Manifest | None) -> None:
        super().__init__(storage, url)
        self._manifest = manifest
        self.metadata: Metadata | None = None

    def attempt(self, token: CancelToken) -> str:
        """Read it.

        Raises:
            CorruptCheckpointError: It is not what was saved, or no metadata.
            OSError: What the filesystem or the storage raised.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        raw = bytes(place.fs.cat_file(f"{place.path}/{METADATA}"))
        token.progress()
        if self._manifest is not None:
            digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(raw)}"
            _check(place, self._manifest, {METADATA: (len(raw), digest)}, token=token)
        try:
            # As torch's own reader does; who can write a checkpoint can run code here.
            self.metadata = pickle.loads(raw)  # noqa: S301
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
            message = f"{METADATA} of {redacted(self.url)} cannot be read: {error}"
            raise CorruptCheckpointError(message) from error
        return ""


class ShardFetch(Work):
    """Read every shard that this rank needs to its end; what was fetched stays until ``discard``.

    Args:
        storage: Clients of storage.
        url: The checkpoint's directory.
        names: The shards.
        manifest: What was saved, where that is known.
        nonce: Makes a name for a directory of this rank's.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        names: Iterable[str],
        *,
        manifest: Manifest | None,
        nonce: Callable[[], str],
    ) -> None:
        super().__init__(storage, url)
        self._left = sorted(set(names))
        self._manifest = manifest
        self._nonce = nonce
        self._folder: Path | None = None

    def attempt(self, token: CancelToken) -> str:
        """Read what is not read yet.

        Raises:
            CorruptCheckpointError: A shard is not what was saved.
            OSError: What the filesystem or the storage raised.
        """
        for name in list(self._left):
            token.raise_if_cancelled()
            found = self._read(name, token)
            if self._manifest is not None:
                place = self.storage.place(self.url)
                _check(place, self._manifest, {name: found}, token=token)
            self._left.remove(name)
        return ""

    def _read(self, name: str, token: CancelToken) -> tuple[int, str]:
        if ".." in PurePosixPath(name).parts:
            message = f"{METADATA} of {redacted(self.url)} names {name!r}, which is outside of it"
            raise CorruptCheckpointError(message)
        place = self.storage.place(f"{self.url}/{name}")
        if place.store.is_local:
            path = Path(place.path)
            # Without a manifest it is known to be there, and nothing else can be.
            is_known = self._manifest is not None
            digest = digest_of_file(path, token) if is_known else ""
            return path.stat().st_size, digest
        # Under a name of the attempt's own: one that was abandoned may still be writing.
        arriving = own_path(self.storage, self._nonce)
        try:
            tree = fetch(place, str(arriving), token)
            token.raise_if_cancelled()
            target = self._fetched / name
            target.parent.mkdir(parents=True, exist_ok=True)
            arriving.replace(target)
        finally:
            arriving.unlink(missing_ok=True)
        return tree.contents[""]

    @property
    def _fetched(self) -> Path:
        if self._folder is None:
            self._folder = own_path(self.storage, self._nonce)
        return self._folder

    @property
    def folder(self) -> str:
        """The directory on this node in which the shards are."""
        place = self.storage.place(self.url)
        return str(place.path if place.store.is_local else self._fetched)

    def discard(self) -> None:
        """Remove what was fetched."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _check(
    place: Place, manifest: Manifest, found: dict[str, tuple[int, str]], *, token: CancelToken
) -> None:
    # The others are not looked at now.
    sizes: dict[str, tuple[int, str | None]] = {
        other: (size, None) for other, (size, _) in manifest.contents.items()
    }
    check_contents(place, manifest, {**sizes, **found}, token=token)
