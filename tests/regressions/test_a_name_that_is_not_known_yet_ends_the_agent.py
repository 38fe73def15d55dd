# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C35: the name of the store's host is not in DNS yet when an agent starts, and the agent ends.

Here: it is tried again until the time to join has passed; then the host and the time are told.
Reported for pytorch as #73682.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from lightning_resilience.adapters import rendezvous_inner as within
from tests.handlers import server, status_of


if TYPE_CHECKING:
    import pytest

    from tests.handlers import Handlers


def resolve_from(attempt: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the name be unknown before this attempt; return where attempts are noted."""
    attempts: list[int] = []
    make = within.make_inner

    def resolving(*args: Any, **how: Any) -> Any:
        attempts.append(len(attempts) + 1)
        if len(attempts) < attempt:
            cause = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            raise RendezvousConnectionError("The connection has failed.") from cause
        return make(*args, **how)

    monkeypatch.setattr(within, "make_inner", resolving)
    return attempts


def test_it_is_tried_again(handlers: Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent joins as soon as the name is known."""
    store = server()
    attempts = resolve_from(4, monkeypatch)

    [info] = handlers.join(handlers.make(store.port, join_timeout=30))

    assert info.world_size == 1
    assert attempts == [1, 2, 3, 4]


def test_a_name_that_never_becomes_known_is_told(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the address, the cause and the time; a scheduler may try again."""
    resolve_from(10**6, monkeypatch)
    handler = handlers.make(7, join_timeout=1)

    assert status_of(handler.next_rendezvous) == 160

    assert "could not join at 127.0.0.1:7 within 1 s" in caplog.text
    assert "Name or service not known" in caplog.text
