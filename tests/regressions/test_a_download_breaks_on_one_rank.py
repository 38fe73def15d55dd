# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C31: a download that broke part-way on one rank ended the job, or was multiplied by retries.

``fsspec/s3fs#786``, ``mosaicml/composer#3140``: reads fail in the middle, on one rank only; the
others are in a collective by then. Wrapped in retries of its own, each outer one repeated all inner
ones. That the attempts of an outage stay within the budget is in ``test_inner_retries`` and
``test_budget_ranks``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.staging import SPOOL_VARIABLE
from tests import lightning_job
from tests.faulty_filesystem import VARIABLE, FaultPlan, Rule
from tests.lightning_job import Job, store_server
from tests.single_rank import fit


if TYPE_CHECKING:
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def break_on_rank_one(_trainer: Any) -> None:
    """Let the first two downloads of rank 1, on a node of its own, break in the middle."""
    import os  # noqa: PLC0415 - runs in another process

    if os.environ["RANK"] == "1":
        os.environ[SPOOL_VARIABLE] = f"{os.environ[VARIABLE]}-node-1"
        rules = [
            Rule(operations=("read",), name="step=2", error="reset", first=first, last=first)
            # The second read of the first attempt, and of the second.
            for first in (2, 4)
        ]
        plan = FaultPlan.write(Path(f"{os.environ[VARIABLE]}-rank-1"), *rules)
        os.environ.update(plan.environment)


def test_the_whole_read_is_made_again_and_the_others_wait(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Three attempts on the rank whose reads break, one on the other, and both train on.

    Rank 0 has also looked at the file before.
    """
    folder = tmp_path / "checkpoints"
    before = Job(folder=str(tmp_path / "before"), steps=2, ranks=1, options=None)
    fit(before)
    shutil.copytree(before.folder, folder)
    job = Job(
        folder=f"faulty://{folder}",
        resume=f"faulty://{folder}/step=2.ckpt",
        before=break_on_rank_one,
    )

    with store_server() as port:
        plan = FaultPlan.write(tmp_path / "plan")
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        codes = [report["code"] for report in running.wait()]

    assert codes == [0, 0], running.told()
    assert running.steps() == [2, 4]
    opened = [
        len(each.calls("open", name="step=2"))
        for each in (plan, FaultPlan(f"{plan.folder}-rank-1"))
    ]
    assert opened == [2, 3]
