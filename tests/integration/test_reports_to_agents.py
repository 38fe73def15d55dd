# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What workers tell decides about restarts: jobs of two nodes under torch's own agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.restarted_job import Fault, make_job, start_agents


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.restarted_job import Agents
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


@pytest.fixture
def launch(tmp_path: Path, warm_python: WarmPython) -> Iterator[Callable[..., Agents]]:
    """Start a job with a fault, and leave nothing of it behind."""
    started: list[Agents] = []

    def start(fault: Fault, *, steps: int = 4, **options: Any) -> Agents:
        job = make_job(str(tmp_path / "checkpoints"), fault, steps=steps)
        started.append(start_agents(warm_python, job, tmp_path, **options))
        return started[-1]

    yield start
    for agents in started:
        agents.end()


def test_an_error_that_every_start_would_repeat_is_not_repeated(
    launch: Callable[..., Agents],
) -> None:
    """The class that a rank has told ends the job after one start."""
    agents = launch(Fault(rank=1, at=(3,) * 9, kind="TypeError"))

    assert agents.wait() == [78, 78], agents.told()

    assert agents.starts == [2]
    for node in range(2):
        assert "Rank 1 failed first, after step 3, with TypeError: the batch is bad" in (
            agents.reason(node)
        )


def test_errors_that_come_after_progress_use_up_no_quota(launch: Callable[..., Agents]) -> None:
    """Each start gets to a newer checkpoint, so three failures are no more than one."""
    agents = launch(Fault(rank=1, at=(3, 5, 7)), steps=8, restart_quota=1)

    assert agents.wait() == [0, 0], agents.told()

    assert agents.starts == [2, 2, 2, 2]


def test_a_job_that_is_told_to_stop_from_outside_is_not_charged(
    launch: Callable[..., Agents],
) -> None:
    """SIGTERM to a worker, and all leave together: the next start costs nothing."""
    agents = launch(Fault(rank=1, at=(3,), kind="SIGTERM"), steps=6, restart_quota=0)

    assert agents.wait() == [0, 0], agents.told()

    assert agents.starts == [2, 2]
