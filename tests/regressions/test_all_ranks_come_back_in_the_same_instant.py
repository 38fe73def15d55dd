# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C12: storage asked thousands of pods to slow down, and they all came back together.

``fsspec/s3fs#865``, ``sillsdev/silnlp#565``: fixed waits, or the same doubling waits on every rank,
repeat the stampede that they wait for.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.core.events import RetryScheduled
from lightning_resilience.core.retry import RetryPolicy
from tests.http_server import Answer, Request, Serving, s3_error, serving
from tests.real_guard import Rank
from tests.s3_server import S3Server


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_python import WarmPython


pytest.importorskip("s3fs")
pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

RANKS = 8
MOST, WINDOW_S = 2, 0.2
RETRY_AFTER_S = 1.0
POLICY = RetryPolicy(
    base_delay_s=0.01,
    throttle_base_delay_s=1.0,
    max_delay_s=2.0,
    max_attempts=20,
    deadline_s=60.0,
    stall_timeout_s=30.0,
)


def save(rank: int, url: str, folder: str) -> None:
    """Publish one object under a guard, as a rank of a seeded training does."""
    # As seed_everything does on every rank: whoever draws from here draws alike on all ranks.
    random.seed(7)
    fs, path = private_filesystem(f"s3://bucket/{rank}.ckpt", S3Server(url=url).storage_options)
    store = FsspecObjectStore(fs, spool_directory=folder)
    staged = Path(folder) / f"staged-{rank}"
    staged.write_bytes(b"weights")
    fs.connect()
    mine = Rank(rank, policy=POLICY)
    (Path(folder) / f"ready-{rank}").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.002)

    done = mine.call(lambda token: store.publish(str(staged), path, token))

    delays = [event.delay_s for event in mine.sink.emitted(RetryScheduled)]
    report = {"attempts": done.attempts, "delays": delays}
    (Path(folder) / f"report-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def overloaded(retry_after: dict[str, str]) -> Callable[[Request], Answer]:
    """A storage that all ranks meet overloaded; it takes ``MOST`` requests in ``WINDOW_S``."""
    knocked: set[str] = set()
    taken: list[float] = []

    def answer(request: Request) -> Answer:
        is_first = request.path not in knocked
        knocked.add(request.path)
        recent = [at_s for at_s in taken if at_s > request.at_s - WINDOW_S]
        if is_first or len(recent) >= MOST:
            return s3_error(503, "SlowDown", **retry_after)
        taken.append(request.at_s)
        return Answer(headers={"ETag": '"1"'})

    return answer


def run_together(warm_python: WarmPython, folder: Path, server: Serving) -> list[dict[str, Any]]:
    """Let all ranks start in the same instant, and return what each has to report."""
    ranks = [
        warm_python.start(
            save, rank, server.url, str(folder), log=folder / f"log-{rank}", environment={}
        )
        for rank in range(RANKS)
    ]
    warm_python.listen(lambda: len(list(folder.glob("ready-*"))) == RANKS, within_s=60)
    (folder / "go").touch()

    codes = [process.wait(60) for process in ranks]

    assert codes == [0] * RANKS, [process.text() for process in ranks]
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("asked", [{}, {"Retry_After": str(RETRY_AFTER_S)}], ids=["", "asked"])
def test_ranks_that_are_throttled_together_come_back_one_by_one(
    asked: dict[str, str], warm_python: WarmPython, tmp_path: Path
) -> None:
    """Each wait is the rank's own, from the throttle's base, and none is below Retry-After."""
    floor_s = RETRY_AFTER_S if asked else 0.0
    with serving(overloaded(asked)) as server:
        reports = run_together(warm_python, tmp_path, server)

    every_s = sorted(delay for report in reports for delay in report["delays"])
    assert len(set(every_s)) == len(every_s) >= RANKS
    assert min(every_s) >= floor_s
    # All began in the same instant, so the first waits are the distances at which they come back;
    # from the base of a transient failure all would be below 0.01 s.
    jitters_s = [report["delays"][0] - floor_s for report in reports]
    assert max(jitters_s) - min(jitters_s) > 0.1
    assert max(jitters_s) < POLICY.throttle_base_delay_s
    assert sum(report["attempts"] for report in reports) == len(server.requests)
