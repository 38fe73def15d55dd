# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C54: a checkpoint that was saved inside a signal handler never ended.

``Lightning-AI/pytorch-lightning#21406``: the handler saves while the main thread is in the middle
of another save, maybe with a lock that both need. ``#20542``: under SLURM SIGTERM is passed by.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from tests import lightning_job
from tests.lightning_job import store_server
from tests.signalled_job import (
    JOB_ID,
    Signalled,
    left_together,
    run_under_slurm,
    signalled_job,
    stopped_together,
    write_scontrol,
)


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_the_requeue_signal_in_the_middle_of_a_save_saves_after_it(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The save that was under way ends first; then all save what a requeued job starts from."""
    home, root = tmp_path / "job", tmp_path / "root"
    asked = write_scontrol(home)
    signalled = Signalled(signal.SIGUSR1, ranks=(1,), where="save")
    job = signalled_job(
        f"{tmp_path}/files", signalled, every=2, trainer={"default_root_dir": str(root)}
    )
    with store_server() as port:
        running = lightning_job.start(warm_python, job, home, port=port, function=run_under_slurm)
        reports = running.wait()

    left_together(running, reports)
    saved = torch.load(root / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == reports[0]["step"] >= 2
    assert asked.read_text(encoding="utf-8") == f"requeue {JOB_ID}\n", running.told()
    assert "step=2.ckpt" in running.names()
    assert running.steps()[0] == 2


@pytest.mark.parametrize("auto_requeue", [True, False])
def test_sigterm_under_slurm_stops_all_ranks(
    auto_requeue: bool,  # noqa: FBT001 - a parameter of a test
    warm_python: WarmPython,
    tmp_path: Path,
) -> None:
    """It is not passed by, and does not requeue: whoever sent it knows what for."""
    home = tmp_path / "job"
    asked = write_scontrol(home)
    trainer: dict[str, Any] = {"default_root_dir": str(tmp_path / "root")}
    if not auto_requeue:
        trainer["plugins"] = [SLURMEnvironment(auto_requeue=False)]
    job = signalled_job(f"{tmp_path}/files", Signalled(signal.SIGTERM, ranks=(1,)), trainer=trainer)
    with store_server() as port:
        running = lightning_job.start(warm_python, job, home, port=port, function=run_under_slurm)
        reports = running.wait()

    stopped_together(running, reports)
    assert not asked.exists()
