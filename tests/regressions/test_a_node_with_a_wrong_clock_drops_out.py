# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C45: nodes whose clocks drift apart take each other for dead.

Here: what counts is how long one has seen no sign of life, by one's own clock. Reported for
awsome-distributed-ai as #202.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_a_clock_that_is_wrong_changes_nothing(agents: Callable[..., Agents]) -> None:
    """One agent's time of day is half a minute ahead, and a node may be silent for 8 s."""
    job = agents(plan={"1.1": "fail"})

    job.start(0)
    job.start(1, before=("tests.agents:shift_clock",))
    job.until_start(2)
    record = job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert [len(each) for each in job.rounds()] == [2, 2]
    assert [each.cause for each in record.charges] == ["failed"]
