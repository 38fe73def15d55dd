# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C52: torch kills workers 30 s after it has told them to stop, in the middle of their last save.

``pytorch/pytorch#119856``, ``#68258``. Here they have 2 s, and a save to slow storage takes 8 s.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig

from tests.faulty_filesystem import FaultPlan, Rule
from tests.restarted_job import Fault, make_job
from tests.signalled_job import MANY


if TYPE_CHECKING:
    from pathlib import Path

    from tests.restarted_job import Agents
    from tests.two_agents import Launch


pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not hasattr(LaunchConfig, "shutdown_timeout"), reason="this torch always leaves 30 s"
    ),
]

ENDS_SOON = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}


def stop(step: int) -> Fault:
    """Let a scheduler end the job: the agents of both nodes are told to stop."""
    return Fault(rank=None, at=(step,), kind="SIGTERM", to_agent=True)


def steps(folder: Path) -> dict[str, int]:
    """Load every checkpoint that is there; return the step in each."""
    return {
        path.name: torch.load(path, weights_only=True)["global_step"]
        for path in folder.glob("*.ckpt")
    }


def test_a_save_that_is_cut_leaves_the_one_before(launch: Launch, tmp_path: Path) -> None:
    """The job goes on from that, and what it knows of its time, it keeps to.

    The first launch was told a grace that it does not have, and is killed in the middle of a save.
    """
    folder = tmp_path / "checkpoints"
    slow = Rule(operations=("put_file",), name="last", slow_s=1.0)
    plan = FaultPlan.write(tmp_path / "plan", slow)

    def launched(fault: Fault, **options: Any) -> Agents:
        job = make_job(f"faulty://{folder}", fault, steps=MANY, every=4, options=options)
        agents = launch(job, plan=plan, environment=ENDS_SOON)
        assert 0 not in agents.wait(), agents.told()
        return agents

    cut = launched(stop(6), termination_grace_s=30.0)
    assert len(plan.calls("put_file", name="last")) == 1, cut.told()
    assert not list(tmp_path.glob("report-*.json"))
    assert steps(folder) == {"step=4.ckpt": 4}

    known = launched(stop(10))

    for rank in range(2):
        report = json.loads((tmp_path / f"report-1-{rank}.json").read_text(encoding="utf-8"))
        assert report["error"] == "SIGTERMException", known.told()
        assert report["resumed"].endswith("/step=4.ckpt")
    found = steps(folder)
    assert {"step=4.ckpt", "step=8.ckpt"} <= set(found)
    assert all(name == f"step={step}.ckpt" for name, step in found.items())
