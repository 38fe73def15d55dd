# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C23: every rank reads the same checkpoint at start.

``Lightning-AI/pytorch-lightning#21017``, ``mosaicml/composer#209``, ``NovaSky-AI/SkyRL#800``: all
ranks of a node fetch the same file from the storage, each for itself, and a start takes as many
times as long.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan
from tests.lightning_job import Job, store_server
from tests.single_rank import fit


if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiprocess,
    # The checkpoint was made elsewhere.
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

RANKS = 4


def opened(
    warm_python: WarmPython, home: Path, options: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Resume with all ranks on one node; return how often the checkpoint was opened."""
    saved = home / "saved"
    fit(Job(folder=str(saved), steps=2, ranks=1, trainer={"default_root_dir": saved}))
    shutil.copytree(saved, home / "checkpoints")
    folder = f"faulty://{home}/checkpoints"
    job = Job(
        folder=folder,
        resume=f"{folder}/step=2.ckpt",
        ranks=RANKS,
        group_timeout_s=60.0,
        options=options,
    )
    plan = FaultPlan.write(home / "plan")
    with store_server() as port:
        running = lightning_job.start(warm_python, job, home / "job", port=port, plan=plan)
        reports = running.wait()
    assert [report["code"] for report in reports] == [0] * RANKS, running.told()
    return plan.calls("open", name="step=2")


def test_plain_lightning_reads_it_once_for_each_rank(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """What this is about: each rank opens it."""
    calls = opened(warm_python, tmp_path, None)

    assert {call["rank"] for call in calls} == {str(rank) for rank in range(RANKS)}


def test_one_rank_of_the_node_reads_it_for_all(warm_python: WarmPython, tmp_path: Path) -> None:
    """Nobody opens it besides: its manifest tells all ranks what they start from."""
    assert len(opened(warm_python, tmp_path, {})) == 1
