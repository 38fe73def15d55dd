# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C49: a job that failed was started again for ever, because nothing remembered how often.

``kubeflow/trainer#1589``: with ``restartPolicy: OnFailure`` the whole launcher is started anew,
under the same name, and with it goes the store that had counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.cli.releasing import Place, release


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.agents import Agents

    Make = Callable[..., Agents]


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_failures_count_across_launchers_that_lose_their_store(
    agents: Make, tmp_path: Path
) -> None:
    """The second launcher has one failure too many, the third starts nothing, a person may."""
    kept = tmp_path / "kept"

    def launched(plan: dict[str, str]) -> Agents:
        conf = {"restarts": kept, "restart_quota": 1, "read_timeout": 1}
        job = agents(conf=conf, plan=plan)
        job.start_all()
        return job

    first = launched({"1.1": "fail"})
    first.until_start(2)
    for node in (1, 0):
        first.kill(node)
    second = launched({"*.1": "fail"})
    assert second.codes() == [86, 86]
    assert len(second.rounds()) == 1
    assert "2 failures without progress" in second.reason(1)["reason"]

    third = launched({})

    assert third.codes() == [86, 86]
    assert third.starts() == []
    assert third.reason(1)["reason"] == second.reason(1)["reason"]
    assert release(Place(run_id="job", store=None, restarts=str(kept)), as_json=True) == 0
    assert launched({"*": "ok"}).codes() == [0, 0]
