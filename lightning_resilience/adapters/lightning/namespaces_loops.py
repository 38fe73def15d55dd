# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Private names of Lightning's training loop, of its signal handlers, and of its SLURM requeueing.

As ``namespaces``, which has all the others: what is needed is found on the Trainer at hand.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.lightning.namespaces import (
    checkpoint_callbacks,
    is_model_checkpoint,
)


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = [
    "BROADCAST",
    "HANDLERS",
    "REGISTER",
    "STEP",
    "VALIDATION",
    "BarText",
    "free_requeue_path",
    "has_broadcast",
    "idle_hooks",
    "is_between_updates",
    "last_checkpoint_saver",
    "requeue_signal",
    "rewind_validation",
    "saves_on_exception",
    "signal_connector",
    "training_bar",
    "training_loop",
    "validated_batches",
    "validation_length",
    "validation_loop",
]

STEP: Final = "advance"
"""The training loop's method for one step."""
BROADCAST: Final = "_broadcast_sigterm_tensor"
"""Its method by which all ranks learn of rank 0's stop flag, at the beginning of each step."""
VALIDATION: Final = "run"
"""The validation loop's method for one validation."""
REGISTER: Final = "register_signal_handlers"
"""The signal connector's method that installs its handlers."""
HANDLERS: Final = ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn", "_sigterm_handler_fn")
"""The handlers that it may install. The first runs a collective, the second saves and starts a
program, and the third writes a log line: nothing of that may happen inside a handler."""

_STEP_HOOKS: Final = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def idle_hooks(callback: Any) -> list[str]:
    """Return the hooks of a step in which a callback does nothing: its class has Lightning's own.

    Lightning passes over a hook that cannot be called; every call of one costs it microseconds.
    """
    return [
        name
        for name in _STEP_HOOKS
        if getattr(type(callback), name).__module__.endswith(".callbacks.callback")
    ]


@dataclass(frozen=True, slots=True)
class BarText:
    """The text before a progress bar.

    Args:
        read: Returns it.
        write: Sets and draws it.
    """

    read: Callable[[], str]
    write: Callable[[str], None]


def training_bar(trainer: Any) -> BarText | None:
    """Return the text of training's progress bar; None where there is no bar that has one."""
    callback = trainer.progress_bar_callback
    bar = getattr(callback, "_train_progress_bar", None)
    if bar is not None and not bar.disable:
        return BarText(lambda: str(bar.desc), bar.set_description_str)
    progress = getattr(callback, "progress", None)
    number = getattr(callback, "train_progress_bar_id", None)
    if progress is None or number is None:
        return None

    def write(text: str) -> None:
        progress.update(number, description=text)
        progress.refresh()

    return BarText(lambda: str(callback.train_progress_bar.description), write)


def training_loop(trainer: Any) -> Any:
    """Return the loop over the steps of an epoch."""
    return trainer.fit_loop.epoch_loop


def validation_loop(trainer: Any) -> Any:
    """Return the loop over the batches of a validation within ``fit``."""
    return training_loop(trainer).val_loop


def validated_batches(trainer: Any) -> int:
    """Return how many batches of this validation are done, asked at the end of one."""
    done: int = validation_loop(trainer).batch_progress.current.ready
    return done


def validation_length(trainer: Any) -> str:
    """Return the length of this validation, in words; nothing where it is not known."""
    batches = validation_loop(trainer).max_batches
    return "" if math.inf in batches else str(batches)


def rewind_validation(trainer: Any) -> None:
    """Let a checkpoint say that this validation is in its first batch.

    Lightning goes on with a validation that a checkpoint was saved in. It has the number of its
    batches, and neither their results nor their data: so what goes on must be all of it.
    """
    progress = validation_loop(trainer).batch_progress
    for counts, before in (
        (progress.total, progress.total.ready - progress.current.ready),
        (progress.current, 0),
    ):
        counts.completed = counts.processed = before
        counts.ready = counts.started = before + 1


def signal_connector(trainer: Any) -> Any:
    """Return what registers signal handlers, and knows whether training was told to stop."""
    return trainer._signal_connector


def has_broadcast(trainer: Any) -> bool:
    """Tell whether each step begins with a broadcast of rank 0's stop flag (Lightning ≥ 2.5.6)."""
    return hasattr(training_loop(trainer), BROADCAST)


def is_between_updates(trainer: Any) -> bool:
    """Tell whether no gradients are accumulated now, between two batches."""
    every: int = trainer.accumulate_grad_batches
    done: int = training_loop(trainer).batch_progress.current.ready
    return done % every == 0


def requeue_signal(trainer: Any) -> int:
    """Return the signal on which SLURM's job is to be requeued; 0 where Lightning does not."""
    environment = trainer._accelerator_connector.cluster_environment
    if type(environment).__name__ != "SLURMEnvironment" or not environment.auto_requeue:
        return 0
    return int(environment.requeue_signal or getattr(signal, "SIGUSR1", 0))


def free_requeue_path(trainer: Any) -> str:
    """Return the name for the checkpoint from which a requeued job starts; lists a directory."""
    path: str = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
    return path


def saves_on_exception(trainer: Any) -> bool:
    """Tell whether a checkpoint callback saves whenever an exception ends the fit."""
    return any(
        getattr(callback, "save_on_exception", not is_model_checkpoint(callback))
        for callback in checkpoint_callbacks(trainer)
        if is_model_checkpoint(callback) or type(callback).__name__ == "OnExceptionCheckpoint"
    )


def last_checkpoint_saver(trainer: Any) -> Callable[[], None] | None:
    """Return what saves "last" now, by the first ``ModelCheckpoint``; None where there is none.

    It saves whether or not that callback is told to keep a "last", and nothing where it has saved
    this very step already.
    """
    callback = next(filter(is_model_checkpoint, checkpoint_callbacks(trainer)), None)
    if callback is None or not callback.dirpath or trainer.fast_dev_run:
        return None

    def save() -> None:
        if callback._last_global_step_saved == trainer.global_step:
            return
        before = callback.save_last
        # Not "link", which would name an older checkpoint again.
        callback.save_last = True
        try:
            callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
        finally:
            callback.save_last = before

    return save
