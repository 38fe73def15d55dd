# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C39: the host of the store dies, and everything that used it dies with it.

Here: whoever used it is told, goes on asking, reaches the new server at the same address through
the same object, and can tell "gone" from "unchanged". Reported for pytorch as #67742 and #150916.
"""

from __future__ import annotations

import pytest

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.errors import StoreUnavailableError
from tests.integration.store_server import HANG_S, Server


@pytest.mark.multiprocess
def test_a_record_is_rebuilt_after_the_store_came_back_empty() -> None:
    """The record's old bytes come back as "gone", and are never mistaken for what is there."""
    server = Server()
    store = TorchStore.connect("127.0.0.1", server.port, timeout_s=HANG_S)
    record = b'{"epoch":3,"state":"open","writer":"a"}'
    store.compare_and_set("breaker", b"", record)

    server.kill()
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            store.compare_and_set("breaker", record, b"next")
    server.start()
    gone = store.compare_and_set("breaker", record, b"next")
    read = store.get("breaker")
    rebuilt = store.compare_and_set("breaker", b"", b'{"epoch":4,"writer":"b"}')

    assert gone == record
    assert read is None
    assert rebuilt == store.get("breaker") == b'{"epoch":4,"writer":"b"}'
    store.close()
    server.kill()
