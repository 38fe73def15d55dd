# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The store that a job shares with other jobs: connected when it is first asked, and briefly.

A server for it is ``lightning-resilience store serve``; see ``core.site`` for what is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.config import parse_store_url


if TYPE_CHECKING:
    from lightning_resilience.ports import SharedStore


__all__ = ["SITE_TIMEOUT_S", "open_site"]

SITE_TIMEOUT_S: Final = 0.5
"""Time for one answer. Two of them and a probe fit into the lease of a probe by its own limits."""


def open_site(url: str | None) -> SharedStore | None:
    """Return a connection to the site's store; None where there is none.

    Args:
        url: Its URL, checked.

    Note:
        Nothing is sent: a store that is away is noticed by the first operation.
    """
    if url is None:
        return None
    host, port = parse_store_url(url, option="site_store")
    return TorchStore.connect(host, port, timeout_s=SITE_TIMEOUT_S)
