# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A real store server dies and comes back under a guard in use."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest

from lightning_resilience import Guard
from lightning_resilience.adapters.standalone import close_connections
from lightning_resilience.adapters.torch_store import TorchStore
from tests.integration.store_server import HANG_S, Server


if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

BOUND_S = 40.0


@pytest.fixture
def server() -> Iterator[Server]:
    """A server in a process of its own."""
    server = Server()
    yield server
    close_connections()
    server.kill()


def call_until(guard: Guard, caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Call until a log line has ``text``."""
    ends_at_s = time.monotonic() + BOUND_S
    while text not in caplog.text:
        assert time.monotonic() < ends_at_s, caplog.text
        assert guard.call(len, "ab") == 2
        time.sleep(0.02)


def test_calls_go_on_alone_and_come_back(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Both are said, and the empty server has the breaker again, at a higher epoch."""
    caplog.set_level(logging.INFO, "lightning_resilience")
    url = f"tcp://127.0.0.1:{server.port}"
    guard = Guard("x", store=url, run_id="run", breaker={"view_max_age_s": 0.05})
    guard.call(len, "ab")

    server.kill()
    call_until(guard, caplog, "decides alone about x:read")
    server.start()
    call_until(guard, caplog, "follows the shared circuit of x:read again")
    guard.call(len, "ab")

    store = TorchStore.connect("127.0.0.1", server.port, timeout_s=HANG_S)
    record = store.get("lr/run/breaker/x:read")
    store.close()
    assert record is not None
    assert b'"epoch":2' in record
    assert b'"state":"closed"' in record
