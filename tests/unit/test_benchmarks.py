# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What benchmarks make of what they have measured, and what they count."""

from __future__ import annotations

import io
import json
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.benchmark_files import load_benchmark


if TYPE_CHECKING:
    from pathlib import Path


joining = load_benchmark("joining")
storm = load_benchmark("restart_storm")


def text(value: bytes) -> bytes:
    """Return a text as a client of torch's store sends it."""
    return struct.pack("=Q", len(value)) + value


def test_a_request_is_taken_apart_to_its_last_byte() -> None:
    """So that the next one begins where it ends."""
    compare_set = b"\x02" + text(b"/lr/run/x") + text(b"") + text(b"new")
    check = b"\x05" + struct.pack("=Q", 2) + text(b"/a") + text(b"/b")
    source = io.BytesIO(compare_set + check)

    assert joining.read_request(source) == ("compare_set", "/lr/run/x", compare_set)
    assert joining.read_request(source) == ("check", "/a", check)
    assert joining.read_request(source) is None


def test_requests_are_told_for_one_agent_and_one_interval() -> None:
    """Torch's own and ours, by the names of the keys."""
    counted = Counter({("get", "/torch.rendezvous.job"): 60, ("compare_set", "/lr/job/x"): 20})

    assert joining.rates(counted, nodes=2, intervals=10) == (3.0, 1.0)


def test_what_joining_costs_more_is_compared_round_by_round() -> None:
    """Both kinds have drawn the same waits in one round."""
    more_ms, ratio = joining.compare([1.0, 1.2, 1.4], [1.01, 1.23, 1.44])

    assert more_ms == pytest.approx([10.0, 30.0, 40.0])
    assert ratio == pytest.approx(1.23 / 1.2)


def test_an_outage_begins_with_the_checkpoint_and_is_counted_apart() -> None:
    """What was asked before is no part of it, and neither is what comes after."""
    outage = storm.Outage(3600.0)

    with outage.request("/storm?list-type=2") as is_ill:
        assert not is_ill
    with outage.request(f"{storm.START_PATH}?x=1") as first, outage.request("/storm") as second:
        assert first
        assert second
    outage.length_s = 0.0
    with outage.request(storm.START_PATH) as is_ill:
        assert not is_ill

    found = [(each.requests, each.peak) for each in (outage.before, outage.during, outage.after)]
    assert found == [(1, 1), (2, 2), (1, 1)]


def job(home: Path, *, restarts: int, trains: bool) -> Any:
    """Return the result of a job of which so much was noted."""
    ranks = range(storm.AGENTS * storm.WORKERS)
    for rank in ranks:
        for count in range(restarts + 1):
            storm.note(str(home), "starts", {"agent": "0", "rank": rank, "count": count})
        if trains:
            storm.note(str(home), "steps", {"step": 6, "rank": rank})
    outage = storm.Outage(8.0)
    outage.struck_at_s = 1e-9
    codes = (0, 0) if trains else (1, None)
    return storm.result_of(storm.TORCHRUN, home, outage=outage, codes=codes)


def test_a_job_that_ends_well_has_trained_again_when_all_workers_have(tmp_path: Path) -> None:
    """From the start of the outage to the last rank's first step."""
    result = job(tmp_path, restarts=1, trains=True)

    last = [json.loads(line) for line in (tmp_path / "steps").read_text("utf-8").splitlines()][-1]
    assert result.is_alive
    assert (result.restarts, result.starts) == (1, 16)
    assert result.trains_after_s == pytest.approx(last["at_s"])


def test_a_table_tells_what_was_left_out_and_why(tmp_path: Path) -> None:
    """And a job that still hung at the limit from one that has died."""
    lines = storm.table([job(tmp_path, restarts=3, trains=False)], {storm.NVRX: "not installed"})

    assert "HANGS" in lines[-2]
    assert "never" in lines[-2]
    assert lines[-1].endswith("left out: not installed")


def test_a_launcher_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no part of this project, and the others are compared all the same."""
    monkeypatch.setenv("PATH", "/nowhere")

    found, skipped = storm.launchers_of(None)

    assert list(found) == [storm.TORCHRUN, storm.OURS]
    assert "nvidia-resiliency-ext" in skipped[storm.NVRX]
    assert storm.NVRX in storm.launchers_of("/x/ft_launcher")[0]
