# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Real agents that a signal tells to stop: a scheduler that wants a node back, or all of them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.agents import TOLD_TO_STOP, WITHIN_S


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents

    Make = Callable[..., Agents]


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_a_node_that_is_told_to_stop_leaves_the_others_to_go_on(agents: Make) -> None:
    """It says so by its status and its reason; nothing is charged; and then the others are told."""
    job = agents(nodes="1:2")
    job.start_all()
    first = job.until_start(1, size=2)

    os.kill(job.agents[1].pid, signal.SIGTERM)
    code = job.agents[1].wait(WITHIN_S)
    job.until_start(2, size=1)
    record, go = job.restarts(), job.go(first[0].incarnation)
    os.kill(job.agents[0].pid, signal.SIGINT)

    assert (code, job.agents[0].wait(WITHIN_S)) == (TOLD_TO_STOP, TOLD_TO_STOP)
    assert (go.cause, record.restarts) == ("preempted", 0)
    for node, name in ((1, "SIGTERM"), (0, "SIGINT")):
        reason = job.reason(node)
        assert (reason["code"], reason["may_start_again"]) == (143, True)
        assert f"got signal {name}," in reason["reason"]


def test_an_agent_is_told_to_stop_while_it_waits_to_start_again(agents: Make) -> None:
    """At the gate there are no workers to end, and the agent still leaves at once."""
    conf = {"restart_base_delay_s": 1e6, "restart_max_delay_s": 1e6}
    job = agents(nodes="1", plan={"1.0": "fail"}, conf=conf)
    job.start(0)
    job.until_start(1)
    job.until(lambda: job.restarts().restarts == 1)

    os.kill(job.agents[0].pid, signal.SIGTERM)

    assert job.codes() == [TOLD_TO_STOP]
    assert len(job.rounds()) == 1
