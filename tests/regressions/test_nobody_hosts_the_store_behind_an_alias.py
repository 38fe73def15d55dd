# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C36: the endpoint is another name of a node, no node takes it for its own, and all wait in vain.

Here: a node to whose own address the endpoint leads hosts the store; ``is_host`` has the last word;
and where nobody hosts it the error names that option. Reported for pytorch as #73656 and #79388.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from tests.handlers import status_of
from tests.ports import free_port


if TYPE_CHECKING:
    from tests.handlers import Handlers


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port at an endpoint of which torch does not see that it is this machine's."""

    def never(*_: Any) -> bool:
        return False

    monkeypatch.setattr(c10d_rendezvous_backend, "_matches_machine_hostname", never)
    return free_port()


def test_the_node_that_has_the_address_hosts_the_store(handlers: Handlers, alias: int) -> None:
    """Whatever the name is by which the endpoint is called."""
    handler = handlers.make(alias, is_host=None, join_timeout=20)

    [info] = handlers.join(handler)

    assert info.world_size == 1
    assert handler._connection.hosts_store


def test_what_the_user_says_has_the_last_word(
    handlers: Handlers, alias: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that shall not host the store does not; the error names the option."""
    handler = handlers.make(alias, is_host=0, read_timeout=1, join_timeout=1)

    assert status_of(handler.next_rendezvous) == 160

    assert "is_host=1" in caplog.text
