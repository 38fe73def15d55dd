# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C34: one error of the rendezvous' store in the agent's watch ends it, and its healthy workers.

Here: what was known last is answered for a bounded grace; then the workers are restarted by way of
the gate, and the agent is not ended. Reported for torchx as #540 and for torchtune as #2676.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from tests.handlers import WITHIN_S, server


if TYPE_CHECKING:
    import pytest

    from lightning_resilience.adapters.rendezvous import ResilientHandler
    from tests.handlers import Handlers


class Deaf:
    """A rendezvous that does not answer ``failing`` times."""

    def __init__(self, handler: ResilientHandler, monkeypatch: pytest.MonkeyPatch) -> None:
        inner: Any = handler._connection.handler()
        self.failing = 0
        for name in ("num_nodes_waiting", "is_closed", "set_closed"):
            monkeypatch.setattr(inner, name, self._answering(getattr(inner, name)))

    def _answering(self, ask: Any) -> Any:
        def answer() -> Any:
            if self.failing:
                self.failing -= 1
                raise RendezvousConnectionError("the store has not answered")
            return ask()

        return answer


def test_the_workers_are_left_alone(handlers: Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lost answer to each question changes nothing."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    deaf = Deaf(handler, monkeypatch)

    deaf.failing = 1
    assert handler.num_nodes_waiting() == 0
    assert handler.num_nodes_waiting() == 0
    deaf.failing = 1
    assert not handler.is_closed()
    deaf.failing = 1
    handler.set_closed()

    assert not handler.is_closed()


def test_the_grace_is_bounded(handlers: Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stays away is reported as a reason to restart, not before its time."""
    store = server()
    handler = handlers.make(store.port, keep_alive_max_attempt=1)
    handlers.join(handler)
    deaf = Deaf(handler, monkeypatch)
    deaf.failing = 10**6

    began_at_s = time.monotonic()
    while not handler.num_nodes_waiting():
        assert time.monotonic() - began_at_s < WITHIN_S
        time.sleep(0.02)

    assert time.monotonic() - began_at_s >= 1.0
