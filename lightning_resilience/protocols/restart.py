# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The gate that an agent passes between two starts of the workers.

::

    ended already? ──▶ settle: who was nearest to the cause? ──▶ circuits let calls through
        ──▶ charge, once for the job ──▶ go/<incarnation>, write-once ──▶ the delay
        ──▶ still not ended, and circuits still let through? ──▶ join

Every agent runs all of it, and nobody leads: what is written is written once, by whoever comes
first, and read by the others. So an agent that dies in the gate holds up nobody. ``core.restart``
has the order and its reasons, ``core.quota`` what an incident costs.

While an ill dependency is waited for, nothing is charged; where that lasts too long, the job ends
with the status for an outage, and not for having failed too often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import breaker, quota
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.core.quota import Cause, Closed, Ending, Ruling
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.restart import GoRecord, ProgressRecord, restart_delay_s
from lightning_resilience.errors import CircuitOpenError
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.circuit import refresh
from lightning_resilience.protocols.effects import Draw, Get, MultiGet, Nonce, Now, Sleep
from lightning_resilience.protocols.probe import await_passage
from lightning_resilience.protocols.shared_cell import create
from lightning_resilience.protocols.site import heed, is_held


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.core.leaving import Apart
    from lightning_resilience.core.restart_config import RestartConfig
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.probe import Patience
    from lightning_resilience.protocols.restart_record import Memory


__all__ = [
    "LOOKS",
    "Dependency",
    "Gate",
    "News",
    "begins_anew",
    "charge_missed",
    "let_through",
    "look_around",
    "may_grow",
    "pass_first_gate",
    "pass_gate",
]

LOOKS: Final = 4
"""After so many looks around, an agent has seen everything that there is to see."""

_CIRCLES: Final = 64
"""So often a circuit may open again during the delay; the deadline comes before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """Something that the job shares, and cannot start without.

    Args:
        circuit: What this agent remembers of its breaker.
        patience: How it is waited for, and probed.
    """

    circuit: Circuit
    patience: Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One agent's way between two starts of the workers.

    Args:
        memory: What this agent remembers of the job's restarts; its keys are of the incarnation
            that is over.
        config: Quotas, delays and bounds.
        dependencies: What the job cannot start without.
        left: Nodes of that incarnation that are not there any more, as this agent has seen.
        is_failure: Whether workers of this agent have failed. Then reports are waited for.
    """

    memory: Memory
    config: RestartConfig
    dependencies: tuple[Dependency, ...] = ()
    left: int = 0
    is_failure: bool = False

    @property
    def incarnation(self) -> str:
        """The start of the workers that is over."""
        return self.memory.keys.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What an agent whose workers are well finds when it looks around.

    Args:
        ending: How the job has ended; None while it has not.
        is_over: Whether the present start of the workers is: others are at the gate.
    """

    ending: Ending | None = None
    is_over: bool = False


def look_around(memory: Memory, turn: int) -> Protocol[News]:
    """Look whether other agents have come to the gate, or have ended the job: one read.

    One key each time, and the bell every other time: whoever comes to the gate because of a failure
    rings it, and everything else is said again by nodes that are missed, or that wait to join.

    Args:
        memory: What this agent remembers of restarts.
        turn: How often it has looked around before, in this start of the workers.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    keys = memory.keys
    # The bell and not the incident: workers that have told why they leave are still leaving, and
    # what they save meanwhile has its time. An agent rings when it has seen one end.
    bell = keys.joint("failed", 0)
    key = (bell, keys.restarts, bell, keys.joint("go", 0))[turn % LOOKS]
    raw: bytes | None = yield Get(key)
    if key != keys.restarts:
        return News(is_over=raw is not None)
    if raw is None and memory.seen is None:
        return News()
    found = yield from restart_record.look(memory, raw)
    return News(ending=found.ending, is_over=quota.charged(found, keys.incarnation))


def begins_anew(keys: Keys) -> Protocol[bool]:
    """Tell whether agents have come to the gate after this start of the workers.

    For an agent whose own workers have ended well, and that was waiting for those of the others.

    Args:
        keys: Names of the keys of that start.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    values: list[bytes | None] = yield MultiGet((keys.joint("failed", 0), keys.joint("go", 0)))
    return any(value is not None for value in values)


def pass_gate(gate: Gate) -> Protocol[GoRecord | Ending | Apart]:
    """Return once this agent may join the next rendezvous, or how the job has ended.

    It ends for this agent alone where others have begun without it meanwhile.

    Args:
        gate: This agent's way.

    Raises:
        StoreUnavailableError: The store did not answer; the gate may be entered again.
        CorruptRecordError: A record does not decode.
    """
    now_s: float = yield Now()
    deadline_at_s = gate.memory.came_at_s(now_s=now_s) + gate.config.gate_deadline_s
    record = yield from restart_record.read(gate.memory)
    if record.ending is not None:
        return record.ending
    told: bytes | None = yield Get(gate.memory.keys.joint("incident", 0))
    if gate.is_failure or told is not None:
        yield Sleep(gate.config.settle_s)
    try:
        yield from _await_dependencies(gate, deadline_at_s=deadline_at_s)
        go = yield from _agreed(gate)
        if isinstance(go, Ending):
            return go
        seen_at_s: float = yield Now()
        yield Sleep(gate.memory.rest_s(go, now_s=seen_at_s))
        return (yield from _last_look(gate, deadline_at_s=deadline_at_s)) or go
    except CircuitOpenError as error:
        return (yield from restart_record.end(gate.memory, _outage(gate, str(error))))


def pass_first_gate(gate: Gate) -> Protocol[Ending | Apart | None]:
    """Return once an agent that begins may join: nothing has ended that it would join.

    It may come to a job that is waiting for an ill dependency, and would wait there in vain, or
    come first after an outage that has ended the job.

    Args:
        gate: This agent's way; there is no incarnation that is over.

    Returns:
        How the job has ended, for this agent alone where others train; None where it may join.

    Raises:
        StoreUnavailableError: The store did not answer; the gate may be entered again.
        CorruptRecordError: A record does not decode.
    """
    now_s: float = yield Now()
    if gate.memory.seen is None:
        ending = yield from restart_record.start(gate.memory)
    else:
        # It has begun before: an ending that it finds now is of the job that it belongs to.
        ending = (yield from restart_record.read(gate.memory)).ending
    if ending is not None:
        return ending
    try:
        deadline_at_s = gate.memory.came_at_s(now_s=now_s) + gate.config.gate_deadline_s
        return (yield from _last_look(gate, deadline_at_s=deadline_at_s))
    except CircuitOpenError as error:
        return (yield from restart_record.end(gate.memory, _outage(gate, str(error))))


def _last_look(gate: Gate, *, deadline_at_s: float) -> Protocol[Ending | Apart | None]:
    """Return once all that the job shares is well; how the job has ended, where it has meanwhile.

    Raises:
        CircuitOpenError: The deadline has passed.
    """
    for _ in range(_CIRCLES):
        record = yield from restart_record.read(gate.memory)
        if record.ending is not None or (yield from let_through(gate.dependencies)):
            return record.ending
        yield from _await_dependencies(gate, deadline_at_s=deadline_at_s)
    why = f"What it needs became ill again {_CIRCLES} times."
    return (yield from restart_record.end(gate.memory, _outage(gate, why)))


def charge_missed(gate: Gate, go: GoRecord, *, gone: int) -> Protocol[None]:
    """Charge the loss of nodes that nobody had missed at the gate, once the new round is there.

    A node that is back before it is missed looks like one that has come. What else has ended the
    workers has been charged already, or is free whoever leaves.

    Args:
        gate: This agent's way.
        go: What was agreed at it.
        gone: Nodes of the incarnation that is over which have no part in the new round.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    if gone and go.cause == Cause.GROWN.value:
        closed = Closed(incarnation=gate.incarnation, cause=Cause.LEFT)
        yield from restart_record.charge(gate.memory, gate.config, closed, is_joined=True)


def _await_dependencies(gate: Gate, *, deadline_at_s: float) -> Protocol[None]:
    for dependency in gate.dependencies:
        yield from heed(dependency.circuit)
        yield from await_passage(
            dependency.circuit,
            dependency.patience,
            operation="restart",
            deadline_at_s=deadline_at_s,
        )


def _agreed(gate: Gate) -> Protocol[GoRecord | Ending]:
    """Return what all agents do about the incarnation that is over."""
    closed, go = yield from _closed(gate)
    if go is not None:
        return go
    ruling = yield from restart_record.charge(gate.memory, gate.config, closed)
    if ruling.ending is not None:
        return ruling.ending
    return (yield from _go(gate, closed, ruling))


def _outage(gate: Gate, why: str) -> Ending:
    waited_s = gate.config.gate_deadline_s
    reason = f"No restart within gate_deadline_s={waited_s:g}. {why}"
    return Ending(code=ExitCode.OUTAGE, reason=reason, incarnation=gate.incarnation)


def _closed(gate: Gate) -> Protocol[tuple[Closed, GoRecord | None]]:
    """Return what has ended the incarnation, and whether agents may join already."""
    keys = gate.memory.keys
    names = (keys.joint("incident", 0), keys.joint("go", 0), keys.progress)
    values: list[bytes | None] = yield MultiGet(names)
    incident = None if values[0] is None else decode(IncidentRecord, values[0], key=names[0])
    go = None if values[1] is None else decode(GoRecord, values[1], key=names[1])
    progress = None if values[2] is None else decode(ProgressRecord, values[2], key=names[2])
    # Workers that have failed without any word are a failure all the same.
    cause = quota.cause_of(incident, left=gate.left, is_called=not gate.is_failure)
    if incident is None and gate.is_failure:
        cause = Cause.FAILED
    closed = Closed(
        incarnation=gate.incarnation,
        cause=cause,
        incident=incident,
        checkpoint_step=-1 if progress is None else progress.checkpoint_step,
    )
    return closed, go


def _go(gate: Gate, closed: Closed, ruling: Ruling) -> Protocol[GoRecord]:
    key = gate.memory.keys.joint("go", 0)
    draw: float = yield Draw()
    writer: str = yield Nonce()
    delay_s = restart_delay_s(gate.config, ruling.delays, draw=draw)
    mine = GoRecord(delay_s=delay_s, cause=closed.cause.value, number=ruling.number, writer=writer)
    written = yield from create(key, encode(mine))
    return decode(GoRecord, written.raw, key=key)


def may_grow(dependencies: tuple[Dependency, ...]) -> Protocol[bool]:
    """Tell whether all is well that nodes would load which wait to be let in. It only looks.

    Their agents wait within the rendezvous, and those of the others not at all: a circuit that was
    opened here would stay open until the workers need it.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    for dependency in dependencies:
        view = yield from refresh(dependency.circuit)
        if not breaker.passes(view.record) or (yield from is_held(dependency.circuit)):
            return False
    return True


def let_through(dependencies: tuple[Dependency, ...]) -> Protocol[bool]:
    """Tell whether all circuits let calls through now, to an agent that waits where one does not.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    for dependency in dependencies:
        yield from heed(dependency.circuit)
        view = yield from refresh(dependency.circuit)
        if not breaker.passes(view.record):
            return False
    return True
