# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C55: forked data-loader workers inherited the handler, and acted on a signal to the whole job.

``GaTech-RL2/EgoVerse#621``, ``KempnerInstitute/KempnerForge#177``: a scheduler signals every
process of the step, workers included.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.lightning.signals import quiet_children
from tests import lightning_job
from tests.lightning_job import store_server
from tests.signalled_job import (
    Signalled,
    run_with_handlers,
    signalled_job,
    stopped_together,
)


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_a_signal_to_the_whole_process_group_stops_the_ranks_and_no_worker(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The ranks save and leave together, and no worker dies of it or does what a rank does."""
    signalled = Signalled(signal.SIGTERM, ranks=(0, 1), group=True)
    job = signalled_job(f"{tmp_path}/files", signalled, workers=2)
    with store_server() as port:
        running = lightning_job.start(
            warm_python, job, tmp_path / "job", port=port, function=run_with_handlers
        )
        reports = running.wait()

    stopped_together(running, reports)
    assert "DataLoader worker" not in running.told()


@pytest.fixture
def _blaming() -> Iterator[None]:
    """A handler that raises whenever a child ends, as torch's does for a worker that was killed."""

    def blame(_number: int, _frame: object) -> None:
        message = "DataLoader worker is killed by signal"
        raise RuntimeError(message)

    before = signal.signal(signal.SIGCHLD, blame)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_blaming")
def test_a_child_that_dies_during_the_last_save_does_not_end_it() -> None:
    """While all ranks save, no death of a child is anybody's business; afterwards it is again."""
    with quiet_children():
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
