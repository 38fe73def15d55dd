# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Strategies whose ranks all write checkpoints, on CPU and gloo, with a model for each.

FSDP runs on CPU where nobody asks it for its name. DeepSpeed is not installed, and needs more than
a CPU: ``Engine`` writes files as its engine does, and Lightning's own strategy calls it.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from torch.distributed.fsdp import fully_shard

from tests.lightning_job import Job, Model


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ShardedModel(Model):
    """Its layer is wide enough that every rank has a part of it."""

    def configure_model(self) -> None:
        """Make the layer once, and shard it where the strategy leaves that to the model."""
        if hasattr(self, "layer"):
            return
        self.layer = torch.nn.Linear(4, 8)
        if self.device_mesh is not None:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """Train with momentum, so that the optimizer has a state."""
        return torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)


class FSDPOnCPU(FSDPStrategy):
    """FSDP with parameters as they were, so that an optimizer of any kind has its own."""


def model_parallel(job: Job, *, sharded: bool) -> Any:
    """Make the strategy that shards by ``fully_shard``."""
    return ModelParallelStrategy(
        data_parallel_size=job.ranks,
        tensor_parallel_size=1,
        save_distributed_checkpoint=sharded,
        process_group_backend="gloo",
        timeout=timedelta(seconds=job.group_timeout_s),
    )


def fsdp(job: Job, *, sharded: bool) -> Any:
    """Make the strategy that shards by ``FullyShardedDataParallel``."""
    return FSDPOnCPU(
        state_dict_type="sharded" if sharded else "full",
        process_group_backend="gloo",
        timeout=timedelta(seconds=job.group_timeout_s),
        use_orig_params=True,
    )


STRATEGIES: Mapping[str, Callable[[Job], Any]] = {
    "ModelParallel sharded": partial(model_parallel, sharded=True),
    "ModelParallel full": partial(model_parallel, sharded=False),
    "FSDP sharded": partial(fsdp, sharded=True),
    "FSDP full": partial(fsdp, sharded=False),
}
