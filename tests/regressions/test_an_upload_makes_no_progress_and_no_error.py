# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C61: an upload stops making progress and raises nothing, and all accelerators are idle."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.faulty_filesystem import Rule
from tests.lightning_job import make_data, make_model, make_trainer, our_threads
from tests.single_rank import names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


pytestmark = pytest.mark.integration

RETRY = {"stall_timeout_s": 0.5, "deadline_s": 30.0}


def train(job: Job) -> Any:
    """Train to the end, and let go what hangs."""
    trainer = make_trainer(job)
    try:
        trainer.fit(make_model(), make_data())
    finally:
        plan_in_use().release()
    assert our_threads() == []
    return trainer


def test_a_save_that_hangs_is_abandoned_and_made_again(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """Its attempt ends after the time without progress, and what still hangs publishes nothing."""
    hangs = Rule(operations=("put_file",), name="step=2", hang=True, last=1)
    job = faulty(hangs, options={"retry": RETRY})

    with caplog.at_level(logging.INFO, logger="lightning_resilience"):
        train(job)

    folder = Path(job.folder.removeprefix("faulty://"))
    saved = [torch.load(folder / name, weights_only=True)["global_step"] for name in names(job)]
    assert saved == [2, 4]
    size_bytes = (folder / "step=2.ckpt").stat().st_size
    told = (
        f"save of {job.folder}/step=2.ckpt on faulty://:write was abandoned after 0.5 s without "
        f"progress ({size_bytes} bytes written)"
    )
    assert any(told in text for text in caplog.messages)


def test_a_trial_that_hangs_does_not_hold_up_the_start(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first step it is bounded by a tenth of the deadline; then training begins."""
    hangs = Rule(operations=("preflight_put_file",), hang=True)
    job = faulty(hangs, options={"retry": {**RETRY, "deadline_s": 12.0}})

    trainer = train(job)

    assert trainer.global_step == job.steps
    assert names(job) == job.expected
    assert any("training begins without knowing" in text for text in caplog.messages)
