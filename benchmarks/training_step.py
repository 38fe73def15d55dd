# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Train with and without the callback, nothing ill and nothing to save: what does a step cost?

Both kinds of ``fit`` run in turn in one process, so that they meet the same neighbours. A step is
timed from one ``on_train_batch_start`` to the next, and the medians over all steps are compared.

Run it::

    python benchmarks/training_step.py --steps 500 --rounds 4

It prints both medians and their ratio, and asserts nothing.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import ResilienceCallback


class Model(LightningModule):
    """A step of a millisecond or two on one core."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

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


def fit(callbacks: list[Callback], steps: int) -> list[float]:
    """Train, and return the length of each step in seconds."""
    stopwatch = Stopwatch()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, stopwatch],
    )
    data = TensorDataset(torch.randn(steps * 64, 256), torch.randint(10, (steps * 64,)))
    trainer.fit(Model(), DataLoader(data, batch_size=64))
    return stopwatch.durations()


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    durations: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(arguments.rounds):
        durations["without"] += fit([], arguments.steps)
        durations["with"] += fit([ResilienceCallback()], arguments.steps)
    medians = {name: statistics.median(values) for name, values in durations.items()}
    for name, median in medians.items():
        print(f"{name:8s} the callback: {median * 1000:.4f} ms a step")
    print(f"ratio: {medians['with'] / medians['without']:.4f}")


if __name__ == "__main__":
    main()
