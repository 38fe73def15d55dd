# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C43: each agent counts restarts for itself, so keys made from its count differ or repeat.

Here: a start of the workers has a name that all its nodes share and no other start has. Reported
for pytorch as #135712.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_a_start_has_one_name_on_all_nodes(agents: Callable[..., Agents]) -> None:
    """Though the nodes' own counts differ as soon as the workers of one have failed."""
    job = agents(plan={"1.1": "fail"})

    job.start_all()
    second = job.until_start(2)
    job.finish()

    assert job.codes() == [0, 0]
    assert {start.count for start in second} == {0, 1}
    assert len({start.incarnation for start in second}) == 1
    assert second[0].incarnation != job.rounds()[0][0].incarnation
