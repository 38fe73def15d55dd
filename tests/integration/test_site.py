# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that share one served store: they stay away from an ill storage, and join, together."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.config import build
from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import ForcedOpen, ForceReleased
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import BreakerRecord, decode, encode
from lightning_resilience.core.site import SITE_RUN, name_at_site, site_config
from lightning_resilience.errors import StoreError
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import BREAKER, HANG_S, WAIT, Job, start, store_server


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.agents import Agents
    from tests.lightning_job import Running
    from tests.warm_python import WarmPython

    Make = Callable[..., Agents]
    from lightning_resilience.ports import SharedStore


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

READS, WRITES = "faulty://:read", "faulty://:write"
"""The first thing that a job asks of its storage is a read."""
SITE = Keys(run_id=SITE_RUN, incarnation="")
CONFIG = site_config(build(breaker.BreakerConfig, BREAKER))


@pytest.fixture
def place() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """URL of the store that the command serves, and its process."""
    command = [sys.executable, "-m", "lightning_resilience", "store", "serve"]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
        process.terminate()


def store_at(url: str) -> TorchStore:
    """A connection of the test's own."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return TorchStore.connect(host, int(port), timeout_s=HANG_S)


def read(store: Any, dependency: str, *, keys: Keys = SITE) -> BreakerRecord | None:
    """Return a breaker's record, if it is there."""
    key = keys.breaker(dependency)
    raw = store.get(key)
    return None if raw is None else decode(BreakerRecord, raw, key=key)


def states(record: BreakerRecord | None) -> list[str]:
    """Return the states that a breaker has gone through."""
    return [] if record is None else [entry.state for entry in record.history]


def history(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the states of a job's breaker, with their reasons."""
    return [(state, reason) for _, state, reason in report["breakers"][READS]["history"]]


def test_jobs_that_find_their_storage_ill_hold_up_a_third_and_all_come_back(
    warm_python: WarmPython, tmp_path: Path, place: tuple[str, subprocess.Popen[str]]
) -> None:
    """Two jobs open the site's circuit; one that would be well waits; each saves all in the end.

    In a job of several ranks the one that looks opens the circuit for all of them.
    """
    url, _ = place
    site = store_at(url)
    ill = FaultPlan.write(tmp_path / "ill", Rule(error="reset"))

    def begin(
        name: str, *, ranks: int = 1, port: int = 0, plan: FaultPlan | None = None
    ) -> Running:
        options = {**WAIT, "site_store": url, "run_id": name, "breaker": {"site_quorum": 2}}
        folder = f"faulty://{tmp_path / name}"
        job = Job(folder=folder, ranks=ranks, options=options, group_timeout_s=20.0)
        return start(warm_python, job, tmp_path / f"home-{name}", port=port, plan=plan)

    sick = [begin(name, plan=ill) for name in ("a", "b")]
    sick[0].until(
        lambda: "open" in states(read(site, name_at_site(READS))), what="the site's circuit opens"
    )
    with store_server() as port:
        third = begin("c", ranks=2, port=port)
        own = store_at(f"tcp://127.0.0.1:{port}")
        keys = Keys(run_id="c", incarnation="")
        third.until(lambda: "open" in states(read(own, READS, keys=keys)), what="the third is held")
        made_before_the_end = third.names()
        FaultPlan.write(ill.folder)
        reports = [report for job in (*sick, third) for report in job.wait()]
        own.close()
    found = read(site, name_at_site(READS))
    site.close()

    assert [report["code"] for report in reports] == [0, 0, 0, 0]
    assert [job.names() for job in (*sick, third)] == [job.job.expected for job in (*sick, third)]
    assert made_before_the_end == []
    assert found is not None
    assert found.state == "closed"
    held = [reason for report in reports for state, reason in history(report) if state == "open"]
    assert any(reason.startswith("the circuit of the site is") for reason in held)
    # Nothing of the third job's own was struck, so it can only have been held.
    opened = [reason for state, reason in history(reports[2]) if state == "open"]
    assert all(reason.startswith("the circuit of the site is") for reason in opened)


def change(store: Any, dependency: str, event: breaker.BreakerInput) -> None:
    """Do what an operator does to the site's circuit."""
    found = read(store, dependency)
    before = b"" if found is None else encode(found)
    record = found or breaker.initial(CONFIG, store_id="store", writer="operator's first")
    stepped = breaker.step(CONFIG, record, event, dependency=dependency, writer=f"w{record.epoch}")
    after = encode(stepped.record)
    assert store.compare_and_set(SITE.breaker(dependency), before, after) == after


def test_agents_do_not_join_while_the_sites_circuit_is_open_and_do_without_the_site(
    agents: Make, tmp_path: Path, place: tuple[str, subprocess.Popen[str]]
) -> None:
    """What an operator holds open nobody joins; let go, one probe is enough; gone, nobody waits."""
    url, process = place
    site = store_at(url)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    plan = FaultPlan.write(tmp_path / "faults")
    name = name_at_site(WRITES)
    change(site, name, ForcedOpen(reason="maintenance"))
    conf = {**BREAKER, "storage": f"faulty://{folder}", "site_store": url}
    job = agents(conf=conf, plan={"*": "wait"})

    job.start_all(environment=plan.environment)
    own, keys = job.store(), Keys(run_id=job.run_id, incarnation="")
    job.until(lambda: _held(own, keys))
    joined_while_held = job.starts()
    change(site, name, ForceReleased(reason="done"))
    job.until_start(1)
    released = read(site, name)
    process.terminate()
    process.wait(HANG_S)
    job.crash(1)
    job.until_start(2)
    job.finish()

    assert job.codes() == [0, 0]
    assert joined_while_held == []
    assert states(released)[-3:] == ["open", "half_open", "closed"]
    assert "the site's store is away" in job.text()
    own.close()
    site.close()


def _held(store: SharedStore, keys: Keys) -> bool:
    try:
        record = read(store, WRITES, keys=keys)
    except StoreError:
        # The agent that hosts it has only begun.
        return False
    return record is not None and record.upstream > 0
