# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The digest of a run changes with every byte, instant and order of it, and with nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.cells import Cells
from lightning_resilience.core.events import StoreLost
from lightning_resilience.drill.process import Host, Operation, Process
from lightning_resilience.drill.scenario import Outage, Scenario, Workload
from lightning_resilience.drill.storage_model import Request
from lightning_resilience.drill.trace import Story, Trace
from lightning_resilience.drill.virtual import HostClock, SeededDice
from lightning_resilience.drill.world import World


if TYPE_CHECKING:
    from collections.abc import Callable


def process_of(rank: int, incarnation: int = 1) -> Process:
    """A process."""
    return Process(
        rank, incarnation, host=Host(0, HostClock()), dice=SeededDice(0, f"r{rank}i{incarnation}")
    )


RANK_0, RANK_1, RESTARTED = process_of(0), process_of(1), process_of(0, 2)


@dataclass
class Recorder:
    """A trace and the store that it looks at."""

    cells: Cells = field(default_factory=Cells)

    def __post_init__(self) -> None:
        self.trace = Trace(self.cells)

    def write(self, now_s: float, process: Process, key: str, value: bytes | None) -> None:
        """Write a key, or delete it."""
        if value is None:
            self.cells.delete(key)
        else:
            self.cells.set(key, value)
        self.trace.wrote(now_s, process, key, before=None)


def operation_of(**fields: Any) -> Operation:
    """An operation."""
    return Operation(**{"process": RANK_0, "kind": "single", "number": 1, **fields})


def request_of(
    what: str = "call", /, *, attempt: int = 1, failed: Exception | None = None, **fields: Any
) -> Request:
    """A request."""
    operation = operation_of(**fields)
    request = Request(what, operation.process, operation, attempt=attempt)
    request.failed = failed
    return request


def abandoned() -> Request:
    """One that nobody waits for."""
    request = request_of()
    request.is_abandoned = True
    return request


def lost(error: str = "y") -> StoreLost:
    """An event."""
    return StoreLost(op="x", error=error)


VARIANTS: dict[str, list[Callable[[Recorder], None]]] = {
    "what is written": [
        lambda to: to.write(1.0, RANK_0, "key", b"value"),
        lambda to: to.write(1.0000000001, RANK_0, "key", b"value"),
        lambda to: to.write(1.0, RANK_1, "key", b"value"),
        lambda to: to.write(1.0, RESTARTED, "key", b"value"),
        lambda to: to.write(1.0, RANK_0, "kez", b"value"),
        lambda to: to.write(1.0, RANK_0, "key", b"valuf"),
        lambda to: to.write(1.0, RANK_0, "key", b""),
        lambda to: to.write(1.0, RANK_0, "key", None),
        lambda to: to.write(1.0, RANK_0, "key0", b"0value"),
    ],
    "what is read": [
        lambda to: to.trace.read(1.0, RANK_0, "key"),
        lambda to: to.trace.read(1.0, RANK_0, "kez"),
        lambda to: to.trace.read(1.0, RANK_1, "key"),
        lambda to: to.trace.read(2.0, RANK_0, "key"),
    ],
    "what happens to the world": [
        lambda to: to.trace.emptied(1.0),
        lambda to: to.trace.emptied(2.0),
        lambda to: to.trace.happened(1.0, "outage begins"),
        lambda to: to.trace.happened(1.0, "outage ends"),
        lambda to: to.trace.changed(1.0, RANK_0, "crashed"),
        lambda to: to.trace.changed(1.0, RANK_0, "ended"),
        lambda to: to.trace.changed(1.0, RANK_1, "ended"),
    ],
    "what comes to storage": [
        lambda to: to.trace.began(1.0, request_of()),
        lambda to: to.trace.began(2.0, request_of()),
        lambda to: to.trace.began(1.0, request_of("probe")),
        lambda to: to.trace.began(1.0, request_of(attempt=2)),
        lambda to: to.trace.began(1.0, request_of(number=2)),
        lambda to: to.trace.began(1.0, request_of(kind="joint")),
        lambda to: to.trace.began(1.0, request_of(process=RANK_1)),
        lambda to: to.trace.ended(1.0, request_of()),
        lambda to: to.trace.ended(1.0, abandoned()),
        lambda to: to.trace.ended(1.0, request_of(failed=OSError("x"))),
        lambda to: to.trace.ended(1.0, request_of(failed=OSError("y"))),
    ],
    "what is said and made": [
        lambda to: to.trace.emitted(1.0, RANK_0, lost()),
        lambda to: to.trace.emitted(1.0, RANK_0, lost("z")),
        lambda to: to.trace.emitted(1.0, RANK_1, lost()),
        lambda to: to.trace.operation_began(1.0, operation_of()),
        lambda to: to.trace.operation_began(1.0, operation_of(kind="joint")),
        lambda to: to.trace.operation_began(1.0, operation_of(number=2)),
        lambda to: to.trace.operation_ended(1.0, operation_of()),
        lambda to: to.trace.operation_ended(1.0, operation_of(store_operations=7)),
        lambda to: to.trace.operation_ended(1.0, operation_of(error=OSError("x"))),
    ],
}  # fmt: skip


def digest_of(*entries: Callable[[Recorder], None]) -> str:
    """The digest of a run in which just this has happened."""
    recorder = Recorder()
    for entry in entries:
        entry(recorder)
    return recorder.trace.digest


@pytest.mark.parametrize("name", VARIANTS)
def test_every_byte_instant_and_name_is_in_the_digest(name: str) -> None:
    """No two different things have one digest; the same thing has the same one."""
    digests = [digest_of(entry) for entry in VARIANTS[name]]

    assert len(set(digests)) == len(digests)
    assert digests == [digest_of(entry) for entry in VARIANTS[name]]
    assert digest_of() not in digests


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_is_in_the_digest(name: str) -> None:
    """Two things the other way round are another run, and one of them twice is one more."""
    first, second, *_ = VARIANTS[name]

    digests = {
        digest_of(first, second), digest_of(second, first), digest_of(first),
        digest_of(first, first), digest_of(second, second),
    }  # fmt: skip

    assert len(digests) == 5


def test_looking_at_a_digest_does_not_change_it() -> None:
    """It can be compared in the middle of a run."""
    first, second, *_ = VARIANTS["what is written"]
    recorder = Recorder()
    first(recorder)
    between = recorder.trace.digest
    second(recorder)

    assert between == digest_of(first)
    assert recorder.trace.digest == digest_of(first, second)


def test_a_long_run_has_a_digest_of_all_of_it() -> None:
    """The first of many entries counts as much as the last."""
    first, second, *_ = VARIANTS["what is written"]
    long = [second] * 5000

    assert digest_of(first, *long) != digest_of(second, *long)
    assert digest_of(*long, first) != digest_of(*long, second)


def test_a_story_tells_what_matters_line_by_line() -> None:
    """Each line says when, who and what."""
    story = Story()
    world = World(
        Scenario(
            ranks=1,
            workload=Workload(kinds=("single",), spread_s=0.0),
            faults=(Outage(at_s=0, for_s=0.05),),
        ),
        1,
        make_observers=lambda _world: [story],
    )
    assert world.run(until_s=100.0)

    text = "\n".join(story.lines)
    for part in (
        "    0.0000 s  rank 0     started",
        "world      outage begins",
        "rank 0     begins single 1",
        "rank 0     → storage: call for single 1, attempt 1",
        "rank 0     ← storage: call ConnectionResetError",
        "rank 0     RetryScheduled",
        "rank 0     ← storage: call done",
        "rank 0     ends single 1: ok",
        "rank 0     ended",
    ):
        assert part in text
