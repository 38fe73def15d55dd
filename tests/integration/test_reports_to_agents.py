# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What workers tell decides about restarts: jobs of two nodes under torch's own agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.restarted_job import Fault, make_job


if TYPE_CHECKING:
    from pathlib import Path

    from tests.two_agents import Launch


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_errors_that_come_after_progress_use_up_no_quota(launch: Launch, tmp_path: Path) -> None:
    """Each start gets to a newer checkpoint, so three failures are no more than one."""
    fault = Fault(rank=1, at=(3, 5, 7))

    agents = launch(make_job(f"{tmp_path}/checkpoints", fault, steps=8), restart_quota=1)

    assert agents.wait() == [0, 0], agents.told()
    assert agents.starts == [2, 2, 2, 2]


def test_an_error_before_the_first_step_is_told_as_well(launch: Launch, tmp_path: Path) -> None:
    """A callback that is misconfigured fails in ``setup``: one start, and the text names it."""
    job = make_job(f"{tmp_path}/checkpoints", options={"joint": {"joint_timeout_s": 60.0}})

    agents = launch(job)

    assert agents.wait() == [78, 78], agents.told()
    assert agents.starts == [2]
    assert "failed first, after step 0, with ConfigError: joint_timeout_s" in agents.reason(0)
