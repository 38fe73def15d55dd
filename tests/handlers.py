# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Handlers of the rendezvous backend ``resilient`` in the test's own process, without agents.

What an agent does with a handler is called by the test itself; several nodes are several threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from lightning_resilience.adapters.rendezvous import BACKEND, ResilientHandler, create_handler
from lightning_resilience.adapters.worker_environment import INCARNATION, STORE


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.elastic.rendezvous import RendezvousInfo


WITHIN_S = 50.0
"""Against a hang only."""
CONF = {
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 8,
    "last_call_timeout": 1,
    "read_timeout": 2,
    "settle_s": 0.1,
    "linger_s": 1,
    "restart_base_delay_s": 0.1,
    "is_host": 0,
}


def server(port: int = 0) -> TCPStore:
    """Return the server of a store, in this process."""
    return TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True, wait_for_workers=False)


class Handlers:
    """Makes handlers, and lets them join together."""

    def __init__(self) -> None:
        self.made: list[ResilientHandler] = []

    def make(
        self,
        port: int,
        *,
        run_id: str = "job",
        nodes: tuple[int, int] = (1, 1),
        host: str = "127.0.0.1",
        **conf: Any,
    ) -> ResilientHandler:
        """Make one as torch's launcher does on a host; it asks for nothing yet."""
        options = {name: value for name, value in {**CONF, **conf}.items() if value is not None}
        handler = create_handler(
            RendezvousParameters(BACKEND, f"127.0.0.1:{port}", run_id, *nodes, host, **options)
        )
        self.made.append(handler)
        return handler

    def join(self, *handlers: ResilientHandler) -> list[RendezvousInfo]:
        """Let all join at once, and return what each has found."""
        with ThreadPoolExecutor(len(handlers)) as pool:
            futures = [pool.submit(each.next_rendezvous) for each in handlers]
            return [future.result(WITHIN_S) for future in futures]

    def close(self) -> None:
        """Let go of what was made."""
        for each in self.made:
            each._connection.close()


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handlers]:
    """Make handlers; what they leave in the environment goes with the test."""
    for name in (INCARNATION, STORE):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv(STORE)
    made = Handlers()
    yield made
    made.close()


def status_of(function: Callable[[], Any]) -> int:
    """Return the status with which a call ends the process."""
    with pytest.raises(SystemExit) as raised:
        function()
    assert isinstance(raised.value.code, int)
    return raised.value.code
