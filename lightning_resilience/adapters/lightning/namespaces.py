# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every name of Lightning that is private, or that exists once per distribution.

Lightning is published twice, as ``lightning`` and as ``pytorch_lightning``, with two class
hierarchies that know nothing of each other. So nothing here compares classes of one with objects of
the other: objects are recognised by the name and the home of their class, and what is needed of a
distribution is imported from the one that the Trainer at hand belongs to.

This is the one file that a release of Lightning can break.
"""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_resilience.core.shards import Saving


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


__all__ = [
    "BOOKKEEPING",
    "LIST_DIRECTORY",
    "asynchronous_io",
    "callback_bases",
    "checkpoint_callbacks",
    "checkpoint_connectors",
    "checkpoint_directories",
    "checkpoint_io_bases",
    "counts_versions",
    "default_weights_only",
    "forget_told_error",
    "innermost_wrapper",
    "is_fitting",
    "is_model_checkpoint",
    "is_stock_io",
    "is_wrapping_io",
    "loads_through_io",
    "on_slurm",
    "process_group_timeout_s",
    "resumes_exceptions",
    "saves_exceptions",
    "saves_on_exception",
    "saving_of",
    "sigterm_exception",
    "stage_runner",
    "stock_io",
]

_DISTRIBUTIONS: Final = {
    "lightning.pytorch": "lightning.fabric",
    "pytorch_lightning": "lightning_fabric",
}
_DEFAULT_TIMEOUT_S: Final = 1800.0

_SHARDING: Final[Mapping[str, Callable[[Any], bool]]] = {
    "FSDPStrategy": lambda strategy: strategy._state_dict_type == "sharded",
    "ModelParallelStrategy": lambda strategy: bool(strategy._save_distributed_checkpoint),
    "DeepSpeedStrategy": lambda _strategy: True,
}

BOOKKEEPING: Final = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "kth_best_model_path",
    "kth_value",
    "current_score",
    "last_model_path",
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_last_time_checked",
    "_defer_save_until_validation",
)
"""What a ``ModelCheckpoint`` remembers of its saves; the last exists in newer releases only."""

LIST_DIRECTORY: Final = "_ModelCheckpoint__warn_if_dir_not_empty"
"""The method by which rank 0 lists the checkpoint directory in ``ModelCheckpoint.setup``."""


def callback_bases() -> tuple[type, ...]:
    """Return the ``Callback`` classes of the distributions in use, for one class that fits both."""
    homes = [home for home in _DISTRIBUTIONS if home in sys.modules] or ["lightning.pytorch"]
    return tuple(import_module(home).Callback for home in homes)


def checkpoint_io_bases() -> tuple[type, ...]:
    """Return the ``CheckpointIO`` classes of the distributions in use."""
    return tuple(import_module(f"{fabric}.plugins.io").CheckpointIO for fabric in _fabrics())


def _fabrics() -> list[str]:
    in_use = [fabric for home, fabric in _DISTRIBUTIONS.items() if home in sys.modules]
    return in_use or ["lightning.fabric"]


def stock_io() -> Any:
    """Make the ``TorchCheckpointIO`` of a distribution in use."""
    return import_module(f"{_fabrics()[0]}.plugins.io").TorchCheckpointIO()


def default_weights_only(checkpoint_io: object = None) -> bool | None:
    """Return what Lightning hands to ``torch.load`` where nobody says ``weights_only``.

    Releases before 2.6 have no such argument anywhere above and load everything; later ones leave
    it to torch.

    Args:
        checkpoint_io: A ``TorchCheckpointIO``, for its distribution; None for one in use.
    """
    home = type(checkpoint_io).__module__
    fabric = next((name for name in _DISTRIBUTIONS.values() if home.startswith(name)), None)
    load = import_module(f"{fabric or _fabrics()[0]}.utilities.cloud_io")._load
    default: bool | None = inspect.signature(load).parameters["weights_only"].default
    return default


def _home_of(trainer: object) -> str:
    for kind in type(trainer).__mro__:
        for home in _DISTRIBUTIONS:
            if kind.__name__ == "Trainer" and kind.__module__.startswith(home):
                return home
    return next(iter(_DISTRIBUTIONS))


def _is_named(value: object, name: str) -> bool:
    fabrics = tuple(_DISTRIBUTIONS.values())
    homes = (*_DISTRIBUTIONS, *fabrics)
    return any(
        kind.__name__ == name and kind.__module__.startswith(homes) for kind in type(value).__mro__
    )


def sigterm_exception(trainer: object) -> type[BaseException]:
    """Return the exception with which this Trainer stops after SIGTERM."""
    module = import_module(f"{_home_of(trainer)}.utilities.exceptions")
    exception: type[BaseException] = module.SIGTERMException
    return exception


def stage_runner(trainer: Any) -> tuple[Any, str]:
    """Return the object and the name of the method in which all training happens."""
    return trainer, "_run_stage"


def saves_on_exception(callback: Any) -> bool:
    """Tell whether a checkpoint callback may save when training ends with an exception."""
    does = type(callback).on_exception
    is_own = all(does is not vars(base)["on_exception"] for base in callback_bases())
    return is_own and bool(getattr(callback, "save_on_exception", True))


def is_stock_io(checkpoint_io: object) -> bool:
    """Tell whether this is ``TorchCheckpointIO`` itself, of either distribution."""
    kind = type(checkpoint_io)
    return kind.__name__ == "TorchCheckpointIO" and kind.__module__.startswith(
        tuple(_DISTRIBUTIONS.values())
    )


def is_wrapping_io(checkpoint_io: object) -> bool:
    """Tell whether this passes checkpoints on, maybe later (``AsyncCheckpointIO``)."""
    return _is_named(checkpoint_io, "_WrappingCheckpointIO")


def innermost_wrapper(checkpoint_io: Any) -> Any:
    """Return the ``CheckpointIO`` that passes on to one that does not; None where none does."""
    wrapper = None
    while is_wrapping_io(checkpoint_io):
        wrapper, checkpoint_io = checkpoint_io, checkpoint_io._checkpoint_io
    return wrapper


def asynchronous_io(checkpoint_io: Any) -> Any:
    """Return the ``AsyncCheckpointIO``, of either distribution, on a checkpoint's way; or None."""
    while is_wrapping_io(checkpoint_io):
        if _is_named(checkpoint_io, "AsyncCheckpointIO"):
            return checkpoint_io
        checkpoint_io = checkpoint_io._checkpoint_io
    return None


def forget_told_error(asynchronous: Any) -> None:
    """Make an ``AsyncCheckpointIO`` forget an error that an earlier fit has ended with.

    Lightning keeps it for ever, and raises it in every later fit. One that nobody was told of yet,
    because the thread is still there, it keeps.
    """
    if asynchronous._executor is None:
        asynchronous._error = None


def saves_exceptions(callback: object) -> bool:
    """Tell whether this is an ``OnExceptionCheckpoint`` of either distribution."""
    return _is_named(callback, "OnExceptionCheckpoint")


def is_model_checkpoint(callback: object) -> bool:
    """Tell whether this is a ``ModelCheckpoint`` of either distribution, or derived from one."""
    return _is_named(callback, "ModelCheckpoint")


def counts_versions(callback: object) -> bool:
    """Tell whether a ``ModelCheckpoint`` asks which names are taken, to find one that is free."""
    return bool(getattr(callback, "_enable_version_counter", True))


def checkpoint_callbacks(trainer: Any) -> Iterable[Any]:
    """Return the Trainer's checkpoint callbacks, of either distribution."""
    return [callback for callback in trainer.callbacks if _is_named(callback, "Checkpoint")]


def checkpoint_directories(trainer: Any) -> list[str]:
    """Return the directories of the Trainer's checkpoint callbacks, as far as they are set up."""
    found = (getattr(callback, "dirpath", None) for callback in checkpoint_callbacks(trainer))
    return [os.fspath(directory) for directory in found if directory]


def checkpoint_connectors() -> list[Any]:
    """Return the classes that choose the checkpoint to start from, of the distributions in use."""
    homes = [home for home in _DISTRIBUTIONS if home in sys.modules]
    name = "trainer.connectors.checkpoint_connector"
    return [import_module(f"{home}.{name}")._CheckpointConnector for home in homes]


def on_slurm(trainer: object) -> bool:
    """Tell whether this Trainer takes itself to be started by SLURM."""
    fabric = _DISTRIBUTIONS[_home_of(trainer)]
    detected: bool = import_module(f"{fabric}.plugins.environments").SLURMEnvironment.detect()
    return detected


def is_fitting(trainer: Any) -> bool:
    """Tell whether the Trainer is in ``fit``, and not in ``validate``, ``test`` or ``predict``."""
    return trainer.state.fn is not None and trainer.state.fn.value == "fit"


def resumes_exceptions(trainer: Any) -> bool:
    """Tell whether a fit that is not told otherwise goes on from what an exception has saved."""
    return is_fitting(trainer) and any(saves_exceptions(callback) for callback in trainer.callbacks)


def saving_of(trainer: Any) -> Saving:
    """Tell how the Trainer's strategy writes checkpoints, by whose methods it has.

    The base's do what they are called: rank 0 writes, through the ``CheckpointIO``. A strategy that
    shards overrides them; of those that are known, a class derived from one is known as long as it
    leaves them alone.
    """
    if _has_base_methods(trainer, "save_checkpoint", "remove_checkpoint"):
        return Saving.RANK_ZERO
    if not _has_base_methods(trainer, "remove_checkpoint"):
        return Saving.UNKNOWN
    for name, is_sharded in _SHARDING.items():
        owner = getattr(import_module(f"{_home_of(trainer)}.strategies"), name, None)
        if owner is not None and _has_methods_of(owner, trainer.strategy):
            return Saving.SHARDED if is_sharded(trainer.strategy) else Saving.GATHERED
    return Saving.UNKNOWN


def _has_methods_of(owner: type, strategy: object) -> bool:
    kind = type(strategy)
    return all(
        getattr(kind, name) is getattr(owner, name)
        for name in ("save_checkpoint", "load_checkpoint")
    )


def loads_through_io(trainer: Any) -> bool:
    """Tell whether every rank loads a checkpoint through the ``CheckpointIO``, and does no more."""
    return _has_base_methods(trainer, "load_checkpoint")


def _has_base_methods(trainer: Any, *names: str) -> bool:
    base = import_module(f"{_home_of(trainer)}.strategies").Strategy
    kind = type(trainer.strategy)
    return all(getattr(kind, name, None) is getattr(base, name) for name in names)


def process_group_timeout_s(strategy: Any = None) -> float:
    """Return the timeout of the process group in seconds; torch's default without one."""
    timeout = getattr(strategy, "_timeout", None)
    if timeout is None and torch.distributed.is_initialized():
        # The strategy has left it to torch, whose default depends on the backend.
        backend = torch.distributed.get_backend()
        timeout = torch.distributed.distributed_c10d._get_default_timeout(backend)
    return _DEFAULT_TIMEOUT_S if timeout is None else float(timeout.total_seconds())
