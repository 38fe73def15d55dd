# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Real agents of torch's on one machine, with the rendezvous backend ``resilient``.

Each is a process forked from a warm one, and runs torch's own launcher; its workers are plain
programs (``agent_worker.py``) that note what they were started with. Times are scaled down.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lightning_resilience.adapters.store_discovery import open_url
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.quota import RestartRecord
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import GoRecord
from tests.ports import free_port
from tests.warm_python import ROOT


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_resilience.ports import SharedStore
    from tests.warm_python import Process, WarmPython


WITHIN_S = 150.0
"""Against a hang only: a loaded machine is slow."""
WORKER = str(Path(__file__).with_name("agent_worker.py"))
TOLD_TO_STOP = 143
"""Status of an agent that a test has told to stop."""
CONF: Mapping[str, Any] = {
    "keep_alive_interval": 1,
    # A busy machine may keep a thread from its heartbeat for seconds.
    "keep_alive_max_attempt": 8,
    "last_call_timeout": 1,
    "read_timeout": 5,
    "restart_base_delay_s": 0.5,
    "restart_max_delay_s": 1.0,
    "settle_s": 0.3,
    "linger_s": 30,
}


class Start(msgspec.Struct, frozen=True):
    """One start of one worker, as it has noted it."""

    node: int
    rank: int
    world: int
    incarnation: str
    store: str
    count: int
    at_s: float
    pid: int

    @property
    def number(self) -> int:
        """Which start of the workers it is."""
        return int(self.incarnation.partition("-")[0])


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one agent is started with: what a user writes on a command line, or in a program."""

    endpoint: str
    run_id: str
    nodes: str
    max_restarts: int
    conf: dict[str, Any]
    program: tuple[str, ...]
    is_library: bool = False
    local_addr: str = "127.0.0.1"
    before: tuple[str, ...] = ()
    """Names of functions ``module:function`` that are called first, without arguments."""


def launch(asked: Launch, folder: str) -> None:
    """Run an agent, in a process of its own."""
    sys.argv = ["torchrun"]
    tempfile.tempdir = None
    logging.getLogger("torch.distributed.elastic").setLevel(logging.INFO)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True)
    register_backend(Path(folder))
    for name in asked.before:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()
    if asked.is_library:
        _launch_from_program(asked)
        return
    from torch.distributed.run import main  # noqa: PLC0415 - in the agent's process only

    conf = ",".join(f"{name}={value}" for name, value in asked.conf.items())
    main(
        [
            f"--nnodes={asked.nodes}",
            "--nproc-per-node=1",
            f"--max-restarts={asked.max_restarts}",
            "--rdzv-backend=resilient",
            f"--rdzv-endpoint={asked.endpoint}",
            f"--rdzv-id={asked.run_id}",
            f"--rdzv-conf={conf}",
            f"--local-addr={asked.local_addr}",
            *asked.program,
        ]
    )


def shift_clock() -> None:
    """Let the wall clock of this process be half a minute ahead, for all that a rendezvous is."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: PLC0415

    from lightning_resilience.adapters import rendezvous_inner  # noqa: PLC0415

    def now(tz: dt.tzinfo) -> dt.datetime:
        return dt.datetime.now(tz) + dt.timedelta(seconds=30)

    # Not a class of its own: what it returns is pickled for the other nodes.
    clock: Any = SimpleNamespace(now=now)
    module: Any = dynamic_rendezvous
    module.datetime = clock
    inner: Any = rendezvous_inner
    inner.dt = SimpleNamespace(datetime=clock, timedelta=dt.timedelta, timezone=dt.timezone)


def die_when_joined() -> None:
    """Let this process be killed as soon as the round that it has joined is whole."""
    from lightning_resilience.adapters.rendezvous_connection import (  # noqa: PLC0415
        Connection,
    )

    join = Connection.join

    def joined(self: Connection) -> Any:
        join(self)
        os.kill(os.getpid(), signal.SIGKILL)

    patched: Any = Connection
    patched.join = joined


def come_too_late() -> None:
    """Let this process come to the first round that it joins once the others have given it up."""
    from lightning_resilience.adapters.rendezvous_connection import (  # noqa: PLC0415
        Connection,
    )
    from lightning_resilience.protocols.incarnation import ROUND_KEY  # noqa: PLC0415

    join = Connection.join
    patched: Any = Connection

    def joined(self: Connection) -> Any:
        patched.join = join
        info = join(self)
        names = self.names(info, before="")
        assert names.driver.store.wait_for(ROUND_KEY, WITHIN_S)
        names.close()
        return info

    patched.join = joined


def _launch_from_program(asked: Launch) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    least, _, most = asked.nodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(least),
        max_nodes=int(most or least),
        nproc_per_node=1,
        run_id=asked.run_id,
        rdzv_backend="resilient",
        rdzv_endpoint=asked.endpoint,
        rdzv_configs=dict(asked.conf),
        max_restarts=asked.max_restarts,
        local_addr=asked.local_addr,
    )
    elastic_launch(config, sys.executable)("-u", *asked.program)


def register_backend(folder: Path) -> None:
    """Let torch find the entry point as after an installation, where it has not found it already.

    A checkout that was installed before it had the entry point has none in its metadata. Then what
    ``pyproject.toml`` says is written as metadata of its own.
    """
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        registry,
        rendezvous_handler_registry as handlers,
    )

    if "resilient" in handlers._registry:
        return
    home = folder / "entry_point-0.dist-info"
    home.mkdir(exist_ok=True)
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-point\nVersion: 0\n")
    found = re.search(
        r'\[project\.entry-points\."(torchrun\.handlers)"\]\n((?:\S+ = .*\n)+)',
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
    )
    assert found is not None
    (home / "entry_points.txt").write_text(f"[{found[1]}]\n{found[2]}".replace('"', ""))
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    registry._register_out_of_tree_handlers()


@dataclass(kw_only=True)
class Agents:
    """The agents of one job, seen from a test.

    Args:
        warm: What they are forked from.
        folder: Of the job.
        plan: What workers do; see ``agent_worker``.
        nodes: As ``--nnodes``.
        conf: More options than ``CONF``.
        max_restarts: Torch's own limit, of each agent.
        run_id: Name of the job.
        port: Of the store; a free one.
        store_url: Of the job's records; None for those of the store at ``port``.
    """

    warm: WarmPython
    folder: Path
    plan: Mapping[str, str] = field(default_factory=dict)
    nodes: str = "2"
    conf: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 10
    run_id: str = "job"
    port: int = field(default_factory=free_port)
    store_url: str | None = None

    def __post_init__(self) -> None:
        self.agents: dict[int, Process] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_plan(self.plan)

    def write_plan(self, plan: Mapping[str, str]) -> None:
        """Say what workers do that start from now on."""
        text = json.dumps({"*": "wait", **plan})
        fresh = self.folder / "plan.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.folder / "plan.json")

    def start(
        self,
        node: int,
        *,
        is_host: bool | None = None,
        environment: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        **launch_options: Any,
    ) -> Process:
        """Start an agent; node 0 hosts the store unless it is said otherwise."""
        hosts = node == 0 if is_host is None else is_host
        conf = {
            **CONF,
            "is_host": int(hosts),
            "termination_log": self.folder / f"reason{node}.json",
            **self.conf,
        }
        asked = Launch(
            **{
                "endpoint": endpoint or f"127.0.0.1:{self.port}",
                "run_id": self.run_id,
                "nodes": self.nodes,
                "max_restarts": self.max_restarts,
                "conf": {name: str(value) for name, value in conf.items() if value is not None},
                "program": (WORKER, str(self.folder)),
                **launch_options,
            }
        )
        own = self.folder / f"node{node}"
        own.mkdir(exist_ok=True)
        variables = {"TEST_NODE": str(node), "TMPDIR": str(own), "LOGLEVEL": "INFO"}
        self.agents[node] = self.warm.start(
            launch,
            asked,
            str(own),
            log=self.folder / f"agent{node}.log",
            environment={**variables, **(environment or {})},
        )
        return self.agents[node]

    def start_all(self, **options: Any) -> None:
        """Start as many agents as there may be."""
        for node in range(int(self.nodes.rpartition(":")[2])):
            self.start(node, **options)

    def codes(self) -> list[int]:
        """Return the exit statuses of all agents, once they have ended."""
        return [agent.wait(WITHIN_S) for _, agent in sorted(self.agents.items())]

    def starts(self) -> list[Start]:
        """Return what workers have noted, the earliest first."""
        path = self.folder / "starts.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [msgspec.json.decode(line, type=Start) for line in lines]

    def rounds(self) -> list[list[Start]]:
        """Return the starts of workers, those of one incarnation together, in rank order."""
        found: dict[str, list[Start]] = {}
        for start in self.starts():
            found.setdefault(start.incarnation, []).append(start)
        return [sorted(each, key=lambda start: start.rank) for each in found.values()]

    def until(self, done: Callable[[], Any], *, within_s: float = WITHIN_S) -> None:
        """Wait until ``done``."""
        ends_at_s = time.monotonic() + within_s
        while not done():
            failed = [agent.code for agent in self.agents.values() if agent.code not in {None, 0}]
            if time.monotonic() >= ends_at_s or set(failed) - {-signal.SIGKILL, TOLD_TO_STOP}:
                message = f"agents have ended with {failed}, or it was long:\n{self.text()}"
                raise AssertionError(message)
            self.warm.listen(lambda: False, within_s=0.05)

    def until_start(self, number: int, *, size: int | None = None) -> list[Start]:
        """Wait until a start of the workers has all of them, and return these."""
        found: list[Start] = []

        def is_whole() -> bool:
            for each in self.rounds():
                if each[0].number == number and len(each) == (size or each[0].world):
                    found[:] = each
            return bool(found)

        self.until(is_whole)
        return found

    def finish(self) -> None:
        """Let workers that wait end well."""
        (self.folder / "finish").touch()

    def text(self) -> str:
        """Return all that the agents have logged."""
        return "\n".join(
            f"--- node {node}\n{agent.text()}" for node, agent in sorted(self.agents.items())
        )

    def reason(self, node: int) -> dict[str, Any]:
        """Return what the reason file of an agent says."""
        path = self.folder / f"reason{node}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def kill(self, node: int, *, with_workers: bool = True) -> None:
        """Kill an agent, and its workers, as a node that loses its power."""
        agent = self.agents[node]
        workers = children_of(agent.pid) if with_workers else []
        for pid in (agent.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait(WITHIN_S)

    def crash(self, node: int) -> None:
        """Kill the worker of an agent."""
        for pid in children_of(self.agents[node].pid):
            os.kill(pid, signal.SIGKILL)

    def store(self) -> SharedStore:
        """Return a connection of the test's own to the job's store."""
        return open_url(self.store_url or f"tcp://127.0.0.1:{self.port}", timeout_s=WITHIN_S)

    def restarts(self) -> RestartRecord:
        """Return the record of restarts, as it is in the store now."""
        store = self.store()
        try:
            key = Keys(run_id=self.run_id, incarnation="").restarts
            raw = store.get(key)
            assert raw is not None
            return decode(RestartRecord, raw, key=key)
        finally:
            store.close()

    def go(self, incarnation: str) -> GoRecord:
        """Return what agents have agreed upon after an incarnation."""
        store = self.store()
        try:
            key = Keys(run_id=self.run_id, incarnation=incarnation).joint("go", 0)
            raw = store.get(key)
            assert raw is not None
            return decode(GoRecord, raw, key=key)
        finally:
            store.close()

    def close(self) -> None:
        """End whatever still runs."""
        left = {start.pid for start in self.starts()}
        for node, agent in self.agents.items():
            if agent.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent.pid, signal.SIGCONT)
                self.kill(node)
        for pid in left:
            with contextlib.suppress(OSError):
                if WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that still are there."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(each) for each in path.read_text().split()]
    return found


@pytest.fixture
def agents(warm_python: WarmPython, tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    """Make the agents of a job; what is left of them ends with the test."""
    made: list[Agents] = []

    def make(**options: Any) -> Agents:
        name = f"job{len(made)}"
        made.append(Agents(**{"warm": warm_python, "folder": tmp_path / name, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()
