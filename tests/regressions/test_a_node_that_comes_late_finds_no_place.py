# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C51: nodes are there later than the rendezvous' short time limits allow.

Here: the store is asked for until the time to join has passed, however short one attempt is; a node
may come when the job runs already; and torch's own time limits can be set, while a misspelt one is
refused. Reported for flytekit as #3419 and for pytorch as #107021.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.handlers import WITHIN_S, server, status_of
from tests.ports import free_port


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents
    from tests.handlers import Handlers


def test_the_store_may_come_later_than_one_attempt_lasts(
    handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent whose attempts last a second finds a store that is made when two have failed."""
    port = free_port()
    early = handlers.make(port, read_timeout=1, join_timeout=40)

    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(early.next_rendezvous)
        while caplog.text.count("joining again in") < 2:
            assert not joined.done()
        store = server(port)

        assert joined.result(WITHIN_S).world_size == 1
    assert store.port == port


def test_torchs_limits_are_handed_on(handlers: Handlers) -> None:
    """As they were given."""
    store = server()
    handler = handlers.make(store.port, join_timeout="70", last_call_timeout="6", read_timeout="9")
    inner = handler._connection.handler()
    settings = inner.settings  # type: ignore[attr-defined]

    assert settings.timeout.join.total_seconds() == 70
    assert settings.timeout.last_call.total_seconds() == 6
    assert inner._store.timeout.total_seconds() == 9  # type: ignore[attr-defined]


def test_a_misspelt_limit_is_refused(handlers: Handlers, caplog: pytest.LogCaptureFixture) -> None:
    """With the name that was probably meant."""
    assert status_of(lambda: handlers.make(7, join_timout=70)) == 64

    assert "join_timeout" in caplog.text


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_a_node_may_come_when_the_job_runs(agents: Callable[..., Agents]) -> None:
    """All are restarted together, which costs nothing of the quota."""
    job = agents(nodes="1:2", max_restarts=0)
    job.start(0)
    job.until_start(1, size=1)

    job.start(1)
    job.until_start(2, size=2)
    record = job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert record.charges == ()
