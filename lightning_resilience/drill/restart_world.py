# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated job that is started again and again: agents on nodes, their workers, and what fails.

Its promises are looked after from outside (``drill.checks_restarts``, ``drill.checks_gate``): in
the store, at the rendezvous, and in what agents do there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.breaker import HostVoted
from lightning_resilience.core.keys import Keys
from lightning_resilience.drill import scenario as given
from lightning_resilience.drill.checks_gate import GateChecks
from lightning_resilience.drill.observer import Observers
from lightning_resilience.drill.process import Host, Process, Strike
from lightning_resilience.drill.restart_agent import DEPENDENCIES, Agent
from lightning_resilience.drill.restart_inner import Inner
from lightning_resilience.drill.restart_plan import Fate, last_fault_s
from lightning_resilience.drill.restart_workers import SPEAKS, Start
from lightning_resilience.drill.simulator import Simulator
from lightning_resilience.drill.storage_model import StorageModel
from lightning_resilience.drill.store_model import StoreModel
from lightning_resilience.drill.trace import Story
from lightning_resilience.drill.virtual import Agenda, HostClock, SeededDice
from lightning_resilience.protocols.circuit import Circuit, apply, begin
from lightning_resilience.protocols.restart_record import Mirror


if TYPE_CHECKING:
    from lightning_resilience.core.quota import RestartRecord
    from lightning_resilience.drill.restart_plan import RestartPlan
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["RestartWorld"]

_RUN_ID: Final = "drill"
_MIRROR_S: Final = 10.0
_SCHEDULER_S: Final = 5.0
_VOTES_EVERY_S: Final = 4.0
# Longer than all that a start may wait for, one after the other.
_START_S: Final = 400.0
_STARTS: Final = 4
_STEPS: Final = 10


class RestartWorld:
    """A job from its first launch to its end.

    Args:
        plan: The job.
        seed: Decides what the plan leaves open.

    Attributes:
        agenda: The virtual clock.
        store: The shared store.
        storage: What the job loads and saves.
        inner: Torch's own rendezvous.
        agents: All agents so far.
        starts: All starts of the workers so far, by incarnation.
        launches: How often the job was launched.
        kept: The record of restarts on storage.
    """

    def __init__(self, plan: RestartPlan, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self.agenda = Agenda()
        self.inner = Inner(self.agenda, least=plan.least, most=plan.nodes)
        self.agents: list[Agent] = []
        self.starts: dict[str, Start] = {}
        self.launches = 1
        self.kept: RestartRecord | None = None
        self._clocks = SeededDice(seed, "clocks")
        self._chance = SeededDice(seed, "world")
        self._hosts = [Host(number, self._clock()) for number in range(plan.nodes)]
        self._story = Story()
        self._made = 0
        self._passed = 0
        self._saved_step = 0
        self._launches_left = plan.launches
        self._lags = list(plan.lags)
        self._is_launching = False
        nobody = Observers(())
        self.store = StoreModel(
            self.agenda, plan.store, dice=SeededDice(seed, "store"), observers=nobody
        )
        self.storage = StorageModel(
            self.agenda, given.Storage(), dice=SeededDice(seed, "storage"), observers=nobody
        )
        self.checks = GateChecks(self)
        observers = Observers([self._story, *self.checks.observers])
        self.store.observers = self.storage.observers = observers
        self._observers = observers
        self.simulator = Simulator(
            self.agenda,
            store=self.store,
            storage=self.storage,
            observers=observers,
            store_timeout_s=plan.store.timeout_s,
        )
        for node, at_s in plan.arrivals:
            self.agenda.at(at_s, self._arrive, node)
        for fault in plan.faults:
            self._plan_fault(fault)

    @property
    def story(self) -> list[str]:
        """What has happened, line by line."""
        return self._story.lines

    def tell(self, who: str, what: str) -> None:
        """Add a line to the story."""
        self._story.lines.append(f"{self.agenda.now_s:10.4f} s  {who:<10} {what}")

    def _clock(self) -> HostClock:
        clocks, draw = self.plan.clocks, self._clocks.draw
        offset_s = clocks.offset_s * (2 * draw() - 1)
        return HostClock(offset_s=offset_s, rate=clocks.rate ** (2 * draw() - 1))

    def keys(self, incarnation: str) -> Keys:
        """Return the names of the keys of a start of the workers."""
        return Keys(run_id=_RUN_ID, incarnation=incarnation)

    def run(self) -> None:
        """Let the job come to its end.

        Raises:
            DrillFailedError: A promise was not kept.
        """
        starts = len(self.plan.fates) + self.plan.launches + _STARTS
        agenda = self.agenda
        while agenda.next_at_s() is not None:
            over_at_s = max(last_fault_s(self.plan), self.simulator.struck_until_s)
            if agenda.now_s > over_at_s + starts * _START_S:
                self.checks.never_ends(self.living)
                break
            agenda.step()
        self.checks.is_over()

    # Agents and their workers ---------------------------------------------------------------------

    @property
    def living(self) -> list[Agent]:
        """Agents whose process is there."""
        return [each for each in self.agents if each.process.is_alive]

    @property
    def is_done(self) -> bool:
        """Whether the workers have trained to the end."""
        return any(each.process.state == "ended" and each.ending is None for each in self.agents)

    def _process(self, node: int, name: str) -> Process:
        self._made += 1
        dice = SeededDice(self.seed, f"{name}#{self._made}")
        process = Process(node, 1, host=self._hosts[node], dice=dice)
        process.name = name
        return process

    def _arrive(self, node: int) -> None:
        if self.is_done or any(each.process.rank == node for each in self.living):
            return
        number = sum(each.process.rank == node for each in self.agents)
        process = self._process(node, f"agent {node}" + "'" * number)
        agent = Agent(self, process)
        self.agents.append(agent)
        self.simulator.start(process, self._life(agent))

    def _life(self, agent: Agent) -> Protocol[None]:
        try:
            yield from agent.life()
        finally:
            # Also where it was killed: a scheduler looks after that.
            self.agenda.after(_SCHEDULER_S, self._look_after, None)

    def _look_after(self, _value: object) -> None:
        if self.living or self._is_launching or self.is_done or not self._launches_left:
            return
        self._launches_left -= 1
        self._is_launching = True
        self.agenda.after(_SCHEDULER_S, self._launch, None)

    def _launch(self, _value: object) -> None:
        """Start all agents anew, with a store of their own."""
        self._is_launching = False
        self.launches += 1
        self.tell("world", "is launched anew")
        self._lose_store()
        for node in range(self.plan.nodes):
            self.agenda.after(self._chance.draw(), self._arrive, node)

    def _lose_store(self) -> None:
        self.store.cells.values.clear()
        self.inner.lose()
        for emptied in self._observers.emptied:
            emptied(self.agenda.now_s)

    def started(self, incarnation: str, nodes: tuple[int, ...]) -> Start:
        """Return a start of the workers; it begins with the first agent that asks for it."""
        found = self.starts.get(incarnation)
        if found is not None:
            return found
        self.checks.starts(incarnation)
        number = len(self.starts) + 1
        fates = self.plan.fates
        start = self.starts[incarnation] = Start(
            number=number,
            incarnation=incarnation,
            nodes=nodes,
            fate=fates[number - 1] if number <= len(fates) else Fate(),
            began_at_s=self.agenda.now_s,
            dice=self._chance,
        )
        kind = start.fate.kind.value
        self.tell("world", f"start {number}, {incarnation}, of {len(nodes)} nodes: {kind}")
        speaks_at_s = start.ends_at_s[start.culprit]
        if start.fate.kind in SPEAKS:
            self.agenda.at(speaks_at_s, self._speak, start)
        if start.fate.saves:
            self.agenda.at((self.agenda.now_s + speaks_at_s) / 2, self._save, start)
        return start

    def _speak(self, start: Start) -> None:
        if self._works(start, start.culprit):
            process = self._process(start.culprit, f"worker {start.culprit}")
            self.simulator.start(process, start.word(self.keys(start.incarnation)))

    def _save(self, start: Start) -> None:
        node = start.nodes[0]
        if self._works(start, node):
            self._saved_step += _STEPS
            process = self._process(node, f"worker {node}")
            program = start.progress(self.keys(start.incarnation), step=self._saved_step)
            self.simulator.start(process, program)

    def _works(self, start: Start, node: int) -> bool:
        return any(
            each.process.rank == node and each.place == "works" and each.start is start
            for each in self.living
        )

    def mirror(self) -> Mirror | None:
        """Return where the record is kept besides the store; None for nowhere."""
        if not self.plan.is_mirrored:
            return None
        return Mirror(self._load, self._keep, timeout_s=_MIRROR_S)

    def _load(self, token: Any) -> RestartRecord | None:  # noqa: ANN401 - a cancel token
        del token
        self._may_fail()
        return self.kept

    def _keep(self, record: RestartRecord, token: Any) -> None:  # noqa: ANN401 - as above
        del token
        self._may_fail()
        self.kept = record

    def _may_fail(self) -> None:
        if self.plan.is_mirror_ill:
            message = "the mirror is away"
            raise OSError(message)

    # What goes wrong ------------------------------------------------------------------------------

    def _plan_fault(self, fault: given.Fault) -> None:
        self.agenda.at(fault.at_s, self._begin_fault, fault)

    def _begin_fault(self, fault: Any) -> None:  # noqa: ANN401 - one of several
        name = type(fault).__struct_config__.tag
        self.tell("world", f"* {name} begins")
        match fault:
            case given.Outage():
                self.storage.begin(fault)
                self.agenda.after(fault.for_s, self.storage.end, fault)
                self._vote(fault)
            case given.StorePartition():
                until_s = self.agenda.now_s + fault.for_s
                for number in fault.hosts:
                    host = self._hosts[number]
                    host.cut_off_until_s = max(host.cut_off_until_s, until_s)
            case given.StoreGone():
                self.store.go()
                self.agenda.after(fault.for_s, self._come_back, fault)
            case given.GroupRestart():
                for agent in self.living:
                    self.simulator.crash(agent.process)
                if not self._is_launching:
                    self._is_launching = True
                    self.agenda.after(_SCHEDULER_S, self._launch, None)
            case _:
                self._strike(fault, name)

    def late_s(self, node: int) -> float:
        """Return how late a node is in the round that is complete, in seconds."""
        at = next((at for at, (lagging, _) in enumerate(self._lags) if lagging == node), None)
        if at is None:
            return 0.0
        _, late_s = self._lags.pop(at)
        self.tell("world", f"* node {node} is late in the round, by {late_s:.1f} s")
        return late_s

    def passed(self) -> None:
        """Let storage become ill once enough agents have passed the gate after the first start."""
        self._passed += 1
        if self._passed == self.plan.ill_after:
            self._begin_fault(given.Outage(at_s=self.agenda.now_s, for_s=self.plan.ill_s))

    def _come_back(self, fault: given.StoreGone) -> None:
        self.tell("world", "* the store is back")
        if fault.comes_back_empty:
            self.inner.lose()
        self.store.come_back(empty=fault.comes_back_empty)

    def _strike(self, fault: given.Crash | given.Pause, name: Any) -> None:  # noqa: ANN401 - a tag
        strike = Strike(what=str(name), for_s=getattr(fault, "for_s", 0.0))
        for agent in self.living:
            process = agent.process
            if process.rank not in fault.ranks:
                continue
            if fault.effects:
                process.strikes.append((process.effects + fault.effects, strike))
            elif strike.what == "crash":
                self.simulator.crash(process)
            else:
                self.simulator.pause(process, strike.for_s)

    def _vote(self, fault: given.Outage) -> None:
        """Let workers notice that storage is ill, as long as it is."""
        if self.agenda.now_s >= fault.at_s + fault.for_s or not self.simulator.living:
            return
        process = self._process(self._made % self.plan.nodes, "voter")
        self.simulator.start(process, self._ballot(process))
        self.agenda.after(_VOTES_EVERY_S, self._vote, fault)

    def _ballot(self, process: Process) -> Protocol[None]:
        for name in DEPENDENCIES:
            circuit = Circuit(
                name, config=self.plan.breaker, keys=self.keys(""), host=process.host.name
            )
            yield from begin(circuit, new_incarnation=False)
            yield from apply(circuit, HostVoted(host=process.name, hosts=1, reason="outage"))
