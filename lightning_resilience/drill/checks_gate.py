# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I10, I3 and I8: agents come through the gate together, and all of them come to the same end.

==================  ================================================================================
check               what it raises for
==================  ================================================================================
I10 ClosedGate      an agent that joins before it was agreed, before the delay that was agreed is
                    over, or while what the job shares is ill by the record
I10 HeldUpByNobody  a time to join that runs out, or a job that ends, because others are at the gate
I8 SameStatus       an agent that leaves with another status than the job has ended with
I3 RestartsEnd      an agent that is still there long after the last fault
==================  ================================================================================

What an agent has just read may be a little old: as old as the last two answers of the store, or as
long as it has stood still since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker import passes
from lightning_resilience.core.joining import JoinFailure
from lightning_resilience.core.quota import RestartRecord
from lightning_resilience.core.records import BreakerRecord, decode
from lightning_resilience.drill.checks_restarts import RecordChecks
from lightning_resilience.drill.checks_rounds import RoundChecks
from lightning_resilience.drill.checks_stops import StopChecks
from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.restart_agent import DEPENDENCIES
from lightning_resilience.drill.restart_plan import JOIN_S
from lightning_resilience.drill.scenario import StoreGone, StorePartition


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.core.quota import Ending
    from lightning_resilience.core.restart import GoRecord
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.restart_agent import Agent
    from lightning_resilience.drill.restart_world import RestartWorld


__all__ = ["RESTART_CHECKS", "GateChecks"]

RESTART_CHECKS: Final = {
    "I3": ("RestartsEnd", "PromptRounds"),
    "I4": ("OneCharge", "HonestCharges", "BoundedRestarts", "KeptCharges", "BoundedStops"),
    "I8": ("OneGo", "OneEnding", "OwnEnding", "OwnNumber", "SameStatus", "OneRound"),
    "I10": ("ClosedGate", "HeldUpByNobody", "WholeRound"),
}
"""Names of the checks by promise."""

_ANSWERS: Final = 2.0
_NEVER_S: Final = float("-inf")


class GateChecks(Observer):
    """Who looks at what agents do.

    Args:
        world: The world.

    Attributes:
        rounds: Who looks at what agents do in a round that is complete.
        observers: Who wants to be told of what happens in the world.
    """

    def __init__(self, world: RestartWorld) -> None:
        self._world = world
        self._records = RecordChecks(world)
        self._ill_since_s: dict[str, float] = {}
        self._was_ill_at_s = _NEVER_S
        self._hindered_at_s: dict[Process, float] = {}
        self._served_at_s: dict[Process, float] = {}
        self._knew: dict[Agent, int] = {}
        self._late_otherwise: set[Agent] = set()
        self._told: dict[Agent, tuple[float, GoRecord]] = {}
        self.rounds = RoundChecks(world, self._records, is_hindered=self._is_hindered)
        stops = StopChecks(world, self._records)
        self.observers = (self, self._records, self.rounds, stops)

    # What happens ---------------------------------------------------------------------------------

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note which circuits are open, and that the job has come further."""
        del before
        self._served_at_s[process] = now_s
        raw = self._world.store.cells.values.get(key)
        if key == self._world.keys("").progress:
            self._records.progressed()
        for name in DEPENDENCIES:
            if key == self._world.keys("").breaker(name) and raw is not None:
                if passes(decode(BreakerRecord, raw, key=key)):
                    self._ill_since_s.pop(name, None)
                else:
                    self._ill_since_s.setdefault(name, now_s)
        if self._ill_since_s:
            self._was_ill_at_s = now_s

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Note whom the store has answered."""
        del key
        self._served_at_s[process] = now_s

    def emptied(self, now_s: float) -> None:
        """Note that nothing is known to be ill any more."""
        del now_s
        self._ill_since_s.clear()

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note who stands still."""
        if what.startswith(("paused", "woke")):
            self._hindered_at_s[process] = now_s

    @property
    def _is_lossy(self) -> bool:
        store = self._world.plan.store
        return bool(store.lost_requests or store.lost_answers or store.late_requests)

    def _is_hindered(self, process: Process, since_s: float) -> bool:
        """Tell whether something has hindered a process since: it stood still, or was cut off."""
        return bool(
            self._is_lossy
            or process.is_paused
            or self._hindered_at_s.get(process, _NEVER_S) >= since_s
            or process.host.cut_off_until_s >= since_s
            or self._records.emptied_at_s >= since_s
            or self._world.store.is_gone
        )

    # What agents do -------------------------------------------------------------------------------

    def passed(self, agent: Agent, go: GoRecord) -> None:
        """Look at what an agent was told at the gate."""
        self._told[agent] = (self._records.agreed_at_s.get(go.writer, _NEVER_S), go)
        self._records.passed(agent, go, since_s=agent.came_at_s)

    def joins(self, agent: Agent) -> None:
        """Look whether an agent may join now."""
        self._knows(agent)
        if agent.joining_s == 0.0:
            self._late_otherwise.discard(agent)
        now_s = self._world.agenda.now_s
        who = agent.process.name
        if agent.over is not None and agent.over.incarnation not in self._records.gos:
            what = f"{who} joins, and nothing is agreed about {agent.over.incarnation}"
            self._records.fail("I10 ClosedGate", what)
        agreed_at_s, go = self._told.pop(agent, (_NEVER_S, None))
        if go is not None and now_s - agreed_at_s < agent.process.host.clock.lasts_s(go.delay_s):
            what = f"{who} joins {now_s - agreed_at_s:.3f} s after {go}"
            self._records.fail("I10 ClosedGate", what)
        store_s = agent.process.host.clock.lasts_s(self._world.plan.store.timeout_s)
        awake_since_s = self._hindered_at_s.get(agent.process, _NEVER_S)
        for name, since_s in self._ill_since_s.items():
            ill_s = now_s - max(since_s, awake_since_s)
            if ill_s > _ANSWERS * store_s * len(DEPENDENCIES):
                what = f"{who} joins, and {name} has been ill for {ill_s:.1f} s by the record"
                self._records.fail("I10 ClosedGate", what)

    def _knows(self, agent: Agent) -> None:
        """Look whether what an agent knows only grows."""
        seen = None if agent.memory is None else agent.memory.seen
        restarts = 0 if seen is None else seen.restarts
        if restarts < self._knew.get(agent, 0):
            what = f"{agent.process.name} knew of {self._knew[agent]} restarts, now of {restarts}"
            self._records.fail("I4 KeptCharges", what)
        self._knew[agent] = restarts

    def _at_the_gate(self, agent: Agent) -> list[str]:
        """Return who is still at the gate, and nothing but the gate has hindered it."""
        since_s = agent.came_at_s
        return [
            each.process.name
            for each in self._world.living
            if each.place == "gate"
            # Whoever has waited in vain as well has only just come back.
            and self._world.agenda.now_s - each.came_at_s > JOIN_S / 2
            and not self._is_hindered(each.process, since_s)
        ]

    def is_late(self, agent: Agent) -> None:
        """Look why the time to join has run out for an agent."""
        held = self._at_the_gate(agent)
        if not held:
            self._late_otherwise.add(agent)
        if held and self._was_ill_at_s < agent.came_at_s and not self._ill_since_s:
            what = f"{agent.process.name} has waited in vain for {held}, who are at the gate"
            self._records.fail("I10 HeldUpByNobody", what)

    def _stay_s(self, agent: Agent) -> float:
        return (agent.place == "gate") * (self._world.agenda.now_s - agent.came_at_s)

    def starts(self, incarnation: str) -> None:
        """Look whether a new start of the workers may be."""
        self._records.starts(incarnation)

    def gives_up(self, agent: Agent, failure: JoinFailure) -> None:
        """Look why an agent ends the job that cannot join."""
        silent_s = self._world.agenda.now_s - self._served_at_s.get(agent.process, _NEVER_S)
        if failure is JoinFailure.UNREACHABLE:
            # Whoever has waited for others as long as it may has the same reason to give up.
            is_held = max(agent.gated_s, self._stay_s(agent)) > JOIN_S / 2
            # Who has stood still at the gate was not held up by that.
            stood_s = self._world.agenda.now_s - self._hindered_at_s.get(agent.process, _NEVER_S)
            is_held = is_held and stood_s > JOIN_S
            tries_s = agent.joining_s + self._apart_s(agent.process.rank)
            if is_held and silent_s < JOIN_S / 2 and tries_s < JOIN_S * 0.75:
                what = f"{agent.process.name} ends the job, and had an answer {silent_s:.1f} s ago"
                self._records.fail("I10 HeldUpByNobody", what)
            return
        is_first = agent not in self._late_otherwise
        held = self._at_the_gate(agent) if failure is JoinFailure.LATE and is_first else []
        if held:
            what = f"{agent.process.name} ends the job, and {held} are at the gate"
            self._records.fail("I10 HeldUpByNobody", what)

    def _apart_s(self, node: int) -> float:
        """Return for how long a node may have been without a store that it has asked, at most."""
        return sum(
            each.for_s
            for each in self._world.plan.faults
            if isinstance(each, StoreGone)
            or (isinstance(each, StorePartition) and node in each.hosts)
        )

    def leaves(self, agent: Agent, ending: Ending) -> None:
        """Look whether an agent leaves with what the job has ended with."""
        self._knows(agent)
        world = self._world
        key = world.keys("").restarts
        raw = world.store.cells.values.get(key)
        stands = None if raw is None else decode(RestartRecord, raw, key=key).ending
        since_s = agent.came_at_s
        if stands == ending or self._is_hindered(agent.process, since_s):
            return
        what = f"{agent.process.name} leaves with {ending}, and the record says {stands}"
        self._records.fail("I8 SameStatus", what)

    def never_ends(self, agents: Sequence[Agent]) -> None:
        """Say who has not come to an end.

        Where messages are lost, enough nodes may never be in the rendezvous at the same time.
        """
        if self._is_lossy:
            return
        told = ", ".join(f"{each.process.name} at: {each.place}" for each in agents)
        self._records.fail("I3 RestartsEnd", f"{told or 'processes'} long after the last fault")

    def is_over(self) -> None:
        """Look at what has become of all agents."""
        statuses: dict[str, set[int]] = {}
        for agent in self._world.agents:
            if agent.ending is not None and agent.ending.incarnation:
                statuses.setdefault(agent.ending.incarnation, set()).add(agent.ending.code)
        for incarnation, codes in statuses.items():
            if len(codes) > 1 and incarnation not in self._records.heeded:
                what = f"agents have left after {incarnation} with {sorted(codes)}"
                self._records.fail("I8 SameStatus", what)
