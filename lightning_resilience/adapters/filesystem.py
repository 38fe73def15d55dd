# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An fsspec filesystem whose every operation is run by a guard.

``guarded`` makes a *private* instance of a dynamic subclass of the concrete class, so that
``isinstance`` holds, and wraps its public synchronous methods **on the instance**, after
construction: asynchronous filesystems mirror their methods onto the instance, past any override in
a class. Each call of the user becomes one call of the ``Runner``, which decides about waiting and
repetition; what the operation calls in turn (``pipe`` opens, ``listdir`` lists) passes straight
through, by a mark that belongs to the thread in which the work runs. The ``await``-able methods are
not guarded.

What differs from a plain filesystem:

* ``exists``, ``isfile`` and ``isdir`` ask the storage past every cache, and raise where it cannot
  be told. Plain fsspec says False to any error.
* ``open`` for writing gives a staged file. It is published when closed, by the guard, under the
  operation ``put_file``; an error inside its ``with`` block discards it, and so does losing it
  without ``close``. Plain fsspec publishes what was written up to the error. Writing to the staged
  file itself is not guarded: half of a stream cannot be repeated.
* Appending, updating and exclusive creation cannot be staged without reading the target first, so
  they are passed on: guarded once, under ``write``, when the file is opened. Writing with
  ``compression`` is refused, since fsspec's compressor does not close the file beneath it.
* Data that a file opened for reading fetches later is fetched through the guard as well, under
  ``read``.
* Where directories do not exist, making one does nothing. Plain s3fs and gcsfs make the *bucket*.
* ``walk`` of an asynchronous filesystem is complete before its first item, so that it can be
  repeated; removing directories from what it yields has no effect there.

Pickled, a guarded filesystem takes its class and options along, not its runner: that belongs to a
process. Unpickled, it uses whatever ``set_default_runner`` was last given in that process, and
without one it calls straight through, one attempt, unguarded. Copies keep the runner.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fsspec import AbstractFileSystem

from lightning_resilience.adapters.object_store import FsspecObjectStore, find_info, protocols
from lightning_resilience.adapters.private_filesystem import (
    private_filesystem,
    private_instance,
    renew_client,
)
from lightning_resilience.adapters.staged_file import StagedFile, StagedText
from lightning_resilience.adapters.staging import Staged, spool_directory
from lightning_resilience.core.evidence import without_credentials
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_resilience.ports import CancelToken


__all__ = [
    "OPERATIONS",
    "Runner",
    "guarded",
    "private_filesystem",
    "renew_client",
    "set_default_runner",
]

T = TypeVar("T")


class Runner(Protocol):
    """Runs one operation of a filesystem: waits, and calls ``work`` as often as it sees fit."""

    def __call__(self, operation: str, path: str, work: Callable[[CancelToken], T], /) -> T:
        """Return what ``work`` returned, or raise what the guard decided on.

        ``work`` may be called on any thread, and again after it has failed.
        """
        ...


OPERATIONS: tuple[str, ...] = (
    *("cat", "cat_file", "cat_ranges", "checksum", "chmod", "copy", "cp", "cp_file", "created"),
    *("delete", "disk_usage", "download", "du", "exists", "expand_path", "find", "get", "get_file"),
    *("glob", "head", "info", "isdir", "isfile", "islink", "lexists", "link", "listdir", "ls"),
    *("makedir", "makedirs", "mkdir", "mkdirs", "modified", "move", "mv", "pipe", "pipe_file"),
    *("put", "put_file", "read_block", "read_bytes", "read_text", "rename", "rm", "rm_file"),
    *("rmdir", "size", "sizes", "stat", "symlink", "tail", "touch", "ukey", "upload"),
    *("write_bytes", "write_text"),
)
"""Public methods, apart from ``open`` and ``walk``, that are run by the guard."""

_DIRECTORY_MAKERS = ("makedir", "makedirs", "mkdir", "mkdirs")
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs"})
_LOCAL_FIRST = frozenset({"put", "put_file", "upload"})

_subclasses: dict[type[AbstractFileSystem], type[AbstractFileSystem]] = {}
_default_runner: list[Runner] = []


class _Inside(threading.local):
    """What this thread works for: the token of a guarded operation, and whether it publishes."""

    token: CancelToken | None = None
    publishing = False


_inside = _Inside()


class _NeverCancelled:
    """The token of work that nobody waits for with a timeout."""

    cancelled = False

    def progress(self) -> None:
        """Nobody listens."""

    def raise_if_cancelled(self) -> None:
        """Never raises."""


def set_default_runner(run: Runner | None) -> None:
    """Set the runner of guarded filesystems that come into this process by unpickling.

    Args:
        run: The runner; None lets them call straight through.
    """
    _default_runner[:] = [] if run is None else [run]


def guarded(
    target: AbstractFileSystem | type[AbstractFileSystem],
    args: tuple[Any, ...] = (),
    options: Mapping[str, Any] | None = None,
    *,
    run: Runner | None,
    spool: str | None = None,
) -> AbstractFileSystem:
    """Return a guarded, private filesystem of the same class as ``target``.

    Args:
        target: A class, or an instance whose arguments are taken over (then ``args`` and
            ``options`` come after them).
        args: Positional arguments of the class.
        options: Its ``storage_options``. Inner retries are turned down in a copy of them;
            everything else that the user set there stays.
        run: The guard. None uses the default runner, see the module's text.
        spool: Directory for staged files of storage without rename; None makes the default one
            when it is first needed.

    Returns:
        The filesystem, an instance of ``target``'s class.
    """
    options = dict(options or {})
    if isinstance(target, AbstractFileSystem):
        args = (*target.storage_args, *args)
        options = {**target.storage_options, **options}
        target = getattr(target, "guarded_class", type(target))
    cls = getattr(target, "guarded_class", target)
    fs = private_instance(_subclass(cls), args, options)
    fs.guard_run, fs.guard_spool = run, spool
    _wrap_operations(fs)
    return fs


def _subclass(base: type[AbstractFileSystem]) -> type[AbstractFileSystem]:
    if base not in _subclasses:
        body = {
            "__module__": __name__,
            "__doc__": f"A guarded {base.__name__}.",
            "__reduce__": _reduce,
            "__copy__": _copy,
            "__deepcopy__": lambda fs, _memo: _copy(fs),
            "_open": _open,
            "guarded_class": base,
            "cachable": False,
        }
        _subclasses[base] = type(f"Guarded{base.__name__}", (base,), body)
    return _subclasses[base]


def _reduce(fs: AbstractFileSystem) -> tuple[Any, ...]:
    state = (fs.storage_options, fs.guard_spool)
    return _rebuild, (fs.guarded_class, fs.storage_args, state)


def _rebuild(
    cls: type[AbstractFileSystem],
    args: tuple[Any, ...],
    state: tuple[Mapping[str, Any], str | None],
) -> AbstractFileSystem:
    options, spool = state
    return guarded(cls, args, options, run=None, spool=spool)


def _copy(fs: AbstractFileSystem) -> AbstractFileSystem:
    return guarded(fs, run=fs.guard_run, spool=fs.guard_spool)


def _wrap_operations(fs: AbstractFileSystem) -> None:
    makes_buckets = not _BUCKETS.isdisjoint(protocols(fs))
    asks = {"exists": _exists, "isfile": _is_file, "isdir": _is_directory}
    for name in OPERATIONS:
        inner = getattr(fs, name, None)
        if not callable(inner):
            continue
        if makes_buckets and name in _DIRECTORY_MAKERS:
            setattr(fs, name, functools.wraps(inner)(_make_no_directory))
            continue
        ask = asks.get(name)
        work = inner if ask is None else functools.wraps(inner)(functools.partial(ask, fs))
        setattr(fs, name, _wrap(fs, name, work))
    fs.open = _wrap_open(fs, fs.open)
    if fs.async_impl:
        fs.walk = _wrap_walk(fs, fs.walk)


def _wrap(fs: AbstractFileSystem, operation: str, inner: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> T:
        return _run(
            fs, operation, _target(operation, args, kwargs), work=lambda: inner(*args, **kwargs)
        )

    return call


def _wrap_walk(fs: AbstractFileSystem, inner: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(inner)
    def walk(*args: Any, **kwargs: Any) -> Iterator[Any]:
        items = _run(
            fs, "walk", _target("walk", args, kwargs), work=lambda: list(inner(*args, **kwargs))
        )
        return iter(items)

    return walk


def _wrap_open(fs: AbstractFileSystem, inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def open_(path: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode or "+" in mode:
            operation = "open" if set("ax+").isdisjoint(mode) else "write"
            return _run(fs, operation, _text(path), work=lambda: inner(path, mode, *args, **kwargs))
        if kwargs.get("compression") is not None:
            message = (
                f"cannot open {_text(path)} for writing with compression: a guarded file is "
                "published when it is closed, which fsspec's compressor does not do; compress the "
                "data and write the result"
            )
            raise NotImplementedError(message)
        if "b" in mode:
            return inner(path, mode, *args, **kwargs)
        text = {key: kwargs.pop(key) for key in ("encoding", "errors", "newline") if key in kwargs}
        return StagedText(inner(path, "wb", *args, **kwargs), **text)

    return open_


def _run(fs: AbstractFileSystem, operation: str, path: str, *, work: Callable[[], T]) -> T:
    """Call ``work`` straight from within a guarded operation, else let the guard call it."""
    if _inside.token is not None:
        return work()

    def marked(token: CancelToken) -> T:
        with _working_for(token):
            return work()

    run = fs.guard_run or next(iter(_default_runner), None)
    return marked(_NeverCancelled()) if run is None else run(operation, path, marked)


@contextlib.contextmanager
def _working_for(token: CancelToken) -> Iterator[None]:
    previous, _inside.token = _inside.token, token
    try:
        yield
    finally:
        _inside.token = previous


def _open(fs: AbstractFileSystem, path: str, mode: str = "rb", **kwargs: Any) -> Any:
    """Open staged for writing, fetching through the guard for reading."""
    autocommit = kwargs.get("autocommit", True)
    if mode == "wb" and not _inside.publishing and not _writes_at_once(fs, path, kwargs):
        return _open_staged(fs, path, autocommit=autocommit)
    file = fs.guarded_class._open(fs, path, mode=mode, **kwargs)  # noqa: SLF001 - fsspec's hook
    fetch = getattr(getattr(file, "cache", None), "fetcher", None)
    if mode == "rb" and callable(fetch):

        def fetch_guarded(start: int, end: int) -> bytes:
            data: bytes = _run(fs, "read", _text(path), work=lambda: fetch(start, end))
            return data

        file.cache.fetcher = fetch_guarded
    return file


def _writes_at_once(fs: AbstractFileSystem, path: str, kwargs: Mapping[str, Any]) -> bool:
    """Devices and pipes cannot be replaced; the memory filesystem hands its data over at once."""
    if "data" in kwargs:
        return True
    place = Path(path)
    return "file" in protocols(fs) and place.exists() and not place.is_file()


def _open_staged(fs: AbstractFileSystem, path: str, *, autocommit: bool) -> StagedFile:
    store = FsspecObjectStore(fs, spool_directory=_spool(fs))
    if getattr(fs, "auto_mkdir", False):
        Path(path).parent.mkdir(parents=True, exist_ok=True)

    def publish(staged: Staged) -> None:
        _run(
            fs, "put_file", _text(path), work=lambda: _publish(fs, store, staged=staged, path=path)
        )

    return StagedFile(store.staging_path(path, uuid.uuid4().hex), publish, autocommit=autocommit)


def _spool(fs: AbstractFileSystem) -> str:
    if "file" in protocols(fs):
        return ""
    spool = fs.guard_spool
    return spool or spool_directory(None, environ=os.environ, run_id="files")


def _publish(
    fs: AbstractFileSystem, store: FsspecObjectStore, *, staged: Staged, path: str
) -> None:
    # What a transaction commits is published now; the filesystem must not defer it once more.
    deferring, fs._intrans = fs._intrans, False  # noqa: SLF001 - fsspec's own mark
    _inside.publishing = True
    try:
        store.publish(staged.path, path, _inside.token or _NeverCancelled())
        # A rename moves the very file whose length is known.
        found = staged.size_bytes if store.is_local else store.size(path)
    finally:
        _inside.publishing = False
        fs._intrans = deferring  # noqa: SLF001 - fsspec's own mark
    if found != staged.size_bytes:
        message = (
            f"{_text(path)}: {staged.size_bytes} bytes were sent, but the storage reports "
            f"{'no such object' if found is None else f'{found} bytes'}; it must be sent again"
        )
        raise CheckpointError(message)


def _exists(fs: AbstractFileSystem, path: str, **_: Any) -> bool:
    return find_info(fs, path) is not None


def _is_file(fs: AbstractFileSystem, path: str, **_: Any) -> bool:
    found = find_info(fs, path)
    return found is not None and found["type"] == "file"


def _is_directory(fs: AbstractFileSystem, path: str, **_: Any) -> bool:
    found = find_info(fs, path)
    return found is not None and found["type"] == "directory"


def _make_no_directory(*_: Any, **__: Any) -> None:
    """Do nothing: object storage has no directories, and making the bucket was not asked for."""


def _target(operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The remote path that an operation is about, or the first of several and their number."""
    position = 1 if operation in _LOCAL_FIRST else 0
    names = (
        ("rpath",) if operation in _LOCAL_FIRST else ("path", "path1", "rpath", "paths", "urlpath")
    )
    value = args[position] if len(args) > position else None
    if value is None:
        value = next((kwargs[name] for name in names if name in kwargs), "")
    return _text(value)


def _text(path: Any) -> str:
    if isinstance(path, (list, tuple, set, dict)):
        first = next(map(str, path), "")
        more = f" (and {len(path) - 1} more)" if len(path) > 1 else ""
        return without_credentials(first + more)
    return without_credentials(str(os.fspath(path) if isinstance(path, os.PathLike) else path))
