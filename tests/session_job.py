# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that save shards together, without a Trainer: only sessions on one shared store.

Under DDP only rank 0 touches storage. Here every rank does, in every operation: it asks for a file,
saves a shard of its own, and removes an older one, each as a joint operation, as a sharded strategy
would. What staging does on the node can fail as well, by the same plan as storage.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters import object_store, staging
from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.store_discovery import open_store
from lightning_resilience.adapters.telemetry import LoggingSink
from lightning_resilience.config import build
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import JointError
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.faulty_filesystem import FaultPlan
from tests.lightning_job import BREAKER, RETRY, our_threads


if TYPE_CHECKING:
    from tests.faulty_filesystem import Rule
    from tests.warm_python import Process, WarmPython


STALL_S = 1.0
DEADLINE_S = 7.0
JOINT_TIMEOUT_S = 4.0
"""A rank that is stopped by a busy machine for this long is taken for lost."""
TOGETHER_S = 60.0

HASTY = {**RETRY, "stall_timeout_s": STALL_S, "deadline_s": DEADLINE_S}
NO_CIRCUIT = {**BREAKER, "trip_failures": 100}
"""A cell ends with what its rank has met last: not with a circuit that was opened by then."""


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """What all ranks do.

    Args:
        folder: Where shards go: path or URL.
        ranks: Number of ranks.
        port: Port of the store's server.
        run_id: Keeps jobs on one server apart.
    """

    folder: str
    ranks: int
    port: int
    run_id: str

    @property
    def path(self) -> Path:
        """Where the shards are, for who looks past the storage."""
        return Path(self.folder.removeprefix("faulty://"))

    def old_shard(self, rank: int) -> Path:
        """Where the shard is that a rank removes."""
        return self.path / "step=0" / f"shard-{rank}.ckpt"

    def new_shard(self, rank: int) -> Path:
        """Where the shard is that a rank saves."""
        return self.path / "step=1" / f"shard-{rank}.ckpt"

    def lay_out(self) -> None:
        """Make what is there before the ranks come."""
        for rank in range(self.ranks):
            self.old_shard(rank).parent.mkdir(parents=True, exist_ok=True)
            self.old_shard(rank).write_bytes(b"old")
            (self.path / f"present-{rank}").touch()


# Faults of the node's own disk, and of a filesystem's names ---------------------------------------


class FaultyDirectories(type(Path())):  # type: ignore[misc] # the class depends on the system
    """Paths whose directories are made, and whose files are renamed, by the plan."""

    def mkdir(self, *args: Any, **kwargs: Any) -> None:
        """Make a directory."""
        plan().suffer("makedirs", str(self))
        super().mkdir(*args, **kwargs)

    def replace(self, target: Any) -> Any:
        """Rename."""
        plan().suffer("rename", str(target))
        return super().replace(target)


class FaultyFiles:
    """The part of ``os`` that staging uses, by the plan."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, *args: Any) -> int:
        """Open a staged file."""
        plan().suffer("stage_open", path)
        return os.open(path, *args)

    def write(self, fd: int, data: Any) -> int:
        """Write to it."""
        plan().suffer("stage_write", str(fd))
        return os.write(fd, data)

    def close(self, fd: int) -> None:
        """Close it; a file is closed also where that fails."""
        os.close(fd)
        plan().suffer("stage_close", str(fd))


def plan() -> FaultPlan:
    """Return the plan of this process."""
    return FaultPlan(os.environ["FAULTY_FILESYSTEM"])


def make_the_node_faulty() -> None:
    """Let what staging and publishing do on this node follow the plan, in this process."""
    vars(staging).update(os=FaultyFiles(), Path=FaultyDirectories)
    vars(object_store).update(Path=FaultyDirectories)


# One rank -----------------------------------------------------------------------------------------


def run_rank(job: ShardJob, report: str) -> None:
    """Take part in all operations up to the first that fails; write down the verdicts."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s: %(message)s")
    rank = int(os.environ["RANK"])
    session = open_session(job, rank)
    meet(session)
    make_the_node_faulty()
    started_at_s = time.monotonic()
    found: dict[str, Any] = {"verdicts": []}
    for op, work, kind in operations(job, session):
        try:
            session.by_all(op, work.url, work, kind=kind)
        except JointError as error:
            found["verdicts"].append([op, type(error).__name__, str(error), error.outcome])
            found["first_rank"] = error.first_rank
            break
        found["verdicts"].append([op, "ok"])
    found["took_s"] = time.monotonic() - started_at_s
    session.close()
    found["threads"] = our_threads(within_s=2.0)
    Path(report).write_text(json.dumps(found), encoding="utf-8")


def operations(job: ShardJob, session: Session) -> list[tuple[str, Any, str]]:
    """Return what this rank does: the operation's name, its work, and read or write."""
    rank, storage = session.member.rank, session.storage
    present = f"{job.folder}/present-{rank}"
    old, new = (
        job.folder + str(path).removeprefix(str(job.path))
        for path in (job.old_shard(rank), job.new_shard(rank))
    )
    checkpoint = {"global_step": 1, "epoch": 0, "rank": rank, "weights": bytes(10_000)}
    save = StagedSave(storage, new, checkpoint, nonce=session.driver.dice.nonce)
    return [
        ("exists", Asked(storage, present, partial(storage.exists, present)), "read"),
        ("save", save, "write"),
        ("remove", Asked(storage, old, partial(storage.remove, old)), "write"),
    ]


def open_session(job: ShardJob, rank: int) -> Session:
    """Open this rank's session."""
    driver = Driver(
        store=open_store(f"tcp://127.0.0.1:{job.port}", world_size=job.ranks),
        clock=SystemClock(),
        dice=SystemDice(rank=rank),
        sink=LoggingSink(rank=rank),
    )
    member = Member(
        keys=Keys(run_id=job.run_id, incarnation="1"),
        rank=rank,
        world_size=job.ranks,
        timeout_s=JOINT_TIMEOUT_S,
        beat_s=JOINT_TIMEOUT_S / 8,
        on_outage="wait",
        store_patience_s=JOINT_TIMEOUT_S,
    )
    spool = partial(
        staging.spool_directory, None, environ={"TMPDIR": os.environ["TMPDIR"]}, run_id="shards"
    )
    return Session(
        member=member,
        policy=Policy(
            retry=build(RetryPolicy, HASTY),
            breaker=build(BreakerConfig, NO_CIRCUIT),
            classify=classify,
        ),
        driver=driver,
        storage=Storage({}, spool=spool, run_id=job.run_id, stall_timeout_s=STALL_S),
    )


def meet(session: Session) -> None:
    """Wait until all ranks are there, so that a slow start is no absence."""
    member, store = session.member, session.driver.store
    names = [f"{member.keys.run_id}/here/{rank}" for rank in range(member.world_size)]
    store.set(names[member.rank], b"1")
    watcher = store.watcher()
    assert all(watcher.wait_for(name, TOGETHER_S) for name in names)
    watcher.close()


# All ranks ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RunningShards:
    """A job that has been started.

    Args:
        job: What it does.
        home: Folder with logs and reports.
        ranks: One process per rank.
        plan: What fails.
    """

    job: ShardJob
    home: Path
    ranks: list[Process]
    plan: FaultPlan

    def wait(self, within_s: float) -> list[dict[str, Any]]:
        """Return the ranks' reports, with their exit codes, once all have ended."""
        return [
            {**self._report(rank), "code": process.wait(within_s)}
            for rank, process in enumerate(self.ranks)
            if process.wait(within_s) is not None
        ]

    def _report(self, rank: int) -> dict[str, Any]:
        path = self.home / f"report-{rank}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def told(self) -> str:
        """Return all logs, for the message of a failed assertion."""
        return "\n".join(f"--- rank {n}\n{item.text()}" for n, item in enumerate(self.ranks))


def start(warm: WarmPython, job: ShardJob, home: Path, *rules: Rule) -> RunningShards:
    """Start all ranks of a job on storage and nodes with these faults."""
    home.mkdir(parents=True, exist_ok=True)
    faults = FaultPlan.write(home / "plan", *rules)
    job.lay_out()
    ranks = [
        warm.start(
            run_rank,
            job,
            str(home / f"report-{rank}.json"),
            log=home / f"rank-{rank}.log",
            environment={
                **faults.environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(job.ranks),
                "TMPDIR": str(home),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(job.ranks)
    ]
    return RunningShards(job=job, home=home, ranks=ranks, plan=faults)


KILLED = -signal.SIGKILL
"""Exit code of a rank that was killed."""
