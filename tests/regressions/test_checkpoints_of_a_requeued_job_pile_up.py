# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C67: each time that SLURM requeues a job, one more ``hpc_ckpt_<n>.ckpt`` is there, for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.requeued_job import RequeuedJob


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_newest_and_the_one_that_was_resumed_stay(
    ranks: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """However often the job is requeued."""
    job = RequeuedJob(warm=warm_python, home=tmp_path, ranks=ranks)

    left = []
    for _ in range(4):
        job.start()
        left.append(job.names())

    numbers = [[f"hpc_ckpt_{number}.ckpt" for number in each] for each in ([1], [1, 2], [2, 3])]
    assert left == [*numbers, ["hpc_ckpt_3.ckpt", "hpc_ckpt_4.ckpt"]]
    assert not job.manifest("hpc_ckpt_2.ckpt").exists()
