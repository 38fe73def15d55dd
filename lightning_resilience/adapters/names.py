# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whether two names are those of the same checkpoint, however they are spelled.

``name_of`` asks nobody: a relative path, a protocol that means the same, a slash at the end.
``real_path_of`` follows links as well, which asks the filesystem, so it is for threads that may
hang.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from lightning_resilience.adapters.private_filesystem import plain_url
from lightning_resilience.adapters.storage import is_local


__all__ = ["name_of", "real_path_of"]

# As fsspec has them: one filesystem, two protocols.
_ALIASES: Final = {"s3a": "s3", "gcs": "gs"}


def name_of(path: str | os.PathLike[str]) -> str:
    """Return what all spellings of a path or URL have in common.

    Args:
        path: A checkpoint or a directory.

    Returns:
        An absolute path where it is local, else a URL without credentials.
    """
    url = plain_url(os.fspath(path)).rstrip("/")
    if is_local(url):
        return str(Path(url.rpartition("://")[2]).absolute())
    parts = urlsplit(url)
    scheme, at = parts.scheme, parts.netloc.rpartition("@")[2]
    # Not ``parts.path``: in an object's name, a question mark is a letter like any other.
    below = url.partition("://")[2].removeprefix(parts.netloc)
    return f"{_ALIASES.get(scheme, scheme)}://{at}{below}"


def real_path_of(name: str) -> str:
    """Return a name from ``name_of`` with every link followed."""
    return os.path.realpath(name) if Path(name).is_absolute() else name
