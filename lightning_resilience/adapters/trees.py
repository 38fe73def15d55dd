# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a foreign program has written, one file or a directory: measured, published, and fetched.

===========  =======================================  ==============================================
storage      a file                                   a directory
===========  =======================================  ==============================================
local        one rename                               one rename; with an older directory of that
                                                      name it changes places, or, where the kernel
                                                      cannot do that, after the older one was moved
                                                      aside: for a moment there is none, and never
                                                      half of one
others       one put, as any checkpoint               what is there is removed, then file by file,
                                                      in the order in which the program finished
                                                      them
===========  =======================================  ==============================================

Object storage cannot show several files at once. A format that is made of several files says itself
when it is complete, by what it writes last (an index, a list of shards), so the order of writing is
kept: whoever comes in between finds files without their index, and not an index without its files.
An older directory goes first, because a mixture of two would look complete. A reader that comes in
between finds a part; give such checkpoints names that are not used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import xxhash

from lightning_resilience.adapters.local_files import fsync_directory
from lightning_resilience.adapters.object_store import find_info, list_files
from lightning_resilience.adapters.staging import discard, stage
from lightning_resilience.core.manifest import digest_of
from lightning_resilience.core.pipeline import Sent, Step, carry_out, publication
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.staging import StagedWriter
    from lightning_resilience.adapters.storage import Place
    from lightning_resilience.core.manifest import Contents
    from lightning_resilience.core.pipeline import Steps
    from lightning_resilience.ports import CancelToken


__all__ = [
    "PIECE_BYTES",
    "Publication",
    "Tree",
    "below",
    "copy_into",
    "digest_of_file",
    "digest_of_open",
    "fetch",
    "files_below",
    "identity",
    "measure",
    "put_in_place",
    "send",
]

PIECE_BYTES: Final = 8 * 2**20
"""How much is read between two marks of progress, in bytes."""

# Arguments of renameat2(2) on Linux: paths are relative to the working directory; both names stay.
_HERE: Final = -100
_EXCHANGE: Final = 2
# What a rename says where something of another kind, or a directory that is not empty, is there.
_OCCUPIED: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A complete file or directory on this node that nobody sees yet.

    Args:
        path: Where it is.
        contents: Size in bytes and digest of each file, by its path below ``path``, in the order in
            which they were finished; a file itself has the empty name.
    """

    path: str
    contents: Contents

    @property
    def size_bytes(self) -> int:
        """The length of all files."""
        return sum(size_bytes for size_bytes, _ in self.contents.values())

    @property
    def digest(self) -> str:
        """That of a file's bytes, or of the list of all files."""
        return digest_of(self.contents)


def measure(path: str, token: CancelToken) -> Tree:
    """Synchronise what was written with its disk, and describe it.

    Args:
        path: A file or a directory.
        token: Told of progress, and asked whether the caller has given up.

    Raises:
        FileNotFoundError: There is no file there.
    """
    files = files_below(Path(path))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "nothing was written", path)
    # By name where a clock that is too coarse makes two of them equally old.
    order = sorted(files, key=lambda name: (files[name].stat().st_mtime_ns, name))
    contents = {}
    for name in order:
        digest = digest_of_file(files[name], token, synchronise=True)
        contents[name] = (files[name].stat().st_size, digest)
    return Tree(path=path, contents=contents)


def files_below(root: Path) -> dict[str, Path]:
    """Return all files of a directory by their paths below it; a file has the empty name."""
    if root.is_file():
        return {"": root}
    files = (item for item in root.rglob("*") if item.is_file())
    return {item.relative_to(root).as_posix(): item for item in files}


def digest_of_file(path: Path, token: CancelToken, *, synchronise: bool = False) -> str:
    """Read a local file through; return its digest.

    Args:
        path: The file.
        token: Told of progress, and asked whether the caller has given up.
        synchronise: Whether to synchronise it with its disk.
    """
    with path.open("rb") as file:
        _, digest = digest_of_open(file, token)
        if synchronise:
            os.fsync(file.fileno())
    return digest


def digest_of_open(file: Any, token: CancelToken) -> tuple[int, str]:
    """Read a file through, wherever it is; return how many bytes came, and their digest.

    Args:
        file: An open binary file, at its beginning.
        token: Told of progress, and asked whether the caller has given up.
    """
    digest = xxhash.xxh3_128()
    size_bytes = 0
    while piece := file.read(PIECE_BYTES):
        token.raise_if_cancelled()
        digest.update(piece)
        size_bytes += len(piece)
        token.progress(read=len(piece))
    return size_bytes, f"xxh3-128:{digest.hexdigest()}"


@dataclass(slots=True, kw_only=True)
class Publication:
    """A tree on its way into storage; an attempt goes on where the last has ended.

    Args:
        tree: What is published.
        aside: A name on the same filesystem for what a local target has to make room for.
    """

    tree: Tree
    aside: str
    _sent: Sent = field(default_factory=Sent)

    def attempt(self, place: Place, token: CancelToken) -> Tree:
        """Publish the tree under ``place``, and verify every size.

        Raises:
            CheckpointError: The storage reports another size than was written, or nothing.
            OSError: What the filesystem or the storage raised.
        """
        carry_out(self.steps(place), self.hands(place, token))
        return self.tree

    def steps(self, place: Place) -> Steps[None]:
        """Return what publishes the tree under ``place``."""
        return publication(self._sent, self.tree.contents, renames=place.store.is_local)

    def hands(self, place: Place, token: CancelToken) -> dict[Step, Callable[[Any], object]]:
        """Return what carries these steps out."""
        return {
            Step.ASK: lambda _: token.raise_if_cancelled(),
            Step.CLEAR: lambda _: place.store.remove(place.path, token),
            Step.PUBLISH: lambda name: self._publish(name, place, token),
            Step.VERIFY: lambda name: _verify(
                place, below(place.path, name), self.tree.contents[name][0]
            ),
        }

    def _publish(self, name: str, place: Place, token: CancelToken) -> None:
        if place.store.is_local:
            put_in_place(self.tree.path, place, aside=self.aside, token=token)
            return
        source = str(Path(self.tree.path, name)) if name else self.tree.path
        place.store.publish(source, below(place.path, name), token)


def below(path: str, name: str) -> str:
    """Return where a file of a tree is; the tree itself has the empty name."""
    return f"{path.rstrip('/')}/{name}" if name else path


def identity(path: str) -> int | None:
    """Return what stays the same of a local file or directory when it is renamed; None for none."""
    with contextlib.suppress(FileNotFoundError):
        return Path(path).stat().st_ino
    return None


def put_in_place(
    source: str, place: Place, *, aside: str, token: CancelToken, stamp: int | None = None
) -> None:
    """Give a complete file or directory its final name on a local filesystem.

    Args:
        source: Where it is now, on the same filesystem. What was at ``place`` before is there
            afterwards, or under ``aside``.
        place: Its final name.
        aside: A name on the same filesystem for what has to make room.
        token: Told of progress, and asked whether the caller has given up.
        stamp: The ``identity`` of what is meant; None for whatever is there.

    Raises:
        CheckpointError: Something else is there by now.
        OSError: What the filesystem raised.
    """
    target = Path(place.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with place.store.landing(place.path, token) as landing:
        landing.send()
        if stamp is not None and identity(source) != stamp:
            message = f"{source} was renamed by an attempt that had been given up"
            raise CheckpointError(message)
        try:
            Path(source).replace(target)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            _change_places(Path(source), target, Path(aside))
    fsync_directory(target.parent)
    token.progress()


def send(source: str, place: Place, *, size_bytes: int, nonce: str, token: CancelToken) -> None:
    """Copy a complete file to storage under its final name, whole or not at all, and verify it.

    Args:
        source: A file on this node; it stays.
        place: Where it goes.
        size_bytes: Its length.
        nonce: Names the copy beside a local target.
        token: Told of progress, and asked whether the caller has given up.

    Raises:
        CheckpointError: The storage reports another size than was written, or nothing.
        OSError: What the filesystem or the storage raised.
    """
    staged = source
    if place.store.is_local:
        # The node's own disk may be another filesystem, from which nothing can be renamed.
        staged = place.store.staging_path(place.path, nonce)
        stage(partial(copy_into, source), staged, token)
    try:
        place.store.publish(staged, place.path, token)
    except BaseException:
        if place.store.is_local:
            discard(staged)
        raise
    _verify(place, place.path, size_bytes)


def copy_into(source: str, file: StagedWriter) -> None:
    """Copy a file on this node into one that is being staged."""
    with Path(source).open("rb") as original:
        while piece := original.read(PIECE_BYTES):
            file.write(piece)


def _verify(place: Place, path: str, written: int) -> None:
    found = place.store.size(path)
    if found != written:
        there = "nothing is there" if found is None else f"{found} bytes are there"
        message = f"{written} bytes were written to {path}, but {there}"
        raise CheckpointError(message)


def _change_places(source: Path, target: Path, aside: Path) -> None:
    # What was under the target's name is in the directory of staged files afterwards.
    if _exchange(source, target):
        return
    target.replace(aside)
    try:
        source.replace(target)
    except BaseException:
        aside.replace(target)
        raise


def _exchange(source: Path, target: Path) -> bool:
    """Let two names change places at once; False where the kernel or the filesystem cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        return False
    names = os.fsencode(source), os.fsencode(target)
    failed: int = exchange(_HERE, names[0], _HERE, names[1], _EXCHANGE)
    return failed == 0


def fetch(place: Place, path: str, token: CancelToken) -> Tree:
    """Copy a file, or a directory with all that is in it, from storage to this node.

    Args:
        place: Where it is.
        path: A new name on this node; its directory is made.
        token: Told of progress, and asked whether the caller has given up.

    Returns:
        What has arrived under ``path``.

    Raises:
        FileNotFoundError: The storage says that it is not there.
        CheckpointError: Another size arrived than the storage reports.
    """
    found = find_info(place.fs, place.path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", place.path)
    if found["type"] != "directory":
        arrived = _fetch_file(place, place.path, Path(path), size=found.get("size"), token=token)
        return Tree(path=path, contents={"": arrived})
    contents = {}
    for below, size in list_files(place.fs, place.path).items():
        name = f"{place.path.rstrip('/')}/{below}"
        if ".." in PurePosixPath(below).parts:
            message = f"{name} would be fetched to a place outside the directory that it is in"
            raise CheckpointError(message)
        contents[below] = _fetch_file(place, name, Path(path, below), size=size, token=token)
    return Tree(path=path, contents=contents)


def _fetch_file(
    place: Place, source: str, target: Path, *, size: int | None, token: CancelToken
) -> tuple[int, str]:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_128()
    token.raise_if_cancelled()
    with place.fs.open(source, "rb") as remote, target.open("wb") as local:
        while piece := remote.read(PIECE_BYTES):
            token.raise_if_cancelled()
            digest.update(piece)
            local.write(piece)
            token.progress(read=len(piece), written=len(piece))
        arrived = local.tell()
    if size is not None and arrived != size:
        message = f"{arrived} bytes of {source} arrived, but it has {size}"
        raise CheckpointError(message)
    return arrived, f"xxh3-128:{digest.hexdigest()}"
