# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C47: a worker had no way to tell its launcher that another attempt is of no use.

``pytorch/pytorch#133877``: every allowed restart was made, and each ended with the same error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faulty_filesystem import FaultPlan, Rule
from tests.restarted_job import make_job


if TYPE_CHECKING:
    from pathlib import Path

    from tests.two_agents import Launch


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_a_denied_save_ends_the_job_after_one_start(launch: Launch, tmp_path: Path) -> None:
    """All ranks leave with one verdict, and one tells its class: both agents end with 78."""
    plan = FaultPlan.write(tmp_path / "plan", Rule(operations=("put_file",), error="denied"))

    agents = launch(make_job(f"faulty://{tmp_path}/checkpoints"), plan=plan)

    assert agents.wait() == [78, 78], agents.told()
    assert agents.starts == [2]
    for node in range(2):
        reason = agents.reason(node)
        assert "Rank 0 failed first, after step 2, with JointError: " in reason
        assert "AccessDenied" in reason
