# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Real agents whose workers fail: all of them restart together, or all of them stop alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agents import Agents

    Make = Callable[..., Agents]


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


@pytest.mark.parametrize(
    ("nodes", "is_library"), [(2, False), (3, True)], ids=["torchrun", "elastic_launch"]
)
def test_a_crash_is_one_restart_of_all(agents: Make, *, nodes: int, is_library: bool) -> None:
    """One delay, one round, and one name for the new start of the workers on every node."""
    job = agents(nodes=str(nodes), plan={"1.1": "fail"})

    job.start_all(is_library=is_library)
    second = job.until_start(2)
    record, go = job.restarts(), job.go(job.rounds()[0][0].incarnation)
    job.finish()

    assert job.codes() == [0] * nodes
    assert [[start.number for start in each] for each in job.rounds()] == [[1] * nodes, [2] * nodes]
    assert {start.incarnation for start in second} == {second[0].incarnation}
    assert {start.world for start in second} == {nodes}
    assert record.restarts == 1
    assert (go.number, go.cause) == (1, "failed")
    assert job.text().count(f"joining again, {go.delay_s:.1f} s after it was agreed") == nodes


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_permanent_error_is_one_attempt(agents: Make, nodes: int) -> None:
    """Every agent leaves with 78 and says why, though torch would restart ten times."""
    job = agents(nodes=str(nodes), plan={"*.1": "raise:TypeError: no such option"})

    job.start_all()

    assert job.codes() == [78] * nodes
    assert len(job.rounds()) == 1
    for node in range(nodes):
        reason = job.reason(node)
        assert (reason["code"], reason["may_start_again"]) == (78, False)
        assert "TypeError: no such option" in reason["reason"]
        assert reason["incarnation"] == job.starts()[0].incarnation


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_crash_loop_stops_at_the_cap(agents: Make, nodes: int) -> None:
    """The quota is the job's: so many restarts, whichever node it was, and 86 on all."""
    plan = {"1.1": "fail", "2.0": "fail", "3.1": "fail"}
    job = agents(nodes=str(nodes), plan=plan, conf={"restart_quota": 2})

    job.start_all()

    assert job.codes() == [86] * nodes
    assert [each[0].number for each in job.rounds()] == [1, 2, 3]
    for node in range(nodes):
        assert "restart_quota=2" in job.reason(node)["reason"]


def test_torchs_own_limit_ends_all_alike(agents: Make) -> None:
    """Where torch may not restart, the other agents do not wait for what never comes."""
    job = agents(plan={"*.1": "fail"}, max_restarts=0)

    job.start_all()

    assert job.codes() == [86, 86]
    assert len(job.rounds()) == 1
    assert all("--max-restarts" in job.reason(node)["reason"] for node in range(2))


def test_an_unknown_option_starts_nothing(agents: Make) -> None:
    """The status is that of wrong usage, and the nearest name is told."""
    job = agents(nodes="1", conf={"restart_qouta": 3})

    job.start(0)

    assert job.codes() == [64]
    assert job.starts() == []
    assert "restart_quota" in job.text()


def test_torchs_record_is_understood(agents: Make, tmp_path: Any) -> None:
    """What a worker's exception was is told by the file that ``@record`` leaves."""
    program = tmp_path / "recorded.py"
    program.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    raise TypeError('bad config')\n"
        "main()\n"
    )
    job = agents(nodes="1")

    job.start(0, program=(str(program),))

    assert job.codes() == [78]
    assert "TypeError: bad config" in job.reason(0)["reason"]
