# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a ``ModelCheckpoint`` remembers is put back when its save fails, all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resilience.adapters.lightning.model_checkpoint import _keep_books
from lightning_resilience.adapters.lightning.namespaces import BOOKKEEPING


def scramble(callback: Any) -> None:
    """Change everything that it remembers, in place where it can be."""
    for name in BOOKKEEPING:
        value = vars(callback).get(name)
        if isinstance(value, dict):
            value["new.ckpt"] = torch.tensor(0.0)
        else:
            setattr(callback, name, f"new {name}")


class Session:
    """Counts joint operations, and what it is told to clear up."""

    def __init__(self) -> None:
        self.operations = 0
        self.cleared: list[str] = []

    def clear_up(self, url: str) -> None:
        """Note the folder."""
        self.cleared.append(url)


IDLE: Any = Session()


@pytest.mark.parametrize(
    ("options", "clears"),
    [
        ({"save_top_k": 2, "monitor": "loss"}, True),
        ({"save_top_k": -1, "save_last": True}, True),
        ({"save_top_k": -1}, False),
    ],
)
def test_what_was_to_be_removed_is_cleared_up_after_a_save(
    options: dict[str, Any], *, clears: bool
) -> None:
    """All ranks clear up together, wherever a removal is possible at all."""
    session: Any = Session()
    callback = ModelCheckpoint(dirpath="s3://bucket/run", **options)

    def save() -> None:
        session.operations += 2

    _keep_books(callback, save, session)

    assert session.cleared == (["s3://bucket/run/"] if clears else [])


def test_nothing_is_cleared_up_where_nothing_was_saved() -> None:
    """A save point that saves nothing costs nothing."""
    session: Any = Session()

    _keep_books(ModelCheckpoint(dirpath="run"), lambda: None, session)

    assert session.cleared == []


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit()])
def test_everything_is_put_back_whatever_the_failure(error: BaseException) -> None:
    """Also what was changed in place, and also after an interruption."""
    callback = ModelCheckpoint(monitor="loss", save_top_k=2)
    callback.best_k_models["old.ckpt"] = torch.tensor(1.0)
    before = {name: repr(vars(callback).get(name)) for name in BOOKKEEPING}

    def fail() -> None:
        scramble(callback)
        raise error

    with pytest.raises(type(error)):
        _keep_books(callback, fail, IDLE)

    assert {name: repr(vars(callback).get(name)) for name in BOOKKEEPING} == before


def test_what_was_not_there_is_not_there_afterwards() -> None:
    """An attribute that the save made goes away with it."""
    callback = ModelCheckpoint()
    had = "kth_value" in vars(callback)
    vars(callback).pop("kth_value", None)

    def fail() -> None:
        scramble(callback)
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - there is but one
        _keep_books(callback, fail, IDLE)

    assert had
    assert "kth_value" not in vars(callback)


def test_what_a_success_wrote_down_stays() -> None:
    """Only a failure puts anything back."""
    callback = ModelCheckpoint()

    _keep_books(callback, lambda: scramble(callback), IDLE)

    assert callback.best_model_path == "new best_model_path"


def test_arguments_are_passed_on() -> None:
    """The wrapped method gets what Lightning passes."""
    got: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> None:
        got.extend([args, kwargs])

    _keep_books(ModelCheckpoint(), inner, IDLE, 1, candidates=2)

    assert got == [(1,), {"candidates": 2}]
