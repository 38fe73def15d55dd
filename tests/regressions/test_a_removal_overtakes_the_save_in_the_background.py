# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C07: removals raced with saves in the background.

``Lightning-AI/pytorch-lightning#14035`` and ``#20953``: with ``AsyncCheckpointIO``, a removal was
carried out before the file was written that it was about, and did nothing: all files remained. Or
it was carried out while the newer one was still in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, store_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

SLOW = Rule(operations=("put_file",), name=".ckpt", slow_s=0.05)


def run(warm_python: WarmPython, home: Path, *, ranks: int) -> tuple[Any, Any, FaultPlan]:
    """Save four times in the background, faster than storage writes, and keep one."""
    plan = FaultPlan.write(home / "plan", SLOW)
    job = Job(
        folder=f"faulty://{home}/checkpoints",
        steps=4,
        every=1,
        ranks=ranks,
        group_timeout_s=20.0,
        checkpoint={"save_top_k": 1},
        options={"max_pending_saves": 4},
        trainer={"plugins": [AsyncCheckpointIO()]},
    )
    with store_server() as port:
        running = lightning_job.start(warm_python, job, home / "job", port=port, plan=plan)
        return running, running.wait(), plan


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_is_what_was_to_be_kept(
    ranks: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Every removal comes after the save that it makes room for, and all of them come."""
    running, reports, plan = run(warm_python, tmp_path, ranks=ranks)

    assert [report["code"] for report in reports] == [0] * ranks, running.told()
    assert running.names() == ["step=4.ckpt"]
    for step in (1, 2, 3):
        (removal,) = plan.calls("rm_file", name=f"step={step}.ckpt")
        looked = plan.calls("info", name=f"step={step + 1}.ckpt")
        # The next one was looked at after it was sent: it is verified.
        assert any(call["at_s"] < removal["at_s"] for call in looked), running.told()
