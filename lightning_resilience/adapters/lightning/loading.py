# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint in Lightning's own format gets out of storage: in pieces that mark progress.

Lightning's stock ``TorchCheckpointIO`` opens an unguarded filesystem of its own, and hands the open
file to ``torch.load``. Here it is our private one, read past every listing, and ``torch.load`` sees
a file that reads no more than a piece at a time: each mark keeps a long load from being taken for a
stall, and of the checkpoint only that piece is in memory twice.

``torch.load`` reads from C++, and what an open file raises there comes out as something else, for
example as a ``ValueError`` about a closed file, or not at all: it was seen to read on after a read
that had failed, and to return. So a load during which a read has failed has failed.
"""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from lightning_resilience.adapters.contents import DAMAGED, contents_digest
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.manifests import check_contents, check_in_place
from lightning_resilience.adapters.marked_file import MarkedFile
from lightning_resilience.adapters.object_store import find_info
from lightning_resilience.adapters.private_filesystem import plain_url
from lightning_resilience.adapters.staging import discard, staging_name
from lightning_resilience.adapters.trees import fetch
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.resolution import Inspection, difference


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.adapters.trees import Tree
    from lightning_resilience.ports import CancelToken


__all__ = ["TorchLoad", "on_cpu"]

_BUFFER_BYTES: Final = 2**20


def on_cpu(storage: Any, location: str) -> Any:
    """Leave a tensor where ``torch.load`` has read it to: Lightning's own ``map_location``."""
    del location
    return storage


class TorchLoad(Work):
    """A load by our own pipeline.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
        nonce: Makes names for what is fetched.
        options: ``map_location`` and ``weights_only`` of ``torch.load``.
        expected: What rank 0 has seen of it; None where nobody has looked.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        nonce: Callable[[], str],
        options: Mapping[str, Any],
        expected: Inspection | None = None,
    ) -> None:
        super().__init__(storage, url)
        self._nonce = nonce
        self._expected = expected
        self._options = dict(options)
        self._names: list[str] = []

    def attempt(self, token: CancelToken) -> Any:
        """Read the checkpoint, once it is known to be what its manifest says, where it has one.

        Raises:
            FileNotFoundError: The storage says that it is not there.
            CorruptCheckpointError: It is not what its manifest says.
            OSError: What the filesystem or the storage raised.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        if plain_url(self.url).startswith("http"):
            return self._load_from_the_web(place, token)
        found = find_info(place.fs, place.path)
        if found is None and self._expected is not None:
            self._disagree("it is not there on this rank")
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", redacted(self.url))
        manifest = check_in_place(place, token, digests=place.store.is_local)
        if manifest is None or place.store.is_local:
            with place.fs.open(place.path, "rb") as file:
                return self._load_chosen(file, size_bytes=found.get("size"), token=token)
        # What comes from elsewhere is read once: fetched, and checked before it is used.
        copy = self._fetch(place, token)
        check_contents(place, manifest, copy.contents, token=token)
        with Path(copy.path).open("rb") as file:
            return self._load_chosen(file, size_bytes=copy.size_bytes, token=token)

    def _load_chosen(self, file: Any, *, size_bytes: int | None, token: CancelToken) -> Any:
        if self._expected is not None:
            self._compare(file, self._expected, size_bytes=size_bytes, token=token)
        return _load(file, token, self._options)

    def _compare(
        self, file: Any, expected: Inspection, *, size_bytes: int | None, token: CancelToken
    ) -> None:
        different = difference(expected, size_bytes=size_bytes)
        if different:
            self._disagree(different)
        marked = MarkedFile(file, token)
        try:
            digest = contents_digest(io.BufferedReader(marked)) if expected.digest else ""
        except DAMAGED as error:
            if marked.error is not None:
                raise marked.error from error
            self._disagree(f"it is damaged on this rank: {error}")
        different = difference(expected, digest=digest)
        if different:
            self._disagree(different)
        file.seek(0)

    def _disagree(self, how: str) -> NoReturn:
        # As a handle that went stale: a network filesystem may show this rank an older state, and
        # a later attempt may see what rank 0 sees.
        message = f"this is not the checkpoint that rank 0 has chosen: {how}"
        raise OSError(errno.ESTALE, message, redacted(self.url))

    def _load_from_the_web(self, place: Place, token: CancelToken) -> Any:
        # A web server need not be able to seek, and Lightning fetches the whole file as well; it
        # also trusts such a file where nobody has said otherwise.
        options = dict(self._options)
        if options["weights_only"] is None:
            options["weights_only"] = False
        with Path(self._fetch(place, token).path).open("rb") as file:
            return _load(file, token, options)

    def _fetch(self, place: Place, token: CancelToken) -> Tree:
        name = str(Path(self.storage.spool_directory, staging_name(self._nonce())))
        self._names.append(name)
        try:
            return fetch(place, name, token)
        except BaseException:
            # One part of a large checkpoint for each attempt would fill the disk.
            discard(name)
            raise

    def close(self) -> None:
        """Remove what was fetched."""
        for name in self._names:
            discard(name)


def _load(file: Any, token: CancelToken, options: Mapping[str, Any]) -> Any:
    marked = MarkedFile(file, token)
    failure: BaseException | None = None
    loaded: Any = None
    try:
        loaded = torch.load(io.BufferedReader(marked, _BUFFER_BYTES), **options)
    except Exception as error:  # noqa: BLE001 - raised again, or what led to it
        failure = error
    failure = marked.error or failure
    if failure is not None:
        raise failure
    return loaded
