# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I8: no two ranks return different verdicts, and none returns a success without all the others.

A verdict is a key that is written once, so it is in the store before anybody returns it; the one
exception is a gate that refuses everybody at once, whose own record says so. Whoever raises instead
that it could not learn the verdict is named by its error, and had no way to the store. A success
has every rank in it, also those without work; a failure is one of a rank that works, is lost, or
has met another at another place in training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.joint import error_of
from lightning_resilience.core.records import FinalRecord, GateRecord
from lightning_resilience.core.roll_call import is_spoiled
from lightning_resilience.core.store_loss import is_deferred
from lightning_resilience.drill.facts import EPSILON_S, Check
from lightning_resilience.drill.scenario import Stray
from lightning_resilience.errors import JointError, JointUnavailableError


if TYPE_CHECKING:
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.scenario import Scenario


__all__ = ["OneVerdict", "is_mismatch"]

_SIGNS: Final = frozenset({"arrived", "beat"})
_WRITE_ONCE: Final = frozenset({"final", "gate"})
_REMOVED: Final = frozenset({"final", "gate", "out", "done", "count"})
# Operations whose keys may be there still: as many as are removed together, and those under way.
_MOST_KEPT: Final = 40


@dataclass(slots=True)
class _Joint:
    """One joint operation of one incarnation.

    Attributes:
        finals: Verdicts that were written: more than one only where the store was emptied.
        gates: Writers of the gates.
        refusals: Reasons of gates that refuse.
        returned: The verdict that was returned first, and by whom.
        place: Where in training that process was.
        error: What was raised first for it.
    """

    finals: list[FinalRecord] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    returned: tuple[FinalRecord, Process] | None = None
    place: str = ""
    error: tuple[str, Process] | None = None


class OneVerdict(Check):
    """Looks at gates, verdicts and what ranks make of them.

    Args:
        facts: What is true.
    """

    promise = "I8"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._joints: dict[tuple[str, int], _Joint] = {}
        # When each rank has last shown that it lives.
        self._signs: dict[tuple[str, int], float] = {}
        # The highest operation to which each rank has come, and to which it had when a process has
        # last looked, with the operation in which that looked.
        self._come: dict[tuple[str, int], int] = {}
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}
        self._began_s: dict[str, float] = {}
        self._before_s: dict[str, float] = {}
        # Who has left its last joint operation without a verdict, and knows of no store that it is
        # the one from which all have one.
        self._deferred: set[str] = set()
        self._timeout_s = self.scenario.workload.joint_timeout_s
        self._prefix = facts.keys.store_id.removesuffix("store_id") + "i"

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a write of a joint operation's keys."""
        if not key.startswith(self._prefix):
            return
        parts = key[len(self._prefix) :].split("/")
        incarnation, part = parts[0], parts[1]
        if part == "waiting":
            return
        number = int(parts[2])
        if incarnation != str(process.incarnation):
            self.fail(f"{process.name} writes {key}, of another incarnation")
        raw = self.values.get(key)
        if raw is None:
            self._removed(process, part, number)
        elif part in _SIGNS:
            self._signs[incarnation, number] = now_s
            if part == "arrived":
                come = self._come.get((incarnation, number), 0)
                self._come[incarnation, number] = max(come, int(raw))
        elif part in _WRITE_ONCE:
            self._decided(process, (incarnation, number), part, raw=raw, before=before)

    def _decided(
        self,
        process: Process,
        operation: tuple[str, int],
        part: str,
        *,
        raw: bytes,
        before: bytes | None,
    ) -> None:
        joint = self._joints.setdefault(operation, _Joint())
        if before is not None and not self._is_ballot(part, before):
            self.fail(f"{process.name} changes a {part} that is written once")
        if part == "gate":
            self._gate(process, joint, raw)
        elif self._is_ballot(part, raw):
            self._ballot(process, raw=raw, before=before)
        else:
            if before is None or self.decoded(FinalRecord, part, before).is_draft:
                self.fail(f"{process.name} makes a verdict where there is no ballot")
            self._verdict(process, joint, operation, raw=raw)

    def _ballot(self, process: Process, *, raw: bytes, before: bytes | None) -> None:
        ballot = self.decoded(FinalRecord, "final", raw)
        if is_spoiled(ballot):
            has_deferred = process.name in self._deferred
            since_s = self._before_s.get(process.name, 0.0)
            if not has_deferred and not self.facts.had_trouble(process, since_s):
                self.fail(f"{process.name} spoils a ballot in a store that has lost nothing")
        elif not process.wrote(ballot.writer):
            self.fail(f"{process.name} signs a ballot as {ballot.writer!r}")
        elif not ballot.is_draft and not self._is_own_draft(process, before):
            self.fail(f"{process.name} lays out a ballot that is not in the place of its own draft")

    def _is_own_draft(self, process: Process, raw: bytes | None) -> bool:
        if raw is None:
            return False
        record = self.decoded(FinalRecord, "final", raw)
        return record.is_draft and process.wrote(record.writer)

    def _gate(self, process: Process, joint: _Joint, raw: bytes) -> None:
        gate = self.decoded(GateRecord, "gate", raw)
        if not process.wrote(gate.writer) or gate.rank != process.rank:
            self.fail(f"{process.name} signs a gate as {gate.writer!r}, rank {gate.rank}")
        joint.gates.append(gate.writer)
        if gate.verdict == "fail":
            joint.refusals.append(gate.writer)

    def _verdict(
        self, process: Process, joint: _Joint, operation: tuple[str, int], *, raw: bytes
    ) -> None:
        final = self.decoded(FinalRecord, "final", raw)
        if not process.wrote(final.writer) and final.writer not in joint.refusals:
            self.fail(f"{process.name} signs a verdict as {final.writer!r}")
        is_refusal = final.writer in joint.refusals
        has_part = final.first_rank in {*final.workers, *final.lost_ranks} or is_refusal
        if final.failure and not has_part and not is_mismatch(final, self.scenario):
            self.fail(
                f"{process.name} says that rank {final.first_rank} has failed, which has no work, "
                "and no gate of its that refuses was ever written"
            )
        joint.finals.append(final)
        if not final.failure:
            self._must_be_there(process, operation)
        for rank in final.lost_ranks:
            self._must_be_silent(process, operation, rank)

    def _is_ballot(self, part: str, raw: bytes) -> bool:
        return part == "final" and self.decoded(FinalRecord, part, raw).is_open

    def _must_be_there(self, process: Process, operation: tuple[str, int]) -> None:
        incarnation, number = operation
        for rank in range(self.scenario.ranks):
            come = self._come.get((incarnation, rank), 0)
            if come < number:
                self.fail(
                    f"{process.name} tells that joint operation {number} went well, and rank "
                    f"{rank} has not come to it: it was last at {come}"
                )

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Note where a process sees another rank."""
        del now_s
        if key.startswith(self._prefix) and "/arrived/" in key:
            rank, own = int(key.rpartition("/")[2]), process.operation
            # Also where the store has lost it: whoever has come is not absent.
            come = self._come.get((str(process.incarnation), rank), 0)
            self._seen[process.name, rank] = (0 if own is None else own.number, come)

    def _must_be_silent(self, process: Process, operation: tuple[str, int], rank: int) -> None:
        incarnation, number = operation
        own = process.operation
        since_s = 0.0 if own is None else own.began_at_s
        looked_in, come = self._seen.get((process.name, rank), (0, 0))
        if looked_in != number:
            come = self._come.get((incarnation, rank), 0)
        if come >= number:
            # It has come, so what it shows counts. One that has not may be busy elsewhere.
            since_s = max(since_s, self._signs.get((incarnation, rank), 0.0))
        silent_s = (self.world.agenda.now_s - since_s) * process.host.clock.rate
        if silent_s < self._timeout_s - EPSILON_S and not self.scenario.store.late_requests:
            self.fail(
                f"{process.name} takes rank {rank} for lost after {silent_s:.3f} s of silence; "
                f"joint_timeout_s is {self._timeout_s:g}"
            )

    def _removed(self, process: Process, part: str, number: int) -> None:
        if part not in _REMOVED:
            self.fail(f"{process.name} removes a key {part!r}, which is never removed")
        if part == "final":
            behind = [
                other.name
                for other in self.world.processes[-self.scenario.ranks :]
                if other.is_alive and _is_in(other, number)
            ]
            if behind:
                self.fail(
                    f"{process.name} removes the verdict of joint operation {number}, in which "
                    f"{', '.join(behind[:5])} may be still"
                )

    # --- what ranks make of it -----------------------------------------------------------------

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Note since when a rank may have lost what it wrote: since its joint operation before."""
        if not operation.is_joint:
            return
        name = operation.process.name
        self._before_s[name] = self._began_s.get(name, 0.0)
        self._began_s[name] = now_s

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look at what a rank returns or raises."""
        del now_s
        if not operation.is_joint:
            return
        process = operation.process
        key = (str(process.incarnation), operation.number)
        joint = self._joints.setdefault(key, _Joint())
        if isinstance(operation.error, JointUnavailableError):
            self._unavailable(operation, operation.error)
        result: Any = operation.result
        self._deferred.discard(process.name)
        if result is not None and is_deferred(result.final):
            self._deferred.add(process.name)
        elif result is not None:
            self._returned(operation, joint, result.final)
        if len(self._joints) > _MOST_KEPT:
            self._forget(key)

    def _returned(self, operation: Operation, joint: _Joint, final: FinalRecord) -> None:
        process = operation.process
        if final not in joint.finals and final.writer not in joint.refusals:
            self.fail(
                f"{process.name} returns a verdict of joint operation {operation.number} that is "
                f"not in the store: {final}"
            )
        first = joint.returned
        if first is None:
            joint.returned, joint.place = (final, process), operation.place
        elif first[0] != final:
            self.fail(
                f"{process.name} returns {_short(final)} of joint operation {operation.number}, "
                f"{first[1].name} returned {_short(first[0])}"
            )
        elif not final.failure and operation.place != joint.place:
            self.fail(
                f"joint operation {operation.number} goes well for {process.name} at "
                f"{operation.place}, and for {first[1].name} at {joint.place}"
            )
        expected, error = error_of(final, seq=operation.number), operation.error
        if isinstance(error, JointError) or (error is None and expected is not None):
            told, due = repr(error), repr(expected)
            if told != due:
                self.fail(f"{process.name} raises {told}; of this verdict follows {due}")

    def _unavailable(self, operation: Operation, error: JointUnavailableError) -> None:
        process = operation.process
        if error.lost_ranks != (process.rank,) or operation.result is not None:
            self.fail(f"{process.name} could not learn the verdict, and its error is {error!r}")
        since_s = self._before_s.get(process.name, 0.0)
        has_deferred = process.name in self._deferred
        if not has_deferred and not self.facts.had_trouble(process, since_s):
            self.fail(
                f"{process.name} could not learn the verdict of joint operation "
                f"{operation.number}, and the store has answered all the time"
            )

    def _forget(self, present: tuple[str, int]) -> None:
        oldest = next(iter(self._joints))
        if oldest != present:
            del self._joints[oldest]


def is_mismatch(final: FinalRecord, scenario: Scenario) -> bool:
    """Tell whether a verdict is that ranks are not in lock-step, and some are not."""
    strays = any(isinstance(fault, Stray) for fault in scenario.faults)
    return strays and "not in lock-step" in final.error


def _is_in(process: Process, number: int) -> bool:
    operation = process.operation
    return (
        operation is None
        or operation.number < number
        or (operation.number == number and operation.ended_at_s is None)
    )


def _short(final: FinalRecord) -> str:
    outcome = final.failure or "ok"
    return f"{outcome} (by {final.writer}, first rank {final.first_rank}, lost {final.lost_ranks})"
