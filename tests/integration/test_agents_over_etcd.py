# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Real agents that meet in a real etcd, by either of torch's two backends for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.cli.releasing import Place, show
from tests.etcd_server import etcd
from tests.restarted_job import Fault, make_job


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.agents import Agents
    from tests.etcd_server import EtcdServer
    from tests.two_agents import Launch

    Make = Callable[..., Agents]


__all__ = ["etcd"]

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

WITHOUT = ("is_host", "keep_alive_interval", "keep_alive_max_attempt", "read_timeout")
"""Options that the backend ``etcd`` does not have."""


def job_in(
    etcd: EtcdServer, agents: Make, *, run_id: str, inner: str = "etcd-v2", **options: Any
) -> Agents:
    """Make the agents of a job that meet in an etcd."""
    left_out = {"is_host": None} if inner == "etcd-v2" else dict.fromkeys(WITHOUT)
    conf = {**left_out, "inner": inner, **options.pop("conf", {})}
    url = f"etcd://127.0.0.1:{etcd.port}/lightning-resilience/{run_id}"
    job: Agents = agents(port=etcd.port, run_id=run_id, store_url=url, conf=conf, **options)
    return job


def test_a_crash_is_one_restart_and_an_etcd_that_comes_back_ends_nothing(
    etcd: EtcdServer, agents: Make
) -> None:
    """One delay and one round for a crash; after an outage the agents find each other again."""
    job = job_in(etcd, agents, run_id="crash", plan={"1.1": "fail"})

    job.start_all()
    second = job.until_start(2)
    record, go = job.restarts(), job.go(job.rounds()[0][0].incarnation)
    etcd.kill()
    job.until(lambda: job.text().count("joining again in") >= 2)
    etcd.start()
    job.until(lambda: len(job.rounds()) == 3 and len(job.rounds()[-1]) == 2)
    after = job.restarts()
    job.finish()

    assert job.codes() == [0, 0]
    assert [len(each) for each in job.rounds()] == [2, 2, 2]
    assert {start.store for start in second} == {job.store_url}
    assert (record.restarts, go.number, go.cause) == (1, 1, "failed")
    assert job.text().count(f"joining again, {go.delay_s:.1f} s after it was agreed") >= 2
    assert after.restarts <= 2


def test_a_short_outage_restarts_nothing_and_a_permanent_error_is_one_attempt(
    etcd: EtcdServer, agents: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers go on while etcd is away for less than a node may be silent; 78 on both agents."""
    job = job_in(
        etcd,
        agents,
        run_id="permanent",
        conf={"keep_alive_max_attempt": 60},
        plan={"2.1": "raise:TypeError: no such option"},
    )

    job.start_all()
    job.until_start(1)
    etcd.kill()
    job.until(lambda: job.text().count("the rendezvous does not answer") >= 2)
    etcd.start()
    job.crash(1)

    assert job.codes() == [78, 78]
    assert [each[0].number for each in job.rounds()] == [1, 2]
    assert job.restarts().restarts == 1
    assert all("TypeError: no such option" in job.reason(node)["reason"] for node in range(2))
    place = Place(run_id=job.run_id, store=job.store_url, restarts=None)
    assert show(place, as_json=False) == 1
    assert "ended: 78" in capsys.readouterr().out


def test_the_older_backend_restarts_and_ends_alike(etcd: EtcdServer, agents: Make) -> None:
    """A crash is one round for all, and a permanent error the end for all."""
    job = job_in(
        etcd,
        agents,
        run_id="older",
        inner="etcd",
        plan={"1.1": "fail", "2.0": "raise:TypeError: no such option"},
    )

    job.start_all()

    assert job.codes() == [78, 78]
    assert [[start.number for start in each] for each in job.rounds()] == [[1, 1], [2, 2]]
    assert job.restarts().restarts == 1
    assert {start.store for start in job.starts()} == {job.store_url}


def test_workers_report_and_agree_by_way_of_etcd(
    etcd: EtcdServer, launch: Launch, tmp_path: Path
) -> None:
    """A training saves together, and its agents learn at which step it has failed, and why."""
    job = make_job(f"{tmp_path}/checkpoints", Fault(rank=1, at=(5,), kind="TypeError"), steps=8)

    agents = launch(job, port=etcd.port, inner="etcd-v2")

    assert agents.wait() == [78, 78], agents.told()
    assert agents.starts == [2]
    assert "failed first, after step 5, with TypeError: the batch is bad" in agents.reason(0)
    assert list((tmp_path / "checkpoints").rglob("*.ckpt"))
