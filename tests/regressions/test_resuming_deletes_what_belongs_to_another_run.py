# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C30: to resume deletes checkpoints that belong to another run.

``Lightning-AI/pytorch-lightning#11379``: the guards (the same directory, not the file that was
resumed) look at local paths only; a remote one is always removed. What a run does in a directory
that is not its own is in ``test_retention``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.single_rank import fit, names


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint"),
]


@pytest.mark.parametrize("ours", [False, True], ids=["plain", "ours"])
def test_what_the_run_started_from_stays_also_remotely(
    *, ours: bool, faulty: Callable[..., Job]
) -> None:
    """Plain Lightning removes it with the first save; with the callback it stays."""
    first = faulty(steps=2, checkpoint={"save_top_k": 1}, options={} if ours else None)
    fit(first)
    start = f"{first.folder}/step=2.ckpt"

    fit(replace(first, steps=4, resume=start))

    kept = ["step=2.ckpt"] if ours else []
    assert names(first) == [*kept, "step=4.ckpt"]
