# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs of one rank in the test's own process, on storage with faults.

``faulty`` and ``spool`` are fixtures of ``conftest.py``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faulty_filesystem import Rule
    from tests.lightning_job import Job


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep staged files, and whatever Lightning writes, in the test's own folder."""
    folder = tmp_path / "spool"
    folder.mkdir()
    monkeypatch.setenv("LIGHTNING_RESILIENCE_SPOOL_DIR", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spool: Path) -> Callable[..., Job]:
    """Make a job of one rank on storage with these faults; called again, the plan is another."""
    # Here, because most tests do without Lightning, which takes seconds to import.
    from tests.faulty_filesystem import VARIABLE, FaultPlan  # noqa: PLC0415
    from tests.lightning_job import Job  # noqa: PLC0415

    plans = iter(range(10_000))

    def make(*rules: Rule, **options: Any) -> Job:
        plan = FaultPlan.write(spool.parent / f"plan-{next(plans)}", *rules)
        monkeypatch.setenv(VARIABLE, str(plan.folder))
        return Job(**{"folder": f"faulty://{tmp_path}/checkpoints", "ranks": 1, **options})

    return make


def plan_in_use() -> Any:
    """Return the plan that the last job was made with."""
    from tests.faulty_filesystem import VARIABLE, FaultPlan  # noqa: PLC0415

    return FaultPlan(os.environ[VARIABLE])


def fit(job: Job) -> Any:
    """Train; return the Trainer."""
    from tests.lightning_job import make_data, make_model, make_trainer  # noqa: PLC0415

    trainer = make_trainer(job)
    trainer.fit(make_model(), make_data(), ckpt_path=job.resume)
    return trainer


def names(job: Job) -> list[str]:
    """Return the names of what is there, other than the directory of manifests."""
    folder = Path(job.folder.removeprefix("faulty://"))
    found = folder.iterdir() if folder.exists() else ()
    return sorted(path.name for path in found if path.name != ".resilience")
