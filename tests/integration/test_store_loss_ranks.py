# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The store's server is killed under four processes that call, and comes back with nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.events import (
    BreakerChanged,
    LocalModeEnded,
    LocalModeEntered,
    ProbeEnded,
)
from lightning_resilience.core.records import BreakerRecord, decode
from tests.integration.contention_ranks import CONFIG, Part, StoreServer


if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.contention_ranks import Crew, Dependency, Report


pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

RANKS = range(4)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    """A store's server that may be killed."""
    running = StoreServer()

    yield running

    running.kill()


@pytest.fixture
def part(server: StoreServer, dependency: Dependency, request: pytest.FixtureRequest) -> Part:
    """What the ranks are in a test: they go alone once the store is away for a moment."""
    return Part(
        dependency=request.node.name,
        store_port=server.port,
        port=dependency.port,
        hosts=len(RANKS),
        store_patience_s=0.2,
        processes=len(RANKS),
    )


def shared_records(reports: list[Report]) -> list[BreakerRecord]:
    """What was written to the shared record of the breaker, in order of time."""
    changes = sorted(
        (change for report in reports for change in report.changes if "/breaker/" in change.key),
        key=lambda change: change.answered_at_s,
    )
    return [
        decode(BreakerRecord, change.raw, key=change.key) for change in changes if change.has_won
    ]


@pytest.mark.parametrize("collective", [True, False], ids=["collective", "single"])
def test_calls_go_on_locally_and_an_empty_store_is_rebuilt_one_epoch_later(
    crew: Crew, dependency: Dependency, part: Part, server: StoreServer, *, collective: bool
) -> None:
    """No call fails for the store, all ranks say that they are alone, and that they no longer are.

    The record of the empty store is closed, at a higher epoch than any that was seen, and holds
    nothing that was decided alone.
    """
    crew.do("begin", replace(part, collective=collective), ranks=RANKS)
    before = shared_records(crew.do("calls", 3, ranks=RANKS))

    server.kill()
    dependency.phase = "alone"
    alone = crew.do("calls_until", "LocalModeEntered", ranks=RANKS)
    alone_then = crew.do("calls", 2, ranks=RANKS)
    server.start()
    dependency.phase = "back"
    back = crew.do("calls_until", "LocalModeEnded", ranks=RANKS)
    after = crew.do("calls", 3, ranks=RANKS)

    ended = [each for report in (*alone, *alone_then, *back, *after) for each in report.calls]
    shared = shared_records(after)
    epochs = [record.epoch for record in shared]
    print(  # noqa: T201 - the figures of this test
        f"{len(dependency.of('call', 'alone'))} calls were made alone, "
        f"{dependency.peak('alone')} at once; shared epochs {epochs}"
    )
    assert [each.error for each in ended] == [""] * len(ended)
    assert len(dependency.of("call", "alone")) >= 2 * len(RANKS)
    assert all(len(report.emitted(LocalModeEntered)) == 1 for report in alone_then)
    assert all(report.emitted(LocalModeEntered)[0].share == 1 / len(RANKS) for report in alone_then)
    assert all(len(report.emitted(LocalModeEnded)) == 1 for report in after)
    assert not any(report.emitted(BreakerChanged) for report in after)
    assert shared[len(before) :], "nobody has rebuilt the record"
    assert shared[-1].epoch > max(record.epoch for record in before)
    assert {record.state for record in shared} == {"closed"}
    assert "local" not in {record.store_id for record in shared}
    assert dependency.peak("back") <= CONFIG.max_concurrent + len(RANKS)


def test_a_circuit_that_was_open_when_the_store_died_lets_nobody_through_before_a_probe(
    crew: Crew, dependency: Dependency, part: Part, server: StoreServer
) -> None:
    """Alone, every rank stays away until its own probe has succeeded; an empty store is open too.

    The dependency is well from the moment at which the store dies, so nothing but that rule keeps
    anybody away.
    """
    # As if each were the only one, so that each probes as soon as it is due.
    crew.do("begin", replace(part, processes=1), ranks=RANKS)
    dependency.judge = lambda _: False
    crew.tell("calls", 1, ranks=RANKS)
    dependency.wait_until(lambda: len(dependency.of("probe")) >= 1)
    server.kill()
    with dependency.changed:
        dependency.phase, dependency.judge = "alone", lambda _: True
    reports = crew.hear(RANKS)
    server.start()
    back = crew.do("calls_until", "LocalModeEnded", ranks=RANKS)

    print(  # noqa: T201 - the figures of this test
        f"alone: {len(dependency.of('probe', 'alone'))} probes and "
        f"{len(dependency.of('call', 'alone'))} calls, {dependency.peak('alone')} at once"
    )
    assert [ended.error for report in reports for ended in report.calls] == [""] * len(RANKS)
    for report in reports:
        calls = [r for r in dependency.of("call", "alone") if r.rank == report.rank]
        probes = [r for r in dependency.of("probe") if r.rank == report.rank and r.is_well]
        assert len(report.emitted(LocalModeEntered)) == 1
        assert [event.succeeded for event in report.emitted(ProbeEnded)][-1]
        assert probes[0].ended_at_s <= calls[0].began_at_s
    assert_it_was_rebuilt_open(back)


def assert_it_was_rebuilt_open(reports: list[Report]) -> None:
    """What the new store is given first is open, and only a probe of the job's closes it.

    Whoever comes first may have seen less than another, who then writes over it: so it is the
    record in the end that is above all that there was.
    """
    shared = shared_records(reports)
    print(f"{[(record.epoch, record.state) for record in shared]}")  # noqa: T201
    new = [record for record in shared if record.store_id != shared[0].store_id]
    old = [record for record in shared if record.store_id == shared[0].store_id]
    states = [record.state for record in new]
    assert states[0] == "open"
    assert set(states[: states.index("recovering")]) <= {"open", "half_open"}
    assert new[-1].epoch > max(record.epoch for record in old)
    assert "local" not in {record.store_id for record in shared}
