# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C66: a native client panicked on one rank, and the others waited for it.

``awslabs/s3-connector-for-pytorch#361``: PyO3's ``PanicException`` derives from ``BaseException``,
so ``except Exception`` lets it through, and nobody tells the other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, store_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


@pytest.mark.parametrize("operation", ["put_file", "info"])
def test_a_panic_is_told_to_all_ranks_and_tried_once(
    operation: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    """It is permanent: one attempt, and the same error on every rank, with the panic in words."""
    job = Job(folder=f"faulty://{tmp_path}/checkpoints", group_timeout_s=40.0)
    rule = Rule(operations=(operation,), name="step=2", error="panic")
    with store_server() as port:
        plan = FaultPlan.write(tmp_path / "plan", rule)
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        first, second = running.wait()

    assert len(plan.calls(operation, name="step=2")) == 1
    assert first["error"] == second["error"] == "JointError", running.told()
    assert first["text"] == second["text"]
    assert "PanicException: called `Result::unwrap()` on an `Err` value" in second["text"]
    assert (second["outcome"], second["first_rank"]) == ("permanent", 0)
    assert abs(first["ended_at_s"] - second["ended_at_s"]) < 5
    assert first["causes"] == [
        "PanicException: called `Result::unwrap()` on an `Err` value",
    ]
