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


def test_workers_that_are_told_to_stop_at_each_start_are_restarted_ever_later(agents: Make) -> None:
    """Nobody told their agents, and something does it again each time: free, but no storm."""
    conf = {"restart_base_delay_s": 1, "restart_max_delay_s": 2, "restart_quota": 1}
    plan = {"1": "stop", "2.0": "stop", "3": "stop", "*": "wait"}
    job = agents(nodes="2", plan=plan, conf=conf)
    job.start_all()

    ended = [job.until_start(number, size=2)[0].incarnation for number in (1, 2, 3)]
    job.until_start(4, size=2)
    gos = [job.go(incarnation) for incarnation in ended]
    record = job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert [go.cause for go in gos] == ["preempted"] * 3
    assert [go.delay_s > 0 for go in gos] == [False, True, True]
    assert (record.restarts, record.charges, record.stops) == (0, (), 3)


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
