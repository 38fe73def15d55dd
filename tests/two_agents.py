# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The fixture that starts jobs under two of torch's own agents; ``restarted_job`` has the job.

``launch`` is a fixture of ``conftest.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lightning_job import Job
    from tests.restarted_job import Agents
    from tests.warm_python import WarmPython


__all__ = ["Launch", "launch"]

Launch: TypeAlias = "Callable[..., Agents]"


@pytest.fixture
def launch(tmp_path: Path, warm_python: WarmPython) -> Iterator[Launch]:
    """Start a job's agents, and leave nothing of them behind."""
    # Here, because most tests do without Lightning, which takes seconds to import.
    from tests.restarted_job import start_agents  # noqa: PLC0415

    started: list[Agents] = []

    def start(job: Job, **options: Any) -> Agents:
        started.append(start_agents(warm_python, job, tmp_path, **options))
        return started[-1]

    yield start
    for agents in started:
        agents.end()
