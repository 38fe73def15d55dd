# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs under a real torchrun, without and with a restart that it must not need."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import WAIT, Job


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

ROOT = Path(__file__).resolve().parents[2]
OUTAGE_S = 8.0
LEAVES_S = 15.0
"""Less than the 30 s after which torchrun kills a worker that does not go."""


class Launched:
    """A job under torchrun."""

    def __init__(self, job: Job, home: Path, plan: FaultPlan) -> None:
        self.plan = plan
        self.home = home
        (home / "job").write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=0"]
        command += [f"--log-dir={home / 'logs'}", "--redirects=3"]
        command += ["-m", "tests.lightning_job", str(home / "job"), str(home)]
        environment = os.environ | plan.environment
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(home)}
        environment |= {"GLOO_SOCKET_IFNAME": "lo"}
        with (home / "torchrun.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def text(self, rank: int) -> str:
        """Return what a rank has said."""
        logs = self.home.glob(f"logs/*/attempt_0/{rank}/*.log")
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def told(self) -> str:
        """Return all logs, for the message of a failed assertion."""
        agent = (self.home / "torchrun.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join([agent, self.text(0), self.text(1)])

    def until(self, done: Callable[[], bool], *, within_s: float = 100.0) -> None:
        """Return once ``done``; it is asked again and again."""
        until_s = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < until_s, self.told()
            assert self.process.poll() is None, self.told()
            time.sleep(0.05)

    def wait(self, within_s: float = 100.0) -> int:
        """Return torchrun's exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.told()) from None

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in map(int, children.read_text().split()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"LOCAL_RANK={rank}".encode() in variables:
                return pid
        raise AssertionError(self.told())

    def report(self, rank: int) -> dict[str, Any]:
        """Return the report of a rank that has ended."""
        found: dict[str, Any] = json.loads((self.home / f"report-{rank}.json").read_text())
        return found


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a job under torchrun, and leave nothing of it behind."""
    started = []

    def start(rule: Rule, **job_options: Any) -> Launched:
        job = Job(folder=f"faulty://{tmp_path}/checkpoints", **job_options)
        launched = Launched(job, tmp_path, FaultPlan.write(tmp_path / "plan", rule))
        started.append(launched)
        return launched

    yield start
    for launched in started:
        if launched.process.poll() is None:
            os.killpg(launched.process.pid, signal.SIGKILL)
            launched.process.wait()


def test_an_outage_longer_than_the_group_timeout_needs_no_restart(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """Under torchrun, too, both ranks wait for storage and finish."""
    launched = launch(Rule(operations=("put_file",), error="reset", lasting_s=OUTAGE_S))

    code = launched.wait()

    assert code == 0, launched.told()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")) == [
        "step=2.ckpt",
        "step=4.ckpt",
    ]
    histories = [launched.report(rank)["breakers"]["faulty://:write"]["history"] for rank in (0, 1)]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("who", ["the launcher", "a rank"])
@pytest.mark.parametrize(
    ("options", "waits", "peer_waits"),
    [
        pytest.param(WAIT, "save waits for", r"save \d+: waiting since", id="in a save"),
        # By default no save waits for storage, but the end of training does.
        pytest.param({}, "`Trainer.fit` stopped", "", id="at the end"),
    ],
)
def test_nobody_is_left_waiting_when_a_part_of_the_job_is_ended(
    who: str,
    options: dict[str, Any],
    waits: str,
    peer_waits: str,
    launch: Callable[..., Launched],
) -> None:
    """SIGTERM to torchrun, or the end of one rank, ends the rank that waits for storage."""
    launched = launch(Rule(operations=("put_file",), error="reset"), options=options)
    launched.until(lambda: waits in launched.text(0))
    launched.until(lambda: re.search(peer_waits, launched.text(1)) is not None)

    began_s = time.monotonic()
    if who == "the launcher":
        launched.process.send_signal(signal.SIGTERM)
    else:
        os.kill(launched.pid(1), signal.SIGKILL)
    code = launched.wait()

    assert code != 0
    assert time.monotonic() - began_s < LEAVES_S, launched.told()
    left = launched.report(0)
    assert left["error"] == "SIGTERMException", launched.told()
    assert (left["patched"], left["handlers"], left["threads"]) == ([], [], [])
