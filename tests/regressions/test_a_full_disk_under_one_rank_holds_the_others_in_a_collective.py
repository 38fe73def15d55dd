# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C20: one rank's disk was full, and the others waited for it in NCCL for half an hour.

``NVIDIA-NeMo/Automodel#3390``, ``awslabs/awsome-distributed-ai#1225``: in a sharded save one target
was full, or a quota used up, while ``df`` showed room. Only that rank had an error; and where the
data was complete and what says so could not be written, nobody found it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests import lightning_job
from tests.dcp_job import DcpJob, run_rank
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import store_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

STEPS = (("save", "first"), ("save", "new"), ("load", "first"), ("load", "new"))


def run(warm: WarmPython, home: Path, rule: Rule) -> tuple[FaultPlan, list[list[dict[str, Any]]]]:
    """Return the plan, and what each of two ranks has told of each step."""
    job: Any = DcpJob(folder=f"faulty://{home}/checkpoints", steps=STEPS, group_timeout_s=1800.0)
    plan = FaultPlan.write(home / "plan", rule)
    with store_server() as port:
        running = lightning_job.start(
            warm, job, home / "job", port=port, plan=plan, function=run_rank
        )
        reports = running.wait()
    return plan, [report["steps"] for report in reports]


def test_all_ranks_say_so_after_one_attempt(warm_python: WarmPython, tmp_path: Path) -> None:
    """The same error names the rank and what to do, and the checkpoint before is still there."""
    rule = Rule(operations=("put_file",), name="new/__1_", error="full")

    plan, told = run(warm_python, tmp_path, rule)

    texts = {each[1]["text"] for each in told}
    assert [(each[1]["error"], each[1]["first_rank"]) for each in told] == [("JointError", 1)] * 2
    assert len(texts) == 1
    assert "capacity" in texts.pop()
    assert len(plan.calls("put_file", name="new/__1_")) == 1
    assert not (tmp_path / "checkpoints" / "new" / ".metadata").exists()
    assert [each[2].get("error") for each in told] == [None] * 2
    assert [each[3].get("error") for each in told] == ["JointError"] * 2


def test_a_checkpoint_whose_mark_found_no_room_is_still_found(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Where only what says that it is complete cannot be written, all say so, and it loads."""
    rule = Rule(operations=("manifest_put_file",), name="new", error="full")

    _, told = run(warm_python, tmp_path, rule)

    assert [(each[1]["error"], each[1]["first_rank"]) for each in told] == [("JointError", 0)] * 2
    assert [each[3].get("error") for each in told] == [None] * 2
