# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which store do the ranks of this job share?

First that applies: what the user names (a store or a URL), the server behind the process group's
default store, this process's memory where it is the only one. The process group's own client is
never used: it is locked while the group waits on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_resilience.adapters.etcd_store import EtcdStore
from lightning_resilience.adapters.store_connection import no_check
from lightning_resilience.adapters.torch_store import TorchStore, innermost_store
from lightning_resilience.core.store_address import is_etcd_url, parse_etcd_url, parse_store_url
from lightning_resilience.errors import ConfigError
from lightning_resilience.ports import SharedStore
from lightning_resilience.runtime.memory import MemoryStore


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store


__all__ = ["default_store", "open_store", "open_url", "store_of_default_group"]


def store_of_default_group(
    *, timeout_s: float = 5.0, check: Callable[[], None] = no_check
) -> TorchStore | None:
    """Our own connection to the store of the default process group.

    Keys are not prefixed as the group's are, so that all ranks, and all groups of one server, see
    the same ones.

    Args:
        timeout_s: Seconds that an operation may take.
        check: Called while an answer is late; what it raises ends the wait.

    Returns:
        None where no process group is initialised, or its backend has no store.

    Raises:
        ConfigError: The group's store is of a kind that a second connection cannot reach.
    """
    store = default_store()
    if store is None:
        return None
    inner = innermost_store(store)
    if isinstance(inner, dist.TCPStore):
        # By address, not by wrapping: keeping the object would keep the group's server alive.
        return TorchStore.connect(inner.host, inner.port, timeout_s=timeout_s, check=check)
    return TorchStore.wrap(inner, timeout_s=timeout_s, check=check)


def open_url(
    url: str,
    *,
    timeout_s: float = 5.0,
    check: Callable[[], None] = no_check,
    option: str = "store",
) -> TorchStore | EtcdStore:
    """The store that a URL names; nothing is sent yet.

    Args:
        url: ``tcp://host:port``, ``etcd://host:port/directory`` or ``etcds://…``.
        timeout_s: Seconds that an operation may take.
        check: Called while an answer is late; what it raises ends the wait.
        option: Name of the option it came from, for the error.

    Raises:
        ConfigError: The URL has another form.
    """
    if is_etcd_url(url):
        address = parse_etcd_url(url, option=option)
        return EtcdStore(address, timeout_s=timeout_s, check=check)
    host, port = parse_store_url(url, option=option)
    return TorchStore.connect(host, port, timeout_s=timeout_s, check=check)


def open_store(
    store: SharedStore | Store | str | None,
    *,
    world_size: int,
    timeout_s: float = 5.0,
    check: Callable[[], None] = no_check,
) -> SharedStore:
    """The store that all ranks share.

    Args:
        store: What the user named: a store, a URL, or None to look for one.
        world_size: Number of processes of the job.
        timeout_s: Seconds that an operation may take.
        check: Called while an answer is late; what it raises ends the wait. Not by a store that is
            an object like ``SharedStore``.

    Raises:
        ConfigError: The URL is malformed, the store is of an unknown kind, or none was named and
            there is none to be found although the job has several processes.

    Note:
        Nothing is sent: a store that is away is noticed by the first operation.
    """
    if isinstance(store, str):
        return open_url(store, timeout_s=timeout_s, check=check)
    if isinstance(store, SharedStore):
        # A handle of our own: who closes it must not close the user's.
        return store.watcher()
    if store is not None:
        return _wrap_named(store, timeout_s=timeout_s, check=check)
    found = store_of_default_group(timeout_s=timeout_s, check=check)
    if found is not None:
        return found
    if world_size == 1:
        return MemoryStore()
    text = (
        f"store is not given, no process group is initialised, and the job has {world_size} "
        "processes: they share no store. Allowed: store='tcp://host:port' (or "
        "LIGHTNING_RESILIENCE_STORE), a store object, or opening it after the process group"
    )
    raise ConfigError(text)


def _wrap_named(store: object, *, timeout_s: float, check: Callable[[], None]) -> TorchStore:
    if not isinstance(store, dist.Store):
        text = (
            f"store is {store!r}; allowed: a URL tcp://host:port, a torch.distributed store, or an "
            "object with the methods of SharedStore"
        )
        raise ConfigError(text)
    return TorchStore.wrap(store, timeout_s=timeout_s, check=check)


def default_store() -> Store | None:
    """Return the store of the default process group itself, or None where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # Torch has no public name for it.
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001
