# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C46: two jobs on one machine with the same port: the second takes part in the first one's store.

Here: the second is told whose store that is, and ends; the first does not notice. Reported for
pytorch as #91940 and #126510.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_the_other_job_is_named(agents: Callable[..., Agents]) -> None:
    """With its run, its host and its process, after it has had time to end."""
    first = agents(nodes="1", run_id="first")
    first.start(0, is_host=True)
    first.until_start(1)
    conf = {"is_host": None, "join_timeout": 1}
    second = agents(nodes="1", run_id="second", port=first.port, conf=conf)

    second.start(0)

    assert second.codes() == [64]
    reason = second.reason(0)["reason"]
    assert "run 'first'" in reason
    assert f"process {first.agents[0].pid}" in reason
    assert second.starts() == []
    first.finish()
    assert first.codes() == [0]
