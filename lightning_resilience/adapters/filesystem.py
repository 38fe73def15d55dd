# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An fsspec filesystem whose every operation is run by a guard.

``guarded`` makes a *private* instance of a dynamic subclass of the concrete class, so that
``isinstance`` holds, and wraps its public synchronous methods **on the instance**, after
construction: asynchronous filesystems mirror their methods onto the instance, past any override in
a class. Each call of the user becomes one call of the ``Runner`` (``guarded_call``). The
``await``-able methods are not guarded.

What differs from a plain filesystem:

* ``exists``, ``isfile`` and ``isdir`` ask the storage past every cache, and raise where it cannot
  be told. Plain fsspec says False to any error.
* ``open`` stages what is written, and fetches what is read through the guard (``guarded_open``).
* Where directories do not exist, making one does nothing. Plain s3fs and gcsfs make the *bucket*.
* ``walk`` of an asynchronous filesystem is complete before its first item, so that it can be
  repeated; removing directories from what it yields has no effect there.
* A path may have ``resilient::`` in front, as the URL had with which the filesystem was found.

After a fork, the first operation in the child makes everything anew: a client, its event loop and
its connections belong to the process that made them, and used in another they hang or refuse. A
plain asynchronous filesystem cannot be used in the child at all.

Pickled, a guarded filesystem takes its class and options along, and its runner only if that can
travel. One that has come without uses whatever ``set_default_runner`` was last given in that
process, and without one it calls straight through, one attempt, unguarded. Copies keep the runner.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec import AbstractFileSystem, asyn

from lightning_resilience.adapters.guarded_call import (
    Runner,
    call_guarded,
    set_default_runner,
    shown,
)
from lightning_resilience.adapters.guarded_open import open_low, wrap_open
from lightning_resilience.adapters.object_store import find_info, protocols
from lightning_resilience.adapters.private_filesystem import (
    private_filesystem,
    private_instance,
    renew_client,
    strip_prefixed,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


__all__ = [
    "OPERATIONS",
    "Runner",
    "guarded",
    "private_filesystem",
    "renew_client",
    "set_default_runner",
]

T = TypeVar("T")

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
# What a forked child has from its parent. It is kept, not closed: the connections are the parent's.
_left_by_parents: list[dict[str, Any]] = []


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
    _wrap_operations(fs, fs)
    return fs


def _subclass(base: type[AbstractFileSystem]) -> type[AbstractFileSystem]:
    if base not in _subclasses:
        body = {
            "__module__": __name__,
            "__doc__": f"A guarded {base.__name__}.",
            "__reduce__": _reduce,
            "__copy__": _copy,
            "__deepcopy__": lambda fs, _memo: _copy(fs),
            "_open": open_low,
            "_strip_protocol": strip_prefixed(base),
            "guarded_class": base,
            "cachable": False,
        }
        _subclasses[base] = type(f"Guarded{base.__name__}", (base,), body)
    return _subclasses[base]


def _reduce(fs: AbstractFileSystem) -> tuple[Any, ...]:
    run = fs.guard_run if getattr(fs.guard_run, "travels", False) else None
    state = (fs.storage_options, fs.guard_spool, run)
    return _rebuild, (fs.guarded_class, fs.storage_args, state)


def _rebuild(
    cls: type[AbstractFileSystem],
    args: tuple[Any, ...],
    state: tuple[Mapping[str, Any], str | None, Runner | None],
) -> AbstractFileSystem:
    options, spool, run = state
    return guarded(cls, args, options, run=run, spool=spool)


def _copy(fs: AbstractFileSystem) -> AbstractFileSystem:
    return guarded(fs, run=fs.guard_run, spool=fs.guard_spool)


def _wrap_operations(fs: AbstractFileSystem, source: AbstractFileSystem) -> None:
    """Wrap the methods of ``source`` on ``source``, for calls of ``fs``."""
    makes_buckets = not _BUCKETS.isdisjoint(protocols(source))
    asks = {"exists": _exists, "isfile": _is_file, "isdir": _is_directory}
    for name in OPERATIONS:
        inner = getattr(source, name, None)
        if not callable(inner):
            continue
        if makes_buckets and name in _DIRECTORY_MAKERS:
            setattr(source, name, functools.wraps(inner)(_make_no_directory))
            continue
        ask = asks.get(name)
        work = inner if ask is None else functools.wraps(inner)(functools.partial(ask, fs))
        setattr(source, name, _at_home(fs, name, _wrap(fs, name, work)))
    source.open = _at_home(fs, "open", wrap_open(fs, source.open))
    if source.async_impl:
        source.walk = _at_home(fs, "walk", _wrap_walk(fs, source.walk))


def _at_home(fs: AbstractFileSystem, name: str, call: Callable[..., T]) -> Callable[..., T]:
    """Let ``call`` be called in this process only; a forked child gets a client of its own."""
    pid = os.getpid()

    @functools.wraps(call)
    def at_home(*args: Any, **kwargs: Any) -> T:
        if os.getpid() == pid:
            return call(*args, **kwargs)
        _move_in(fs)
        there: Callable[..., T] = getattr(fs, name)
        return there(*args, **kwargs)

    at_home.guard_pid = pid  # type: ignore[attr-defined] # for whoever comes second
    return at_home


def _move_in(fs: AbstractFileSystem) -> None:
    # No lock: one that another thread of the parent held at the fork would stay locked for ever.
    # Two threads that come at once make two clients, and each works.
    if fs.open.guard_pid == os.getpid():
        return
    if asyn.loop[0] is None:
        asyn.reset_lock()
    fresh = private_instance(type(fs), fs.storage_args, fs.storage_options)
    fresh.guard_run, fresh.guard_spool = fs.guard_run, fs.guard_spool
    # The client's own references lead to the fresh one, so it stays, and both are one state.
    fresh.guard_twin = fresh
    _wrap_operations(fs, fresh)
    _left_by_parents.append(vars(fs))
    fs.__dict__ = vars(fresh)


def _wrap(fs: AbstractFileSystem, operation: str, inner: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> T:
        return call_guarded(
            fs, operation, _target(operation, args, kwargs), work=lambda: inner(*args, **kwargs)
        )

    return call


def _wrap_walk(fs: AbstractFileSystem, inner: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(inner)
    def walk(*args: Any, **kwargs: Any) -> Iterator[Any]:
        items = call_guarded(
            fs, "walk", _target("walk", args, kwargs), work=lambda: list(inner(*args, **kwargs))
        )
        return iter(items)

    return walk


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
    return shown(value)
