# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C53: SIGTERM came to some ranks only, and the others failed with transport errors.

``Lightning-AI/pytorch-lightning#20806``: the rank that was told leaves, and the others meet its
absence in their next collective.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests import lightning_job
from tests.lightning_job import store_server
from tests.signalled_job import Signalled, signalled_job, stopped_together


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_stops_both_at_the_same_step(
    rank: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Whichever rank is told, both save the same step and leave after it, as if both were told."""
    job = signalled_job(f"{tmp_path}/files", Signalled(signal.SIGTERM, ranks=(rank,)))
    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()

    stopped_together(running, reports)
