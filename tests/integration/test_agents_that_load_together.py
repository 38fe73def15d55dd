# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Workers that come back when an outage is over: a few at a time read what all of them need."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import BreakerRecord, encode
from tests.http_server import s3_error, serving
from tests.restarted_job import HANG_S, Fault, make_job
from tests.s3_server import S3Server, pass_on


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.http_server import Answer, Request
    from tests.restarted_job import Agents
    from tests.two_agents import Launch


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

LIMIT = 2
BREAKER = {
    "open_for_s": 4,
    "max_open_for_s": 4,
    "view_max_age_s": 1,
    "probe_timeout_s": 1,
    "probe_lease_s": 3.5,
    "max_concurrent": LIMIT,
}
READ_S = 1.0
"""How long the storage takes for a whole checkpoint: long enough for reads to meet."""


@dataclass
class Storage:
    """Stands before a storage, and counts who reads a whole checkpoint at once."""

    behind: S3Server
    is_ill: bool = False
    refused: int = 0
    reads: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: Request) -> Answer:
        """Answer one request, beside others."""
        if self.is_ill:
            self.refused += 1
            return s3_error(503, "SlowDown")
        is_checkpoint = request.path.partition("?")[0].endswith(".ckpt")
        if not (is_checkpoint and request.headers.get("Range", "").startswith("bytes=0-")):
            return pass_on(request, self.behind)
        with self._counted():
            time.sleep(READ_S)
            return pass_on(request, self.behind)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self.lock:
            self.reads.append(time.monotonic())
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        yield
        with self.lock:
            self.at_once -= 1


def open_circuits(agents: Agents, dependency: str) -> None:
    """Open the circuits of the job's storage, as a trip of its workers does."""
    record = BreakerRecord(
        epoch=7, generation=1, state="open", limit=LIMIT, open_s=1.0, reason="503", writer="test"
    )
    store = TorchStore.connect("127.0.0.1", agents.port, timeout_s=HANG_S)
    for kind in ("read", "write"):
        key = Keys(run_id="job", incarnation="").breaker(f"{dependency}:{kind}")
        store.set(key, encode(record))
    store.close()


def test_after_an_outage_no_more_than_the_limit_load_at_once(
    launch: Launch, tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    """Nobody starts while the storage is ill; then each worker reads, at most two at once."""
    storage = Storage(s3_server)
    go = tmp_path / "go"
    fault = Fault(rank=3, at=(3,), after=str(go))
    folder = f"s3://{bucket}/checkpoints"
    job = make_job(
        folder,
        fault,
        workers=2,
        disks=str(tmp_path / "disks"),
        group_timeout_s=60.0,
        options={"breaker": BREAKER},
    )
    with serving(storage.answer, at_once=True) as server:
        environment = S3Server(server.url).environment | {"AWS_MAX_ATTEMPTS": "1"}
        agents = launch(job, workers=2, environment=environment, storage=folder, **BREAKER)
        agents.until((tmp_path / "go.waiting").exists)
        assert storage.reads == []
        storage.is_ill = True
        open_circuits(agents, f"s3://{bucket}")
        go.touch()
        agents.until(lambda: storage.refused >= LIMIT)
        assert agents.starts == [4]
        well_at_s = time.monotonic()
        storage.is_ill = False

        assert agents.wait() == [0, 0], agents.told()

    assert agents.starts == [4, 4]
    # Each worker, whose disk is its own, and nobody besides.
    assert len(storage.reads) == 4
    assert min(storage.reads) > well_at_s
    assert storage.most_at_once <= LIMIT
