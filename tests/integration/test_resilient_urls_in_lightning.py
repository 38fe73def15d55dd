# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Lightning with ``resilient::`` URLs: without the callback, and with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from fsspec.core import url_to_fs
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resilience import ResilienceCallback
from lightning_resilience.adapters.file_guards import FileGuard
from lightning_resilience.adapters.resilient_filesystem import ResilientFileSystem
from lightning_resilience.adapters.standalone import close_connections
from tests import chained, faulty_filesystem
from tests.chained import fast
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import make_data, make_model


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.s3_server import S3Server


pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _guarded(spool: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    del spool
    chained.register()
    faulty_filesystem.register()
    # Lightning hands over a URL and nothing else: options come from fsspec's configuration.
    monkeypatch.setitem(fsspec.config.conf, "resilient", fast())
    yield
    ResilientFileSystem.clear_instance_cache()
    close_connections()


@pytest.fixture(params=["file", "s3"])
def folder(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A folder for checkpoints, as a prefixed URL."""
    if request.param == "file":
        return f"resilient::file://{tmp_path}/checkpoints"
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_server.storage_options)
    return f"resilient::s3://{s3_server.new_bucket()}/checkpoints"


def train(folder: str, *callbacks: Any, ckpt_path: str | None = None, max_steps: int = 4) -> Any:
    """Train with a checkpoint at every second step."""
    books = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True
    )
    trainer = Trainer(
        callbacks=[*callbacks, books],
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make_model(), make_data(), ckpt_path=ckpt_path)
    return trainer


def names(folder: str) -> list[str]:
    """Return what is in the folder, for somebody without a guard."""
    fs, path = url_to_fs(folder.removeprefix("resilient::"))
    fs.invalidate_cache()
    found = sorted(os.path.basename(name) for name in fs.ls(path, detail=False))  # noqa: PTH119 - a URL
    return [name for name in found if name != ".resilience"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_checkpoints_are_saved_and_loaded(folder: str) -> None:
    """Saving, listing, removing and resuming go through the guard, by the URL alone."""
    trainer = train(folder)

    books = trainer.checkpoint_callback
    assert isinstance(books._fs.guard_run, FileGuard)
    assert books.best_model_path == f"{folder}/step=4.ckpt"
    assert names(folder) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    again = train(folder, ckpt_path=f"{folder}/step=2.ckpt", max_steps=6)
    assert again.global_step == 6
    with fsspec.open(f"{folder}/step=6.ckpt", "rb") as file:
        assert torch.load(file, weights_only=False)["global_step"] == 6


def test_with_the_callback_the_prefix_changes_nothing(folder: str) -> None:
    """The callback is the guard then: one guard, one breaker, under the storage's own name."""
    callback = ResilienceCallback()

    train(folder, callback)

    assert names(folder) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    kinds = {name.partition("://")[0] for name in callback.breaker_report()}
    assert kinds == {folder.removeprefix("resilient::").partition("://")[0]}


@pytest.mark.parametrize("callbacks", [0, 1], ids=["alone", "with the callback"])
def test_a_blip_is_survived(
    callbacks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails twice is made the third time."""
    plan = FaultPlan.write(
        tmp_path / "plan", Rule(operations=("put_file",), name="step=2", error="reset", last=2)
    )
    monkeypatch.setenv(faulty_filesystem.VARIABLE, str(plan.folder))
    folder = f"resilient::faulty://{tmp_path}/checkpoints"
    retry = {"base_delay_s": 0.01, "throttle_base_delay_s": 0.01}

    train(folder, *[ResilienceCallback(retry=retry) for _ in range(callbacks)])

    assert len(plan.calls("put_file", name="step=2")) == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")) == [
        "last.ckpt",
        "step=2.ckpt",
        "step=4.ckpt",
    ]
