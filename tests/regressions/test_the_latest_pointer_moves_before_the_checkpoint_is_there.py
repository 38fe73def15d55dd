# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C09: the pointer to the latest checkpoint was moved before that was on disk.

``KempnerInstitute/KempnerForge#102``: it named an incomplete checkpoint, and the one before may be
gone. Here the pointer is the link that ``save_last="link"`` makes.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_resilience import JointError, ResilientCheckpointIO
from tests.single_rank import fit, names


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration]

HANG_S = 60.0


class Watching(TorchCheckpointIO):
    """Writes, and notes before each write what the link names; may fail, or die in the middle."""

    def __init__(self, folder: Path, *, fails_at: int = 0, dies_at: int = 0) -> None:
        self.folder = folder
        self.fails_at = fails_at
        self.dies_at = dies_at
        self.seen: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Note, and write."""
        link = self.folder / "last.ckpt"
        there = link.exists() or not link.is_symlink()
        self.seen.append(link.resolve().name if there else "nothing")
        if checkpoint["global_step"] == self.fails_at:
            message = "no rights"
            raise PermissionError(message)
        if checkpoint["global_step"] == self.dies_at:
            Path(path).write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path, storage_options)


def make(folder: Path, *, background: bool, steps: int, **options: Any) -> tuple[Job, Watching]:
    """Make a job on a local directory that keeps one checkpoint and a link to it."""
    from tests.lightning_job import Job  # noqa: PLC0415 - as the fixtures of single ranks do

    watching = Watching(folder, **options)
    plugin: Any = ResilientCheckpointIO(watching)
    plugins = [AsyncCheckpointIO(plugin) if background else plugin]
    job = Job(
        folder=str(folder),
        ranks=1,
        steps=steps,
        checkpoint={"save_top_k": 1, "save_last": "link"},
        trainer={"plugins": plugins},
    )
    return job, watching


def train_and_die(folder: Path, background: bool) -> None:  # noqa: FBT001 - called by position
    """Train, and die in the middle of the second save."""
    fit(make(folder, background=background, steps=40, dies_at=4)[0])


@pytest.fixture
def job(tmp_path: Path, spool: Path) -> Callable[..., tuple[Job, Watching]]:
    """Make such a job in the test's own folder."""
    del spool
    return partial(make, tmp_path / "checkpoints")


@pytest.mark.parametrize("background", [False, True])
def test_the_link_names_a_complete_checkpoint_at_any_time(
    *, background: bool, job: Callable[..., tuple[Job, Watching]]
) -> None:
    """Data, then the link, then the removal of what it named before."""
    made, watching = job(background=background, steps=6)

    fit(made)

    assert watching.seen == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert names(made) == ["last.ckpt", "step=6.ckpt"]
    assert (watching.folder / "last.ckpt").resolve().name == "step=6.ckpt"


@pytest.mark.parametrize("background", [False, True])
def test_the_link_stays_where_the_next_one_is_not_written(
    *, background: bool, job: Callable[..., tuple[Job, Watching]]
) -> None:
    """The one that it names is still there."""
    made, watching = job(background=background, steps=4, fails_at=4)

    with pytest.raises(JointError):
        fit(made)

    assert names(made) == ["last.ckpt", "step=2.ckpt"]
    assert (watching.folder / "last.ckpt").resolve().name == "step=2.ckpt"


@pytest.mark.multiprocess
@pytest.mark.parametrize("background", [False, True])
def test_the_link_names_what_is_there_when_the_job_is_killed_in_a_save(
    *, background: bool, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Also where training has gone on meanwhile, and the save is a slow one of the background."""
    folder = tmp_path / "checkpoints"
    variables = {"LIGHTNING_RESILIENCE_SPOOL_DIR": str(tmp_path / "spool")}

    process = warm_python.start(
        train_and_die, folder, background, log=tmp_path / "log", environment=variables
    )

    assert process.wait(HANG_S) == -signal.SIGKILL, process.text()
    last = (folder / "last.ckpt").resolve()
    assert last.name == "step=2.ckpt"
    assert torch.load(last, weights_only=False)["global_step"] == 2
