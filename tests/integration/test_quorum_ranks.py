# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Four hosts at one dependency: one with a broken link trips itself, and two trip the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.events import (
    BreakerChanged,
    DependencyAwaited,
    HostIsolated,
    HostRejoined,
    SlotAwaited,
)
from lightning_resilience.core.records import BreakerRecord, decode
from tests.integration.breaker_ranks import KEYS
from tests.integration.contention_ranks import Part


if TYPE_CHECKING:
    import torch.distributed as dist

    from tests.integration.contention_ranks import Crew, Dependency


pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

HOSTS = range(4)
BROKEN = 3
OTHERS = [host for host in HOSTS if host != BROKEN]


@pytest.fixture
def part(tcp_store: dist.TCPStore, dependency: Dependency, request: pytest.FixtureRequest) -> Part:
    """What the ranks are in a test: each a host, with a way of its own."""
    return Part(
        dependency=request.node.name,
        store_port=tcp_store.port,
        port=dependency.port,
        collective=False,
        hosts=len(HOSTS),
        processes=len(HOSTS),
    )


def shared(store: dist.TCPStore, part: Part) -> BreakerRecord:
    """The job's record now."""
    key = KEYS.breaker(part.dependency)
    return decode(BreakerRecord, store.get(key), key=key)


def test_a_host_with_a_broken_link_isolates_itself_and_rejoins(
    crew: Crew, dependency: Dependency, part: Part, tcp_store: dist.TCPStore
) -> None:
    """The others go on without waiting, the job's circuit stays closed, and the vote goes away."""
    crew.do("begin", part, ranks=HOSTS)
    dependency.judge = lambda request: request.rank != BROKEN
    crew.tell("calls", 1, ranks=[BROKEN])
    # Its second own probe: it has been alone for a whole open wait.
    dependency.wait_until(lambda: len(dependency.of("probe")) >= 2)
    others = crew.do("calls", 20, ranks=OTHERS)
    meanwhile = shared(tcp_store, part)
    probing = {request.rank for request in dependency.of("probe")}
    with dependency.changed:
        tried = len(dependency.of("call")) - 20 * len(OTHERS)
        dependency.judge = lambda _: True
    (healed,) = crew.hear([BROKEN])
    (rejoined,) = crew.do("calls", 3, ranks=[BROKEN])
    after = shared(tcp_store, part)

    print(  # noqa: T201 - the figures of this test
        f"{tried} calls of the host with the broken link, {len(dependency.of('probe'))} probes; "
        f"{sum(r.operations.total() for r in others)} store operations for {20 * len(OTHERS)} "
        "calls of the others"
    )
    assert (meanwhile.state, meanwhile.epoch, meanwhile.votes) == ("closed", 1, ("h3",))
    assert probing == {BROKEN}
    assert tried == part.config.trip_failures
    assert [e.attempts for report in others for e in report.calls] == [1] * 20 * len(OTHERS)
    for kind in (DependencyAwaited, SlotAwaited, HostIsolated, BreakerChanged):
        assert not any(report.emitted(kind) for report in others)
    assert [ended.error for ended in (*healed.calls, *rejoined.calls)] == [""] * 4
    assert [event.host for event in rejoined.emitted(HostIsolated)] == ["h3"]
    assert [event.host for event in rejoined.emitted(HostRejoined)] == ["h3"]
    assert (after.state, after.epoch, after.votes) == ("closed", 1, ())


def test_two_hosts_that_fail_trip_the_job_and_all_come_back(
    crew: Crew, dependency: Dependency, part: Part, tcp_store: dist.TCPStore
) -> None:
    """A quorum of two opens the circuit for everybody; when it heals, all four get through."""
    crew.do("begin", part, ranks=HOSTS)
    dependency.judge = lambda request: request.rank not in {2, 3}
    crew.tell("calls", 1, ranks=[2, 3])
    dependency.wait_until(lambda: len(dependency.of("probe")) >= 1)
    meanwhile = shared(tcp_store, part)
    with dependency.changed:
        dependency.judge = lambda _: True
    reports = crew.hear([2, 3])
    reports = [*crew.do("calls", 2, ranks=[0, 1]), *reports]
    after = crew.do("calls", 2, ranks=HOSTS)
    at_the_end = shared(tcp_store, part)

    history = [(entry.epoch, entry.state) for entry in at_the_end.history]
    print(f"{len(dependency.of('probe'))} probes, history {history}")  # noqa: T201
    assert meanwhile.state != "closed"
    assert (2, "open") in history
    assert "2 of 4 hosts voted" in at_the_end.history[1].reason
    assert [ended.error for report in reports for ended in report.calls] == [""] * 6
    assert [ended.error for report in after for ended in report.calls] == [""] * 8
    assert (at_the_end.state, at_the_end.votes) == ("closed", ())
