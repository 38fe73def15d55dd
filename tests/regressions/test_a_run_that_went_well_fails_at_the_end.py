# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C57: workers have ended well, and the end fails, because the store's host has left before.

Here: what cannot be told any more is logged, and an agent whose workers ended well ends well.
Reported for pytorch as #69520 and #195543.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.agents import children_of
from tests.handlers import server


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents
    from tests.handlers import Handlers


def test_a_store_that_has_gone_is_no_failure(handlers: Handlers) -> None:
    """Leaving asks it something, gets no answer, and goes on."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    del store

    assert not handler.shutdown()


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
@pytest.mark.parametrize("first", [0, 1], ids=["the host is ready first", "the other one is"])
def test_agents_that_are_ready_at_different_times_end_well(
    agents: Callable[..., Agents], first: int
) -> None:
    """Whichever is ready first, and though it is silent for longer than a node may be."""
    job = agents(plan={f"1.{first}": "ok"}, conf={"keep_alive_max_attempt": 5})
    job.start_all()
    job.until_start(1)
    job.until(lambda: not children_of(job.agents[first].pid))
    sees_for_s = time.monotonic() + 7.0
    job.until(lambda: time.monotonic() > sees_for_s or len(job.rounds()) > 1)

    job.finish()

    assert job.codes() == [0, 0]
    assert len(job.rounds()) == 1
    assert not any((job.folder / f"reason{node}.json").exists() for node in range(2))
