# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every rank in turn fails in every place in every way, and all ranks end with one verdict.

A case is a place; its cells are the ways in which it fails, on each rank of a job of two and of one
of four. Several cells of a case run at the same time, because they spend theirs waiting; not all of
them, because eighty processes that start at once are a load under which clocks run out elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.manifest import decode_manifest, manifest_path
from tests import session_job
from tests.faulty_filesystem import Rule
from tests.lightning_job import store_server
from tests.session_job import KILLED, RunningShards, ShardJob


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess, pytest.mark.slow]

HANG_S = 120.0
"""No cell takes nearly as long, also where thirty processes share two cores."""

AT_ONCE = 8
"""Cells that run at the same time, of two or four processes each."""

PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "exists": ("exists", {"operations": ("info",), "name": "present"}),
    "spool": ("exists", {"operations": ("makedirs",)}),
    "makedirs": ("save", {"operations": ("makedirs",), "name": "step=1"}),
    "open": ("save", {"operations": ("stage_open",)}),
    "write": ("save", {"operations": ("stage_write",)}),
    "close": ("save", {"operations": ("stage_close",)}),
    "publish": ("save", {"operations": ("put_file",)}),
    "rename": ("save", {"operations": ("rename",), "name": "step=1"}),
    "land": ("save", {"operations": ("land",)}),
    "verify": ("save", {"operations": ("info",), "name": "step=1"}),
    "manifest": ("save", {"operations": ("manifest_put_file",)}),
    "rm": ("remove", {"operations": ("rm_file",), "name": "step=0"}),
}
"""Where it fails: the joint operation that it belongs to, and the calls that are struck."""

ON_A_FILESYSTEM = {"makedirs", "rename"}
"""Places that are met only where a shard is staged beside its target."""

SENT = {"land", "rename"}
"""Places at which it may still be carried out, so that the shard's name is not used again."""

WAYS: dict[str, dict[str, Any]] = {
    "transient": {"error": "reset", "last": 1},
    "permanent": {"error": "denied"},
    "hanging": {"hang": True},
    "killed": {"kill": True},
}
OPERATIONS = ["exists", "save", "remove"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Port of one store server for all cells, which outlives the ranks."""
    with store_server() as number:
        yield number


@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", PLACES)
def test_wherever_a_rank_fails_all_ranks_end_with_the_same_verdict(
    place: str, warm_python: WarmPython, tmp_path: Path, port: int
) -> None:
    """Whether it passes, is refused, never returns or dies: in bounded time, by every rank."""
    operation, calls = PLACES[place]
    cells = [
        (way, ranks, rank) for way in reversed(WAYS) for ranks in (2, 4) for rank in range(ranks)
    ]
    running: list[tuple[str, int, RunningShards]] = []

    def end_the_first() -> None:
        way, rank, cell = running.pop(0)
        reports, is_sent = cell.wait(HANG_S), place in SENT
        check(cell, reports, operation=operation, way=way, rank=rank, is_sent=is_sent)

    for way, ranks, rank in cells:
        if len(running) == AT_ONCE:
            end_the_first()
        cell = start(
            warm_python,
            tmp_path / f"{way}-{rank}-of-{ranks}",
            Rule(**calls, **WAYS[way], rank=rank),
            port=port,
            ranks=ranks,
            is_local=place in ON_A_FILESYSTEM,
        )
        running.append((way, rank, cell))
    while running:
        end_the_first()


def start(
    warm: WarmPython, home: Path, rule: Rule, *, port: int, ranks: int, is_local: bool
) -> RunningShards:
    """Start one cell."""
    folder = f"{home}/shards" if is_local else f"faulty://{home}/shards"
    job = ShardJob(folder=folder, ranks=ranks, port=port, run_id=str(home))
    return session_job.start(warm, job, home, rule)


def check(
    cell: RunningShards,
    reports: list[dict[str, Any]],
    *,
    operation: str,
    way: str,
    rank: int,
    is_sent: bool,
) -> None:
    """Compare one cell with what must hold."""
    where = f"{cell.home.name}\n{cell.told()}"
    left = [report for number, report in enumerate(reports) if (way, number) != ("killed", rank)]
    codes = [report["code"] for report in reports]
    assert codes == [KILLED if (way, n) == ("killed", rank) else 0 for n in range(len(codes))], (
        where
    )
    struck = [call["rank"] for call in cell.plan.calls() if call["struck"]]
    assert set(struck) == {str(rank)}, where
    verdicts = left[0]["verdicts"]
    assert [report["verdicts"] for report in left] == [verdicts] * len(left), where
    before = OPERATIONS[: OPERATIONS.index(operation)]
    if way == "transient":
        assert verdicts == [[each, "ok"] for each in OPERATIONS], where
        check_shards(cell)
    else:
        assert verdicts[:-1] == [[each, "ok"] for each in before], where
        assert verdicts[-1][:2] == [operation, "JointError"], where
        assert verdicts[-1][3] in OUTCOMES[way], where
        assert {report["first_rank"] for report in left} == {rank}, where
        assert f"rank {rank}" in verdicts[-1][2], where
        refused = "cannot be used yet" in verdicts[-1][2]
        assert refused == (way == "hanging" and is_sent), where
    threads = [name for report in left for name in report["threads"]]
    assert way == "hanging" or threads == [], where
    assert set(threads) <= {"lightning-resilience-call"}, where
    check_manifests(cell, where)


OUTCOMES = {
    "permanent": {"permanent"},
    "hanging": {"transient"},
    "killed": {"lost"},
}
"""The failure class that all ranks agree on."""


def check_shards(cell: RunningShards) -> None:
    """All of it was done: every shard is there with its manifest, and no older one is."""
    for rank in range(cell.job.ranks):
        assert manifest_of(cell.job.new_shard(rank)) is not None
        assert not cell.job.old_shard(rank).exists()


def check_manifests(cell: RunningShards, where: str) -> None:
    """Whatever happened, what a manifest says is true, and each has its file."""
    for rank in range(cell.job.ranks):
        shard = cell.job.new_shard(rank)
        manifest = manifest_of(shard)
        assert manifest is None or manifest.size_bytes == shard.stat().st_size, where


def manifest_of(shard: Path) -> Any:
    """Return the manifest of a shard, None if it has none."""
    path = shard.parent / manifest_path(shard.name)
    return decode_manifest(path.read_bytes(), path=str(path)) if path.exists() else None
