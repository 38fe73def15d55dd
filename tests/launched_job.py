# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A job whose ranks are made by any launcher, in either distribution of Lightning.

``run`` is what the user's program does; with a launcher that makes processes it runs in the first
one. Each rank notes in the folder of the job what it has started from. Run as a program, this is
the script that Lightning's own launcher starts once more for each further rank.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

# Order: both distributions first, since a callback fits those that it finds.
import lightning.pytorch  # noqa: F401
import pytorch_lightning

from lightning_resilience.adapters.lightning.namespaces import callback_bases
from tests.lightning_job import EvaluatedModel, Job, Steps, make_data, make_trainer


class OtherModel(Steps, pytorch_lightning.LightningModule):
    """The model of the other distribution, at a place where a spawned process finds it."""

    def test_step(self, batch: Any, _index: int) -> Any:
        """Test."""
        return self.layer(batch[0]).square().mean()


_Callback: Any = type("_Callback", callback_bases(), {})


class Notes(_Callback):  # type: ignore[misc] # the base depends on what is installed
    """Notes what a rank has started from."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """Note the start of training."""
        self._note(trainer, "fit")

    def on_test_start(self, trainer: Any, _module: Any) -> None:
        """Note the start of a test."""
        self._note(trainer, "test")

    def _note(self, trainer: Any, stage: str) -> None:
        found = {"path": str(trainer.ckpt_path), "step": trainer.global_step}
        path = Path(self.folder, f"{stage}-{trainer.global_rank}.json")
        path.write_text(json.dumps(found), encoding="utf-8")


def noted(folder: Path, stage: str, ranks: int = 2) -> list[tuple[str, int]]:
    """Return what each rank has started from, and at which step it was then."""
    paths = [folder / f"{stage}-{rank}.json" for rank in range(ranks)]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [(each["path"], each["step"]) for each in found]


def run(job: Job, folder: str) -> None:
    """Train; where the best checkpoint is asked for, train first and test that."""
    warnings.filterwarnings("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, Notes(folder))
    model = EvaluatedModel() if job.home == "lightning.pytorch" else OtherModel()
    is_best = job.resume == "best"
    trainer.fit(model, make_data(), ckpt_path=None if is_best else job.resume)
    if is_best:
        trainer.test(model, make_data(2), ckpt_path="best", verbose=False)


if __name__ == "__main__":
    run(pickle.loads(Path(sys.argv[1]).read_bytes()), sys.argv[2])
