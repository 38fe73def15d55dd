# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs in which a process gets a signal at a known point, and what they have in common then."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from tests.lightning_job import Job, run_rank


if TYPE_CHECKING:
    from tests.lightning_job import Running

AT = 5
"""The step in which the signal comes."""
MANY = 4000
"""More steps than any job makes before it stops."""
TRAINING = "this rank trains"
JOB_ID = "4711"
"""SLURM's number of the job."""


@dataclass
class Signalled(Callback):
    """Sends this process a signal.

    Args:
        number: The signal.
        ranks: Ranks that get it.
        where: In the middle of a ``step``, in a ``save``, in a ``validation``, or at the ``start``,
            when Lightning has installed no handler yet.
        step: In which step.
        group: Whether the whole process group gets it, data-loader workers included.
        times: How many times it comes, one after the other.
    """

    number: int
    ranks: tuple[int, ...]
    where: str = "step"
    step: int = AT
    group: bool = False
    times: int = 1

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        """Send it before the first step."""
        self._send(trainer, "start", is_now=True)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Send it in the middle of a step."""
        self._send(trainer, "step", is_now=trainer.global_step == self.step)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        """Send it in the middle of a validation."""
        self._send(trainer, "validation", is_now=not trainer.sanity_checking and self.times > 0)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        """Send it in the middle of a save."""
        self._send(trainer, "save", is_now=self.times > 0)

    def _send(self, trainer: Any, where: str, *, is_now: bool) -> None:
        if where != self.where or not is_now or trainer.global_rank not in self.ranks:
            return
        times, self.times = self.times, 0
        for _ in range(times):
            if self.group:
                os.killpg(os.getpgid(0), self.number)
            else:
                signal.raise_signal(signal.Signals(self.number))


def add_signal(trainer: Any, *, signalled: Signalled) -> None:
    """Let a Trainer get a signal."""
    trainer.callbacks.insert(0, signalled)


class _Telling(Callback):
    """Tells when training is under way."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == AT:
            os.write(1, f"{TRAINING}\n".encode())


def tell_when_training(trainer: Any) -> None:
    """Let a Trainer say that it trains."""
    trainer.callbacks.append(_Telling())


def signalled_job(folder: str, signalled: Signalled, **job: Any) -> Job:
    """Make a job that trains until a signal stops it; nothing else saves anything."""
    given = {"steps": MANY, "every": MANY, "group_timeout_s": 20.0, **job}
    return Job(folder=folder, before=partial(add_signal, signalled=signalled), **given)


def stopped_together(
    running: Running, reports: list[dict[str, Any]], *, name: str = "last.ckpt"
) -> None:
    """Check that all ranks have saved and left at the same step, with nothing left behind."""
    left_together(running, reports)
    told = running.told()
    (step,) = {report["step"] for report in reports}
    assert step > AT, told
    assert running.names() == [name], told
    assert running.steps() == [step], told


def left_together(running: Running, reports: list[dict[str, Any]]) -> None:
    """Check that all ranks have left at the same step, before the end, with nothing left behind."""
    told = running.told()
    assert [report.get("error") for report in reports] == ["SIGTERMException"] * len(reports), told
    steps = {report["step"] for report in reports}
    assert len(steps) == 1, told
    assert max(steps) < MANY, told
    for report in reports:
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], []), told


# What a process runs ------------------------------------------------------------------------------


def run_with_handlers(job: Job, report: str) -> None:
    """Train where the user has handlers of their own, in a process group of its own."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _user_handler)
    run_rank(job, report)


def _user_handler(number: int, _frame: object) -> None:
    os.write(sys.stdout.fileno(), f"the user's handler for {number} in {os.getpid()}\n".encode())


def run_under_slurm(job: Job, report: str) -> None:
    """Train as a task that srun has started, with a stand-in for SLURM's ``scontrol``."""
    home = Path(report).parent
    # torchrun's would be found first.
    for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        os.environ.pop(name, None)
    rank = os.environ["RANK"]
    ranks = str(job.ranks)
    os.environ |= {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NAME": "training",
        "SLURM_NTASKS": ranks,
        "SLURM_NTASKS_PER_NODE": ranks,
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "PATH": f"{home}:{os.environ['PATH']}",
    }
    run_rank(job, report)


def write_scontrol(home: Path) -> Path:
    """Write the stand-in; return the file in which it notes what it was asked."""
    home.mkdir(parents=True, exist_ok=True)
    asked = home / "asked"
    program = home / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n', encoding="utf-8")
    program.chmod(0o755)
    return asked
