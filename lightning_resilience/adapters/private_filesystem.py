# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""fsspec instances that nobody else has, and that do not repeat anything by themselves.

Retries around retries multiply: s3fs tries 5 times what botocore tries 5 times, so one failed call
of ours reaches the storage 25 times, and aiohttp adds one for broken connections. Ours are counted,
spread and gated, so the inner ones are turned down, on an instance outside fsspec's cache.

s3fs and gcsfs keep every listing for ever, and answer from it what another process has changed
since: what that wrote does not exist. So their listings are not kept, unless the user says
``use_listings_cache``. What the user set besides stays as it is.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs
from fsspec.utils import stringify_path

from lightning_resilience.adapters.object_store import protocols
from lightning_resilience.core.evidence import type_names
from lightning_resilience.core.parts import CONNECTIONS


if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsspec import AbstractFileSystem


__all__ = [
    "PREFIX",
    "plain_url",
    "prefix_aware",
    "private_filesystem",
    "private_instance",
    "renew_client",
    "strip_prefixed",
]

PREFIX = "resilient::"
"""Stands before the URL of a filesystem that is to be guarded."""

_KEEP_LISTINGS = frozenset({"s3", "gs"})
# gcsfs has no option for the number of its attempts; these are what its decorator repeats.
_GCSFS_RETRIED = ("_request", "_get_file_request", "_get_file_concurrent")

_prefix_aware: dict[type[AbstractFileSystem], type[AbstractFileSystem]] = {}


def private_filesystem(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[AbstractFileSystem, str]:
    """Return a private filesystem for ``url``, and the path in it.

    Args:
        url: URL or path.
        storage_options: Options of the filesystem; merged with ours, not replaced.

    Returns:
        The filesystem and the path as that filesystem wants it.
    """
    fs, path = url_to_fs(plain_url(url), **dict(storage_options or {}))
    cls = type(fs) if url == plain_url(url) else prefix_aware(type(fs))
    return private_instance(cls, fs.storage_args, fs.storage_options), path


def private_instance(
    cls: type[AbstractFileSystem], args: tuple[Any, ...], options: Mapping[str, Any]
) -> AbstractFileSystem:
    """Make an instance of ``cls`` outside fsspec's cache: no inner retries, no kept listings."""
    options = dict(options)
    names = protocols(cls)
    if not _KEEP_LISTINGS.isdisjoint(names):
        options.setdefault("use_listings_cache", False)
    if "s3" in names:
        options["config_kwargs"] = _one_request(options.get("config_kwargs") or {})
    fs = cls(*args, **{**options, "skip_instance_cache": True})
    if "s3" in names:
        fs.retries = 1
    if "gs" in names:
        _undecorate(fs)
    return fs


def plain_url(url: str) -> str:
    """Return ``url`` without ``resilient::``: whose guard it is has been decided."""
    return url.removeprefix(PREFIX)


def strip_prefixed(base: type[AbstractFileSystem]) -> classmethod[Any, Any, Any]:
    """Return ``_strip_protocol`` for a subclass of ``base`` that is given prefixed paths as well.

    Lightning hands whole URLs to the filesystem that it has found for one.
    """

    def strip(_cls: type[AbstractFileSystem], path: Any) -> Any:
        if isinstance(path, list):
            return [base._strip_protocol(plain_url(stringify_path(each))) for each in path]  # noqa: SLF001 - fsspec's hook
        return base._strip_protocol(plain_url(stringify_path(path)))  # noqa: SLF001 - fsspec's hook

    return classmethod(strip)


def prefix_aware(base: type[AbstractFileSystem]) -> type[AbstractFileSystem]:
    """Return a subclass of ``base`` that changes nothing but takes prefixed paths."""
    if base not in _prefix_aware:
        body = {"__module__": __name__, "_strip_protocol": strip_prefixed(base), "cachable": False}
        _prefix_aware[base] = type(base.__name__, (base,), body)
    return _prefix_aware[base]


def renew_client(fs: AbstractFileSystem) -> bool:
    """Make a filesystem read its credentials anew and forget every listing.

    For failures of class ``auth``: long runs outlive temporary credentials, and the client keeps
    those that it was made with although fresh ones are there.

    Args:
        fs: A private filesystem, not one from fsspec's cache: others may be using that.

    Returns:
        False where this kind of filesystem has no way to renew its client.

    Raises:
        Exception: What the library raised when it made the new client, or when it asked for a
            fresh token. Then nothing is gained by another attempt with this one.
    """
    fs.invalidate_cache()
    if "s3" in protocols(fs):
        fs.connect(refresh=True)
        return True
    if "gs" in protocols(fs):
        _renew_google(fs.credentials)
        return True
    return False


def _renew_google(credentials: Any) -> None:
    """Ask for a fresh token now, so that a refresh that cannot work is known before an attempt."""
    refused = getattr(credentials.credentials, "token", None)
    credentials.connect(method=credentials.token)
    found = credentials.credentials
    if found is not None and found.token == refused:
        # Valid for all that it knows, but the storage has just refused it.
        found.token = None
    try:
        credentials.maybe_refresh()
    except Exception as error:
        # gcsfs makes a 401 of whatever google-auth says, and that knows whether it may pass.
        if error.__cause__ is not None and "RefreshError" in type_names(error.__cause__):
            raise error.__cause__ from error.__cause__.__cause__
        raise


def _one_request(config_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    from lightning_resilience.adapters.s3_session import session_options  # noqa: PLC0415 - optional

    retries = {**(config_kwargs.get("retries") or {}), "total_max_attempts": 1}
    defaults = {**session_options(), "max_pool_connections": CONNECTIONS}
    return {**defaults, **config_kwargs, "retries": retries}


def _undecorate(fs: AbstractFileSystem) -> None:
    if hasattr(fs, "retry_config"):
        # gcsfs asks for the kind of bucket by another protocol, and repeats that for a minute.
        fs.retry_config = {**fs.retry_config, "timeout": 0.0}
    for name in _GCSFS_RETRIED:
        inner = getattr(getattr(type(fs), name, None), "__wrapped__", None)
        if inner is not None:
            setattr(fs, name, types.MethodType(inner, fs))
