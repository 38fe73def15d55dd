# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C08: a failure of a background save appeared late and hid the error that ended training.

``google/orbax#605``, and the same in Lightning's ``AsyncCheckpointIO``: the save fails in its
thread, user code raises ``ValueError`` later, and ``fit`` raises the save's error at its end, with
the user's demoted to its context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.faulty_filesystem import Rule
from tests.lightning_job import make_data, make_model, make_trainer
from tests.single_rank import fit, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


pytestmark = [pytest.mark.integration]


class Fails(Callback):
    """A bug in training, some steps after the save."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Fail."""
        if trainer.global_step == 3:
            message = "a bug in training"
            raise ValueError(message)


def test_the_users_exception_is_what_fit_raises(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The save's failure is in the log, and the exception that ended training comes out."""
    plugins = {"plugins": [AsyncCheckpointIO()]}
    job = faulty(Rule(operations=("put_file",), error="denied"), trainer=plugins)
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, Fails())

    with pytest.raises(ValueError, match="a bug in training"):
        trainer.fit(make_model(), make_data())

    assert len(plan_in_use().calls("put_file")) == 1
    assert "was not written in the background" in caplog.text
    assert "Access Denied" in caplog.text


def test_fit_does_not_end_well_with_a_save_that_failed(faulty: Callable[..., Job]) -> None:
    """A failure of a save is raised by the next one."""
    plugins = {"plugins": [AsyncCheckpointIO()]}
    job = faulty(Rule(operations=("put_file",), error="denied", last=1), trainer=plugins, steps=40)

    with pytest.raises(Exception, match=r"Access ?Denied"):
        fit(job)
