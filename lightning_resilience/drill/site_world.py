# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Several simulated jobs that share a storage, and a store of their site besides their own.

The processes run the shipped protocols: guarded calls under their job's breaker, which is under
the site's. Whether promises are kept is seen from outside (``drill.checks_site``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.drill import scenario as given
from lightning_resilience.drill.checks_site import SiteChecks
from lightning_resilience.drill.observer import Observers
from lightning_resilience.drill.process import Host, Operation, Process, Strike
from lightning_resilience.drill.simulator import Simulator
from lightning_resilience.drill.site_plan import last_fault_s
from lightning_resilience.drill.storage_model import Request, StorageModel
from lightning_resilience.drill.store_model import StoreModel
from lightning_resilience.drill.trace import Story
from lightning_resilience.drill.virtual import Agenda, HostClock, SeededDice
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.circuit import Circuit
from lightning_resilience.protocols.circuit_memory import (
    KnownSite,
    Link,
    give_detour,
    give_upstream,
)
from lightning_resilience.protocols.effects import Draw, Sleep
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.protocols.restart import Dependency, may_grow


if TYPE_CHECKING:
    from lightning_resilience.drill.site_plan import SitePlan
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["DEPENDENCY", "SiteWorld"]

DEPENDENCY: Final = "drill://storage:write"

_STORE_PATIENCE_S: Final = 5.0
_LOOKS_EVERY_S: Final = 5.0
# A call that hangs is abandoned after this time, so three of them fit into a window.
_STALL_S: Final = 20.0
# Longer than all that one call may wait for once the world is well.
_CALL_S: Final = 400.0


class SiteWorld:
    """Jobs from their starts to their ends.

    Args:
        plan: The jobs.
        seed: Decides what the plan leaves open.

    Attributes:
        agenda: The virtual clock.
        store: The store of all jobs; their keys differ.
        site: The site's store.
        storage: What the jobs share.
        processes: All processes.
    """

    def __init__(self, plan: SitePlan, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self.agenda = Agenda()
        self._clocks = SeededDice(seed, "clocks")
        self._hosts = [Host(number, self._clock()) for number in range(plan.jobs)]
        self._story = Story()
        nobody = Observers(())
        self.store = StoreModel(
            self.agenda, given.Store(), dice=SeededDice(seed, "store"), observers=nobody
        )
        self.site = StoreModel(
            self.agenda, plan.site, dice=SeededDice(seed, "site"), observers=nobody
        )
        self.storage = StorageModel(
            self.agenda, given.Storage(), dice=SeededDice(seed, "storage"), observers=nobody
        )
        self.checks = SiteChecks(self)
        observers = Observers([self._story, *self.checks.observers])
        self.store.observers = self.site.observers = self.storage.observers = observers
        self.observers = observers
        self.simulator = Simulator(
            self.agenda,
            store=self.store,
            storage=self.storage,
            observers=observers,
            store_timeout_s=given.Store().timeout_s,
            site=self.site,
            site_timeout_s=plan.site.timeout_s,
        )
        self.processes: list[Process] = []
        for job, starts_s in enumerate(plan.starts_s):
            self.agenda.at(starts_s, self._start, job)
        for fault in plan.faults:
            self.agenda.at(fault.at_s, self._begin_fault, fault)
        for at_s, for_s, is_empty in plan.gone:
            self.agenda.at(at_s, self._go, (for_s, is_empty))

    @property
    def story(self) -> list[str]:
        """What has happened, line by line."""
        return self._story.lines

    def _clock(self) -> HostClock:
        clocks, draw = self.plan.clocks, self._clocks.draw
        offset_s = clocks.offset_s * (2 * draw() - 1)
        return HostClock(offset_s=offset_s, rate=clocks.rate ** (2 * draw() - 1))

    def run(self) -> None:
        """Let all jobs come to their ends.

        Raises:
            DrillFailedError: A promise was not kept.
        """
        agenda = self.agenda
        while (next_at_s := agenda.next_at_s()) is not None:
            over_at_s = max(last_fault_s(self.plan), self.simulator.struck_until_s)
            if next_at_s > over_at_s and not self.simulator.living:
                break
            bound_s = self.plan.calls * self.plan.seldom * (_CALL_S + 2 * self.plan.every_s)
            if next_at_s > over_at_s + bound_s:
                self.checks.never_ends(bound_s)
            agenda.step()
        self.checks.is_over()

    def job_of(self, process: Process) -> str:
        """Return the name of a process's job."""
        return f"job{process.host.number}"

    def looks(self, process: Process) -> bool:
        """Tell whether a process looks at the site for its job."""
        return self.is_agent(process) or process.rank % self.plan.processes == 0

    def is_agent(self, process: Process) -> bool:
        """Tell whether a process makes no calls, and looks whether nodes may be let in."""
        return process.rank >= self.plan.jobs * self.plan.processes

    def _start(self, job: int) -> None:
        plan = self.plan
        for index in range(plan.processes):
            process = self._process(job, job * plan.processes + index, name=f"job{job}.{index}")
            self.simulator.start(process, self._life(process))
        if plan.grows:
            agent = self._process(job, plan.jobs * plan.processes + job, name=f"job{job}.agent")
            self.simulator.start(agent, self._watch_growth(agent))

    def _process(self, job: int, rank: int, *, name: str) -> Process:
        dice = SeededDice(self.seed, f"process {rank}")
        process = Process(rank, 1, host=self._hosts[job], dice=dice)
        process.name = name
        self.processes.append(process)
        return process

    def workers(self, job: str) -> list[Process]:
        """Return the processes of a job that make calls."""
        return [
            each for each in self.processes if self.job_of(each) == job and not self.is_agent(each)
        ]

    def _watch_growth(self, agent: Process) -> Protocol[None]:
        site, job = KnownSite(), self.job_of(agent)
        while any(each.is_alive for each in self.workers(job)):
            # As the agent of the rendezvous does: it keeps what it knows of the site alone.
            circuit = self._circuit(agent)
            site.put_above(circuit)
            operation = Operation(process=agent, kind="growth", number=0)
            needed = Dependency(circuit=circuit, patience=self._call(operation).patience)
            yield from may_grow((needed,))
            yield Sleep(_LOOKS_EVERY_S)

    def _circuit(self, process: Process) -> Circuit:
        circuit = Circuit(
            DEPENDENCY,
            config=self.plan.breaker,
            keys=Keys(run_id=self.job_of(process), incarnation="1"),
            host=process.host.name,
        )
        give_detour(circuit, link=Link(), processes=self.plan.processes)
        give_upstream(circuit, link=Link(), looks=self.looks(process))
        process.circuit = circuit
        return circuit

    def _life(self, process: Process) -> Protocol[None]:
        circuit = self._circuit(process)
        plan, seldom = self.plan, self.plan.seldom
        calls, pause_s = plan.calls * seldom, plan.every_s
        if self.looks(process):
            calls, pause_s = plan.calls, plan.every_s * seldom
        for number in range(1, calls + 1):
            draw: float = yield Draw()
            yield Sleep(pause_s * (0.5 + draw))
            operation = Operation(process=process, kind="call", number=number)
            operation.began_at_s = self.agenda.now_s
            for began in self.observers.operation_began:
                began(self.agenda.now_s, operation)
            try:
                yield from guard(circuit, self._call(operation))
            except ResilienceError as error:
                # As a careful user does: the next call is another one.
                operation.error = error.with_traceback(None)
            operation.ended_at_s = self.agenda.now_s
            for ended in self.observers.operation_ended:
                ended(self.agenda.now_s, operation)

    def _call(self, operation: Operation) -> GuardedCall:
        return GuardedCall(
            work=partial(self._submit, operation, "call"),
            operation=operation.kind,
            target=f"{operation.number}.ckpt",
            policy=RetryPolicy(stall_timeout_s=_STALL_S),
            patience=Patience(
                probe=partial(self._submit, operation, "probe"),
                classify=classify,
                when_open=self.plan.when_open,
                leads=self.looks(operation.process),
            ),
            may_go_alone=True,
            store_patience_s=_STORE_PATIENCE_S,
        )

    def _submit(self, operation: Operation, kind: str, _token: CancelToken) -> Request:
        operation.attempts += kind == "call"
        request = Request(kind, operation.process, operation, attempt=operation.attempts)
        self.storage.submit(request)
        return request

    # What goes wrong ------------------------------------------------------------------------------

    def _begin_fault(self, fault: Any) -> None:  # noqa: ANN401 - one of several
        name = type(fault).__struct_config__.tag
        self._story.happened(self.agenda.now_s, f"{name} begins")
        match fault:
            case given.Outage():
                self.storage.begin(fault)
                self.agenda.after(fault.for_s, self.storage.end, fault)
            case given.StoragePartition():
                until_s = self.agenda.now_s + fault.for_s
                for number in fault.hosts:
                    host = self._hosts[number]
                    longest_s = max(host.cut_off_from_storage_until_s, until_s)
                    host.cut_off_from_storage_until_s = longest_s
            case _:
                self._strike(fault, str(name))

    def _strike(self, fault: given.Crash | given.Pause, name: str) -> None:
        strike = Strike(what=name, for_s=getattr(fault, "for_s", 0.0))
        for process in self.processes:
            if process.rank not in fault.ranks or not process.is_alive:
                continue
            if fault.effects:
                process.strikes.append((process.effects + fault.effects, strike))
            elif name == "crash":
                self.simulator.crash(process)
            else:
                self.simulator.pause(process, strike.for_s)

    def _go(self, absence: tuple[float, bool]) -> None:
        for_s, is_empty = absence
        self._story.happened(self.agenda.now_s, "the site's store goes")
        self.site.go()
        self.checks.site_went()
        self.agenda.after(for_s, self._come_back, is_empty)

    def _come_back(self, is_empty: bool) -> None:  # noqa: FBT001 - what the agenda hands on
        self._story.happened(self.agenda.now_s, "the site's store is back")
        self.site.come_back(empty=is_empty)
