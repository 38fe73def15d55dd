# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that save and load with ``torch.distributed.checkpoint``, where some of it fails.

The last word is always the same: all ranks say the same, and there is metadata under the
checkpoint's name only where every shard of every rank is there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import lightning_job
from tests.dcp_job import DcpJob, run_rank
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import store_server


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lightning_job import Running
    from tests.s3_server import S3Server
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

HANG_S = 50.0


@pytest.fixture
def start(warm_python: WarmPython, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a job of some ranks, on storage with these faults."""
    with contextlib.ExitStack() as servers:

        def start_job(
            *steps: tuple[str, str], rules: tuple[Rule, ...] = (), **options: Any
        ) -> Running:
            environment = options.pop("environment", None)
            job: Any = DcpJob(
                **{"folder": f"faulty://{tmp_path}/checkpoints", "steps": steps, **options}
            )
            plan = FaultPlan.write(tmp_path / "plan", *rules)
            return lightning_job.start(
                warm_python,
                job,
                tmp_path / "job",
                port=servers.enter_context(store_server()),
                plan=plan,
                environment=environment,
                function=run_rank,
            )

        yield start_job


def rows(running: Running) -> list[list[dict[str, Any]]]:
    """Return what each rank has told of each step, once all have ended."""
    reports = running.wait(HANG_S)
    assert [report["code"] for report in reports] == [0] * len(reports), running.told()
    return [report["steps"] for report in reports]


def values_of(told: list[list[dict[str, Any]]], step: int) -> list[Any]:
    """Return what each rank has loaded in a step: the rows that it has, in the order of ranks."""
    assert [rank[step].get("error") for rank in told] == [None] * len(told)
    weights = [rank[step]["value"][0] for rank in told]
    assert all(rank[step]["value"][1] == weights[0][0] for rank in told)
    return [row for weight in weights for row in weight]


def expected(value: float) -> list[list[float]]:
    """Return the whole tensor of a state."""
    return [[4.0 * row + column + value for column in range(4)] for row in range(8)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_saved_is_loaded_by_torch_as_well(
    start: Callable[..., Running], tmp_path: Path, ranks: int
) -> None:
    """What the writer has saved, both readers load, and the reader loads what torch has saved."""
    folder = tmp_path / "checkpoints"

    told = rows(
        start(
            ("save", "ours"),
            ("load", "ours"),
            ("load_stock", "ours"),
            ("save_stock", "torchs"),
            ("load", "torchs"),
            folder=str(folder),
            ranks=ranks,
        )
    )

    assert values_of(told, 1) == values_of(told, 2) == expected(1.0)
    assert values_of(told, 4) == expected(2.0)
    shards = [path.name.split("_")[2] for path in (folder / "ours").glob("*.distcp")]
    assert sorted(shards) == [str(rank) for rank in range(ranks)]
    assert (folder / ".resilience" / "ours.json").exists()
