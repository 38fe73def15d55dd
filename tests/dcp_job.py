# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that save and load with ``torch.distributed.checkpoint``, on gloo and without a Trainer."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_resilience import ResilientReader, ResilientWriter
from tests import faulty_filesystem, lightning_job
from tests.session_job import make_the_node_faulty


if TYPE_CHECKING:
    from collections.abc import Mapping


RETRY: Mapping[str, Any] = {
    **lightning_job.RETRY,
    "max_attempts": 3,
    "deadline_s": 8.0,
    "stall_timeout_s": 5.0,
}
JOINT: Mapping[str, Any] = {"joint_timeout_s": 6.0, "joint_beat_s": 0.2}
OPTIONS: Mapping[str, Any] = {
    "retry": RETRY,
    "breaker": {**lightning_job.BREAKER, "trip_failures": 2},
}
ROWS, COLUMNS = 8, 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DcpJob:
    """What all ranks do.

    Args:
        folder: Where checkpoints go: path or URL.
        steps: What is done in turn: a verb of ``Rank`` and the name of a checkpoint.
        ranks: Number of ranks.
        options: Options of the writer and the reader.
        group_timeout_s: Timeout of the process group, in seconds.
    """

    folder: str
    steps: tuple[tuple[str, str], ...]
    ranks: int = 2
    options: Mapping[str, Any] = field(default_factory=lambda: {**OPTIONS, "joint": {**JOINT}})
    group_timeout_s: float = 60.0


def state(value: float) -> dict[str, Any]:
    """Return a state: a tensor of which each rank has rows, one that all have, and an object."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + value
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "bias": whole[0].clone()},
        "step": {"value": value},
    }


def plain(value: float) -> dict[str, Any]:
    """Return a state that all ranks have."""
    return {"weight": torch.full((ROWS,), value), "value": value}


def seen(tensors: Mapping[str, Any]) -> list[Any]:
    """Return what a rank has of a state, to be told."""
    weight = tensors["model"]["weight"]
    assert isinstance(weight, DTensor)
    return [
        weight.to_local().tolist(),
        tensors["model"]["bias"].tolist(),
        tensors["step"]["value"],
    ]


class TravellingWriter(ResilientWriter):
    """A writer that brings the faults to the process that it is sent to."""

    def __setstate__(self, made: dict[str, Any]) -> None:
        faulty_filesystem.register()
        vars(self).update(made)


class Rank:
    """One rank.

    Args:
        job: What it does.
    """

    def __init__(self, job: DcpJob) -> None:
        self.job = job
        self.value = 0.0

    def url(self, name: str) -> str:
        """Return where a checkpoint is."""
        return f"{self.job.folder}/{name}"

    def save(self, name: str) -> None:
        """Save a state that no other save has."""
        self.value += 1.0
        writer = ResilientWriter(self.url(name), **self.job.options)
        save(state(self.value), storage_writer=writer)

    def save_async(self, name: str) -> None:
        """Save in the background, in a thread."""
        self.value += 1.0
        writer = ResilientWriter(self.url(name), **self.job.options)
        future: Any = async_save(state(self.value), storage_writer=writer)
        future.result()

    def path(self, name: str) -> str:
        """Return where a checkpoint is, for who looks past the storage."""
        return self.url(name).removeprefix("faulty://")

    def save_stock(self, name: str) -> None:
        """Save as torch does."""
        self.value += 1.0
        save(state(self.value), storage_writer=FileSystemWriter(self.path(name)))

    def save_in_process(self, name: str) -> None:
        """Save in the background, in a process of its own."""
        # Releases before 2.7 save in threads only.
        from torch.distributed.checkpoint.state_dict_saver import (  # noqa: PLC0415
            AsyncCheckpointerType,
        )

        self.value += 1.0
        writer = TravellingWriter(self.url(name), **self.job.options)
        future: Any = async_save(
            plain(self.value),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result()

    def save_in_pairs(self, name: str) -> None:
        """Save two checkpoints at the same time, each by half of the ranks."""
        self.value += 1.0
        halves = [dist.new_group([first, first + 1]) for first in range(0, self.job.ranks, 2)]
        mine = dist.get_rank() // 2
        url = f"{self.url(name)}-{mine}"
        writer = ResilientWriter(url, **self.job.options)
        tensors = plain(self.value + mine)
        save(tensors, storage_writer=writer, process_group=halves[mine])
        reader = ResilientReader(url, process_group=halves[mine], **self.job.options)
        found = plain(-1.0)
        load(found, storage_reader=reader, process_group=halves[mine])
        assert torch.equal(found["weight"], tensors["weight"])

    def save_often(self, name: str) -> int:
        """Save many times; return how many keys of ours are in the shared store then."""
        for _ in range(10):
            self.save(name)
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, is_master=False
        )
        return len([key for key in store.list_keys() if key.startswith("lr/")])

    def save_by_itself(self, name: str) -> None:
        """Save and load on each rank alone, although there is a group."""
        url = f"{self.url(name)}-{dist.get_rank()}"
        tensors = plain(7.0 + dist.get_rank())
        save(tensors, storage_writer=ResilientWriter(url, **self.job.options), no_dist=True)
        found = plain(-1.0)
        reader = ResilientReader(url, **{**self.job.options, "joint": False})
        load(found, storage_reader=reader, no_dist=True)
        assert torch.equal(found["weight"], tensors["weight"])

    def load(self, name: str) -> list[Any]:
        """Load, and tell what is there then, also where that fails."""
        return self._loaded(ResilientReader(self.url(name), **self.job.options))

    def load_stock(self, name: str) -> list[Any]:
        """Load as torch does."""
        return self._loaded(FileSystemReader(self.path(name)))

    @staticmethod
    def _loaded(reader: Any) -> list[Any]:
        tensors = state(-100.0)
        before = seen(tensors)
        try:
            load(tensors, storage_reader=reader)
        except BaseException:
            # Nothing is loaded anywhere before all is known to be good.
            assert seen(tensors) == before
            raise
        return seen(tensors)


def run_rank(job: DcpJob, report: str) -> None:
    """Do what the job says, and write what came of it."""
    logging.basicConfig(level=logging.DEBUG)
    warnings.simplefilter("ignore")
    faulty_filesystem.register()
    make_the_node_faulty()
    if job.ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=job.group_timeout_s))
    rank, told = Rank(job), []
    for verb, name in job.steps:
        began_s = time.monotonic()
        row: dict[str, Any] = {"verb": verb}
        try:
            row["value"] = getattr(rank, verb)(name)
        except BaseException as error:  # noqa: BLE001 - told, and looked at by the test
            _log.exception("%s %s", verb, name)
            row |= described(error)
        told.append({**row, "elapsed_s": time.monotonic() - began_s})
        Path(report).write_text(json.dumps({"steps": told}), encoding="utf-8")
    os._exit(0)


def described(error: BaseException) -> dict[str, Any]:
    """Return what an error says, to be told."""
    return {
        "error": type(error).__name__,
        "text": str(error),
        "first_rank": getattr(error, "first_rank", None),
        "cause": type(error.__cause__).__name__,
    }
