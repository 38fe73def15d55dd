# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``resilient::`` in front of a URL: fsspec's own way to a guarded filesystem.

``resilient::s3://bucket/key`` is the filesystem of ``s3://``, guarded: an instance of its class,
with its paths. fsspec finds the name through the entry point ``fsspec.specs``, and hands the path
of the inner URL on only to a ``ChainedFileSystem``; so that is what :class:`ResilientFileSystem`
is, and its metaclass returns the guarded filesystem in its place.

Instances are cached as fsspec's are, for each process, class and set of options (and thread, where
the class is not asynchronous), apart from fsspec's own: plain users of ``s3://`` never get a
guarded one, nor one whose inner retries are turned down. A client with fresh credentials is made
*in* the instance, so nothing has to be taken from the cache for it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.config import apply_config
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.utils import tokenize

from lightning_resilience.adapters.file_guards import FileGuard
from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.guard_options import OPTIONS, guard_options
from lightning_resilience.adapters.object_store import protocols
from lightning_resilience.adapters.private_filesystem import prefix_aware
from lightning_resilience.config import read_environment, refuse_unknown
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.guard_options import GuardOptions


__all__ = ["ResilientFileSystem"]

_Metaclass: Any = type(ChainedFileSystem)


class _Chain(_Metaclass):  # type: ignore[misc] # fsspec has no types
    """Makes the guarded filesystem where fsspec makes an instance."""

    _cache: dict[str, AbstractFileSystem]

    def __call__(cls, *args: Any, **given: Any) -> AbstractFileSystem:  # noqa: N805 - a metaclass
        """Return a guarded filesystem of the class behind the prefix."""
        given = apply_config(cls, given)
        skip = bool(given.pop("skip_instance_cache", False))
        given.pop("fo", None)
        target = _target(args, given.pop("target_protocol", None))
        storage = given.pop("target_options", None) or {}
        _refuse_asynchronous(given, storage)
        options = _options(given, target)
        if not read_environment().enabled:
            return prefix_aware(target)(**storage)
        skip = skip or bool(storage.get("skip_instance_cache", False)) or not target.cachable
        # As fsspec does: an instance that is not asynchronous may not be safe in another thread.
        thread = None if target.async_impl else threading.get_ident()
        token = tokenize(target, os.getpid(), thread, options, **storage)
        found = None if skip else cls._cache.get(token)
        if found is None:
            found = guarded(target, (), storage, run=FileGuard(options))
            if not skip:
                found = cls._cache.setdefault(token, found)
        return found


def _target(args: tuple[Any, ...], protocol: str | None) -> type[AbstractFileSystem]:
    if args or not protocol:
        message = (
            "resilient:: stands in front of a whole URL, for example resilient::s3://bucket/key; "
            "fsspec.filesystem('resilient', target_protocol='s3') is the same without a path."
        )
        raise ConfigError(message)
    target: type[AbstractFileSystem] = fsspec.get_filesystem_class(protocol)
    if issubclass(target, ChainedFileSystem):
        message = (
            f"resilient:: cannot guard {protocol}::, which is a chain itself. Put it once, in "
            "front of the storage's own URL, for example simplecache::resilient::s3://bucket/key."
        )
        raise ConfigError(message)
    return target


def _refuse_asynchronous(given: dict[str, Any], storage: Mapping[str, Any]) -> None:
    if given.pop("asynchronous", False) or storage.get("asynchronous", False):
        message = (
            "asynchronous=True is not allowed: a guard waits, and would hold up the event loop. "
            "Leave it away, and call the filesystem from a thread (asyncio.to_thread), or use the "
            "plain URL without resilient::."
        )
        raise ConfigError(message)


def _options(given: Mapping[str, Any], target: type[AbstractFileSystem]) -> GuardOptions:
    try:
        refuse_unknown("resilient::", given, allowed=OPTIONS)
    except ConfigError as error:
        name = next(iter(protocols(target)), "its protocol")
        message = (
            f"{error} These stand under resilient={{...}}; options of the storage stand under "
            f"{name}={{...}}."
        )
        raise ConfigError(message) from None
    return guard_options(given)


class ResilientFileSystem(ChainedFileSystem, metaclass=_Chain):  # type: ignore[misc] # no types
    """The name behind ``resilient::``; what it makes is never an instance of it.

    Args:
        target_protocol: Protocol of the filesystem to guard. fsspec takes it from the URL.
        target_options: Its options. In ``fsspec.open``: under its protocol, ``s3={...}``.
        retry: A ``RetryPolicy``, or a mapping of its options. In ``fsspec.open`` this and all that
            follow stand under ``resilient={...}``.
        budget: A ``BudgetConfig``, or a mapping of its options.
        breaker: A ``BreakerConfig``, or a mapping of its options.
        admission: An ``AdmissionConfig``, or a mapping of its options.
        store: The store that all processes of the job share: a URL ``tcp://host:port``, or an
            object. None takes ``LIGHTNING_RESILIENCE_STORE``, the server behind the default process
            group, or this process's memory.
        run_id: Name of the run; None takes the environment's. Give one where several jobs share a
            store.
        classify: Names the failure class of an exception, or returns None for the default.
        when_open: ``wait`` (default) for an ill storage, up to ``deadline_s``, or ``raise``.
        strict: Whether an operation fails while the shared store is away.

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another; the filesystem is
            asynchronous, or is itself a chain. Before anything is sent.

    Example:
        >>> import fsspec
        >>> with fsspec.open("resilient::memory://example", "w") as file:
        ...     _ = file.write("all of it or nothing")
    """

    protocol = "resilient"
