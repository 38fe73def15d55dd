# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A training job of two nodes whose agents are torch's own, with our rendezvous backend.

Agents are forked from the warm interpreter, and fork their workers: torch's agent and its launcher
are the real ones, and no start of a worker takes the seconds that an import does. Each start of a
worker leaves a line in a file, and the agents leave the reason of the end in another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_resilience.adapters.rendezvous_entry import resilient
from tests.faulty_filesystem import FaultPlan
from tests.lightning_job import Job, run_rank
from tests.ports import free_port


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.warm_python import Process, WarmPython


HANG_S = 150.0
"""No job of these tests takes nearly as long; longer than this is a hang."""

OPTIONS = {
    "keep_alive_interval": 2,
    # Tests of other files may keep an agent from running for seconds.
    "keep_alive_max_attempt": 20,
    "last_call_timeout": 1,
    "restart_base_delay_s": 0.2,
    "restart_max_delay_s": 0.4,
    "settle_s": 0.5,
    "linger_s": 10.0,
}
"""Options of the rendezvous, scaled down."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls one rank.

    Args:
        rank: The rank; None for all.
        at: Training step before which it happens, for the first start of the workers, the second,
            and so on; in later ones nothing happens.
        kind: What is raised; or the name of a signal that the process gets.
        to_agent: Whether it is the rank's agent that gets the signal, as from a scheduler.
        after: Path of a file that is waited for first; ``.waiting`` is appended to that of a file
            that says that it is.
    """

    rank: int | None
    at: tuple[int, ...]
    kind: str = "ValueError"
    to_agent: bool = False
    after: str = ""


class Befalls(lightning.pytorch.Callback):
    """Lets a fault happen.

    Args:
        fault: The fault.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Raise, or have the process told to stop."""
        fault, start = self._fault, _start_number()
        is_due = start <= len(fault.at) and trainer.global_step == fault.at[start - 1]
        if fault.rank not in {None, trainer.global_rank} or not is_due:
            return
        if fault.after:
            Path(f"{fault.after}.waiting").touch()
            while not Path(fault.after).exists():
                time.sleep(0.05)
        if fault.kind.startswith("SIG"):
            os.kill(os.getppid() if fault.to_agent else os.getpid(), signal.Signals[fault.kind])
            return
        errors: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
        message = f"the batch is bad, {time.time()}"
        raise errors[fault.kind](message)


def befall(trainer: Any, *, fault: Fault | None, disks: str) -> None:
    """Let a fault happen to a Trainer; where ``disks`` is a folder, each rank has a disk there."""
    if disks:
        os.environ["LIGHTNING_RESILIENCE_SPOOL_DIR"] = f"{disks}/{os.environ['RANK']}"
    if fault is not None:
        trainer.callbacks.insert(0, Befalls(fault))


def make_job(
    folder: str, fault: Fault | None = None, *, workers: int = 1, disks: str = "", **options: Any
) -> Job:
    """Make a job of two nodes, which goes on from its last checkpoint.

    Args:
        folder: Where checkpoints go.
        fault: What befalls it.
        workers: How many there are on each node.
        disks: Folder in which each rank has a disk of its own, as if it were alone on its node;
            empty where all share one.
        options: More options of the job.
    """
    trainer = {"devices": workers, "num_nodes": 2, **options.pop("trainer", {})}
    before = partial(befall, fault=fault, disks=disks)
    return Job(folder=folder, trainer=trainer, before=before, resume="last", **options)


def _start_number() -> int:
    return int(os.environ["LIGHTNING_RESILIENCE_INCARNATION"].partition("-")[0])


def run_worker(job: Job, home: str) -> None:
    """Note the start, and train."""
    # The agent's own, which a worker that is no fork does not have.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, start = os.environ["RANK"], _start_number()
    with Path(home, "starts").open("a", encoding="utf-8") as file:
        file.write(f"{start} {rank}\n")
    run_rank(job, f"{home}/report-{start}-{rank}.json")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an agent is started with.

    Args:
        options: Of the rendezvous.
        port: Of its store.
        workers: How many there are on each node.
    """

    options: Mapping[str, Any]
    port: int
    workers: int = 1


def run_agent(job: Job, home: str, setup: Setup) -> None:
    """Run one node's agent to its end."""
    os.setsid()
    with contextlib.suppress(ValueError):
        # Where the package is installed, torch has found it.
        rendezvous_handler_registry.register("resilient", resilient())
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=setup.workers,
        run_id="job",
        rdzv_backend="resilient",
        rdzv_endpoint=f"127.0.0.1:{setup.port}",
        rdzv_configs=dict(setup.options),
        max_restarts=20,
        monitor_interval=0.1,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, run_worker)(job, home)


@dataclass(kw_only=True)
class Agents:
    """Two agents that have been started.

    Args:
        home: Folder with logs and reports.
        port: Of the job's store.
        processes: One for each agent.
    """

    home: Path
    port: int
    processes: list[Process] = field(default_factory=list)

    def wait(self) -> list[int]:
        """Return the agents' exit statuses."""
        return [process.wait(HANG_S) for process in self.processes]

    @property
    def starts(self) -> list[int]:
        """How many workers were started, in the first start, the second, and so on."""
        lines = (self.home / "starts").read_text(encoding="utf-8").split("\n")
        numbers = [int(line.partition(" ")[0]) for line in lines if line]
        return [numbers.count(number) for number in range(1, max(numbers, default=0) + 1)]

    def until(self, done: Callable[[], bool]) -> None:
        """Return once ``done``; it is asked again and again."""
        self.processes[0].listen(done, within_s=HANG_S)
        assert done(), self.told()

    def reason(self, node: int) -> str:
        """Return the reason that an agent has left."""
        path = self.home / f"reason-{node}.json"
        return json.dumps(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ""

    def told(self) -> str:
        """Return all logs, for the message of a failed assertion."""
        return "\n".join(f"--- {each.log.name}\n{each.text()}" for each in self.processes)

    def end(self) -> None:
        """Leave nothing of them behind."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def start_agents(
    warm: WarmPython,
    job: Job,
    home: Path,
    *,
    plan: FaultPlan | None = None,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Agents:
    """Start two agents.

    Args:
        warm: Makes the processes.
        job: What their workers do.
        home: Folder for logs and reports.
        plan: The faults of the job's filesystem.
        workers: How many there are on each node.
        environment: More variables.
        options: More options of the rendezvous.
    """
    port = free_port()
    plan = plan or FaultPlan.write(home / "no-faults")
    variables = {**plan.environment, "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
    agents = Agents(home=home, port=port)
    for node in range(2):
        given = {**OPTIONS, **options, "termination_log": str(home / f"reason-{node}.json")}
        setup = Setup(options=given, port=port, workers=workers)
        log = home / f"agent-{node}.log"
        process = warm.start(run_agent, job, str(home), setup, log=log, environment=variables)
        agents.processes.append(process)
    return agents
