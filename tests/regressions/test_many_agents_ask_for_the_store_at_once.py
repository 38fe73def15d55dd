# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C42: all agents ask for the store in one moment, its queue overflows, and connections are reset.

Here: the first contact is spread, and a connection that is reset is tried again. Reported for
pytorch as PR #129261.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING

from lightning_resilience.core.restart import first_contact_s
from tests.handlers import server


if TYPE_CHECKING:
    from tests.handlers import Handlers


RESET = struct.pack("ii", 1, 0)
NODES = 8


def test_all_of_them_join(handlers: Handlers) -> None:
    """One round has them all."""
    store = server()
    made = [handlers.make(store.port, nodes=(NODES, NODES), read_timeout=30) for _ in range(NODES)]

    found = handlers.join(*made)

    assert sorted(info.rank for info in found) == list(range(NODES))
    assert {info.world_size for info in found} == {NODES}


def test_a_reset_right_after_the_connection_is_tried_again(handlers: Handlers) -> None:
    """As an overflowing queue does it; here, somebody who accepts and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    accepted: list[int] = []

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while len(accepted) < 2:
                connection, _ = listener.accept()
                accepted.append(1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.close()
        listener.close()
        stores.append(server(port))

    stores: list[object] = []
    thread = threading.Thread(target=hang_up)
    thread.start()
    [info] = handlers.join(handlers.make(port, read_timeout=1, join_timeout=40))
    thread.join()

    assert info.world_size == 1
    assert len(accepted) == 2


def test_the_first_contact_is_spread_over_more_time_for_more_nodes() -> None:
    """A thousand nodes ask within twenty seconds, and two as soon as torch lets them."""
    last = [first_contact_s(nodes, draw=0.999) for nodes in (2, 100, 1000, 100_000)]

    assert last == sorted(last)
    assert last[0] == 0.0
    assert 15.0 < last[2] <= 20.0
    assert last[3] <= 30.0
