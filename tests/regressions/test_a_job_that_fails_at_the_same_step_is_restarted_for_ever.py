# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C48: a program that fails in the same way each time was restarted as often as any other.

``pytorch/pytorch#60910``: nobody told a launcher how far its workers had come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.restarted_job import Fault, make_job


if TYPE_CHECKING:
    from pathlib import Path

    from tests.two_agents import Launch


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_the_same_error_at_the_same_step_is_met_twice_and_not_more(
    launch: Launch, tmp_path: Path
) -> None:
    """Its text differs in numbers only: with a quota of ten, the job ends after two starts."""
    fault = Fault(rank=1, at=(3,) * 9)

    agents = launch(make_job(f"{tmp_path}/checkpoints", fault), restart_quota=10)

    assert agents.wait() == [86, 86], agents.told()
    assert agents.starts == [2, 2]
    assert "It is the same error at step 3, 2 times in a row" in agents.reason(0)
