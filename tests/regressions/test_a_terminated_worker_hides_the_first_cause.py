# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C56: what launchers reported was the SIGTERM that the other workers got, and not the first error.

``flyteorg/flytekit#2064``: and a job that was told to stop counted as one that has failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.restarted_job import Fault, make_job


if TYPE_CHECKING:
    from pathlib import Path

    from tests.two_agents import Launch


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_the_record_keeps_the_error_of_which_the_others_died(
    launch: Launch, tmp_path: Path
) -> None:
    """Rank 0 ends as well, of its transport or by SIGTERM: both agents name rank 1's error."""
    agents = launch(make_job(f"{tmp_path}/checkpoints", Fault(rank=1, at=(3,))), restart_quota=0)

    assert agents.wait() == [86, 86], agents.told()
    assert agents.starts == [2]
    for node in range(2):
        told = "Rank 1 failed first, after step 3, with ValueError: the batch is bad"
        assert told in agents.reason(node)


def test_a_worker_that_was_killed_is_not_hidden_by_what_the_others_say(
    launch: Launch, tmp_path: Path
) -> None:
    """It has said nothing, and rank 0 leaves with the error of its transport."""
    fault = Fault(rank=1, at=(3,), kind="SIGKILL")

    agents = launch(make_job(f"{tmp_path}/checkpoints", fault), restart_quota=0)

    assert agents.wait() == [86, 86], agents.told()
    assert agents.starts == [2]
    for node in range(2):
        assert "Rank 1 was killed" in agents.reason(node)


def test_a_worker_that_is_told_to_stop_from_outside_is_not_charged(
    launch: Launch, tmp_path: Path
) -> None:
    """All ranks leave together, neither with success nor as a failure, and go on from there."""
    fault = Fault(rank=1, at=(3,), kind="SIGTERM")

    agents = launch(make_job(f"{tmp_path}/checkpoints", fault, steps=6), restart_quota=0)

    assert agents.wait() == [0, 0], agents.told()
    assert agents.starts == [2, 2]
