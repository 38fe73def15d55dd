# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated job: ranks on hosts, one store, one storage, and the faults of a scenario.

A run has two parts. Until the last fault is over, checks of safety look at every event. From then
on the world is well, and what is left of the job must come to its end within a bound: that is the
check of liveness, and it needs a bound that is known beforehand.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.keys import Keys
from lightning_resilience.drill import scenario as given
from lightning_resilience.drill.observer import Observer, Observers
from lightning_resilience.drill.process import Host, Process, Strike
from lightning_resilience.drill.simulator import Simulator
from lightning_resilience.drill.storage_model import StorageModel
from lightning_resilience.drill.store_model import StoreModel
from lightning_resilience.drill.trace import Trace
from lightning_resilience.drill.virtual import Agenda, HostClock, SeededDice
from lightning_resilience.drill.workload import Job


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_resilience.drill.scenario import Fault, Scenario


__all__ = ["RUN_ID", "World"]

RUN_ID: Final = "drill"


class World:
    """One run.

    Args:
        scenario: What is simulated.
        seed: Decides what the scenario leaves open.
        make_observers: Makes who looks, given the world before anything has happened in it.

    Attributes:
        agenda: The virtual clock, and what is to come.
        store: The shared store.
        storage: The dependency.
        processes: All processes so far; those of the present incarnation come last.
        trace: The run's digest.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        make_observers: Callable[[World], Iterable[Observer]] = lambda _world: (),
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.agenda = Agenda()
        self._faults_over_at_s = max((_over_at_s(fault) for fault in scenario.faults), default=0.0)
        self.processes: list[Process] = []
        self._incarnation = 0
        self._clocks = SeededDice(seed, "clocks")
        self.hosts = [Host(number, self._clock()) for number in range(scenario.hosts)]
        self._seats = self._take_seats()
        nobody = Observers(())
        self.store = StoreModel(
            self.agenda, scenario.store, dice=SeededDice(seed, "store"), observers=nobody
        )
        self.storage = StorageModel(
            self.agenda, scenario.storage, dice=SeededDice(seed, "storage"), observers=nobody
        )
        self.trace = Trace(self.store.cells)
        self.observers = Observers([self.trace, *make_observers(self)])
        self.store.observers = self.storage.observers = self.observers
        self.simulator = Simulator(
            self.agenda,
            store=self.store,
            storage=self.storage,
            observers=self.observers,
            store_timeout_s=scenario.store.timeout_s,
        )
        self.agenda.at(0.0, self._begin)
        for fault in scenario.faults:
            self._plan(fault)

    @property
    def healed_at_s(self) -> float:
        """When the last fault is over, on the virtual clock.

        It grows where a fault strikes only after some effects, and so later than was planned.
        """
        return max(self._faults_over_at_s, self.simulator.struck_until_s)

    def _clock(self) -> HostClock:
        clocks = self.scenario.clocks
        draw = self._clocks.draw
        offset_s = clocks.offset_s * (2 * draw() - 1)
        # As often slower as faster: the rate's logarithm is uniform.
        return HostClock(offset_s=offset_s, rate=clocks.rate ** (2 * draw() - 1))

    def _take_seats(self) -> list[Host]:
        ranks = self.scenario.ranks
        return [self.hosts[rank * len(self.hosts) // ranks] for rank in range(ranks)]

    def run(self, *, until_s: float) -> bool:
        """Let things happen until every process has ended.

        Args:
            until_s: Latest instant, on the virtual clock.

        Returns:
            Whether all have ended by then.
        """
        agenda, simulator = self.agenda, self.simulator
        while (next_at_s := agenda.next_at_s()) is not None:
            # Faults that are still to come may make new processes, and the first come at 0.
            if not simulator.living and next_at_s > self.healed_at_s:
                break
            if next_at_s > until_s:
                return False
            agenda.step()
        return simulator.living == 0

    # --- processes -----------------------------------------------------------------------------

    def _begin(self, _value: object) -> None:
        self._incarnation += 1
        job = Job(
            scenario=self.scenario,
            keys=Keys(run_id=RUN_ID, incarnation=str(self._incarnation)),
            agenda=self.agenda,
            storage=self.storage,
            observers=self.observers,
        )
        for rank in range(self.scenario.ranks):
            name = f"r{rank}i{self._incarnation}"
            process = Process(
                rank,
                self._incarnation,
                host=self._seats[rank],
                dice=SeededDice(self.seed, name),
            )
            self.processes.append(process)
            self.simulator.start(process, job.program(process))

    def _present(self, ranks: Iterable[int]) -> list[Process]:
        """Return the processes that ranks have now."""
        present = self.processes[-self.scenario.ranks :]
        return [present[rank] for rank in ranks]

    # --- faults --------------------------------------------------------------------------------

    def _plan(self, fault: Fault) -> None:
        begin, end = self._acts(fault)
        self.agenda.at(fault.at_s, partial(self._happen, f"{_name(fault)} begins", begin))
        if end is not None:
            self.agenda.at(_over_at_s(fault), partial(self._happen, f"{_name(fault)} ends", end))

    def _happen(self, what: str, act: Callable[[], None], _value: object) -> None:
        for happened in self.observers.happened:
            happened(self.agenda.now_s, what)
        act()

    def _acts(self, fault: Fault) -> tuple[Callable[[], None], Callable[[], None] | None]:
        match fault:
            case given.Outage() | given.Brownout() | given.Refusal():
                return partial(self.storage.begin, fault), partial(self.storage.end, fault)
            case given.StorePartition() | given.StoragePartition():
                return partial(self._cut_off, fault), _nothing
            case given.StoreGone():
                back = partial(self.store.come_back, empty=fault.comes_back_empty)
                return self.store.go, back
            case given.GroupRestart():
                return self._restart, None
            case given.Stray():
                # It is the ranks' own programs that do so.
                return _nothing, None
            case _:
                return partial(self._strike, fault), None

    def _cut_off(self, fault: given.StorePartition | given.StoragePartition) -> None:
        is_store = isinstance(fault, given.StorePartition)
        way = "cut_off_until_s" if is_store else "cut_off_from_storage_until_s"
        for number in fault.hosts:
            host = self.hosts[number]
            setattr(host, way, max(getattr(host, way), _over_at_s(fault)))

    def _restart(self) -> None:
        for process in self._present(range(self.scenario.ranks)):
            self.simulator.crash(process)
        self._begin(None)

    def _strike(self, fault: given.Crash | given.Pause | given.Interrupt) -> None:
        strike = Strike(what=_name(fault), for_s=getattr(fault, "for_s", 0.0))
        for process in self._present(fault.ranks):
            if fault.effects:
                process.strikes.append((process.effects + fault.effects, strike))
            elif strike.what == "crash":
                self.simulator.crash(process)
            elif strike.what == "pause":
                self.simulator.pause(process, strike.for_s)
            else:
                self.simulator.interrupt(process)


def _nothing() -> None:
    return None


def _name(fault: Fault) -> str:
    return str(type(fault).__struct_config__.tag)


def _over_at_s(fault: Fault) -> float:
    return fault.at_s + float(getattr(fault, "for_s", 0.0))
