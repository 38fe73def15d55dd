# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Strategies whose ranks all write checkpoints, on CPU and gloo, with a model for each.

FSDP runs on CPU where nobody asks it for its name. DeepSpeed is not installed, and needs more than
a CPU: ``Engine`` writes files as its engine does, and Lightning's own strategy calls it.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from tests.lightning_job import Job, Model


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_log = logging.getLogger(__name__)


class ShardedModel(Model):
    """Its layer is wide enough that every rank has a part of it."""

    def configure_model(self) -> None:
        """Make the layer once, and shard it where the strategy leaves that to the model."""
        if hasattr(self, "layer"):
            return
        self.layer = torch.nn.Linear(4, 8)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """Train with momentum, so that the optimizer has a state."""
        return torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)

    def on_train_start(self) -> None:
        """Tell in which state this rank starts."""
        self._tell("starts")

    def on_train_end(self) -> None:
        """Tell in which state this rank ends."""
        self._tell("ends")

    def _tell(self, word: str) -> None:
        (optimizer,) = self.trainer.optimizers
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        parts = [*self.parameters(), *momenta]
        local = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
        _log.info("this rank %s with %s", word, [part.tolist() for part in local])


class FSDPOnCPU(FSDPStrategy):
    """FSDP that wraps the model for a CPU, which Lightning and torch refuse by default."""

    def _setup_model(self, model: Any) -> Any:
        """Wrap it as the base does, and say the device."""
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class GatheredFSDP(FSDPStrategy):
    """FSDP that gathers a model which it has not wrapped: torch's own gathering needs a GPU."""

    def _setup_model(self, model: Any) -> Any:
        """Leave it as it is."""
        return model

    def lightning_module_state_dict(self) -> Any:
        """Return everything on rank 0, and nothing elsewhere."""
        assert self.model is not None
        return self.model.state_dict() if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return everything on rank 0, and nothing elsewhere."""
        return optimizer.state_dict() if self.is_global_zero else {}


class Engine:
    """Writes and reads files as DeepSpeed's engine does, with a barrier where that has one.

    Args:
        strategy: The strategy whose model and optimizers these are.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def save_checkpoint(
        self, save_dir: str, *, client_state: Any, tag: str, exclude_frozen_parameters: bool
    ) -> None:
        """Write a shard on each rank, the model on rank 0, and there also the pointer."""
        del exclude_frozen_parameters
        rank = dist.get_rank()
        if rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        folder = Path(save_dir, tag)
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            state = {"module": self._module.state_dict(), **client_state}
            torch.save(state, folder / "mp_rank_00_model_states.pt")
        optimizer = self._strategy.optimizers[0].state_dict()
        torch.save(optimizer, folder / self._shard(rank))
        dist.barrier()
        if rank == 0:
            Path(save_dir, "latest").write_text(tag, encoding="utf-8")
        dist.barrier()

    def load_checkpoint(self, path: str, **_options: Any) -> tuple[str, Any]:
        """Follow the pointer, and read the model and this rank's shard."""
        folder = Path(path, Path(path, "latest").read_text(encoding="utf-8"))
        state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
        self._module.load_state_dict(state.pop("module"))
        shard = torch.load(folder / self._shard(dist.get_rank()), weights_only=False)
        self._strategy.optimizers[0].load_state_dict(shard)
        dist.barrier()
        return str(folder), state

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    @staticmethod
    def _shard(rank: int) -> str:
        return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


class DeepSpeedOnCPU(DDPStrategy):
    """DDP whose checkpoints are Lightning's for DeepSpeed, written by an engine of these tests."""

    save_checkpoint = DeepSpeedStrategy.save_checkpoint
    load_checkpoint = DeepSpeedStrategy.load_checkpoint
    zero_stage_3 = load_full_weights = exclude_frozen_parameters = False
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def load_model_state_dict(self, *_args: Any, **_options: Any) -> None:
        """Leave it to the engine."""

    def load_optimizer_state_dict(self, *_args: Any, **_options: Any) -> None:
        """Leave it to the engine."""

    @property
    def deepspeed_engine(self) -> Engine:
        """The engine."""
        return Engine(self)


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
    kind = FSDPOnCPU if sharded else GatheredFSDP
    return kind(
        state_dict_type="sharded" if sharded else "full",
        process_group_backend="gloo",
        timeout=timedelta(seconds=job.group_timeout_s),
    )


def deepspeed(job: Job) -> Any:
    """Make the strategy whose engine writes."""
    timeout = timedelta(seconds=job.group_timeout_s)
    return DeepSpeedOnCPU(process_group_backend="gloo", timeout=timeout)


STRATEGIES: Mapping[str, Callable[[Job], Any]] = {
    "ModelParallel sharded": partial(model_parallel, sharded=True),
    "ModelParallel full": partial(model_parallel, sharded=False),
    "FSDP sharded": partial(fsdp, sharded=True),
    "FSDP full": partial(fsdp, sharded=False),
    "DeepSpeed": deepspeed,
}
