# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Eight processes crowd one dependency: never more in it than the limit, and nobody is stuck.

The figures are printed (``pytest -s``): most calls at once, requests, operations of the store.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker import BreakerState
from lightning_resilience.core.events import LocalModeEntered, SlotForgiven
from lightning_resilience.core.records import BreakerRecord, SlotRecord, decode
from lightning_resilience.protocols.circuit_memory import Limits
from tests.integration.breaker_ranks import KEYS
from tests.integration.contention_ranks import CONFIG, Part


if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

    from tests.integration.contention_ranks import Change, Crew, Dependency, Report


pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

RANKS = 8
LIMIT = CONFIG.max_concurrent
ADMISSION = AdmissionConfig(slot_lease_s=1.6, beat_every_s=0.2)
# Scheduling of eight processes on two cores.
SLACK_S = 3.0


@pytest.fixture
def part(tcp_store: dist.TCPStore, dependency: Dependency, request: pytest.FixtureRequest) -> Part:
    """What the ranks are in a test, with records of its own."""
    return Part(
        dependency=request.node.name,
        store_port=tcp_store.port,
        port=dependency.port,
        limits=Limits(admission=ADMISSION),
    )


@contextlib.contextmanager
def cells(part: Part, number: int = LIMIT) -> Iterator[Cells]:
    """The slots of a part's dependency, to be read."""
    store = TorchStore.connect("127.0.0.1", part.store_port)
    try:
        yield Cells(store, part.dependency, number)
    finally:
        store.close()


class Cells:
    """The slots of a dependency."""

    def __init__(self, store: TorchStore, dependency: str, number: int) -> None:
        self._store = store
        self._keys = [KEYS.slot(dependency, index) for index in range(number)]

    def raw(self) -> list[bytes | None]:
        """Their bytes now."""
        return [self._store.get(key) for key in self._keys]

    def records(self) -> list[SlotRecord]:
        """What they say; a slot that nobody has used is free."""
        return [
            decode(SlotRecord, raw, key=key) if raw else SlotRecord(writer="")
            for key, raw in zip(self._keys, self.raw(), strict=True)
        ]

    def held(self) -> int:
        """How many are held."""
        return sum(bool(record.holder) for record in self.records())


def changes(reports: list[Report]) -> list[tuple[Change, BreakerRecord]]:
    """All changes of the breaker's record, in the order of their epochs."""
    written = {
        change.raw: (change, decode(BreakerRecord, change.raw, key=change.key))
        for report in reports
        for change in report.changes
        if change.has_won and "/breaker/" in change.key
    }
    return sorted(written.values(), key=lambda each: (each[1].epoch, each[0].sent_at_s))


def tell_figures(dependency: Dependency, reports: list[Report], *, calls: int) -> None:
    """Print what was counted."""
    operations = sum((report.operations for report in reports), start=type(reports[0].operations)())
    phases = dict.fromkeys(request.phase for request in dependency.requests)
    for phase in phases:
        print(  # noqa: T201 - the figures of this test
            f"{phase or 'all'}: {len(dependency.of('call', phase))} calls and "
            f"{len(dependency.of('probe', phase))} probes reached it, "
            f"{dependency.peak(phase)} calls at once"
        )
    print(  # noqa: T201 - the figures of this test
        f"store operations: {operations.total()} of {len(reports)} callers for {calls} calls: "
        f"{operations.total() / calls:.1f} a call, {dict(operations)}"
    )


def test_the_limit_holds_before_an_outage_during_the_ramp_and_after_it(
    crew: Crew, dependency: Dependency, part: Part
) -> None:
    """Collective calls in flight never exceed the record's limit; the outage sees a few requests.

    After a probe the first call is alone, and no more are let in than the limit of any record that
    had been written by then.
    """
    crew.do("begin", part)
    dependency.phase, dependency.lasts_s = "before", 0.03
    crew.do("calls", 5)

    dependency.phase, dependency.judge = "outage", lambda _: False
    crew.tell("calls", 5)
    dependency.wait_until(lambda: len(dependency.of("probe")) >= 1)
    with dependency.changed:
        dependency.phase, dependency.judge = "ramp", lambda _: True
    reports = crew.hear()
    dependency.phase = "after"
    reports = crew.do("calls", 5)

    tell_figures(dependency, reports, calls=RANKS * 15)
    assert all(ended.error == "" for report in reports for ended in report.calls)
    assert dependency.peak("before") == LIMIT
    assert dependency.peak("outage") <= LIMIT
    assert len(dependency.of("call", "outage")) <= 2 * LIMIT + RANKS
    assert dependency.peak("after") <= LIMIT
    assert_the_ramp_was_kept(dependency, reports)


def assert_the_ramp_was_kept(dependency: Dependency, reports: list[Report]) -> None:
    """In flight at any time: at most the highest limit that had been written since the probe."""
    records = changes(reports)
    states = [record.state for _, record in records]
    assert states.count(BreakerState.OPEN.value) >= 1
    began = next(
        index
        for index, (before, after) in enumerate(pairwise(records), start=1)
        if before[1].state == "half_open" and after[1].state == "recovering"
    )
    ramp = records[began:]
    limits = [record.limit for _, record in ramp]
    print(f"limits of the ramp: {limits}")  # noqa: T201 - the figures of this test
    assert limits == [1, 2, 4]
    for request in dependency.of("call", "ramp"):
        written = [r.limit for change, r in ramp if change.sent_at_s <= request.began_at_s]
        assert written, "a call came before the probe had been answered"
        assert request.at_once <= max(written)


def test_a_slot_whose_holder_is_killed_in_its_call_is_forgiven(
    crew: Crew, dependency: Dependency, part: Part
) -> None:
    """SIGKILL in the only slot: another is let in within 1.5 leases of the death, and all get in.

    The exact bound is held where no time passes but the clock's; here, two cores add their delay.
    """
    part = replace(part, config=replace(CONFIG, max_concurrent=1))
    crew.do("begin", part)
    dependency.gate.clear()
    crew.tell("calls", 1, ranks=[0])
    dependency.wait_until(lambda: len(dependency.inside()) == 1)
    others = range(1, RANKS)
    crew.tell("calls", 1, ranks=others)

    crew.kill(0)
    dependency.wait_until(lambda: len(dependency.requests) == 2)
    dependency.gate.set()
    reports = crew.hear(others)
    crew.renew(0)

    first, second = dependency.requests[:2]
    waited_s = second.began_at_s - first.ended_at_s
    tell_figures(dependency, reports, calls=RANKS - 1)
    print(f"forgiven {waited_s:.2f} s after the death, lease {ADMISSION.slot_lease_s} s")  # noqa: T201
    assert ADMISSION.slot_lease_s / 2 <= waited_s <= 1.5 * ADMISSION.slot_lease_s + SLACK_S
    assert {request.at_once for request in dependency.requests} == {1}
    assert sum(len(report.emitted(SlotForgiven)) for report in reports) == 1
    assert sorted(request.rank for request in dependency.requests) == list(range(RANKS))


# A holder whose beats are rare has made none when it comes back, and leaves at once.
LATE = {"beat": ADMISSION, "leaving": AdmissionConfig(slot_lease_s=300.0, beat_every_s=50.0)}


@pytest.mark.parametrize("late", LATE)
def test_a_holder_that_stood_still_past_its_lease_changes_nothing(
    crew: Crew, dependency: Dependency, part: Part, late: str
) -> None:
    """Its late beat and its late leaving do not touch the slot of whoever has it now."""
    part = replace(part, config=replace(CONFIG, max_concurrent=1))
    crew.do("begin", replace(part, limits=Limits(admission=LATE[late])), ranks=[0])
    crew.do("begin", part, ranks=[1])
    dependency.gate.clear()
    crew.tell("calls", 1, ranks=[0])
    dependency.wait_until(lambda: len(dependency.inside()) == 1)
    crew.stop(0)
    crew.tell("calls", 1, ranks=[1])
    dependency.wait_until(lambda: len(dependency.inside()) == 2)

    with cells(part, 1) as slots:
        # The new holder stands still as well, so that every change would be the old one's.
        crew.stop(1)
        before = slots.raw()
        back_at_s = time.monotonic()
        crew.go_on(0)
        dependency.gate.set()
        (old,) = crew.hear([0])
        after = slots.raw()
        crew.go_on(1)
        (new,) = crew.hear([1])
        at_the_end = slots.held()

    tried = [change for change in old.changes if change.sent_at_s > back_at_s]
    print(f"tried when it came back: {tried}")  # noqa: T201 - the figures of this test
    assert tried, "no late beat or leaving was even tried"
    assert not any(change.has_won for change in tried)
    assert before == after
    assert [ended.error for ended in (*old.calls, *new.calls)] == ["", ""]
    assert at_the_end == 0


def test_the_only_caller_of_a_ramp_is_killed_and_the_ramp_goes_on(
    crew: Crew, dependency: Dependency, part: Part
) -> None:
    """The one call that a probe lets in dies with its process: its slot is forgiven, all get in."""
    crew.do("begin", part)
    dependency.judge = lambda request: request.kind == "probe"
    crew.tell("calls", 1)
    dependency.wait_until(lambda: len(dependency.of("probe")) == 1)
    dependency.gate.clear()
    dependency.wait_until(lambda: len(dependency.inside()) == 1 and is_after_the_probe(dependency))
    with dependency.changed:
        dependency.judge = lambda _: True
    victim = dependency.inside()[0].rank
    crew.kill(victim)
    dependency.wait_until(
        lambda: len(dependency.inside()) == 1 and dependency.inside()[0].rank != victim
    )
    alone = len(dependency.inside())
    dependency.gate.set()
    others = [rank for rank in range(RANKS) if rank != victim]
    reports = crew.hear(others)
    crew.renew(victim)

    tell_figures(dependency, reports, calls=RANKS - 1)
    assert alone == 1
    assert [ended.error for report in reports for ended in report.calls] == [""] * (RANKS - 1)
    assert sum(len(report.emitted(SlotForgiven)) for report in reports) == 1


def is_after_the_probe(dependency: Dependency) -> bool:
    """Whether the call that is in it began after the first probe was answered."""
    return dependency.inside()[0].began_at_s > dependency.of("probe")[0].ended_at_s


OPERATIONS = ("get", "multi_get", "set", "delete", "compare_and_set", "add")


@pytest.mark.parametrize("processes", [0, RANKS], ids=["with the store", "alone if need be"])
@pytest.mark.parametrize("lost", OPERATIONS)
def test_lost_answers_lose_no_slot(
    crew: Crew, dependency: Dependency, part: Part, lost: str, processes: int
) -> None:
    """Whatever answers are lost: the limit holds, all get through, and every slot is there after.

    Each operation is executed, and then its caller is told that the store did not answer.
    """
    crew.do("begin", replace(part, lost=lost, processes=processes))
    dependency.judge = lambda request: request.kind == "probe" or request.phase != "outage"
    crew.do("calls", 6)
    dependency.phase = "outage"
    crew.tell("calls", 4)
    dependency.wait_until(lambda: len(dependency.of("probe")) >= 1)
    dependency.phase = "after"
    reports = crew.hear()

    alone = sum(bool(report.emitted(LocalModeEntered)) for report in reports)
    losses = sum(report.losses for report in reports)
    tell_figures(dependency, reports, calls=RANKS * 10)
    print(f"{losses} answers to {lost} were lost, {alone} ranks went alone")  # noqa: T201
    assert losses >= 1
    assert [ended.error for report in reports for ended in report.calls] == [""] * RANKS * 4
    assert max(request.at_once for request in dependency.of("call")) <= LIMIT + alone
    assert_every_slot_is_there(crew, dependency, part)


def assert_every_slot_is_there(crew: Crew, dependency: Dependency, part: Part) -> None:
    """As many calls as there are slots are in at once, and afterwards every slot is free."""
    crew.do("begin", replace(part, lost=""))
    with dependency.changed:
        dependency.phase = "full"
    dependency.gate.clear()
    crew.tell("calls", 1)
    dependency.wait_until(lambda: len(dependency.inside()) == LIMIT)
    dependency.gate.set()
    crew.hear()
    with cells(part) as slots:
        assert slots.held() == 0
    assert dependency.peak("full") == LIMIT
