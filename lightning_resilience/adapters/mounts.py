# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which filesystem a path is on, and of what kind that is.

By the kernel's own list: a filesystem that is ill is asked nothing where a name alone will do.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath


__all__ = ["filesystem_kind", "mount_point", "mount_point_by_name"]


def mount_point(path: str) -> str:
    """Return the mount point of the filesystem that holds ``path``, or would hold it."""
    place = Path(path).absolute()
    # resolve: a symlinked directory belongs to the filesystem that it points into.
    place = place.resolve()
    while not place.is_mount() and place != place.parent:
        place = place.parent
    return str(place)


def mount_point_by_name(path: str) -> str:
    """Return the mount point that ``path`` lies below by its name alone.

    Unlike :func:`mount_point` it asks the filesystem nothing: one that is ill would answer with an
    error, or never. A link that leads to another filesystem is not seen through.
    """
    # Two slashes in front are a root of their own to pathlib, and one to the kernel.
    name = re.sub(r"^//+", "/", path)
    place = PurePath(os.path.abspath(name))  # noqa: PTH100 - resolve would ask the filesystem
    # Below a changed root there may be no mount at "/".
    mounts = {PurePath(place.anchor), *(PurePath(_unescaped(found[1])) for found in _mounts())}
    return str(max((mount for mount in mounts if place.is_relative_to(mount)), key=_depth))


def _mounts() -> list[list[str]]:
    try:
        text = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [fields for fields in map(str.split, text.splitlines()) if fields[2:]]


def _unescaped(mount: str) -> str:
    # The kernel writes white space and backslashes as three octal digits.
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mount)


def _depth(place: PurePath) -> int:
    return len(place.parts)


def filesystem_kind(path: str) -> str:
    """Return the type of the filesystem that holds ``path`` (``ext4``, ``nfs``), "" if unknown."""
    mount = mount_point(path)
    kinds = [fields[2] for fields in _mounts() if _unescaped(fields[1]) == mount]
    return kinds[-1] if kinds else ""
