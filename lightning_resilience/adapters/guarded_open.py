# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a guarded filesystem opens files.

Writing gives a staged file. It is published when closed, by the guard, under the operation
``put_file``; an error inside its ``with`` block discards it, and so does losing it without
``close``. Plain fsspec publishes what was written up to the error. Writing to the staged file
itself is not guarded: half of a stream cannot be repeated.

Appending, updating and exclusive creation cannot be staged without reading the target first, so
they are passed on: guarded once, under ``write``, when the file is opened. Writing with
``compression`` is refused, since fsspec's compressor does not close the file beneath it.

Data that a file opened for reading fetches later is fetched through the guard, under ``read``.
"""

from __future__ import annotations

import functools
import os
import threading
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.guarded_call import call_guarded, shown, token_inside
from lightning_resilience.adapters.living import held
from lightning_resilience.adapters.object_store import FsspecObjectStore, protocols
from lightning_resilience.adapters.staged_file import StagedFile, StagedText
from lightning_resilience.adapters.staging import Staged, spool_directory
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fsspec import AbstractFileSystem


__all__ = ["object_store", "open_low", "wrap_open"]


class _Publishing(threading.local):
    """Whether this thread publishes a staged file, and so writes for once without staging."""

    is_on = False


_publishing = _Publishing()


def wrap_open(fs: AbstractFileSystem, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``open`` for ``fs``; ``inner`` is the method of its class."""

    @functools.wraps(inner)
    def open_(path: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode or "+" in mode:
            operation = "open" if set("ax+").isdisjoint(mode) else "write"
            return call_guarded(
                fs, operation, shown(path), work=lambda: inner(path, mode, *args, **kwargs)
            )
        if kwargs.get("compression") is not None:
            message = (
                f"cannot open {shown(path)} for writing with compression: a guarded file is "
                "published when it is closed, which fsspec's compressor does not do; compress the "
                "data and write the result, or give the compression to fsspec.open"
            )
            raise NotImplementedError(message)
        if "b" in mode:
            return inner(path, mode, *args, **kwargs)
        text = {key: kwargs.pop(key) for key in ("encoding", "errors", "newline") if key in kwargs}
        return StagedText(inner(path, "wb", *args, **kwargs), **text)

    return open_


def open_low(fs: AbstractFileSystem, path: str, mode: str = "rb", **kwargs: Any) -> Any:
    """Open staged for writing, fetching through the guard for reading: fsspec's hook ``_open``."""
    autocommit = kwargs.get("autocommit", True)
    if mode == "wb" and not _publishing.is_on and not _writes_at_once(fs, path, kwargs):
        return _open_staged(fs, path, autocommit=autocommit)
    file = fs.guarded_class._open(fs, path, mode=mode, **kwargs)  # noqa: SLF001 - fsspec's hook
    fetch = getattr(getattr(file, "cache", None), "fetcher", None)
    if mode == "rb" and callable(fetch):

        def fetch_guarded(start: int, end: int) -> bytes:
            data: bytes = call_guarded(fs, "read", shown(path), work=lambda: fetch(start, end))
            return data

        file.cache.fetcher = fetch_guarded
    return file


def _writes_at_once(fs: AbstractFileSystem, path: str, kwargs: Mapping[str, Any]) -> bool:
    """Devices and pipes cannot be replaced; the memory filesystem hands its data over at once."""
    if "data" in kwargs:
        return True
    place = Path(path)
    return "file" in protocols(fs) and place.exists() and not place.is_file()


def object_store(fs: AbstractFileSystem) -> FsspecObjectStore:
    """Return the store of whole files on ``fs``, staged where its user wants it."""
    spool = ""
    if "file" not in protocols(fs):
        make = partial(spool_directory, None, environ=os.environ, run_id="files")
        spool = fs.guard_spool or held(make)
    return FsspecObjectStore(fs, spool_directory=spool)


def _open_staged(fs: AbstractFileSystem, path: str, *, autocommit: bool) -> StagedFile:
    store = object_store(fs)
    if getattr(fs, "auto_mkdir", False):
        Path(path).parent.mkdir(parents=True, exist_ok=True)

    def publish(staged: Staged) -> None:
        call_guarded(
            fs,
            "put_file",
            shown(path),
            work=lambda: _publish(fs, store, staged=staged, path=path),
        )

    return StagedFile(store.staging_path(path, uuid.uuid4().hex), publish, autocommit=autocommit)


def _publish(
    fs: AbstractFileSystem, store: FsspecObjectStore, *, staged: Staged, path: str
) -> None:
    # What a transaction commits is published now; the filesystem must not defer it once more.
    deferring, fs._intrans = fs._intrans, False  # noqa: SLF001 - fsspec's own mark
    _publishing.is_on = True
    try:
        store.publish(staged.path, path, token_inside())
        # A rename moves the very file whose length is known.
        found = staged.size_bytes if store.is_local else store.size(path)
    finally:
        _publishing.is_on = False
        fs._intrans = deferring  # noqa: SLF001 - fsspec's own mark
    if found != staged.size_bytes:
        message = (
            f"{shown(path)}: {staged.size_bytes} bytes were sent, but the storage reports "
            f"{'no such object' if found is None else f'{found} bytes'}; it must be sent again"
        )
        raise CheckpointError(message)
