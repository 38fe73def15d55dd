# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked of a client of a ``torch.distributed`` store, so that the answer is one.

``TorchStore`` says where torch's stores differ; these are the requests that have to know of it.
"""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import DistStoreError


if TYPE_CHECKING:
    from lightning_resilience.adapters.store_connection import StoreClient


__all__ = ["read", "read_all", "wait", "wait_in_file", "write"]

_ABSENT: Final = b"\x00lightning-resilience: no value is ever this\x00"
"""The expectation with which a key is read: no value has it, so nothing is ever written."""

_FILE_POLL_S: Final = 0.02
"""How often a ``FileStore`` is looked at; torch's own wait looks every 0.01 s."""


def read(client: StoreClient, key: str) -> bytes | None:
    """Return a value, or None; never blocks. One round trip."""
    value = client.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT else value


def read_all(client: StoreClient, keys: list[str]) -> list[bytes | None]:
    """Return several values; two round trips where all exist."""
    if client.has_extended_api() and client.check(keys):
        try:
            return list[Any](client.multi_get(keys))
        except DistStoreError:
            # A key was deleted in between.
            return [read(client, key) for key in keys]
    return [read(client, key) for key in keys]


def write(client: StoreClient, key: str, value: bytes) -> None:
    """Write a value, and return once the server has it.

    A ``TCPStore`` answers nothing to a ``set``: what is written into a connection that has just
    broken is lost, and nobody is told. A server takes what comes by one connection in order, so an
    answer to what is asked after it is one to both.
    """
    client.set(key, value)
    client.check([key])


def wait(client: StoreClient, key: str, timeout_s: float) -> bool:
    """Block until a key exists, for a bounded time in seconds; tell whether it does."""
    if timeout_s <= 0:
        return client.check([key])
    try:
        # Rounded up: 0 milliseconds would be for ever on some stores.
        client.wait([key], timedelta(milliseconds=math.ceil(timeout_s * 1000)))
    except DistStoreError:
        return False
    return True


def wait_in_file(client: StoreClient, key: str, timeout_s: float) -> bool:
    """Do so on a ``FileStore``, whose own wait counts whole seconds."""
    pause = threading.Event()
    for _ in range(math.ceil(timeout_s / _FILE_POLL_S)):
        if client.check([key]):
            return True
        pause.wait(_FILE_POLL_S)
    return client.check([key])
