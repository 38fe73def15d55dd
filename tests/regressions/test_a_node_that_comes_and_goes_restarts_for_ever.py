# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C38: a node leaves and comes back again and again, and each time everybody is restarted.

Torch counts no restart for a change of members, so nothing ends that. Here: each loss is counted,
once for the job, also where the node is back before anybody has missed it. Reported for pytorch as
#147064.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_losses_of_nodes_have_a_quota(agents: Callable[..., Agents]) -> None:
    """One that is quickly back is a loss as well; one loss too many ends the job."""
    conf = {"membership_quota": 1, "keep_alive_max_attempt": 4, "linger_s": 3}
    job = agents(nodes="1:3", conf=conf, max_restarts=0)
    job.start(0)
    job.start(1)
    job.until_start(1, size=2)

    job.kill(1)
    job.start(1)
    job.until_start(2, size=2)
    job.kill(1)
    job.start(1)

    assert job.codes() == [86, 86]
    assert job.text().count("the job has ended with status 86") == 2
    assert "membership_quota=1" in job.reason(0)["reason"]
    assert len(job.rounds()) == 2
