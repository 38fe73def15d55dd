# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The protocols of a filesystem by their names, and a path without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


__all__ = ["is_google", "protocols", "strip_protocol"]

_GOOGLE: Final = frozenset({"gs", "gcs"})


def protocols(fs: AbstractFileSystem | type[AbstractFileSystem]) -> tuple[str, ...]:
    """Return the names of a filesystem's protocol, the usual one first.

    Empty for the class of a filesystem whose instances decide.
    """
    names = fs.protocol
    if isinstance(names, str):
        return (names,)
    return tuple(names) if isinstance(names, (tuple, list)) else ()


def is_google(fs: AbstractFileSystem) -> bool:
    """Tell whether it is a client of Google Cloud Storage."""
    return not _GOOGLE.isdisjoint(protocols(fs))


def strip_protocol(fs: AbstractFileSystem, path: str) -> str:
    """Return the path as the filesystem itself wants it."""
    return str(fs._strip_protocol(path))  # noqa: SLF001 - fsspec has no public name for it
