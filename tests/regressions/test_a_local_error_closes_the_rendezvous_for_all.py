# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C41: an error of one agent's launcher closes the rendezvous for nodes that are healthy.

Here: an agent that alone has come to its end leaves; the others form again without it. Reported for
nvidia-resiliency-ext as #421.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.handlers import WITHIN_S, server


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.rendezvous import ResilientHandler
    from tests.handlers import Handlers


def give_up(handler: ResilientHandler) -> bool:
    """Do what torch's launcher does when it has failed itself."""
    try:
        Path("/dev/null/logs").mkdir()
    except OSError:
        return handler.shutdown()
    raise AssertionError


def test_the_others_form_again(handlers: Handlers) -> None:
    """As soon as the one that has left is missed."""
    store = server()
    one, other = (
        handlers.make(store.port, nodes=(1, 2), keep_alive_max_attempt=3) for _ in range(2)
    )
    assert [info.world_size for info in handlers.join(one, other)] == [2, 2]

    give_up(one)
    assert not other.is_closed()
    _wait_for(other.num_nodes_waiting)
    [info] = handlers.join(other)

    assert info.world_size == 1


def test_a_job_that_has_ended_is_closed(handlers: Handlers) -> None:
    """So that a node that comes too late does not wait for the others."""
    store = server()
    one, other = (handlers.make(store.port, nodes=(2, 2)) for _ in range(2))
    handlers.join(one, other)

    assert one.shutdown()

    _wait_for(other.is_closed)


def _wait_for(answer: Callable[[], int]) -> None:
    """Ask until the answer is yes: torch's handler looks once a second at most."""
    ends_at_s = time.monotonic() + WITHIN_S
    while not answer():
        assert time.monotonic() < ends_at_s
        time.sleep(0.05)
