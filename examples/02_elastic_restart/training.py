# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What each worker trains, and what befalls it."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import fsspec
import torch
from job import BREAKER, MISHAP_STEP, NODE, PACE_S, SAVE_EVERY, STEPS, STRIKE, Diary
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import ResilienceCallback, RetryPolicy


if TYPE_CHECKING:
    from job import Job

RETRY = RetryPolicy(base_delay_s=0.2, throttle_base_delay_s=0.5, max_delay_s=2.0)


class Net(LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)

    def training_step(self, batch: list[torch.Tensor], _batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Descend."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mishap(Callback):
    """What befalls the job, at a pace at which it can be watched.

    Args:
        job: The job.
        diary: Where it is noted.
    """

    def __init__(self, job: Job, diary: Diary) -> None:
        self._job = job
        self._diary = diary

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        """Note where training begins."""
        self._diary.note(f"trains from step {trainer.global_step} on")

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Wait; fail, if it is due."""
        time.sleep(PACE_S)
        if os.environ[NODE] != "1" or trainer.global_step != MISHAP_STEP:
            return
        if self._job.is_looping:
            message = "the label 11 is out of range"
            raise ValueError(message)
        if self._diary.count("starts") == 1:
            fsspec.filesystem("http").cat(f"{self._job.storage}{STRIKE}")
            message = "the network is down"
            raise ConnectionError(message)


def train(job: Job) -> None:
    """Train as one worker of the job; torch's agent calls this in a process of its own."""
    diary = Diary(job, f"worker {os.environ[NODE]}").listen()
    diary.note("starts")
    try:
        trainer = make_trainer(job, diary)
        data = DataLoader(TensorDataset(torch.ones(256, 8)), batch_size=4)
        trainer.fit(Net(), data, ckpt_path=resume_from(job))
    except Exception as error:
        diary.note(f"fails: {type(error).__name__}: {str(error)[:55]}")
        raise
    diary.note(f"has trained to step {trainer.global_step}")


def resume_from(job: Job) -> str | None:
    """Say where to start from: with the callback, "last" means the same to all ranks, or waits."""
    if job.is_guarded:
        return "last"
    newest = f"{job.folder}/last.ckpt"
    return newest if fsspec.url_to_fs(newest)[0].exists(newest) else None


def make_trainer(job: Job, diary: Diary) -> Trainer:
    """Make the Trainer; with the callback where the job is guarded."""
    warnings.filterwarnings("ignore")
    checkpoints = ModelCheckpoint(
        job.folder, "{step:04d}", every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True
    )
    callbacks = [checkpoints, Mishap(job, diary)]
    if job.is_guarded:
        callbacks.append(ResilienceCallback(retry=RETRY, breaker=BREAKER))
    return Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20)),
        max_steps=STEPS,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
