# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Train with and without the callback, nothing ill and nothing to save: what does a step cost?

Beside it stands a fit with a callback that does nothing at all, because Lightning takes some time
of a step for each callback that it has. All kinds of ``fit`` run in turn in the same processes, so
that they meet the same neighbours, in an order that is drawn for each round. A step is timed from
one ``on_train_batch_start`` to the next. Three figures are compared: the median over all steps, the
fastest tenth, which neighbours disturb less, and what a step takes longer than one without a
callback in the same round, with its standard error. Small steps (``--width 8``) show that one best.
No neighbour hides the last figure: how long the callback's own code takes in a step, timed by
itself.

Run it, with one rank and with two (DDP on gloo), and with a look at the breakers after every step::

    python benchmarks/training_step.py
    python benchmarks/training_step.py --ranks 2
    python benchmarks/training_step.py --ranks 2 --pause-training 1

It prints medians and ratios, and asserts nothing.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import socket
import statistics
import time
import timeit
import warnings
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import ResilienceCallback


if TYPE_CHECKING:
    from collections.abc import Callable


STEP_S: Final = 2e-3
"""The step that the own code's share is printed of."""


class Model(LightningModule):
    """A step of about two milliseconds on one core.

    Args:
        width: Width of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), 0.01)


class Stopwatch(Callback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_arguments: object) -> None:
        """Note the time."""
        self.starts.append(time.perf_counter())

    def durations(self) -> list[float]:
        """Return the length of each step in seconds."""
        return [after - before for before, after in zip(self.starts, self.starts[1:], strict=False)]


class OwnCode(Callback):
    """Times what the callback does in a step, with nothing inside of what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_start(self, trainer: Trainer, *_arguments: object) -> None:
        """Time it, at its best of several times."""
        callbacks: list[Callback] = vars(trainer)["callbacks"]
        ours = next(one for one in callbacks if isinstance(one, ResilienceCallback))
        boundary = vars(ours)["_boundary"]
        name = "_before_step" if trainer.world_size == 1 else "_in_broadcast"
        step = partial(getattr(boundary, name), _nothing)
        number = 20_000
        self.seconds = min(timeit.repeat(step, number=number, repeat=5)) / number


def _nothing() -> None:
    return None


def fit(callbacks: list[Callback], arguments: argparse.Namespace) -> list[float]:
    """Train, and return the length of each step in seconds."""
    stopwatch = Stopwatch()
    steps, ranks = arguments.steps, arguments.ranks
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, stopwatch],
    )
    torch.manual_seed(7)
    data = TensorDataset(
        torch.randn(ranks * steps * 64, 256), torch.randint(10, (ranks * steps * 64,))
    )
    trainer.fit(Model(arguments.width), DataLoader(data, batch_size=64))
    return stopwatch.durations()


def measure(arguments: argparse.Namespace) -> None:
    """Measure in turn; rank 0 prints a table."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], list[Callback]]] = {
        "without": list,
        "empty": lambda: [Callback()],
        "with": lambda: [ResilienceCallback(pause_training=arguments.pause_training)],
    }
    rounds: dict[str, list[list[float]]] = {name: [] for name in kinds}
    # Drawn, but the same on all ranks.
    order = random.Random(7)
    for _ in range(arguments.rounds):
        for name in order.sample([*kinds], len(kinds)):
            rounds[name].append(fit(kinds[name](), arguments))
    own = OwnCode()
    fit([*kinds["with"](), own], argparse.Namespace(**{**vars(arguments), "steps": 2}))
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        if rank:
            return
    report(rounds, own.seconds)


def report(rounds: dict[str, list[list[float]]], own_s: float) -> None:
    """Print the figures."""
    steps = {name: [step for one in fits for step in one] for name, fits in rounds.items()}
    medians = {name: statistics.median(durations) for name, durations in steps.items()}
    fast = {name: statistics.quantiles(durations, n=10)[0] for name, durations in steps.items()}
    for name, fits in rounds.items():
        print(
            f"{name:8s} {medians[name] * 1e3:.4f} ms a step "
            f"(ratio {medians[name] / medians['without']:.4f}), the fastest tenth "
            f"{fast[name] * 1e3:.4f} ms (ratio {fast[name] / fast['without']:.4f}), "
            f"{longer(fits, rounds['without'])}"
        )
    print(f"with / empty: {medians['with'] / medians['empty']:.4f}")
    share = own_s / STEP_S
    print(f"the callback's own code: {own_s * 1e6:.2f} us a step, {share:.2%} of one of 2 ms")


def longer(fits: list[list[float]], others: list[list[float]]) -> str:
    """Return how much longer a step takes, compared round by round."""
    pairs = zip(fits, others, strict=True)
    more = [(statistics.median(one) - statistics.median(other)) * 1e6 for one, other in pairs]
    error = statistics.stdev(more) / math.sqrt(len(more))
    return f"{statistics.median(more):+.1f} ± {error:.1f} us"


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Measure as one of several ranks, which a launcher has started."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(arguments.ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    measure(arguments)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=1792, help="of the hidden layer")
    parser.add_argument("--pause-training", type=int, default=None, metavar="K")
    return parser.parse_args()


def main() -> None:
    """Measure in this process, or in one process for each rank."""
    arguments = parse()
    if arguments.ranks == 1:
        measure(arguments)
        return
    # The helper thread's connection ends with the server; torch says so at length.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn(run_rank, args=(arguments, port), nprocs=arguments.ranks)  # type: ignore[no-untyped-call] # torch has no types here


if __name__ == "__main__":
    main()
