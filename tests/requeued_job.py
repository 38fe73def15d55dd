# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A SLURM job that is requeued again and again, and what it leaves in its directory."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.core.manifest import manifest_path
from tests import lightning_job
from tests.lightning_job import store_server
from tests.signalled_job import (
    Signalled,
    left_together,
    run_under_slurm,
    signalled_job,
    write_scontrol,
)


if TYPE_CHECKING:
    from tests.faulty_filesystem import FaultPlan
    from tests.lightning_job import Running
    from tests.warm_python import WarmPython

APART = 5
"""Steps that each start begins before it is told to stop."""


@dataclass
class SignalledLater(Signalled):
    """Sends a signal in a step that is counted from the beginning of this start."""

    begun: int = 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Send it in the middle of a step."""
        self.begun += 1
        self._send(trainer, "step", is_now=self.begun == self.step)


@dataclass(kw_only=True)
class RequeuedJob:
    """A job of several starts.

    Args:
        warm: Makes the processes.
        home: Folder of all that belongs to it.
        ranks: Number of ranks.
        protocol: What comes before the path of its directory.
        options: Options of the callback.
        trainer: More options of the Trainer.
        training: What is trained, where it is no small model of one file.
        plan: The faults of its filesystem.
        starts: How many there were.
    """

    warm: WarmPython
    home: Path
    ranks: int = 2
    protocol: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    plan: FaultPlan | None = None
    starts: int = 0

    @property
    def root(self) -> Path:
        """Its directory."""
        return self.home / "root"

    def start(self, *, checks: bool = True) -> Running:
        """Train until a signal says that time is up.

        Args:
            checks: Whether all ranks have to leave well, and one has to ask for the job again.
        """
        self.starts += 1
        home = self.home / f"start-{self.starts}"
        asked = write_scontrol(home)
        signalled = SignalledLater(signal.SIGUSR1, ranks=(self.ranks - 1,), step=APART)
        job = signalled_job(
            f"{self.home}/files",
            signalled,
            ranks=self.ranks,
            options=self.options,
            trainer={"default_root_dir": f"{self.protocol}{self.root}", **self.trainer},
            **self.training,
        )
        with store_server() as port:
            running = lightning_job.start(
                *(self.warm, job, home),
                port=port,
                plan=self.plan,
                environment={"RANK": "0"},
                function=run_under_slurm,
            )
            reports = running.wait()
        if checks:
            left_together(running, reports)
            assert asked.exists(), running.told()
        return running

    def names(self) -> list[str]:
        """Return the names of what is there, in their order as texts."""
        return sorted(path.name for path in self.root.glob("hpc_ckpt_*.ckpt"))

    def manifest(self, name: str) -> Path:
        """Return where the manifest of a checkpoint is."""
        return Path(manifest_path(f"{self.root}/{name}"))
