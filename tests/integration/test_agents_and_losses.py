# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Real agents that lose something: the host of the store, or the storage of the job."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.breaker import BreakerState
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import BreakerRecord, decode, encode
from tests.agents import WITHIN_S
from tests.faulty_filesystem import FaultPlan, Rule


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.agents import Agents

    Make = Callable[..., Agents]


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

BREAKER = {
    "open_for_s": 4,
    "max_open_for_s": 4,
    "view_max_age_s": 1,
    "probe_timeout_s": 1,
    "probe_lease_s": 3.5,
}
WRITES = "faulty://:write"


def test_the_host_of_the_store_comes_back(agents: Make) -> None:
    """The other agent finds it at the same address, fills the store again, and the job goes on."""
    job = agents(conf={"keep_alive_max_attempt": 3, "read_timeout": 2}, plan={"1.1": "fail"})
    job.start_all()
    job.until_start(2)

    job.kill(0)
    job.start(0)
    job.until(lambda: len(job.rounds()) == 3 and len(job.rounds()[-1]) == 2)
    record = job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert record.restarts == 2
    assert [each.cause for each in record.charges] == ["failed", "left"]


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
def test_the_host_of_the_store_never_comes_back(agents: Make, *, is_frozen: bool) -> None:
    """The other agent ends when it was enough, and says that a scheduler may try again."""
    conf = {"keep_alive_max_attempt": 2, "read_timeout": 1, "join_timeout": 4}
    job = agents(conf=conf)
    job.start_all()
    job.until_start(1)

    if is_frozen:
        # It accepts, and answers nobody.
        os.kill(job.agents[0].pid, signal.SIGSTOP)
    else:
        job.kill(0)
    code = job.agents[1].wait(150)
    job.kill(0)

    assert code == 160
    reason = job.reason(1)
    assert (reason["name"], reason["may_start_again"]) == ("outage", True)
    assert "could not join at 127.0.0.1:" in reason["reason"]


def test_a_node_dies_when_it_has_just_joined(agents: Make) -> None:
    """Torch's agents wait for it to give ranks: the round is made anew before they do."""
    job = agents(conf={"keep_alive_max_attempt": 5})

    job.start(0)
    job.start(1, before=("tests.agents:die_when_joined",))
    job.agents[1].wait(WITHIN_S)
    job.start(1)
    job.until_start(1, size=2)
    record = job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert job.text().count("in a world of size 2") > 2
    assert record.restarts == 0


@pytest.mark.parametrize("late", [0, 1], ids=["node_0", "another"])
def test_a_node_comes_late_to_a_round_that_is_complete(agents: Make, *, late: int) -> None:
    """The others have waited for long enough: all begin anew at once, in the same store."""
    job = agents(conf={"keep_alive_max_attempt": 5})

    for node in range(2):
        job.start(node, before=("tests.agents:come_too_late",) if node == late else ())
    job.until_start(1, size=2)
    record = job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert [len(each) for each in job.rounds()] == [2]
    assert record.restarts == 0
    assert job.text().count("has to be made anew") == 2
    assert "DistNetworkError" not in job.text()


def open_circuit(job: Agents) -> None:
    """Open the circuit of the job's storage, as a trip of its workers does."""
    record = BreakerRecord(
        epoch=7, generation=1, state="open", limit=16, open_s=4.0, reason="reset", writer="test"
    )
    store = job.store()
    store.set(Keys(run_id=job.run_id, incarnation="").breaker(WRITES), encode(record))
    store.close()


def circuit(job: Agents) -> BreakerRecord:
    """Return the record of that circuit."""
    key = Keys(run_id=job.run_id, incarnation="").breaker(WRITES)
    store = job.store()
    raw = store.get(key)
    store.close()
    assert raw is not None
    return decode(BreakerRecord, raw, key=key)


def on_storage(agents: Make, plan: FaultPlan, **conf: float) -> Agents:
    """Start two agents of a job on storage that does as ``plan`` says, with an open circuit."""
    folder = plan.folder.parent / "checkpoints"
    folder.mkdir()
    job = agents(conf={**BREAKER, "storage": f"faulty://{folder}", **conf})
    job.start_all(environment=plan.environment)
    job.until_start(1)
    open_circuit(job)
    return job


def test_nobody_joins_while_the_storage_is_ill(agents: Make, tmp_path: Path) -> None:
    """The restart waits until one probe has found it well, and that wait costs no quota."""
    plan = FaultPlan.write(tmp_path / "faults", Rule(error="endpoint", lasting_s=3))
    job = on_storage(agents, plan)

    job.crash(1)
    job.until(lambda: len(job.rounds()) == 2)
    found, record = circuit(job), job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert found.state in {BreakerState.RECOVERING.value, BreakerState.CLOSED.value}
    states = [each.state for each in found.history]
    assert states.index("half_open") < len(states) - 1
    assert record.restarts == 1


def test_storage_that_stays_ill_ends_the_job(agents: Make, tmp_path: Path) -> None:
    """With the status that lets a scheduler try again later, on every node."""
    plan = FaultPlan.write(tmp_path / "faults", Rule(error="endpoint"))
    job = on_storage(agents, plan, gate_deadline_s=5)

    job.crash(1)

    assert job.codes() == [160, 160]
    assert len(job.rounds()) == 1
    assert "gate_deadline_s=5" in job.reason(0)["reason"]
    assert job.reason(0)["reason"] == job.reason(1)["reason"]
