# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C40: a node dies, and the others go on waiting for it, because nobody waits to join.

Here: the agents that are left notice that it is gone, and form again without it. Reported for
pytorch as #111646.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_those_who_are_left_form_again(agents: Callable[..., Agents]) -> None:
    """Though no worker of theirs has noticed anything, and no node wants to join."""
    job = agents(nodes="1:2", conf={"keep_alive_max_attempt": 3})
    job.start_all()
    assert len(job.until_start(1, size=2)) == 2

    job.kill(1)
    alone = job.until_start(2)
    record = job.restarts()
    job.finish()

    assert [(start.node, start.world) for start in alone] == [(0, 1)]
    assert [each.cause for each in record.charges] == ["left"]
    assert job.agents[0].wait(150) == 0
