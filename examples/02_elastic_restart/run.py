# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
r"""Restarts that do not storm: two nodes, two bad days, without and with the rendezvous backend.

The nodes are two of torch's own agents on this host, with one worker each (DDP, gloo, CPU) that
saves a checkpoint every 4 steps to an S3-protocol server on loopback. Each bad day comes twice:

* **A crash loop**: the worker of node 1 fails at step 6, in every start, in the same way.
  With ``--rdzv-backend c10d`` each agent restarts it as often as it may, and in the end leaves with
  status 1, which a scheduler takes for a reason to start all of it again. With ``resilient`` the
  same error at the same step twice is no accident: both agents leave with 86, and say why.
* **An outage of the storage at resume**: the worker of node 1 fails once, and the storage is ill
  from that moment on. With ``c10d`` each restart asks the ill storage for the newest checkpoint,
  fails, and is followed by the next, until none is left. With ``resilient`` and
  ``ResilienceCallback`` there is one restart; its workers wait together, one of them probes for
  all, and training goes on from the checkpoint when the storage is well.

The outage is as long for both jobs: until the first has used up its restarts, and 6 s at least.
Times are scaled down, and so is the start of a worker: the agents fork it from a process that has
imported Lightning already. On the command line, each agent would be::

    torchrun --nnodes 2 --rdzv-backend resilient --rdzv-endpoint HOST:PORT --rdzv-id job1 \
        --max-restarts 1000 --rdzv-conf restarts=s3://bucket/restarts train.py

Run it (about a minute; needs ``s3fs`` and ``moto[server]``)::

    python examples/02_elastic_restart/run.py        # --fast: shorter; --keep: keep the logs

The last lines, under the diaries of the four jobs; the exit code is 0 only if every claim holds::

    ✓ loop, c10d: every restart was used, and the job failed
    ✓ loop, resilient: one restart, then both agents left with 86
    ✓ loop, resilient: both left the same reason, which names the error
    ✓ outage, c10d: every restart was used while the storage was ill, and the job failed
    ✓ outage, resilient: both agents ended with 0, after one restart
    ✓ outage, resilient: training went on from the checkpoint when the storage was well
    ✓ outage, resilient: requests of the storage stayed within the bound, in the same outage
    All 7 claims hold.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from job import BREAKER, SAVE_EVERY, Job
from storage import Storage


if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.context import ForkServerContext, ForkServerProcess

NODES = (0, 1)
DAYS = (("loop", "c10d"), ("loop", "resilient"), ("outage", "c10d"), ("outage", "resilient"))
LEAST_OUTAGE_S = 6.0
MANY = 1000
"""Torch's own limit where ours counts: each agent counts for itself, and the first ends the job."""
WITHIN_S = 120.0
"""Against a hang only."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a diary."""

    at_s: float
    who: str
    what: str


class Run:
    """One job, and what came of it.

    Args:
        job: The job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.began_s = 0.0
        self.codes: dict[int, int] = {}
        self.lines: list[Line] = []
        self.refused = 0
        self.struck_at_s = 0.0
        self.outage_s = 0.0

    def carry_out(self, context: ForkServerContext) -> None:
        """Start both agents, and wait until they have left; leave nothing of them behind."""
        self.job.home.mkdir()
        port = free_port()
        agents = [context.Process(target=be_node, args=(self.job, node, port)) for node in NODES]
        self.began_s = time.monotonic()
        try:
            for agent in agents:
                agent.start()
            while len(self.codes) < len(agents):
                for node, agent in enumerate(agents):
                    self.look_at(node, agent)
                if time.monotonic() > self.began_s + WITHIN_S:
                    raise SystemExit(f"{late(WITHIN_S)} The logs are in {self.job.home}")
        finally:
            for agent in agents:
                agent.terminate()

    def look_at(self, node: int, agent: ForkServerProcess) -> None:
        """Note it when an agent has left."""
        agent.join(0.05)
        if agent.exitcode is not None and node not in self.codes:
            self.codes[node] = agent.exitcode
            self.add(f"agent {node}", f"has left with status {agent.exitcode}")

    def add(self, who: str, what: str, *, at_s: float | None = None) -> None:
        """Add a line to the diary."""
        self.lines.append(Line(at_s=at_s or time.monotonic(), who=who, what=what))

    def read(self, storage: Storage) -> None:
        """Read what the processes have noted, and what the storage has seen."""
        text = (self.job.home / "diary.jsonl").read_text(encoding="utf-8")
        self.lines += [Line(**json.loads(line)) for line in text.splitlines()]
        self.refused, self.struck_at_s = storage.refused, storage.struck_at_s
        if self.struck_at_s:
            # Where nothing has healed it: as long as it took to use up all restarts.
            self.outage_s = min(storage.outage_s, time.monotonic() - self.struck_at_s)
            self.outage_s = max(self.outage_s, LEAST_OUTAGE_S)
            self.add("storage", "IS ILL", at_s=self.struck_at_s)
            self.add("storage", "is well again", at_s=self.well_at_s)
        self.lines.sort(key=lambda line: line.at_s)

    @property
    def well_at_s(self) -> float:
        """When the storage was well again."""
        return self.struck_at_s + self.outage_s

    def of(self, what: str) -> list[Line]:
        """Return the lines that begin so."""
        return [line for line in self.lines if line.what.startswith(what)]

    @property
    def restarts(self) -> dict[int, int]:
        """How often each node has started its worker again."""
        starts = [line.who for line in self.of("starts")]
        return {node: starts.count(f"worker {node}") - 1 for node in NODES}

    @property
    def reasons(self) -> list[dict[str, Any]]:
        """What the agents have left as the reason of the end."""
        paths = sorted(self.job.home.glob("reason-*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def told(self) -> list[str]:
        """Return the diary, to be printed."""
        lines = [
            f"{line.at_s - self.began_s:6.1f} s  {line.who:<8}  {line.what}" for line in self.lines
        ]
        burnt = ", ".join(f"{count} on node {node}" for node, count in self.restarts.items())
        codes = ", ".join(f"{code} on node {node}" for node, code in sorted(self.codes.items()))
        ill = f"; requests of the ill storage: {self.refused}" if self.refused else ""
        reasons = [f"reason: {self.reasons[0]['reason']}"] if self.reasons else []
        title = f"--- {self.job.name}"
        return ["", title, *lines, f"restarts: {burnt}; status: {codes}{ill}", *reasons]


def late(within_s: float) -> str:
    """Say that a job has not ended, and whether this machine may be the reason."""
    machine = f"This machine has {os.cpu_count()} cores and a load of {os.getloadavg()[0]:.1f}"
    return f"It should have ended within {within_s:g} s. {machine}; a busy one takes longer."


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def claims(runs: Sequence[Run], max_restarts: int) -> dict[str, bool]:
    """Say everything that the example claims, and whether it is so."""
    loop, calm, storm, waited = runs
    reasons = calm.reasons
    trained = [line for line in waited.of("trains") if line.at_s > waited.struck_at_s]
    return {
        "loop, c10d: every restart was used, and the job failed": (
            max(loop.restarts.values()) >= max_restarts and all(loop.codes.values())
        ),
        "loop, resilient: one restart, then both agents left with 86": (
            calm.restarts == {0: 1, 1: 1} and calm.codes == {0: 86, 1: 86}
        ),
        "loop, resilient: both left the same reason, which names the error": (
            len(reasons) == len(NODES)
            and reasons[0]["reason"] == reasons[1]["reason"]
            and "out of range" in reasons[0]["reason"]
        ),
        "outage, c10d: every restart was used while the storage was ill, and the job failed": (
            max(storm.restarts.values()) >= max_restarts
            and all(storm.codes.values())
            and all(line.at_s < storm.well_at_s for line in storm.of("starts"))
        ),
        "outage, resilient: both agents ended with 0, after one restart": (
            waited.codes == {0: 0, 1: 0} and waited.restarts == {0: 1, 1: 1}
        ),
        "outage, resilient: training went on from the checkpoint when the storage was well": (
            len(trained) == len(NODES)
            and all(line.at_s > waited.well_at_s for line in trained)
            and {line.what for line in trained} == {f"trains from step {SAVE_EVERY} on"}
        ),
        "outage, resilient: requests of the storage stayed within the bound, in the same outage": (
            waited.outage_s == storm.outage_s and 0 < waited.refused <= most_requests(waited)
        ),
    }


def most_requests(run: Run) -> int:
    """Bound the requests that may reach the ill storage, whatever the number of workers.

    Three failures of reads and of writes open a circuit; then there are probes, of two requests at
    most, which are never closer together than ``open_for_s``.
    """
    return 2 * 3 + 2 * math.ceil(run.outage_s / BREAKER["open_for_s"])


def be_node(job: Job, node: int, port: int) -> None:
    """Be the process of one node."""
    # Here, because the process that starts the nodes needs none of torch.
    from node import run_node  # noqa: PLC0415 - see above

    run_node(job, node, port)


def isolate() -> None:
    """Keep this machine's own AWS settings and proxies out of the example."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "LIGHTNING_RESILIENCE"))]:
        del os.environ[name]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_MAX_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def run_all(logs: Path, max_restarts: int) -> list[Run]:
    """Run each bad day twice, and print the diaries."""
    # For the process that forks the nodes, which has the path of its own interpreter and not ours.
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *sys.path[1:]])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["node", "s3fs", "torch.distributed.run"])
    runs: list[Run] = []
    with Storage() as storage:
        os.environ |= {"AWS_ENDPOINT_URL": storage.url, "TMPDIR": str(logs)}
        for day, backend in DAYS:
            job = Job(
                name=f"{day}-{backend}",
                home=logs / f"{day}-{backend}",
                storage=storage.url,
                is_looping=day == "loop",
                is_guarded=backend == "resilient",
                max_restarts=MANY if backend == "resilient" else max_restarts,
            )
            before = runs[-1].outage_s if runs else 0.0
            storage.reset(job.name, outage_s=before or math.inf)
            run = Run(job)
            run.carry_out(context)
            run.read(storage)
            print(*run.told(), sep="\n", flush=True)
            runs.append(run)
    return runs


def main() -> int:
    """Run the jobs, and say what came of them."""
    parser = argparse.ArgumentParser(description="Two bad days, without and with the backend.")
    parser.add_argument("--fast", action="store_true", help="shorter, for tests")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    options = parser.parse_args()
    isolate()
    max_restarts = 1 if options.fast else 3
    logs = Path(tempfile.mkdtemp(prefix="elastic-restart-"))
    results = claims(run_all(logs, max_restarts), max_restarts)
    broken = sum(not holds for holds in results.values())
    print()
    if broken or options.keep:
        print(f"The logs are in {logs}")
    else:
        shutil.rmtree(logs, ignore_errors=True)
    for claim, holds in results.items():
        print(f"{'✓' if holds else '✗'} {claim}")
    whole = f"All {len(results)} claims hold."
    print(f"{broken} of {len(results)} claims do not hold." if broken else whole)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
