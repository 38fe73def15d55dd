# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I3, I4, I8 and I10: a complete round of the rendezvous has one end for all its nodes, and soon.

==================  ================================================================================
check               what it raises for
==================  ================================================================================
I3 PromptRounds     an agent that waits in a round for longer than it may, or once others have given
                    it up
I4 HonestCharges    a loss of nodes that is charged, and all nodes of that start are there
I8 OneRound         a round that some of its nodes begin in and others give up, a name of one that
                    is changed, or one that nodes of another round begin with
I10 WholeRound      a round that is named before all its nodes have come to it
==================  ================================================================================

Which round an agent is in is what the rendezvous has told it, and not what the keys are called: in
a store that came back empty rounds have the names of older ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.quota import Cause, RestartRecord
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import IncarnationRecord
from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.restart_round import NAMED_S, NAMING_S
from lightning_resilience.protocols.incarnation import ROUND_KEY


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.quota import Charge
    from lightning_resilience.drill.checks_restarts import RecordChecks
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.restart_agent import Agent
    from lightning_resilience.drill.restart_inner import Place
    from lightning_resilience.drill.restart_world import RestartWorld


__all__ = ["RoundChecks"]

_NEVER_S: Final = float("-inf")
_ANSWERS: Final = 2.0
"""Of the store, after which whoever waits knows that a round was given up."""
_ANSWERS_IN_ALL: Final = 8.0
"""Of the store, that an agent asks for in a round besides."""


@dataclass(slots=True)
class _Round:
    """What has become of a round.

    Args:
        place: Of one of its nodes.
        since_s: When the first of its nodes has found it complete, on the virtual clock.
        came: Nodes that have come to it.
        named: With what its nodes begin; empty before the first.
        named_at_s: When the first of them began, on the virtual clock.
        given_up_at_s: When the first of them has given it up; minus infinity for never.
    """

    place: Place
    since_s: float
    came: set[int] = field(default_factory=set)
    named: str = ""
    named_at_s: float = _NEVER_S
    given_up_at_s: float = _NEVER_S


class RoundChecks(Observer):
    """Who looks at what agents do in a round that is complete.

    Args:
        world: The world.
        records: Who knows when the store has lost everything.
        is_hindered: Tells whether something has hindered a process since a time.
    """

    def __init__(
        self,
        world: RestartWorld,
        records: RecordChecks,
        *,
        is_hindered: Callable[[Process, float], bool],
    ) -> None:
        self._world = world
        self._records = records
        self._is_hindered = is_hindered
        self._rounds: dict[int, _Round] = {}
        self._names: dict[str, int] = {}
        self._looked_at: set[str] = set()
        self._gone: set[tuple[int, Process]] = set()
        self._places: dict[Process, Place] = {}
        self._waits_since_s: dict[Process, float] = {}

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a round that is named, or given up, and at what is charged for nodes."""
        del now_s
        raw = self._world.store.cells.values.get(key)
        if raw is not None and key == self._world.keys("").restarts:
            for each in decode(RestartRecord, raw, key=key).charges:
                self._charged(process, each)
        if not key.endswith(ROUND_KEY) or raw is None:
            return
        record, place = decode(IncarnationRecord, raw, key=key), self._places[process]
        if before is not None:
            was = decode(IncarnationRecord, before, key=key)
            what = f"{process.name} has replaced {was} by {record}, in round {place.number}"
            self._records.fail("I8 OneRound", what)
        there = self._rounds[place.number]
        if not record.incarnation:
            self._given_up(there)
        missing = set(place.nodes) - there.came
        if record.incarnation and missing:
            what = f"{process.name} has named round {place.number}, to which {sorted(missing)}"
            self._records.fail("I10 WholeRound", f"{what} of {place.nodes} have not come")

    def _charged(self, process: Process, charge: Charge) -> None:
        """Look whether a loss of nodes that costs something is one of nodes of that start."""
        number = self._names.get(charge.incarnation)
        if charge.cause != Cause.LEFT or number is None or charge.incarnation in self._looked_at:
            return
        self._looked_at.add(charge.incarnation)
        there = self._rounds[number]
        # Who has come to the round, and could not ask for its name, has no part in the start.
        if not any(
            not each.is_alive
            or (number, each) in self._gone
            or self._is_hindered(each, there.since_s)
            for each in there.place.members
        ):
            what = f"{process.name} has charged {charge.incarnation} as left by nodes"
            self._records.fail("I4 HonestCharges", f"{what}, and all of them are there")

    def comes(self, agent: Agent, place: Place) -> None:
        """Note that an agent has a place in a round that is complete."""
        self._places[agent.process] = place
        self._rounds.setdefault(place.number, _Round(place, self._world.agenda.now_s))

    def waits(self, agent: Agent) -> None:
        """Note that an agent says that it is there, and waits for the others."""
        place = self._places[agent.process]
        self._rounds[place.number].came.add(agent.process.rank)
        self._waits_since_s[agent.process] = self._world.agenda.now_s

    def begins(self, agent: Agent, found: IncarnationRecord) -> None:
        """Look whether an agent may begin in a start of the workers."""
        now_s, place = self._world.agenda.now_s, self._places[agent.process]
        there = self._rounds[place.number]
        self._is_prompt(agent, there)
        who = f"{agent.process.name}, of round {place.number}, begins {found.incarnation!r}"
        if self._names.setdefault(found.incarnation, place.number) != place.number:
            what = f"{who}, the name of round {self._names[found.incarnation]}"
            self._records.fail("I8 OneRound", what)
        if not there.named:
            there.named, there.named_at_s = found.incarnation, now_s
        if there.named != found.incarnation and not self._is_lost(there.named_at_s):
            self._records.fail("I8 OneRound", f"{who}, and others {there.named!r}")
        if not self._is_lost(there.given_up_at_s):
            what = f"{who}, and others have given that up at {there.given_up_at_s:.1f} s"
            self._records.fail("I8 OneRound", what)

    def leaves(self, agent: Agent, *, is_given_up: bool) -> None:
        """Look at an agent that leaves a round, since that was given up or the store is silent."""
        place = self._places[agent.process]
        there = self._rounds[place.number]
        self._is_prompt(agent, there)
        self._gone.add((place.number, agent.process))
        if not is_given_up:
            return
        self._world.tell(agent.process.name, f"finds round {place.number} given up")
        if there.named and not self._is_lost(there.named_at_s):
            what = f"{agent.process.name} has given round {place.number} up, and others have begun"
            self._records.fail("I8 OneRound", f"{what} {there.named!r} in it")
        self._given_up(there)

    def _given_up(self, there: _Round) -> None:
        if self._is_lost(there.given_up_at_s):
            there.given_up_at_s = self._world.agenda.now_s

    def _is_lost(self, since_s: float) -> bool:
        """Tell whether what was said of a round since then was lost with the store."""
        return self._records.emptied_at_s >= since_s

    def _is_prompt(self, agent: Agent, there: _Round) -> None:
        """Look for how long an agent has waited for the end of a round that it learns now."""
        process, now_s = agent.process, self._world.agenda.now_s
        since_s, clock = self._waits_since_s[process], process.host.clock
        if self._is_hindered(process, since_s):
            return
        is_first = self._places[process].rank == 0
        answer_s = clock.lasts_s(self._world.plan.store.timeout_s)
        for_s = clock.lasts_s(NAMING_S if is_first else NAMED_S) + _ANSWERS_IN_ALL * answer_s
        if now_s - since_s > for_s:
            what = f"{process.name} has waited in a round for {now_s - since_s:.1f} s"
            self._records.fail("I3 PromptRounds", what)
        # Node 0 waits for the others one by one, and each for as long as it may.
        in_vain_s = now_s - max(since_s, there.given_up_at_s)
        is_told = not is_first and not self._is_lost(there.given_up_at_s)
        if is_told and in_vain_s > _ANSWERS * answer_s:
            what = f"{process.name} has waited for {in_vain_s:.1f} s in a round that was given up"
            self._records.fail("I3 PromptRounds", what)
