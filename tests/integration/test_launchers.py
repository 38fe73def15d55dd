# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All ranks start from one checkpoint, whoever launched them and whichever way it is asked for.

Each pair of launcher and distribution runs once, and each way of asking under several of them.
While one job is looked at, the next ones have begun: most of what they do is to import and to wait.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.faulty_filesystem import FaultPlan
from tests.lightning_job import Job, launched, store_server
from tests.ports import free_port
from tests.single_rank import fit


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = "lightning.pytorch", "pytorch_lightning"
PATIENCE_S = 240.0
"""Several jobs at the same time, some of which import everything anew."""

AHEAD = 4
"""Jobs that run at the same time, of two or three processes each."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job.

    Args:
        launcher: Who makes its ranks.
        home: Name of the Lightning distribution.
        resume: The ``ckpt_path``.
    """

    launcher: str
    home: str
    resume: str | None

    def __str__(self) -> str:
        return f"{self.launcher} {self.home} {self.resume}"


CASES = [
    Case(launcher="torchrun", home=FIRST, resume="last"),
    Case(launcher="torchrun", home=SECOND, resume="hpc"),
    Case(launcher="srun", home=FIRST, resume=None),
    Case(launcher="srun", home=SECOND, resume="last"),
    Case(launcher="script", home=FIRST, resume="hpc"),
    Case(launcher="script", home=SECOND, resume="last"),
    Case(launcher="spawn", home=FIRST, resume="last"),
    Case(launcher="spawn", home=SECOND, resume="best"),
    Case(launcher="fork", home=FIRST, resume="best"),
    Case(launcher="fork", home=SECOND, resume="last"),
]


def run_in_child(job: Job, folder: str) -> None:
    """Run the program, which imports both distributions."""
    from tests.launched_job import run  # noqa: PLC0415 - not into the process of the tests

    run(job, folder)


class Started:
    """The processes of one job, and what they have left."""

    def __init__(self, case: Case, home: Path, checkpoint: Path) -> None:
        self.case = case
        self.home = home
        self.folder = f"faulty://{home}/checkpoints"
        self.root = f"faulty://{home}/root"
        self.plan = FaultPlan.write(home / "plan")
        for name in ("checkpoints", "root"):
            (home / name).mkdir()
        # An older one beside the right one, which is not the last in the order of the alphabet.
        for name in ("root/hpc_ckpt_9.ckpt", "root/hpc_ckpt_10.ckpt", "checkpoints/last.ckpt"):
            shutil.copy(checkpoint, home / name)
        self.waits: list[Callable[[], int]] = []
        self.program: subprocess.Popen[bytes] | None = None

    def end(self) -> None:
        """Leave no program behind, nor what it has started."""
        if self.program is not None and self.program.poll() is None:
            os.killpg(self.program.pid, signal.SIGKILL)
            self.program.wait()

    @property
    def job(self) -> Job:
        """What is trained."""
        is_process_maker = self.case.launcher in {"spawn", "fork"}
        strategy = {"strategy": f"ddp_{self.case.launcher}"} if is_process_maker else {}
        return Job(
            folder=self.folder,
            home=self.case.home,
            resume=self.case.resume,
            # The second rank of a script imports everything anew, beside all other jobs.
            group_timeout_s=PATIENCE_S / 2,
            trainer={"default_root_dir": self.root, **strategy},
        )

    @property
    def environment(self) -> dict[str, str]:
        """What every process has in its environment."""
        common = {"TMPDIR": str(self.home), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return {**self.plan.environment, **common, "PYTHONPATH": str(ROOT)}

    def told(self) -> str:
        """Return all logs, for the message of a failed assertion."""
        logs = sorted(self.home.glob("*.log"))
        return "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)


def start_in_warm(started: Started, warm: WarmPython, *own: dict[str, str]) -> None:
    """Start one process for each of these environments."""
    for rank, variables in enumerate(own):
        process = warm.start(
            run_in_child,
            started.job,
            str(started.home),
            log=started.home / f"{rank}.log",
            environment=started.environment | variables,
        )
        started.waits.append(partial(process.wait, PATIENCE_S))


def srun(rank: int, port: int) -> dict[str, str]:
    """Return what SLURM puts into the environment of a task."""
    return {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "training",
        "SLURM_JOB_ID": "4711",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start_script(started: Started) -> None:
    """Start the program; Lightning's launcher starts it again for the second rank."""
    (started.home / "job").write_bytes(pickle.dumps(started.job))
    command = [sys.executable, "-m", "tests.launched_job", str(started.home / "job")]
    command.append(str(started.home))
    environment = os.environ | started.environment | {"MASTER_PORT": str(free_port())}
    with (started.home / "0.log").open("wb") as log:
        started.program = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    started.waits.append(partial(started.program.wait, PATIENCE_S))


class Jobs:
    """The jobs of all cases, each started when its turn comes near."""

    def __init__(self, warm: WarmPython, checkpoint: Path, homes: Callable[[str], Path]) -> None:
        self._warm = warm
        self._checkpoint = checkpoint
        self._homes = homes
        self._started: dict[Case, Started] = {}
        self._servers = contextlib.ExitStack()

    def of(self, case: Case) -> Started:
        """Return the job of a case; it and those after it have begun."""
        at = CASES.index(case)
        for each in CASES[at : at + AHEAD]:
            if each not in self._started:
                self._started[each] = self._start(each)
        return self._started[case]

    def end(self) -> None:
        """Leave nothing behind."""
        self._servers.close()

    def _start(self, case: Case) -> Started:
        started = Started(case, self._homes(case.launcher), self._checkpoint)
        self._servers.callback(started.end)
        if case.launcher == "torchrun":
            port = self._servers.enter_context(store_server())
            known: dict[str, Any] = {"port": port, "run_id": uuid.uuid4().hex, "restarts": 0}
            start_in_warm(started, self._warm, *(launched(rank, 2, **known) for rank in (0, 1)))
        elif case.launcher == "srun":
            port = free_port()
            start_in_warm(started, self._warm, srun(0, port), srun(1, port))
        elif case.launcher == "script":
            start_script(started)
        else:
            start_in_warm(started, self._warm, {})
        return started


@pytest.fixture(scope="module")
def jobs(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Have a checkpoint that all jobs start from."""
    before = tmp_path_factory.mktemp("before")
    options = {"default_root_dir": before}
    fit(Job(folder=str(before), steps=2, ranks=1, options=None, trainer=options))
    made = Jobs(warm_python, before / "step=2.ckpt", tmp_path_factory.mktemp)
    yield made
    made.end()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_start_from_one_checkpoint(case: Case, jobs: Jobs) -> None:
    """Found by one rank, with its protocol, after the process group has come up."""
    from tests.launched_job import noted  # noqa: PLC0415 - after the processes have been started

    started = jobs.of(case)

    codes = [wait() for wait in started.waits]

    assert not any(codes), started.told()
    expected = {
        "last": (f"{started.folder}/last.ckpt", 2),
        "hpc": (f"{started.root}/hpc_ckpt_10.ckpt", 2),
        None: (f"{started.root}/hpc_ckpt_10.ckpt", 2),
        # A test takes no more than the weights from it.
        "best": (f"{started.folder}/step=4.ckpt", 0),
    }[case.resume]
    stage = "test" if case.resume == "best" else "fit"
    assert noted(started.home, stage) == [expected, expected], started.told()
    # Fetched once to the node that both ranks are on. What was copied here has no manifest, and is
    # looked at once before that; the best one is the job's own.
    name = expected[0].rpartition("/")[2]
    assert len(started.plan.calls("open", name=name)) == (1 if case.resume == "best" else 2)
