# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Files and directories that wait on this node: made to last, copied, and removed as a whole."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_resilience.adapters.local_files import fsync_directory
from lightning_resilience.adapters.staging import discard, stage
from lightning_resilience.adapters.trees import Tree, below, copy_into


if TYPE_CHECKING:
    from lightning_resilience.ports import CancelToken


__all__ = ["copy_tree", "discard_tree", "synchronise_names"]


def synchronise_names(path: str) -> None:
    """Make the names in a directory last, and in all below it; a file has none.

    ``measure`` has synchronised what is in the files.
    """
    root = Path(path)
    if root.is_dir():
        for directory in (*(item for item in root.rglob("*") if item.is_dir()), root):
            fsync_directory(directory)


def copy_tree(tree: Tree, path: str, token: CancelToken) -> Tree:
    """Copy all files of a tree on this node.

    Args:
        tree: What is copied.
        path: A new name; its directory is there.
        token: Told of progress, and asked whether the caller has given up.

    Returns:
        What is there now, its files in the same order, measured anew.

    Raises:
        CallTimeoutError: The caller has given up; what is copied stays.
        OSError: What a filesystem raised.
    """
    contents = {}
    for name in tree.contents:
        target = Path(below(path, name))
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = stage(partial(copy_into, below(tree.path, name)), str(target), token)
        contents[name] = (staged.size_bytes, staged.digest)
    synchronise_names(path)
    return Tree(path=path, contents=contents)


def discard_tree(path: str) -> None:
    """Remove a file, or a directory with all that is in it. Idempotent: absent is success."""
    if Path(path).is_dir():
        shutil.rmtree(path)
    else:
        discard(path)
