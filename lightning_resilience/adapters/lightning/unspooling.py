# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Publish one spooled checkpoint: as a save does, from what is there already."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.checkpoint_io import verify_size
from lightning_resilience.adapters.lightning.commit import Commit
from lightning_resilience.adapters.lightning.foreign_io import LocalSave
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.manifests import read_manifest
from lightning_resilience.adapters.staging import Staged, discard, stage
from lightning_resilience.adapters.tree_copies import copy_tree
from lightning_resilience.adapters.trees import (
    Publication,
    Tree,
    copy_into,
    digest_of_file,
    files_below,
    measure,
)
from lightning_resilience.core.manifest import Origin, difference, manifest_of
from lightning_resilience.core.pipeline import Progress, Step, carry_out, save
from lightning_resilience.core.spool import is_outdated
from lightning_resilience.errors import CallTimeoutError, CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from lightning_resilience.adapters.spool import Kept
    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["Publishing"]


@contextlib.contextmanager
def _always() -> Iterator[bool]:
    yield True


class Publishing(Work):
    """The publication of one spooled checkpoint, which marks its progress.

    Args:
        storage: Clients of storage.
        kept: What is published.
        nonce: Makes names for staged files.
        sending: Entered around what is sent; says whether it is still wanted.
        is_wanted: Asked between pieces whether it is still wanted.
        from_before: Whether an earlier start has left it: then storage may have a newer one.
    """

    def __init__(
        self,
        storage: Storage,
        kept: Kept,
        *,
        nonce: Callable[[], str],
        sending: Callable[[], AbstractContextManager[bool]] = _always,
        is_wanted: Callable[[], bool] = lambda: True,
        from_before: bool = False,
    ) -> None:
        super().__init__(storage, kept.entry.path)
        entry = kept.entry
        self._kept = kept
        self._nonce = nonce
        self._sending = sending
        self._is_wanted = is_wanted
        self._from_before = from_before
        origin = Origin(
            step=entry.step,
            epoch=entry.epoch,
            run=entry.run,
            training=entry.training,
            versions=entry.versions,
        )
        self._known: Progress[Staged] = Progress()
        self._commit = Commit(origin, nonce=nonce)
        self._tree = _KeptTree(storage, kept, nonce=nonce, origin=origin)

    def attempt(self, token: CancelToken) -> Staged | Tree | None:
        """Publish, verify and commit it.

        Returns:
            What was published; None where nobody wants it any more, or storage has a newer one.

        Raises:
            CorruptCheckpointError: What is on this node is not what was spooled.
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        with self._sending() as is_wanted:
            return self._publish(_Wanted(token, self._is_wanted)) if is_wanted else None

    def _publish(self, token: CancelToken) -> Staged | Tree | None:
        entry, place = self._kept.entry, self.storage.place(self.url)
        if self._from_before and is_outdated(entry, read_manifest(place, token)):
            return None
        if entry.files:
            return self._tree.attempt(token)
        steps = save(self._known, keeps_staged=not place.store.is_local)
        return carry_out(steps, self._hands(place, token))

    def _hands(self, place: Place, token: CancelToken) -> dict[Step, Callable[[Any], object]]:
        contents = self._kept.entry.contents
        return {
            Step.ASK: lambda _: token.raise_if_cancelled(),
            Step.STAGE: lambda _: self._stage(place, token),
            Step.UNMARK: lambda _: self._commit.begin(place, token),
            Step.PUBLISH: lambda staged: place.store.publish(staged.path, place.path, token),
            Step.DISCARD: lambda staged: discard(staged.path),
            Step.VERIFY: lambda staged: verify_size(place, staged),
            Step.MARK: lambda _: self._commit.end(place, contents, token),
        }

    def _stage(self, place: Place, token: CancelToken) -> Staged:
        """Return the file to publish, after its digest was compared."""
        kept = self._kept
        if place.store.is_local:
            # Beside the target, where a rename publishes it.
            name = place.store.staging_path(place.path, self._nonce())
            staged = stage(partial(copy_into, kept.file), name, token)
        else:
            digest = digest_of_file(Path(kept.file), token)
            size_bytes = Path(kept.file).stat().st_size
            staged = Staged(path=kept.file, size_bytes=size_bytes, digest=digest)
        if (staged.size_bytes, staged.digest) != (kept.entry.size_bytes, kept.entry.digest):
            if staged.path != kept.file:
                discard(staged.path)
            raise _damaged(
                kept,
                f"{staged.size_bytes} bytes and {staged.digest} instead of "
                f"{kept.entry.size_bytes} and {kept.entry.digest}",
            )
        return staged


class _KeptTree(LocalSave):
    """The publication of a spooled directory: that of one which a ``CheckpointIO`` has just staged.

    Args:
        storage: Clients of storage.
        kept: What is published.
        nonce: Makes names for staged files.
        origin: Where the checkpoint comes from.
    """

    def __init__(
        self, storage: Storage, kept: Kept, *, nonce: Callable[[], str], origin: Origin
    ) -> None:
        super().__init__(storage, kept.entry.path, nonce=nonce, call=_nothing, origin=origin)
        self._kept = kept
        self._manifest = manifest_of(kept.entry.path, kept.entry.contents, origin)

    def _make(self, own: Path | None, token: CancelToken) -> Publication:
        kept = self._kept
        there = files_below(Path(kept.file))
        self._refuse_others({name: (file.stat().st_size, None) for name, file in there.items()})
        tree = Tree(path=kept.file, contents=kept.entry.contents)
        if own is None:
            # In the order of the record: when the files were written says nothing any more.
            return Publication(tree=self._as_written(measure(kept.file, token)), aside="")
        path = self._path_in(own)
        return Publication(
            tree=self._as_written(copy_tree(tree, path, token)), aside=f"{path}.replaced"
        )

    def _as_written(self, found: Tree) -> Tree:
        self._refuse_others(found.contents)
        return Tree(path=found.path, contents=self._kept.entry.contents)

    def _refuse_others(self, found: Mapping[str, tuple[int, str | None]]) -> None:
        what = difference(self._manifest, found)
        if what:
            raise _damaged(self._kept, what)


def _nothing(path: str) -> None:
    del path


def _damaged(kept: Kept, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the spooled checkpoint {kept.file} is not what was written: {what}. It is not published "
        f"as {kept.entry.path}."
    )


class _Wanted:
    """A token that also says whether what is published is still wanted."""

    def __init__(self, token: CancelToken, is_wanted: Callable[[], bool]) -> None:
        self._token = token
        self._is_wanted = is_wanted

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given up, or the run ends."""
        return self._token.cancelled or not self._is_wanted()

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Say that a part is done."""
        self._token.progress(written=written, sent=sent, read=read)

    def raise_if_cancelled(self) -> None:
        """Raise where the caller has given up, or the run ends."""
        self._token.raise_if_cancelled()
        if not self._is_wanted():
            message = "the run ends, and what was being published stays on this node"
            raise CallTimeoutError(message)
