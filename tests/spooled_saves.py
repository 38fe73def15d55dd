# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Outages in which checkpoints wait on the node, and what a test looks at meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback

from tests.faulty_filesystem import Rule
from tests.lightning_job import make_data, make_model, make_trainer


if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning_job import Job


MARKS = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]
SPOOL: dict[str, Any] = {"on_outage": "spool"}
STORAGE = ("put_file", "info", "rm_file", "ls", "manifest_put_file", "manifest_cat_file")
"""All that a save asks of storage."""


def outage(**when: Any) -> Rule:
    """Storage fails all that a save asks of it."""
    return Rule(operations=STORAGE, error="reset", **when)


def unpublished(spool: Path) -> list[str]:
    """Return the names of the checkpoints that wait on this node, the oldest first."""
    records = sorted(spool.glob("*/*/unpublished/*.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(record.read_text())["path"].rpartition("/")[2] for record in records]


def run(trainer: Any, resume: str | None = None) -> Any:
    """Train, and return the Trainer."""
    trainer.fit(make_model(), make_data(), ckpt_path=resume)
    return trainer


def with_plugin(job: Job, checkpoint_io: Any, *callbacks: Callback) -> Any:
    """Make the Trainer of a job with this plugin, and these callbacks before all others."""
    trainer = make_trainer(replace(job, trainer={**job.trainer, "plugins": [checkpoint_io]}))
    trainer.callbacks[:0] = callbacks
    return trainer


class Spy(Callback):
    """Remembers what waited on the node after each step.

    Args:
        spool: The spool's folder.
    """

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.waiting: list[list[str]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Look."""
        self.waiting.append(unpublished(self.spool))


class LoadsThroughThePlugin(Callback):
    """Saves, and asks the plugin itself for the same path in the next line."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save and load."""
        if trainer.global_step == 3:
            path = f"{trainer.checkpoint_callback.dirpath}/mine.ckpt"
            trainer.save_checkpoint(path)
            self.loaded = trainer.strategy.checkpoint_io.load_checkpoint(path)
