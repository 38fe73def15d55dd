# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C59: rank 0 was still saving when the other ranks' collective timed out.

``huggingface/accelerate#3512``, ``meta-pytorch/torchtune#2093``: the watchdog ends a job whose save
would have worked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, store_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def test_a_save_longer_than_the_timeout_ends_plain_lightning_and_not_us(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """A save that makes progress may last longer than the group's timeout, and than the stall's."""
    # The put has eight pieces: 6.4 s for one that never stands still for longer than 0.8 s.
    slow = {
        "plain": Rule(operations=("open",), slow_s=6.4, last=1),
        "ours": Rule(operations=("put_file",), slow_s=0.8, last=1),
    }
    options = {"plain": None, "ours": {"retry": {"stall_timeout_s": 4.0}}}
    with store_server() as one, store_server() as two:
        plain, ours = (
            lightning_job.start(
                warm_python,
                Job(folder=f"faulty://{tmp_path}/{name}/files", options=options[name]),
                tmp_path / name,
                port=port,
                plan=FaultPlan.write(tmp_path / name / "plan", slow[name]),
            )
            for name, port in (("plain", one), ("ours", two))
        )
        without, with_it = plain.wait(), ours.wait()

    assert [report["code"] for report in with_it] == [0, 0], ours.told()
    assert len(ours.plan.calls("put_file")) == 2
    assert ours.steps() == [2, 4]
    assert any(report["code"] for report in without), plain.told()
