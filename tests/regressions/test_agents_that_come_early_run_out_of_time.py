# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C50: agents come further apart than each may wait, and the job never forms again.

Here: who has waited in vain waits once more, since others may have been held up; and then it is
enough. Reported for kubeflow's trainer as #2000.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.handlers import WITHIN_S, server, status_of


if TYPE_CHECKING:
    import pytest

    from tests.handlers import Handlers


def test_who_comes_too_late_is_waited_for_once_more(
    handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    """The second agent comes when the first has run out of time."""
    store = server()
    early, late = (handlers.make(store.port, nodes=(2, 2), join_timeout=8) for _ in range(2))

    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(early.next_rendezvous)
        ends_at_s = time.monotonic() + WITHIN_S
        while "RendezvousTimeoutError" not in caplog.text:
            assert time.monotonic() < ends_at_s
            time.sleep(0.05)
        info = late.next_rendezvous()

        assert {info.world_size, joined.result(WITHIN_S).world_size} == {2}


def test_nobody_is_waited_for_without_end(handlers: Handlers) -> None:
    """Who is alone ends with the status that lets a scheduler try again."""
    store = server()
    alone = handlers.make(store.port, nodes=(2, 2), join_timeout=1)

    assert status_of(alone.next_rendezvous) == 160
