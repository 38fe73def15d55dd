# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is true in a simulated world: the breaker's record as it is, and what each process has done.

Every check needs some of it, so it is kept once. Nothing here is what a process believes: the
record is the one in the store, decoded when it was written; a result is what storage has answered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import BreakerRecord, decode
from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.workload import DEPENDENCY
from lightning_resilience.errors import CorruptRecordError, DrillFailedError


if TYPE_CHECKING:
    from lightning_resilience.core.events import Event
    from lightning_resilience.core.records import Record
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request
    from lightning_resilience.drill.world import World


__all__ = ["EPSILON_S", "Check", "Deeds", "Facts"]

EPSILON_S: Final = 1e-6
"""Rounding of a duration between two clocks, in seconds."""

_NEVER_S: Final = float("-inf")
_RUN_ID: Final = "drill"
# More than any policy counts in a row before it votes.
_FAILURES_KEPT: Final = 32
_SAYS_LOST: Final = frozenset({"StoreLost", "LocalModeEntered", "ViewTrusted", "HostIsolated"})


@dataclass(slots=True)
class Deeds:
    """What one process has done, as store and storage have seen it.

    Attributes:
        read_at_s: When its latest read of the breaker's record was performed.
        read: What that read has found.
        call: Its latest call that has reached storage.
        ok: Its latest call that has succeeded there, unless nobody waited for it any more.
        failed: Its latest call that has failed there in a way that counts, likewise.
        result: The later one of the two.
        in_row: Its calls that have failed in a row, up to the latest that ended.
        missed_at_s: When it last said that the store had not answered it.
        counted: The latest of its calls that was given up and is counted among the failures.
        failed_at_s: When the calls in that row have failed, the latest of them.
    """

    read_at_s: float = _NEVER_S
    read: BreakerRecord | None = None
    call: Request | None = None
    ok: Request | None = None
    failed: Request | None = None
    result: Request | None = None
    in_row: int = 0
    missed_at_s: float = _NEVER_S
    counted: Request | None = None
    failed_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=_FAILURES_KEPT))

    @property
    def has_abandoned(self) -> bool:
        """True where its latest call was given up at its timeout."""
        return self.call is not None and self.call.is_abandoned

    @property
    def failures(self) -> int:
        """Calls that have failed in a row, one that was given up included."""
        return self.in_row + (self.has_abandoned and self.counted is not self.call)


class Facts(Observer):
    """Keeps what is true. It comes before all checks, so that they see what has just happened.

    Args:
        world: The world.

    Attributes:
        record: The breaker's record in the store, or None where there is none.
        before: What was there before the write of it that is being told.
        epoch_began_at_s: When its epoch was written.
        before_began_at_s: When the epoch of ``before`` was.
        closed_until_s: When it was last seen to be closed, where it is not now.
        life: How often the store has lost everything.
        emptied_at_s: When it last did.
        failures: Calls of all processes that have failed since the latest trip.
        failures_before: What that was before the write of the record that is being told.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.scenario = world.scenario
        self.keys = Keys(run_id=_RUN_ID, incarnation="")
        self.breaker_key = self.keys.breaker(DEPENDENCY)
        self.budget_key = self.keys.budget(DEPENDENCY)
        self.slot_of = {
            self.keys.slot(DEPENDENCY, index): index
            for index in range(world.scenario.breaker.max_concurrent)
        }
        self.record: BreakerRecord | None = None
        self.before: BreakerRecord | None = None
        self.epoch_began_at_s = _NEVER_S
        self.before_began_at_s = _NEVER_S
        self.closed_until_s = 0.0
        self.life = 0
        self.emptied_at_s = _NEVER_S
        self.failures = 0
        self.failures_before = 0
        self._gone_at_s = _NEVER_S
        self._away: list[tuple[float, float]] = []
        self._deeds: dict[Process, Deeds] = {}
        self._counts: dict[type, bool] = {}
        store = world.scenario.store
        self.is_lossy = bool(store.lost_requests or store.lost_answers or store.late_requests)
        self.late_s = store.timeout_s + (store.late_s if store.late_requests else 0.0)

    def of(self, process: Process) -> Deeds:
        """Return what a process has done."""
        deeds = self._deeds.get(process)
        if deeds is None:
            deeds = self._deeds[process] = Deeds()
        return deeds

    @property
    def is_closed(self) -> bool:
        """True while the record in the store says closed."""
        return self.record is not None and self.record.state == BreakerState.CLOSED.value

    def was_closed_at_s(self, now_s: float) -> float:
        """Return when the circuit was last closed: now, while it is."""
        return now_s if self.is_closed else self.closed_until_s

    def had_trouble(self, process: Process, since_s: float) -> bool:
        """Tell whether the store may have left a process without an answer since an instant."""
        store, config = self.world.store, self.scenario.store
        return (
            self.is_lossy
            or process.hurries
            or store.is_gone
            or self._gone_at_s >= since_s
            or process.host.cut_off_until_s >= since_s
            or store.longest_queue_s + 4 * config.latency_s >= config.timeout_s
        )

    @staticmethod
    def stood_still(process: Process, since_s: float) -> bool:
        """Tell whether a process has stood still at any time since an instant."""
        return process.is_paused or process.woken_at_s >= since_s

    @staticmethod
    def is_alone(process: Process, operation: Operation) -> bool:
        """Tell whether a process follows a breaker of its own in an operation."""
        detour = None if process.circuit is None else process.circuit.detour
        if detour is None:
            return False
        return detour.is_isolated or (
            not operation.is_joint and detour.link.lost_since_s is not None
        )

    def counts(self, error: Exception) -> bool:
        """Tell whether a failure says something about the dependency's health."""
        kind = type(error)
        if kind not in self._counts:
            self._counts[kind] = classify(error).counts
        return self._counts[kind]

    # --- news ----------------------------------------------------------------------------------

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Decode the breaker's record."""
        del process, before
        if key != self.breaker_key:
            return
        old, new = self.record, self._decoded(self.world.store.cells.values.get(key))
        if self.is_closed:
            self.closed_until_s = now_s
        self.before_began_at_s = self.epoch_began_at_s
        if old is None or new is None or (old.store_id, old.epoch) != (new.store_id, new.epoch):
            self.epoch_began_at_s = now_s
        self.failures_before = self.failures
        if old is not None and new is not None and new.generation != old.generation:
            self.failures = 0
        self.before, self.record = old, new

    def _decoded(self, raw: bytes | None) -> BreakerRecord | None:
        try:
            return None if raw is None else decode(BreakerRecord, raw, key=self.breaker_key)
        except CorruptRecordError:
            # Whoever checks the record says so.
            return None

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Note what the process has read."""
        if key == self.breaker_key:
            deeds = self.of(process)
            deeds.read_at_s, deeds.read = now_s, self.record

    def emptied(self, now_s: float) -> None:
        """Note that nothing is there any more."""
        if self.is_closed:
            self.closed_until_s = now_s
        self.before, self.record = self.record, None
        self.life += 1
        self.emptied_at_s = now_s

    def began(self, now_s: float, request: Request) -> None:
        """Note a call, and that the one before it was given up where it was."""
        del now_s
        if request.kind != "call":
            return
        deeds = self.of(request.process)
        self._count_abandoned(deeds)
        deeds.call = request

    def ended(self, now_s: float, request: Request) -> None:
        """Note a result that somebody waited for."""
        if request.kind != "call" or request.is_abandoned or not request.process.is_alive:
            return
        deeds = self.of(request.process)
        if request.failed is None:
            deeds.ok = deeds.result = request
            deeds.in_row = 0
            deeds.failed_at_s.clear()
        elif self.counts(request.failed):
            deeds.failed = deeds.result = request
            deeds.failed_at_s.append(now_s)
            deeds.in_row += 1
            self.failures += 1

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Note who says that the store does not answer, and look for calls that were given up."""
        name = type(event).__name__
        if name in _SAYS_LOST:
            self.of(process).missed_at_s = now_s
        elif name == "AttemptFailed":
            self._count_abandoned(self.of(process))

    def _count_abandoned(self, deeds: Deeds) -> None:
        if deeds.has_abandoned and deeds.counted is not deeds.call:
            deeds.counted = deeds.call
            deeds.failed_at_s.append(self.world.agenda.now_s)
            deeds.in_row += 1
            self.failures += 1

    def happened(self, now_s: float, what: str) -> None:
        """Note when the store's server goes and comes."""
        if not what.startswith("store_gone"):
            return
        if what.endswith("ends"):
            self._away.append((self._gone_at_s, now_s))
        self._gone_at_s = now_s

    def store_away_s(self, since_s: float) -> tuple[float, int]:
        """Return for how long the store's server was gone since an instant, and how often."""
        spans = [(max(start_s, since_s), end_s) for start_s, end_s in self._away if end_s > since_s]
        return sum(end_s - start_s for start_s, end_s in spans), len(spans)


class Check(Observer):
    """Looks whether one promise is kept, after everything that happens.

    Args:
        facts: What is true.
    """

    promise = ""
    """Which promise it is."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.world = facts.world
        self.scenario = facts.scenario
        self.values = facts.world.store.cells.values

    def fail(self, what: str) -> NoReturn:
        """Say that the promise was not kept.

        Raises:
            DrillFailedError: Always; with the seed, the instant and the entry of the agenda.
        """
        world = self.world
        name = f"{self.promise} {type(self).__name__}"
        raise DrillFailedError(
            f"{name} does not hold in {world.scenario.name or 'this world'}: {what} "
            f"(seed {world.seed}, {world.agenda.now_s:.6f} s, entry {world.agenda.happened} of the "
            "agenda).",
            seed=world.seed,
            step=world.agenda.happened,
            check=name,
        )

    def decoded(self, kind: type[Record], key: str, raw: bytes) -> Record:
        """Decode a record that was written.

        Raises:
            DrillFailedError: It is none.
        """
        try:
            return decode(kind, raw, key=key)
        except CorruptRecordError as error:
            self.fail(f"what was written does not decode: {error}")

    def expect(self, holds: object, what: str) -> None:
        """Fail with ``what`` unless something holds. Only where the text costs nothing."""
        if not holds:
            self.fail(what)
