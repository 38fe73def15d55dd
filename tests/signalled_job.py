# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs in which a process gets a signal at a known step, and what they must have in common then."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from tests.lightning_job import Job


if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lightning_job import Running

AT = 5
"""The step in which the signal comes."""
MANY = 4000
"""More steps than any job makes before it stops."""


class Signalled(Callback):
    """Sends this process a signal in the middle of a step.

    Args:
        number: The signal.
        ranks: Ranks that get it.
        group: Whether the whole process group gets it, data-loader workers included.
    """

    def __init__(self, number: int, ranks: Sequence[int], *, group: bool = False) -> None:
        self._number = number
        self._ranks = ranks
        self._group = group

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Send it, once."""
        if trainer.global_step == AT and trainer.global_rank in self._ranks:
            if self._group:
                os.killpg(os.getpgid(0), self._number)
            else:
                signal.raise_signal(signal.Signals(self._number))


def add_signal(trainer: Any, *, number: int, ranks: Sequence[int]) -> None:
    """Let these ranks of a Trainer get a signal."""
    trainer.callbacks.insert(0, Signalled(number, ranks))


def signalled(folder: str, number: int, ranks: Sequence[int], **job: Any) -> Job:
    """Make a job that trains until a signal stops it; nothing else saves anything."""
    given = {"steps": MANY, "every": MANY, "group_timeout_s": 20.0, **job}
    return Job(folder=folder, before=partial(add_signal, number=number, ranks=ranks), **given)


def stopped_together(running: Running, reports: list[dict[str, Any]]) -> None:
    """Check that all ranks have saved and left at the same step, with nothing behind."""
    told = running.told()
    assert [report["error"] for report in reports] == ["SIGTERMException"] * len(reports), told
    (step,) = {report["step"] for report in reports}
    assert AT < step < MANY, told
    assert running.names() == ["last.ckpt"]
    assert running.steps() == [step]
    for report in reports:
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], []), told
