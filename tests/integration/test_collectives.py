# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Where nothing fails, training with the callback is training without it, on two ranks.

The process group numbers its collectives, those of DDP's reducer included, so the number tells how
many there have been. Each job runs with the callback and without it, at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests import lightning_job
from tests.lightning_job import Job, Running, store_server


if TYPE_CHECKING:
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

STEPS: Final = 12
EVERY: Final = 3
COUNTED = "counted "
SETUP: Final = 3
"""Our own collectives in ``setup``: a barrier, and the broadcast of an object, which is two."""

KINDS: Final[dict[str, dict[str, Any]]] = {
    "idle": {"checkpoint": {"every_n_train_steps": 10**6}},
    "plain": {},
    "pausing": {"options": {"pause_training": 1}},
    "top k": {"checkpoint": {"monitor": "loss", "save_top_k": 1, "save_last": True}},
    "link": {"checkpoint": {"monitor": "loss", "save_top_k": 2, "save_last": "link"}},
    "resumed": {},
}


class Counting(Callback):
    """Tells how many collectives each step had, and what came out of the training."""

    def __init__(self) -> None:
        self._at: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note the number before a step; a save belongs to the step before it."""
        self._at.append(_collectives())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Tell."""
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for value in pl_module.state_dict().values():
            digest.update(value.numpy().tobytes())
        counted = {
            "steps": [after - before for before, after in pairwise(self._at)],
            "fit": _collectives(),
            "weights": digest.hexdigest(),
            "step": trainer.global_step,
        }
        os.write(1, f"{COUNTED}{json.dumps(counted)}\n".encode())


def _collectives() -> int:
    # Of all groups, so that none of ours is overlooked.
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def count(trainer: Any) -> None:
    """Let a Trainer tell of its collectives, before any other callback."""
    trainer.callbacks.insert(0, Counting())


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same job with the callback and without it."""

    ours: Running
    plain: Running

    def counted(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what each rank of both has told."""
        return _counted(self.ours), _counted(self.plain)


def _counted(running: Running) -> list[dict[str, Any]]:
    reports = running.wait()
    assert [report["code"] for report in reports] == [0, 0], running.told()
    lines = [
        line.removeprefix(COUNTED)
        for process in running.ranks
        for line in process.text().splitlines()
        if line.startswith(COUNTED)
    ]
    assert len(lines) == len(reports), running.told()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def pairs(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Start both jobs of every kind, one kind after the other."""
    pairs: dict[str, Pair] = {}
    for kind, options in KINDS.items():
        home = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        resume = None
        if kind == "resumed":
            resume = f"{pairs['plain'].plain.job.folder}/step=6.ckpt"
        with contextlib.ExitStack() as servers:
            both = {}
            for name in ("ours", "plain"):
                given = (
                    {"options": {}, **options} if name == "ours" else options | {"options": None}
                )
                job = Job(
                    folder=f"{home}/{name}/files",
                    steps=STEPS,
                    every=EVERY,
                    group_timeout_s=30.0,
                    before=count,
                    resume=resume,
                    **given,
                )
                port = servers.enter_context(store_server())
                both[name] = lightning_job.start(warm_python, job, home / name, port=port)
            pairs[kind] = Pair(**both)
            pairs[kind].counted()
    return pairs


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_has_a_collective_more_than_without_the_callback(
    kind: str, pairs: dict[str, Pair]
) -> None:
    """Steps without a save have the same number, and steps with one at most that number."""
    for ours, plain in zip(*pairs[kind].counted(), strict=True):
        assert len(ours["steps"]) == len(plain["steps"]) > STEPS / 3
        assert min(plain["steps"]) > 0
        first = STEPS - len(plain["steps"])
        for number, (mine, theirs) in enumerate(
            zip(ours["steps"], plain["steps"], strict=True), start=first
        ):
            saves = number % EVERY == 0
            assert mine <= theirs if saves else mine == theirs, (number, ours, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_has_at_most_the_collectives_of_our_setup_more(
    kind: str, pairs: dict[str, Pair]
) -> None:
    """One broadcast, by which all ranks learn of the run, and one barrier; saves need fewer."""
    for ours, plain in zip(*pairs[kind].counted(), strict=True):
        assert ours["fit"] <= plain["fit"] + SETUP


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_learn_the_same_to_the_last_bit(kind: str, pairs: dict[str, Pair]) -> None:
    """Weights and the stream of chance are those of a training without the callback."""
    ours, plain = pairs[kind].counted()

    assert [(told["weights"], told["step"]) for told in ours] == [
        (told["weights"], told["step"]) for told in plain
    ]
    assert {told["step"] for told in ours} == {STEPS}


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_hold_the_same_to_the_last_bit(kind: str, pairs: dict[str, Pair]) -> None:
    """The same files with the same content, but for the folder that they are in."""
    pair = pairs[kind]
    pair.counted()
    ours, plain = Path(pair.ours.job.folder), Path(pair.plain.job.folder)
    names = sorted(path.name for path in plain.glob("*.ckpt"))

    assert sorted(path.name for path in ours.glob("*.ckpt")) == names
    assert bool(names) == (kind != "idle")
    for name in names:
        assert (ours / name).is_symlink() == (plain / name).is_symlink()
        mine, theirs = (_content(folder, name) for folder in (ours, plain))
        assert mine == theirs


def _content(folder: Path, name: str) -> Any:
    content = torch.load(folder / name, weights_only=True)
    return _comparable(content, str(folder))


def _comparable(value: Any, folder: str) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, dict):
        return {_comparable(key, folder): _comparable(item, folder) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item, folder) for item in value]
    return value.replace(folder, "…") if isinstance(value, str) else value
