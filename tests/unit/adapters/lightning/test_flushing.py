# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the checkpoints that a node has kept a start takes care of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resilience.adapters.lightning.flushing import _wanted_by
from lightning_resilience.core.spooled import SpoolEntry


if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("checkpoints/step=2.ckpt", True),
        ("checkpoints/deep/step=2.ckpt", False),
        ("elsewhere/asked.ckpt", True),
        ("elsewhere/other.ckpt", False),
        ("root/hpc_ckpt_3.ckpt", True),
        ("root/mine.ckpt", False),
        ("elsewhere/hpc_ckpt_3.ckpt", False),
    ],
)
def test_a_start_publishes_what_its_own_training_has_saved(
    *, name: str, expected: bool, tmp_path: Path
) -> None:
    """In its callbacks' directories, what it is asked to load, and what a requeue has left."""
    trainer = Trainer(
        default_root_dir=tmp_path / "root",
        callbacks=[ModelCheckpoint(dirpath=tmp_path / "checkpoints")],
        logger=False,
    )
    wanted = _wanted_by(trainer, f"{tmp_path}/elsewhere/asked.ckpt")

    assert wanted(SpoolEntry(path=f"{tmp_path}/{name}", size_bytes=1, digest="d")) is expected
