# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Between two saves, all ranks pause after the same step while storage is ill, and go on together.

A save in the background finds storage ill while training goes on, and opens its breaker. With
``pause_training=k`` training then waits, for longer than the process group's timeout. Not by
default: where saves are spooled, training is to go on, so these jobs say ``on_outage="wait"``.
"""

from __future__ import annotations

import os
import re
import threading
import time
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import WAIT, Job, find, store_server


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

GROUP_TIMEOUT_S = 6.0
OUTAGE_S = 8.0
"""Longer than the process group's timeout."""
SAVED_AT = 5
MANY = 3000
PACE_S = 0.01
AFTER = 20
"""Steps after the pause, before the job ends."""
SAVED = "saved.ckpt"


class Ending(Callback):
    """Trains at a pace, and ends the job some steps after it has stood still for long."""

    def __init__(self, end_after: int = AFTER) -> None:
        self._left = end_after
        self._has_stood = False
        self._ended_at_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Find out whether training has stood still before this step."""
        stood_s = time.monotonic() - (self._ended_at_s or time.monotonic())
        self._has_stood = self._has_stood or stood_s > OUTAGE_S / 3
        time.sleep(PACE_S)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Begin the save in the background, and end the job on all ranks after the same step."""
        if trainer.global_step == SAVED_AT:
            self.save(trainer)
        self._left -= self._has_stood
        trainer.should_stop = self._left == 0
        # Order: what is done here, a save included, is no standing still.
        self._ended_at_s = time.monotonic()

    def save(self, trainer: Any) -> None:
        """Save, in the background of rank 0."""
        trainer.save_checkpoint(f"{_folder(trainer)}/{SAVED}")


class EndingWithAnUpload(Ending):
    """In place of the save, the last rank sends a file of its own, in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: list[threading.Thread] = []

    def save(self, trainer: Any) -> None:
        """Send a file."""
        if trainer.global_rank != trainer.world_size - 1:
            return
        source = Path(os.environ["TMPDIR"], "file")
        source.write_bytes(b"content")
        alone = find(trainer, "ResilienceCallback")._session.alone
        target = f"{_folder(trainer)}/{SAVED}"
        put = alone.guarded_filesystem(target).put_file
        self._threads.append(threading.Thread(target=put, args=(str(source), target)))
        self._threads[0].start()

    def on_train_end(self, *_: Any) -> None:
        """Have it sent before the job ends."""
        for thread in self._threads:
            thread.join(lightning_job.HANG_S)


def _folder(trainer: Any) -> str:
    folder = find(trainer, "ModelCheckpoint").dirpath
    return f"faulty://{folder.removeprefix('faulty://')}"


def add(trainer: Any, *, callback: Callback) -> None:
    """Let a Trainer have a callback before all others, and a progress bar."""
    trainer.callbacks.insert(0, callback)
    lightning_job.show_bar(trainer)


@pytest.fixture
def run(warm_python: WarmPython, tmp_path: Path) -> Callable[..., Running]:
    """Run a job in which storage is ill at its only save, to its end."""

    def run_job(ending: Callback, *, options: dict[str, Any] | None = None, **job: Any) -> Running:
        rule = Rule(operations=("put_file",), error="reset", lasting_s=OUTAGE_S)
        made = Job(
            folder=f"faulty://{tmp_path}/files",
            steps=MANY,
            every=MANY,
            group_timeout_s=GROUP_TIMEOUT_S,
            before=partial(add, callback=ending),
            # A view of the circuit that is as young as this job would let the first pause through.
            options={"checkpoints": {"preflight": False}, **(options or {})},
            **job,
        )
        plan = FaultPlan.write(tmp_path / "plan", rule)
        with store_server() as port:
            running = lightning_job.start(warm_python, made, tmp_path / "job", port=port, plan=plan)
            reports = running.wait()
        assert [report["code"] for report in reports] == [0] * made.ranks, running.told()
        for report in reports:
            assert (report["patched"], report["threads"], report["handlers"]) == ([], [], [])
        assert running.names() == [SAVED], running.told()
        return running

    return run_job


def pauses(running: Running) -> list[list[tuple[int, float]]]:
    """Return each rank's pauses: after which step, and for how long in seconds."""
    pattern = re.compile(r"the pause after step (\d+), .* is over after ([\d.]+) s")
    return [
        [(int(step), float(lasted)) for step, lasted in pattern.findall(process.text())]
        for process in running.ranks
    ]


def paused_together(running: Running) -> None:
    """Check that all ranks have paused once, after the same step, for longer than the timeout."""
    told = running.told()
    first, *others = pauses(running)
    assert len(first) == 1, told
    ((step, lasted_s),) = first
    assert [[after for after, _ in other] for other in others] == [[step]] * len(others), told
    assert step >= SAVED_AT, told
    assert lasted_s > GROUP_TIMEOUT_S, told
    assert {running.report(rank)["step"] for rank in range(len(running.ranks))} == {step + AFTER}


@pytest.mark.parametrize(
    ("ranks", "home"),
    [(1, "lightning.pytorch"), (2, "lightning.pytorch"), (2, "pytorch_lightning")],
)
def test_all_ranks_pause_after_the_same_step_and_go_on_together(
    ranks: int, home: str, run: Callable[..., Running]
) -> None:
    """The pause is one, longer than the group's timeout, and no step is lost or made twice."""
    plugin = import_module(f"{home}.plugins.io").AsyncCheckpointIO()

    running = run(
        Ending(),
        ranks=ranks,
        home=home,
        trainer={"plugins": [plugin]},
        options={**WAIT, "pause_training": 1},
    )

    paused_together(running)
    said = re.findall("paused, waits for faulty://:write|Epoch 0:", running.ranks[0].text())
    texts = [text for text, _ in groupby(said)]
    assert texts == ["Epoch 0:", "paused, waits for faulty://:write", "Epoch 0:"]


def test_the_rank_that_finds_storage_ill_is_the_one_that_waits_for_it(
    run: Callable[..., Running],
) -> None:
    """Also where that is not rank 0, which knows nothing of the outage."""
    running = run(EndingWithAnUpload(), ranks=3, options={**WAIT, "pause_training": 1})

    paused_together(running)
    assert "pause" in running.ranks[2].text()
    probes = [call["rank"] for call in running.plan.calls("put_file") if call["struck"]]
    assert set(probes) == {"2"}


def test_at_save_points_training_goes_on_between_them(run: Callable[..., Running]) -> None:
    """By default a save in the background fails and succeeds there, and nothing stands still."""
    running = run(
        Ending(end_after=-1),
        trainer={"plugins": [AsyncCheckpointIO()], "max_steps": 100},
    )

    assert pauses(running) == [[], []]
    assert [running.report(rank)["step"] for rank in (0, 1)] == [100, 100]
