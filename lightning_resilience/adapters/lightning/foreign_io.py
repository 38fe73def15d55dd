# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A user's own ``CheckpointIO``: called with a path on this node, or as a whole.

It keeps its format. By default it writes a *staged* file or directory and reads a fetched one, and
between the node and the storage everything is ours: published at once where the storage can,
verified, repeated, abandoned when it stalls, or kept here while storage is ill (``spooling``). Its
own code then never meets an ill storage.

The staged path is the checkpoint's own name in a new directory, so that an IO that looks at the
name finds what it expects, and what it writes besides is seen. One that ignores the path, or needs
the real URL, is found out by what is not there, and is used with ``staging=False``: it is called as
a whole under the guard, and the storage is asked afterwards.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.commit import Commit
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.manifests import (
    check_contents,
    check_in_place,
    remove_manifest,
)
from lightning_resilience.adapters.staging import staging_name
from lightning_resilience.adapters.storage import is_local
from lightning_resilience.adapters.tree_copies import synchronise_names
from lightning_resilience.adapters.trees import (
    Publication,
    fetch,
    files_below,
    measure,
)
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.manifest import Origin
from lightning_resilience.core.pipeline import Progress, Step, carry_out, save, whole_save
from lightning_resilience.core.spooled import WHOLE_WAITS
from lightning_resilience.errors import CheckpointError, ConfigError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.adapters.trees import Tree
    from lightning_resilience.core.pipeline import Steps
    from lightning_resilience.ports import CancelToken


__all__ = ["FetchedLoad", "LocalSave", "WholeLoad", "WholeSave"]


class _OnThisNode(Work):
    """Work in directories of its own."""

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        nonce: Callable[[], str],
        call: Callable[[str], Any],
    ) -> None:
        super().__init__(storage, url)
        self._nonce = nonce
        self._call = call
        self._directories: list[str] = []

    def _spooled_path(self) -> str:
        directory = Path(self.storage.spool_directory, staging_name(self._nonce()))
        self._directories.append(str(directory))
        return self._path_in(directory)

    def _path_in(self, directory: Path) -> str:
        directory.mkdir(parents=True)
        return str(directory / self.url.rstrip("/").rpartition("/")[2])

    def close(self) -> None:
        """Remove the directories of the spool directory."""
        for directory in self._directories:
            _discard(directory)


def _discard(directory: str | Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _discard_own(directory: Path | None) -> None:
    if directory is not None:
        _discard(directory)


class LocalSave(_OnThisNode):
    """A save by a user's own ``CheckpointIO`` to a staged path, which we publish.

    Args:
        storage: Clients of storage.
        url: Where the checkpoint goes.
        nonce: Makes names for staged directories.
        call: Has the checkpoint written to a path on this node.
        origin: Where the checkpoint comes from, for its manifest.
    """

    has_steps = True

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        nonce: Callable[[], str],
        call: Callable[[str], Any],
        origin: Origin | None = None,
    ) -> None:
        super().__init__(storage, url, nonce=nonce, call=call)
        self.origin = origin or Origin(run=storage.run_id)
        self.step = self.origin.step
        self._commit = Commit(self.origin, nonce=nonce)
        self._known: Progress[Publication] = Progress()

    @property
    def marks_progress(self) -> bool:  # type: ignore[override] # here it depends on the target
        """Whether an attempt only publishes."""
        return not is_local(self.url)

    def prepare(self, token: CancelToken) -> None:
        """Stage for storage that is not a filesystem.

        Raises:
            ConfigError: Nothing was written to the path, or not only there.
        """
        if not is_local(self.url):
            self._known.staged = self._stage(self._spooled_path(), token)

    def attempt(self, token: CancelToken) -> Tree:
        """Publish what is staged and commit it; for a filesystem, stage beside the target first.

        Raises:
            ConfigError: Nothing was written to the path, or not only there.
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        is_local = place.store.is_local
        # Beside a local target, where a rename is possible. That is the filesystem whose health is
        # in question, so each attempt writes anew, and takes away what it has made.
        own = Path(place.path).parent / staging_name(self._nonce()) if is_local else None
        hands = self._hands(place, own, token)

        def publish(staged: Publication) -> Steps[None]:
            hands.update(staged.hands(place, token))
            return staged.steps(place)

        try:
            steps = save(self._known, keeps_staged=not is_local, publish=publish)
            return carry_out(steps, hands).tree
        finally:
            _discard_own(own)

    def _hands(
        self, place: Place, own: Path | None, token: CancelToken
    ) -> dict[Step, Callable[[Any], object]]:
        commit = self._commit
        return {
            Step.ASK: lambda _: token.raise_if_cancelled(),
            Step.STAGE: lambda _: self._make(own, token),
            Step.UNMARK: lambda _: commit.begin(place, token),
            Step.DISCARD: lambda _: _discard_own(own),
            Step.MARK: lambda done: commit.end(place, done.tree.contents, token),
        }

    def size_bytes(self) -> tuple[int, int]:
        """Return how long what is staged is, twice; nobody knows it before that."""
        staged = self._known.staged
        contents = {} if staged is None else staged.tree.contents
        size_bytes = sum(size for size, _ in contents.values())
        return size_bytes, size_bytes

    def spool(self, path: str, token: CancelToken) -> Tree:
        """Have ``path`` be the checkpoint, whole and on this node; storage is asked nothing.

        Args:
            path: A new name on the disk of the spool directory.
            token: Of the call.

        Raises:
            CheckpointError: There are links in what was written, and what they point to may go.
            ConfigError: Nothing was written to the path that it was given, or not only there.
            OSError: What the node's filesystem raised.
        """
        staged = self._known.staged or self._stage(self._spooled_path(), token)
        tree = staged.tree
        _refuse_links(tree.path)
        synchronise_names(tree.path)
        token.raise_if_cancelled()
        self._known.staged = None
        Path(tree.path).replace(path)
        return replace(tree, path=path)

    def _make(self, own: Path | None, token: CancelToken) -> Publication:
        """Stage it in a directory beside the target, or where there is none in the spool's."""
        return self._stage(self._spooled_path() if own is None else self._path_in(own), token)

    def _stage(self, path: str, token: CancelToken) -> Publication:
        self._call(path)
        token.raise_if_cancelled()
        _refuse_strays(path)
        return Publication(tree=measure(path, token), aside=f"{path}.replaced")


def _refuse_strays(path: str) -> None:
    # Looked at as a whole: an IO that adds an ending to the name has staged something else.
    staged = Path(path)
    found = sorted(item.name for item in staged.parent.iterdir())
    is_empty = staged.is_dir() and not any(item.is_file() for item in staged.rglob("*"))
    if found == [staged.name] and not is_empty:
        return
    there = ", ".join(found) if found and not is_empty else "nothing"
    message = (
        f"the CheckpointIO was given the staged path {path} to write one file or one directory "
        f"to, raised nothing, and {there} is there. One that ignores the path, adds to it, or "
        "needs the real one is used by plugins=[ResilientCheckpointIO(inner=..., staging=False)]."
    )
    raise ConfigError(message)


def _refuse_links(path: str) -> None:
    root = Path(path)
    links = [file for file in (root, *files_below(root).values()) if file.is_symlink()]
    if links:
        message = f"{links[0].name} is a link, and what it points to may be gone by then"
        raise CheckpointError(message)


class FetchedLoad(_OnThisNode):
    """A load by a user's own ``CheckpointIO`` from what we have fetched to this node.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
        nonce: Makes names for what is fetched.
        call: Has the checkpoint read from a path on this node.
    """

    has_steps = True

    def attempt(self, token: CancelToken) -> str:
        """Fetch it, and check it as far as it has a manifest.

        Raises:
            FileNotFoundError: The storage says that it is not there.
            CorruptCheckpointError: It is not what its manifest says.
            OSError: What the storage raised.
        """
        token.raise_if_cancelled()
        path, place = self._spooled_path(), self.storage.place(self.url)
        try:
            manifest = check_in_place(place, token, digests=False)
            tree = fetch(place, path, token)
            if manifest is not None:
                check_contents(place, manifest, tree.contents, token=token)
        except BaseException:
            # One part of a large checkpoint for each attempt would fill the disk.
            _discard(Path(path).parent)
            raise
        return path

    def finish(self, value: Any, token: CancelToken) -> Any:
        """Read what was fetched."""
        token.raise_if_cancelled()
        return self._call(value)


class WholeSave(Work):
    """A save by a user's own ``CheckpointIO``, which is called as a whole and marks no progress.

    Args:
        storage: Clients of storage, to verify.
        url: Where the checkpoint goes.
        write: Saves the checkpoint.
    """

    marks_progress = False
    not_spooled = WHOLE_WAITS

    def __init__(self, storage: Storage, url: str, write: Callable[[], Any]) -> None:
        super().__init__(storage, url)
        self._write = write

    def attempt(self, token: CancelToken) -> None:
        """Save the checkpoint and ask the storage whether it is there, and new.

        Raises:
            OSError: It is not, although nothing was raised. That is a failure of the unknown kind:
                it may have been dropped because it is not allowed, and repeating has its limit.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        hands: dict[Step, Callable[[Any], object]] = {
            Step.ASK: lambda _: token.raise_if_cancelled(),
            Step.STAMP: lambda _: self.storage.stamp(self.url, token),
            Step.UNMARK: lambda _: remove_manifest(place, token),
            Step.WRITE: lambda _: self._write(),
        }
        before, after = carry_out(whole_save(), hands)
        if after is None:
            message = f"the CheckpointIO raised nothing, but {redacted(self.url)} does not exist"
            raise OSError(message)
        if after and after == before:
            shown = redacted(self.url)
            message = f"the CheckpointIO raised nothing, but {shown} is still the older file"
            raise OSError(message)


class WholeLoad(Work):
    """A load by a user's own ``CheckpointIO``, which is called as a whole and marks no progress.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
        read: Loads the checkpoint.
    """

    marks_progress = False

    def __init__(self, storage: Storage, url: str, read: Callable[[], Any]) -> None:
        super().__init__(storage, url)
        self._read = read

    def attempt(self, token: CancelToken) -> Any:
        """Check the checkpoint as far as it has a manifest, and load it.

        Raises:
            CorruptCheckpointError: It is not what its manifest says.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        check_in_place(place, token, digests=place.store.is_local)
        return self._read()
