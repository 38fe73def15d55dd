# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The server of the shared store is killed in the middle of a training, and comes back empty."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import pytest

from lightning_resilience.core.detour import GRACE_VIEWS
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan
from tests.integration.store_server import Server
from tests.lightning_job import HANG_S, Job, store_server


if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

LAST_STEP_BEFORE = 3


@pytest.fixture
def group_port() -> Iterator[int]:
    """Port of the process group's own store, which stays well."""
    with store_server() as number:
        yield number


@pytest.fixture
def server() -> Iterator[Server]:
    """The shared store that is killed."""
    made = Server()
    yield made
    made.kill()


def meet(home: Path, said: str, awaited: str) -> None:
    """Say something to the test, and wait for its answer."""
    (home / said).touch()
    until_s = time.monotonic() + HANG_S
    while not (home / awaited).exists():
        assert time.monotonic() < until_s, f"{awaited} did not come"
        time.sleep(0.02)


class Rank0Asks(lightning.pytorch.Callback):
    """Lets the test kill the store, and asks storage on rank 0 alone while it is away."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Stop between two saves."""
        if trainer.global_step != LAST_STEP_BEFORE or not trainer.is_global_zero:
            return
        meet(self._home, "reached", "killed")
        # Until no view is young enough to be trusted without the store.
        time.sleep(1.1 * GRACE_VIEWS * lightning_job.BREAKER["view_max_age_s"])
        lightning_job.find(trainer, "ModelCheckpoint").to_yaml()
        meet(self._home, "went on", "restarted")


def add(home: Path, trainer: Any) -> None:
    """Give the Trainer that callback."""
    trainer.callbacks.append(Rank0Asks(home))


def test_training_goes_on_and_the_breaker_is_rebuilt(
    warm_python: WarmPython, tmp_path: Path, group_port: int, server: Server
) -> None:
    """Rank 0 goes on alone and says so; afterwards the record continues at a higher epoch."""
    home = tmp_path / "job"
    home.mkdir()
    folder = f"faulty://{tmp_path}/checkpoints"
    job = Job(
        folder=folder,
        group_timeout_s=40.0,
        options={"store": f"tcp://127.0.0.1:{server.port}"},
        before=partial(add, home),
    )
    plan = FaultPlan.write(tmp_path / "plan")
    running = lightning_job.start(warm_python, job, home, port=group_port, plan=plan)

    running.until((home / "reached").exists, what="the step before the kill")
    server.kill()
    (home / "killed").touch()
    running.until((home / "went on").exists, what="the question while the store is away")
    server.start()
    (home / "restarted").touch()
    reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.names() == job.expected
    log = running.ranks[0].text()
    assert "decides alone about faulty://:write" in log
    assert (Path(f"{tmp_path}/checkpoints") / "best_k_models.yaml").exists()
    writes = [report["breakers"]["faulty://:write"] for report in reports]
    assert writes[0]["history"] == writes[1]["history"]
    epochs = [(epoch, state) for epoch, state, _ in writes[0]["history"]]
    assert epochs == [(1, "closed"), (2, "closed")]
    assert "rebuilt" in writes[0]["history"][-1][2]
