# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A process is killed at every effect of a save point, and the next start goes on from the newest.

Enumerated: a first run tells how many effects there are, and one job is killed at each of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import killed_saves
from tests.killed_saves import Bench, Outage


if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3_server import S3Server
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess, pytest.mark.timeout(900)]

# Two processes share the cells of a bench; alone on two cores the slowest takes a minute.
PARTS = 2
HANG_S = 800.0

NAMED = {"LIGHTNING_RESILIENCE_RUN_ID": "the-run"}

Row = dict[str, Any]


def run_cells(
    warm_python: WarmPython, benches: list[Bench], environment: dict[str, str]
) -> tuple[list[str], list[Row]]:
    """Kill a job at every effect; return the effects, and what was found after each death."""
    processes = []
    for part, bench in enumerate(benches):
        variables = {
            "LIGHTNING_RESILIENCE_SPOOL_DIR": f"{bench.home}/spool",
            **environment,
        }
        process = warm_python.start(
            killed_saves.run,
            bench,
            part,
            len(benches),
            log=bench.log,
            environment=variables,
        )
        processes.append(process)
    codes = [process.wait(HANG_S) for process in processes]
    assert codes == [0] * len(benches), "\n".join(process.text() for process in processes)
    reports = [json.loads(bench.report.read_text(encoding="utf-8")) for bench in benches]
    effects = reports[0]["effects"]
    rows = sorted(
        (row for report in reports for row in report["rows"]), key=lambda row: row["number"]
    )
    # All of them, and each was struck where the first run has seen it.
    assert [row["number"] for row in rows] == list(range(1, len(effects) + 1))
    return effects, rows


def complaints(row: Row, *, newest: int) -> list[str]:
    """Return what is wrong after one death.

    Args:
        row: What was found.
        newest: The step that the next start goes on from.
    """
    seen = [*row["found"].items(), *row["waits"].items()]
    wrong = [f"{name}: {step}" for name, step in seen if isinstance(step, str)]
    if row["code"]:
        wrong.append(f"the next start failed: {row['log'][-2000:]}")
    elif row["started_at"] != newest:
        wrong.append(f"the next start went on from {row['started_at']} and not from {newest}")
    wrong += [f"after it, {name}: {it}" for name, it in row["after"].items() if isinstance(it, str)]
    wrong += [f"still there: {name}" for name in row["left_after"]]
    return [f"killed at {row['number']} ({row['effect']}): {each}" for each in wrong]


LOCAL: dict[str, dict[str, Any]] = {
    "a last one that is written over": {},
    "a link that is moved": {
        "steps_before": 0,
        "saves_before": 1,
        "checkpoint": {"save_last": "link"},
    },
    "the first one of all": {"steps_before": 0},
    "names that are new": {"checkpoint": {"save_last": None, "filename": "last-{step}"}},
}


def newest_of(row: Row) -> int:
    """Return the step that a start from the last checkpoint goes on from.

    A last one counts whether or not it has a manifest, another one only with it: unless nothing
    else is there, as between the first checkpoint of all and its manifest. What waits on the node
    is published first.
    """
    found = row["found"]
    last = [step for name, step in found.items() if name.startswith("last")]
    others = [found[name] for name in row["committed"] if name in found]
    waiting = [step for step in row["waits"].values() if isinstance(step, int)]
    return max(last + others + waiting or found.values(), default=0)


@pytest.mark.parametrize("scene", LOCAL)
def test_on_a_filesystem(scene: str, warm_python: WarmPython, tmp_path: Path) -> None:
    """No torn file has a final name, the newest is found, and nothing unfinished stays."""
    benches = []
    for part in range(PARTS):
        home = tmp_path / str(part)
        home.mkdir()
        benches.append(Bench(home=str(home), folder=str(home / "checkpoints"), **LOCAL[scene]))

    effects, rows = run_cells(warm_python, benches, NAMED)

    assert [wrong for row in rows for wrong in complaints(row, newest=newest_of(row))] == []
    assert {effect.split()[0] for effect in effects} >= {"open", "write", "fsync", "rename"}
    assert any(row["left"] for row in rows)


@pytest.mark.parametrize("outage", [Outage.IN_SAVE, Outage.BEFORE_START], ids=lambda it: it.value)
def test_while_it_waits_on_the_node(
    outage: Outage, warm_python: WarmPython, tmp_path: Path
) -> None:
    """What is complete on the node is published by the next start, and nothing torn ever is.

    Storage takes no checkpoint, and the job is killed as it spools what it saves; or storage is
    well again, and the job is killed as it starts with two that wait.
    """
    benches = []
    for part in range(PARTS):
        home = tmp_path / str(part)
        home.mkdir()
        folder = f"faulty://{home}/checkpoints"
        benches.append(Bench(home=str(home), folder=folder, outage=outage))

    effects, rows = run_cells(warm_python, benches, NAMED)

    assert [wrong for row in rows for wrong in complaints(row, newest=newest_of(row))] == []
    assert {effect.split()[0] for effect in effects} >= {"open", "write", "fsync", "rename"}
    waiting = {tuple(row["waits"].values()) for row in rows}
    assert waiting >= {(), (4,), (4, 4)}


@pytest.mark.parametrize("parts", [False, True], ids=["one request", "parts"])
def test_on_object_storage(
    *,
    parts: bool,
    warm_python: WarmPython,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same; and of an upload in parts that has not ended, nothing is left to pay for.

    One of the jobs has no run id, so that no two starts of it stage in the same directory.
    """
    # Small parts, so that a small checkpoint has some.
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    benches = []
    for part in range(PARTS):
        home = tmp_path / str(part)
        home.mkdir()
        folder = f"s3://{s3_server.new_bucket()}/run"
        bench = Bench(home=str(home), folder=folder, server=s3_server.url, parts=parts)
        benches.append(bench)

    environment = {**s3_server.environment, **(NAMED if parts else {})}
    effects, rows = run_cells(warm_python, benches, environment)

    assert [wrong for row in rows for wrong in complaints(row, newest=newest_of(row))] == []
    asked = {effect.split()[0] for effect in effects}
    sending = {"create_multipart_upload", "upload_part", "complete_multipart_upload"}
    assert asked >= {"delete_object", *(sending if parts else {"put_object"})}
    sent = [effect for effect in effects if effect.startswith("half of ")]
    whole = [effect for effect in effects if effect.split()[0] in {"put_object", "upload_part"}]
    assert len(sent) == len(whole) > 0
    assert any(row["left"] for row in rows)
