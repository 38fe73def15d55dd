# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The progress bar says what training waits for, and then again what it said before."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_resilience.adapters.lightning.namespaces_loops import training_bar
from lightning_resilience.adapters.lightning.progress import BarSink
from lightning_resilience.core.events import Event, TrainingPaused, TrainingResumed
from tests.lightning_job import make_data, make_model


HOMES = ["lightning.pytorch", "pytorch_lightning"]
BARS = ["TQDMProgressBar", "RichProgressBar"]
PAUSED = TrainingPaused(dependency="s3://b:write", step=2, reason="why")
RESUMED = TrainingResumed(dependency="s3://b:write", step=2, elapsed_s=1.0)


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread of tqdm's that outlives every bar.
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


class Kept:
    """A sink that keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)


def fit(home: str, bar: Any, ask: Any) -> None:
    """Train a little, and call ``ask`` with the Trainer after the second step."""
    module = import_module(home)

    class Asking(module.Callback):  # type: ignore[misc,name-defined] # of either distribution
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                ask(trainer)

    trainer = module.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bar is not None,
        callbacks=[Asking()] if bar is None else [Asking(), bar],
    )
    trainer.fit(make_model(home), make_data())


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", BARS)
def test_the_bar_says_so_and_puts_it_back(name: str, home: str) -> None:
    """Both of Lightning's bars, of both distributions: while training waits, and no longer."""
    said: list[str] = []

    def ask(trainer: Any) -> None:
        inner = Kept()
        sink = BarSink(trainer, inner)
        bar = training_bar(trainer)
        assert bar is not None
        said.append(bar.read())
        for event in (PAUSED, PAUSED, RESUMED, RESUMED):
            sink.emit(event)
            said.append(bar.read())
        assert inner.events == [PAUSED, PAUSED, RESUMED, RESUMED]

    fit(home, getattr(import_module(f"{home}.callbacks"), name)(), ask)

    before, *texts = said
    assert "Epoch 0" in before
    paused = "paused, waits for s3://b:write"
    assert texts == [paused, paused, before, before]


def test_a_wait_that_was_interrupted_leaves_no_text_behind() -> None:
    """What nobody has told the end of is put back when the fit ends."""
    said: list[str] = []

    def ask(trainer: Any) -> None:
        sink = BarSink(trainer, Kept())
        bar = training_bar(trainer)
        assert bar is not None
        sink.emit(PAUSED)
        sink.put_back()
        sink.put_back()
        said.append(bar.read())

    fit("lightning.pytorch", TQDMProgressBar(), ask)

    assert "Epoch 0" in said[0]


def test_what_a_background_thread_waits_for_is_not_shown() -> None:
    """Training goes on meanwhile."""
    said: list[str] = []

    def ask(trainer: Any) -> None:
        sink = BarSink(trainer, Kept())
        thread = threading.Thread(target=sink.emit, args=(PAUSED,))
        thread.start()
        thread.join()
        bar = training_bar(trainer)
        assert bar is not None
        said.append(bar.read())

    fit("lightning.pytorch", TQDMProgressBar(), ask)

    assert "Epoch 0" in said[0]


@pytest.mark.parametrize("bar", [None, TQDMProgressBar(refresh_rate=0)], ids=["none", "disabled"])
def test_where_there_is_no_bar_nothing_happens(bar: Any) -> None:
    """The event goes on its way all the same."""
    inner = Kept()

    def ask(trainer: Any) -> None:
        assert training_bar(trainer) is None
        BarSink(trainer, inner).emit(PAUSED)

    fit("lightning.pytorch", bar, ask)

    assert inner.events == [PAUSED]


def test_a_bar_that_cannot_be_drawn_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is no reason to end a save."""
    monkeypatch.setattr(Trainer, "progress_bar_callback", property(lambda _: 1 / 0))
    inner = Kept()

    def ask(trainer: Any) -> None:
        BarSink(trainer, inner).emit(PAUSED)

    fit("lightning.pytorch", None, ask)

    assert inner.events == [PAUSED]
