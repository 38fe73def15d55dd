# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Eight processes on a real store share one breaker, and one probe."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from lightning_resilience.core.breaker import LEGAL, BreakerState
from lightning_resilience.core.events import BreakerChanged, ProbeStarted
from tests.http_server import in_background
from tests.integration.breaker_ranks import (
    CONFIG,
    HANG_S,
    Dependency,
    DependencyServer,
    Job,
    Request,
    Seen,
)


if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

# Scheduling of eight processes on two cores.
SLACK_S = 3.0


@contextmanager
def running(ranks: int) -> Iterator[tuple[Job, Dependency, dist.TCPStore]]:
    """A store, a dependency that is ill, and a job that needs it."""
    store = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=HANG_S), wait_for_workers=False
    )  # fmt: skip
    dependency = Dependency()
    with DependencyServer(dependency) as server, in_background(server):
        job = Job(ranks, (store.port, server.server_address[1]))
        try:
            yield job, dependency, store
        finally:
            job.end()


def assert_one_story(reports: list[Seen]) -> None:
    """All read the same history, it is legal, and what each saw on the way is a part of it."""
    histories = [report.value for report in reports]
    assert all(history == histories[0] for history in histories)
    (history,) = histories[:1]
    for (epoch, state), (next_epoch, next_state) in pairwise(history):
        assert next_epoch == epoch + 1
        assert (BreakerState(state), BreakerState(next_state)) in LEGAL
    for report in reports:
        assert set(report.seen) <= set(history)
        assert list(report.seen) == sorted(report.seen)


def assert_one_probe_at_a_time(
    dependency: Dependency, reports: list[Seen], *, killed: int = 0
) -> None:
    """Counted at the dependency: no two probes overlap, and each has an epoch of its own."""
    epochs = [event.epoch for report in reports for event in report.emitted(ProbeStarted)]
    assert {request.at_once for request in dependency.probes()} == {1}
    assert len(epochs) == len(set(epochs))
    assert len(dependency.probes()) <= len(epochs) + killed


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_outage_is_tripped_probed_and_left_together(ranks: int) -> None:
    """One transition trips it, one probe at a time asks, and when it heals all get through.

    Requests that reach it meanwhile are the probes, for two ranks as for eight.
    """
    with running(ranks) as (job, dependency, _):
        job.tell("save")
        dependency.await_probes(2)
        healed_at_s = dependency.probes()[1].began_at_s
        dependency.well.set()
        saved = job.hear()
        told = job.do("history")

    assert [report.value for report in saved] == ["saved"] * ranks
    assert_one_story(told)
    assert_one_probe_at_a_time(dependency, told)

    trips = [epoch for report in told for epoch in report.trips()]
    assert len(trips) == 1
    opened = [next(epoch for epoch, state in report.seen if state == "open") for report in saved]
    assert min(opened) == trips[0]

    tripped_at_s = next(
        at
        for report in told
        for at, event in report.events
        if isinstance(event, BreakerChanged) and event.epoch == trips[0]
    )
    late = [
        request
        for request in dependency.requests
        if tripped_at_s + CONFIG.view_max_age_s < request.began_at_s < healed_at_s
    ]
    assert {request.kind for request in late} <= {"probe"}
    assert len(late) <= 2


def test_a_prober_that_is_killed_is_replaced_within_one_and_a_half_leases() -> None:
    """SIGKILL in the middle of a probe: another rank takes over, and seven get through."""
    with running(8) as (job, dependency, _):
        killed: list[int] = []

        def kill_first(request: Request) -> None:
            if not killed:
                killed.append(request.pid)
                os.kill(request.pid, signal.SIGKILL)

        dependency.on_probe = kill_first
        job.tell("save")
        dependency.await_probes(1)
        dependency.well.set()
        dependency.await_probes(2)
        saved = job.hear()
        told = job.do("history")

    first, second = dependency.probes()[:2]
    assert second.began_at_s - first.began_at_s <= 1.5 * CONFIG.probe_lease_s + SLACK_S
    assert second.began_at_s - first.began_at_s >= CONFIG.probe_lease_s - CONFIG.probe_timeout_s
    assert first.pid == killed[0] != second.pid
    assert [report.value for report in saved] == ["saved"] * 7
    assert_one_story(told)
    assert_one_probe_at_a_time(dependency, told, killed=1)
    assert any(event.taken_over for report in told for event in report.emitted(ProbeStarted))


def test_writers_of_equal_states_never_both_win_and_a_vanished_key_is_noticed() -> None:
    """Of eight that write one state from the same bytes one wins; from a lost key nobody."""
    with running(8) as (job, _, store):
        for turn in range(20):
            store.set(f"cell{turn}", "closed by nobody")
            reports = job.do("write", f"cell{turn}", b"closed by nobody", "open")
            outcomes = [report.value for report in reports]
            winners = [raw for won, _, raw in outcomes if won]
            assert len(winners) == 1
            assert {raw for _, _, raw in outcomes} == set(winners)
            assert store.get(f"cell{turn}") == winners[0]

        store.set("lost", "closed by nobody")
        store.delete_key("lost")
        reports = job.do("write", "lost", b"closed by nobody", "open")
        outcomes = [report.value for report in reports]

        assert outcomes == [(False, True, b"")] * 8
        assert not store.check(["lost"])
