# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Objects of either distribution are recognised, and those of strangers are not."""

from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_resilience import ResilientCheckpointIO
from lightning_resilience.adapters.lightning import namespaces
from lightning_resilience.core.shards import Saving


HOMES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest) -> str:
    """Each distribution."""
    name: str = request.param
    import_module(name)
    return name


@pytest.fixture
def fabric(home: str) -> Any:
    """The fabric that belongs to it."""
    return import_module(f"{HOMES[home]}.plugins.io")


def trainer_of(home: str, **options: Any) -> Any:
    """Make a Trainer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return import_module(home).Trainer(accelerator="cpu", devices=1, **quiet, **options)


def trainer_with(home: str, kind: type, **state: Any) -> Any:
    """Make a Trainer with a strategy that was never set up, for want of what it needs."""
    strategy: Any = object.__new__(kind)
    vars(strategy).update(state)
    trainer = object.__new__(import_module(home).Trainer)
    trainer._accelerator_connector = SimpleNamespace(strategy=strategy)
    return trainer


def test_a_model_checkpoint_is_recognised(home: str) -> None:
    """Also one that a user has derived."""
    kind = import_module(f"{home}.callbacks").ModelCheckpoint
    derived = type("Mine", (kind,), {})

    assert namespaces.is_model_checkpoint(kind())
    assert namespaces.is_model_checkpoint(derived())


def test_other_callbacks_are_not(home: str) -> None:
    """Neither a neighbour nor a stranger of the same name."""
    stranger = type("ModelCheckpoint", (), {})

    assert not namespaces.is_model_checkpoint(import_module(f"{home}.callbacks").Timer())
    assert not namespaces.is_model_checkpoint(stranger())


def test_checkpoint_callbacks_are_found_in_a_trainer(home: str) -> None:
    """All of them, also those that only derive from ``Checkpoint``."""
    callbacks = import_module(f"{home}.callbacks")
    mine = type("Mine", (callbacks.Checkpoint,), {})()
    default = callbacks.ModelCheckpoint()
    trainer = trainer_of(home, callbacks=[callbacks.Timer(), mine, default])

    assert set(namespaces.checkpoint_callbacks(trainer)) == {mine, default}


def test_the_stock_io_is_recognised_and_derived_ones_are_not(fabric: Any) -> None:
    """A user's own may have another format, so it is not treated as the stock one."""
    derived = type("Mine", (fabric.TorchCheckpointIO,), {})

    assert namespaces.is_stock_io(fabric.TorchCheckpointIO())
    assert not namespaces.is_stock_io(derived())
    assert not namespaces.is_stock_io(type("TorchCheckpointIO", (), {})())


def test_an_io_that_passes_on_is_recognised(home: str) -> None:
    """``AsyncCheckpointIO`` writes later."""
    kind = import_module(f"{home}.plugins.io").AsyncCheckpointIO

    assert namespaces.is_wrapping_io(kind())


def test_the_innermost_of_those_that_pass_on_is_found(home: str, fabric: Any) -> None:
    """Its inner one is what writes, however many are around it."""
    kind = import_module(f"{home}.plugins.io").AsyncCheckpointIO
    inner = kind(fabric.TorchCheckpointIO())

    assert namespaces.innermost_wrapper(kind(inner)) is inner
    assert namespaces.innermost_wrapper(fabric.TorchCheckpointIO()) is None


def test_weights_only_is_what_this_lightning_says(fabric: Any, home: str) -> None:
    """From 2.6 on it is left to torch; before, there was no such argument, and all is loaded."""
    load = fabric.TorchCheckpointIO.load_checkpoint
    expected = None if "weights_only" in inspect.signature(load).parameters else False

    assert namespaces.default_weights_only(fabric.TorchCheckpointIO()) is expected
    assert HOMES[home] in fabric.TorchCheckpointIO.__module__


def test_a_checkpoint_io_of_ours_is_one_of_theirs() -> None:
    """A Trainer takes it for a plugin, and the stock one can be made."""
    kinds = namespaces.checkpoint_io_bases()

    assert issubclass(ResilientCheckpointIO, kinds)
    assert namespaces.is_stock_io(namespaces.stock_io())


def test_the_exception_for_sigterm_is_the_trainers_own(home: str) -> None:
    """Lightning handles its own class, not that of the other distribution."""
    found = namespaces.sigterm_exception(trainer_of(home))

    assert found is import_module(f"{home}.utilities.exceptions").SIGTERMException


def test_the_private_names_exist(home: str) -> None:
    """A release of Lightning that renames one of them is noticed here."""
    callback = import_module(f"{home}.callbacks").ModelCheckpoint()

    newest = {"_defer_save_until_validation"}
    assert set(namespaces.BOOKKEEPING) - set(vars(callback)) <= newest | {"kth_value"}
    for name in (namespaces.LIST_DIRECTORY, "_link_checkpoint", "file_exists"):
        assert callable(getattr(callback, name))


@pytest.mark.parametrize(
    ("name", "state", "saving"),
    [
        ("SingleDeviceStrategy", {}, Saving.RANK_ZERO),
        ("DDPStrategy", {}, Saving.RANK_ZERO),
        ("FSDPStrategy", {"_state_dict_type": "full"}, Saving.GATHERED),
        ("FSDPStrategy", {"_state_dict_type": "sharded"}, Saving.SHARDED),
        ("ModelParallelStrategy", {"_save_distributed_checkpoint": False}, Saving.GATHERED),
        ("ModelParallelStrategy", {"_save_distributed_checkpoint": True}, Saving.SHARDED),
        ("DeepSpeedStrategy", {}, Saving.SHARDED),
    ],
)
def test_it_is_known_how_a_strategy_saves(
    name: str, state: dict[str, Any], saving: Saving, home: str
) -> None:
    """Lightning's own are told apart by their methods, and those with two ways by an option."""
    kind = getattr(import_module(f"{home}.strategies"), name)

    assert namespaces.saving_of(trainer_with(home, kind, **state)) is saving


@pytest.mark.parametrize("option", ["_state_dict_type", "_save_distributed_checkpoint"])
def test_the_options_of_strategies_that_shard_exist(option: str, home: str) -> None:
    """A release of Lightning that renames one of them is noticed here."""
    names = {"_state_dict_type": "FSDPStrategy"}
    kind = getattr(import_module(f"{home}.strategies"), names.get(option, "ModelParallelStrategy"))

    assert option in vars(kind())


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint", "remove_checkpoint"])
def test_a_strategy_derived_from_one_that_shards_is_known_if_it_leaves_these_alone(
    name: str, home: str
) -> None:
    """What somebody else writes or reads there is not known."""
    base = import_module(f"{home}.strategies").FSDPStrategy
    same = type("Same", (base,), {})
    other = type("Other", (base,), {name: lambda *_args: None})

    state = {"_state_dict_type": "sharded"}
    known = [namespaces.saving_of(trainer_with(home, kind, **state)) for kind in (same, other)]

    assert known == [Saving.SHARDED, Saving.UNKNOWN]


def test_a_strategy_that_loads_in_its_own_way_is_found(home: str) -> None:
    """What it does besides is not known, so it is left to it."""
    base = import_module(f"{home}.strategies").SingleDeviceStrategy
    kind = type("LoadsItself", (base,), {"load_checkpoint": lambda *_args: None})

    assert namespaces.loads_through_io(trainer_of(home))
    assert not namespaces.loads_through_io(trainer_of(home, strategy=kind("cpu")))


@pytest.mark.parametrize("name", ["save_checkpoint", "remove_checkpoint"])
def test_strategies_that_write_in_their_own_way_are_not(name: str, home: str) -> None:
    """Whatever they do there, it is not known to be rank 0's work."""
    base = import_module(f"{home}.strategies").SingleDeviceStrategy
    kind = type("Sharded", (base,), {name: lambda *_args: None})
    trainer = trainer_of(home, strategy=kind("cpu"))

    assert namespaces.saving_of(trainer) is Saving.UNKNOWN


def test_the_group_timeout_is_the_strategys_in_seconds() -> None:
    """Without one it is torch's default."""
    with_one = SimpleNamespace(_timeout=timedelta(minutes=2))
    without = SimpleNamespace()

    assert namespaces.process_group_timeout_s(with_one) == 120.0
    assert namespaces.process_group_timeout_s(without) == 1800.0


@pytest.mark.slow
def test_one_class_fits_the_distributions_that_are_imported() -> None:
    """With both imported, ours are a ``Callback`` and a ``CheckpointIO`` of both."""
    script = (
        "import lightning.pytorch, pytorch_lightning, lightning_resilience as r; "
        "homes = lightning.pytorch, pytorch_lightning; "
        "print(*(issubclass(r.ResilienceCallback, home.Callback) for home in homes)); "
        "import lightning.fabric.plugins as a, lightning_fabric.plugins as b; "
        "print(*(issubclass(r.ResilientCheckpointIO, home.CheckpointIO) for home in (a, b)))"
    )

    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )

    assert ran.stdout.split() == ["True"] * 4
