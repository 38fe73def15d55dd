# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Saves in the background: bounded, waited for at the end, and none of their errors sticks."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_resilience import JointError
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, make_data, make_model, make_trainer, run_rank, store_server
from tests.signalled_job import (
    Signalled,
    left_together,
    run_under_slurm,
    signalled_job,
    stopped_together,
    write_scontrol,
)
from tests.single_rank import fit, names
from tests.spooled_saves import LoadsThroughThePlugin


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration]

MANY = 400
"""More steps than a job makes until it is told of a failure."""
AGAIN = "-again"


def use(trainer: Any, *, plugin: Any) -> None:
    """Let a Trainer save through a plugin."""
    trainer.strategy.checkpoint_io = plugin


def run_twice(job: Job, report: str) -> None:
    """Train twice with one plugin: what is saved first fails in the background."""
    plugin = import_module(f"{job.home}.plugins.io").AsyncCheckpointIO()
    job = replace(job, before=partial(use, plugin=plugin))
    with pytest.raises(JointError):
        run_rank(job, f"{report}.first")
    run_rank(replace(job, folder=f"{job.folder}{AGAIN}", steps=4), report)


@pytest.mark.multiprocess
@pytest.mark.parametrize("home", ["lightning.pytorch", "pytorch_lightning"])
def test_a_failure_is_told_once_and_a_second_fit_is_clean(
    home: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Both ranks end the first fit with it, at the same step, and the next one with that plugin."""
    denied = Rule(operations=("put_file",), name="step=2.ckpt", error="denied", last=1)
    plan = FaultPlan.write(tmp_path / "plan", denied)
    folder = f"faulty://{tmp_path}/checkpoints"
    job = Job(folder=folder, home=home, steps=MANY, group_timeout_s=20.0)

    with store_server() as port:
        running = lightning_job.start(
            warm_python, job, tmp_path / "job", port=port, plan=plan, function=run_twice
        )
        reports = running.wait()

    first = [
        json.loads((tmp_path / "job" / f"report-{rank}.json.first").read_text(encoding="utf-8"))
        for rank in range(2)
    ]
    assert [report["error"] for report in first] == ["JointError"] * 2, running.told()
    assert first[0]["text"] == first[1]["text"]
    assert "step=2.ckpt failed in the background" in first[0]["text"]
    assert first[0]["step"] == first[1]["step"] < MANY
    for report in (*first, *reports):
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], [])
    assert [report["code"] for report in reports] == [0, 0], running.told()
    saved = Path(f"{tmp_path}/checkpoints{AGAIN}").glob("*.ckpt")
    assert sorted(path.name for path in saved) == ["step=2.ckpt", "step=4.ckpt"]


def test_an_error_of_a_fit_without_us_is_forgotten(faulty: Callable[..., Job]) -> None:
    """Lightning has raised it at the end of that fit, and would raise it in every later one."""
    broken = Rule(operations=("open",), name=".ckpt", error="reset", last=1)
    plugins = {"plugins": [AsyncCheckpointIO()]}
    job = faulty(broken, steps=2, trainer=plugins)
    handlers = lightning_job.handlers()
    with pytest.raises(ConnectionResetError):
        fit(replace(job, options=None))
    # A teardown that raises leaves Lightning's own handlers behind, also without us.
    lightning_job.restore(handlers)

    fit(job)

    assert names(job) == ["step=2.ckpt"]


@pytest.mark.multiprocess
def test_at_the_bound_both_ranks_wait_for_longer_than_their_group_would(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The first write waits out an outage, the second save waits for it, and all are written."""
    outage = Rule(operations=("put_file",), error="reset", lasting_s=6.0)
    plan = FaultPlan.write(tmp_path / "plan", outage)
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        steps=3,
        every=1,
        group_timeout_s=4.0,
        options={"max_pending_saves": 1},
        trainer={"plugins": [AsyncCheckpointIO()]},
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.steps() == [1, 2, 3]
    assert "training waits for storage: max_pending_saves=1" in running.ranks[0].text()


@pytest.mark.multiprocess
@pytest.mark.parametrize("on_outage", ["wait", "spool"])
def test_what_is_saved_at_a_signal_waits_out_an_outage_in_the_background(
    on_outage: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    """No rank leaves before it is in storage, as long as there is time."""
    plan = FaultPlan.write(
        tmp_path / "plan", Rule(operations=("put_file",), error="reset", lasting_s=2.0)
    )
    plugins = {"plugins": [AsyncCheckpointIO()]}
    signalled = Signalled(signal.SIGTERM, ranks=(1,))
    job = signalled_job(
        f"faulty://{tmp_path}/files", signalled, trainer=plugins, options={"on_outage": on_outage}
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    stopped_together(running, reports)
    last_put = plan.calls("put_file", name="last.ckpt")[-1]
    assert min(report["ended_at_s"] for report in reports) > last_put["at_s"]


@pytest.mark.multiprocess
def test_a_job_is_requeued_once_its_checkpoint_is_in_storage(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """SLURM may end the job at once, and with it the thread that writes."""
    home = tmp_path / "job"
    asked = write_scontrol(home)
    plan = FaultPlan.write(
        tmp_path / "plan", Rule(operations=("put_file",), name="hpc_ckpt", slow_s=0.1)
    )
    root = f"faulty://{tmp_path}/root"
    job = signalled_job(
        f"faulty://{tmp_path}/files",
        Signalled(signal.SIGUSR1, ranks=(1,)),
        trainer={"plugins": [AsyncCheckpointIO()], "default_root_dir": root},
    )
    with store_server() as port:
        running = lightning_job.start(
            warm_python, job, home, port=port, plan=plan, function=run_under_slurm
        )
        reports = running.wait()

    left_together(running, reports)
    saved = Path(f"{tmp_path}/root/hpc_ckpt_1.ckpt")
    assert asked.exists(), running.told()
    assert saved.stat().st_mtime_ns <= asked.stat().st_mtime_ns


def test_a_load_past_the_strategy_waits_as_well(faulty: Callable[..., Job]) -> None:
    """One rank asks the plugin itself for what it has handed over, and gets it."""
    slow = Rule(operations=("put_file",), name="mine.ckpt", slow_s=0.1)
    plugins = {"plugins": [AsyncCheckpointIO()]}
    trainer = make_trainer(faulty(slow, trainer=plugins))
    loads = LoadsThroughThePlugin()
    trainer.callbacks.insert(0, loads)

    trainer.fit(make_model(), make_data())

    assert loads.loaded["global_step"] == 3


def test_a_load_past_the_strategy_gets_the_failure_itself(faulty: Callable[..., Job]) -> None:
    """What the storage has raised for the save is what the load raises."""
    denied = Rule(operations=("put_file",), name="mine.ckpt", error="denied")
    plugins = {"plugins": [AsyncCheckpointIO()]}
    trainer = make_trainer(faulty(denied, trainer=plugins))
    trainer.callbacks.insert(0, LoadsThroughThePlugin())

    with pytest.raises(PermissionError, match="Access Denied"):
        trainer.fit(make_model(), make_data())
