# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A storage of checkpoints in memory: files by path, and one effect after the other.

What is one request, or one system call, is one effect here: a put of a whole file, a rename, the
removal of one file, a link. What takes several is torn in between: a directory that is sent, copied
or removed file by file. After each effect, whoever looks is told, so that every instant at which a
process can be killed is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.manifest import DIRECTORY


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["DAMAGED", "FOLDER", "Blob", "SaveStorage", "below"]

FOLDER: Final = "run"
"""The directory of the checkpoints."""

DAMAGED: Final = f"xxh3-128:{0:032x}"
"""Digest of whatever is not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One file.

    Args:
        number: Training steps of the checkpoint that it is a part of; 0 for what is none.
        digest: Of its content.
        size_bytes: Its length.
        data: Its bytes, where somebody reads them; a checkpoint's are never looked at.
        is_damaged: Whether its content is not what was written.
        modified: When it was written, in effects.
    """

    number: int = 0
    digest: str = ""
    size_bytes: int = 0
    data: bytes = b""
    is_damaged: bool = False
    modified: int = 0


class SaveStorage:
    """Files and links, each below ``FOLDER``.

    Attributes:
        files: What is there by path; a directory is what its files' paths begin with.
        links: What each link points to.
        effects: How many effects there were.
        seen: Called after each effect with what it was.
    """

    def __init__(self) -> None:
        self.files: dict[str, Blob] = {}
        self.links: dict[str, str] = {}
        self.effects = 0
        self.seen: Callable[[str], object] = str

    # Effects --------------------------------------------------------------------------------------

    def put(self, path: str, blob: Blob) -> None:
        """Let a file appear under a name, whole; what had that name is gone."""
        self.links.pop(path, None)
        self.files[path] = replace(blob, modified=self.effects + 1)
        self._happened(f"{path} is written")

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a directory; what had that name is gone, at once.

        Raises:
            FileNotFoundError: Nothing is there to be renamed.
        """
        moved = self.tree(source)
        if not moved:
            raise FileNotFoundError(source)
        for path in (*self._paths(source), *self._paths(target)):
            del self.files[path]
        self.links.pop(target, None)
        for name, blob in moved.items():
            self.files[below(target, name)] = blob
        self._happened(f"{source} is renamed to {target}")

    def remove(self, path: str) -> None:
        """Remove one file or link; absent is success."""
        self.files.pop(path, None)
        self.links.pop(path, None)
        self._happened(f"{path} is removed")

    def link(self, path: str, target: str) -> None:
        """Let a name point to another one; what had that name is gone, at once."""
        for each in self._paths(path):
            del self.files[each]
        self.links[path] = target
        self._happened(f"{path} points to {target}")

    def damage(self, path: str, *, cuts: bool) -> None:
        """Change the content of one file; nobody has asked for that.

        Args:
            path: The file.
            cuts: Whether its length changes, too.
        """
        blob = self.files[path]
        # By half: no other checkpoint is as long, and a size that is wrong can be told from any.
        size_bytes = blob.size_bytes // 2 if cuts else blob.size_bytes
        self.files[path] = replace(blob, digest=DAMAGED, size_bytes=size_bytes, is_damaged=True)
        self._happened(f"{path} is damaged")

    def _happened(self, what: str) -> None:
        self.effects += 1
        self.seen(what)

    # Questions ------------------------------------------------------------------------------------

    def real(self, path: str) -> str:
        """Return what a name stands for: itself, or what the link points to."""
        return self.links.get(path, path)

    def tree(self, path: str) -> dict[str, Blob]:
        """Return the files of a checkpoint by their paths below it; a file has the empty name."""
        return {each[len(path) + 1 :]: self.files[each] for each in self._paths(path)}

    def identity(self, path: str) -> int | None:
        """Return what stays the same when it is renamed: when its oldest file was written."""
        return min((blob.modified for blob in self.tree(path).values()), default=None)

    def listed(self) -> dict[str, int]:
        """Return when each thing directly in the folder was written, by its path."""
        found: dict[str, int] = {}
        for path, blob in self.files.items():
            name = path[len(FOLDER) + 1 :].partition("/")[0]
            if path.startswith(f"{FOLDER}/") and name != DIRECTORY:
                at = f"{FOLDER}/{name}"
                found[at] = max(found.get(at, 0), blob.modified)
        for path, target in self.links.items():
            # A link has the time of what it points to.
            times = [blob.modified for blob in self.tree(target).values()]
            found[path] = max(times, default=0)
        return found

    def _paths(self, path: str) -> list[str]:
        return [each for each in self.files if each == path or each.startswith(f"{path}/")]


def below(path: str, name: str) -> str:
    """Return where a file of a checkpoint is."""
    return f"{path}/{name}" if name else path
