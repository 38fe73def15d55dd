# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One agent of a simulated job: it comes to the gate, joins, watches its workers, and leaves.

What it asks and what it decides is shipped. Around that is what ``adapters.rendezvous`` does with
torch's agent: which of it comes after which, and what follows from an exception.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from lightning_resilience.core.exit_codes import may_start_again
from lightning_resilience.core.joining import JoinFailure, Joining, ending_of
from lightning_resilience.core.leaving import Apart, told_to_stop, unread, used_up
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.restart import GoRecord, first_contact_s, missed
from lightning_resilience.core.worker_exits import incident_of_exit
from lightning_resilience.drill.process import Operation
from lightning_resilience.drill.restart_inner import JoinFailedError
from lightning_resilience.drill.restart_plan import JOIN_S
from lightning_resilience.drill.restart_round import join, learn_name
from lightning_resilience.drill.restart_watch import RENDEZVOUS_KEY, AgentWatch
from lightning_resilience.drill.restart_workers import WORKERS_PER_NODE
from lightning_resilience.drill.storage_model import Request
from lightning_resilience.errors import StoreError
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.circuit import Circuit
from lightning_resilience.protocols.effects import (
    Draw,
    Get,
    Nonce,
    Now,
    Sleep,
)
from lightning_resilience.protocols.incarnation import (
    Part,
    RoundGivenUpError,
    take_leave,
)
from lightning_resilience.protocols.incident import publish_incident
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.protocols.restart import (
    Dependency,
    Gate,
    charge_missed,
    pass_first_gate,
    pass_gate,
)
from lightning_resilience.protocols.restart_record import Memory


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.core.quota import Ending
    from lightning_resilience.core.restart import IncarnationRecord
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.restart_inner import Place
    from lightning_resilience.drill.restart_workers import Start
    from lightning_resilience.drill.restart_world import RestartWorld
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["DEPENDENCIES", "Agent"]

DEPENDENCIES: Final = ("drill://storage:read", "drill://storage:write")

_MONITOR_S: Final = 2.0


class _LeftError(Exception):
    """The agent leaves.

    Args:
        ending: How the job has ended, as it knows.
    """

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending


class Agent:
    """One agent.

    Args:
        world: The world.
        process: Its process; the rank is the number of its node.

    Attributes:
        place: ``begins``, ``gate``, ``joins``, ``works`` or ``gone``.
        over: The start of the workers that it had part in last; None before the first.
        part: The same, with its number in it.
        memory: What it remembers of restarts.
        ending: With what it has left; None where it has not, or all went well.
        came_at_s: When it came to where it is, on the virtual clock.
        gated_s: Its longest stay at the gate since its last start, in seconds.
        start: The start of the workers that it had part in last.
    """

    def __init__(self, world: RestartWorld, process: Process) -> None:
        self.world = world
        self.process = process
        self.place = "begins"
        self.over: IncarnationRecord | None = None
        self.part: Part | None = None
        self.memory: Memory | None = None
        self.ending: Ending | None = None
        self.came_at_s = world.agenda.now_s
        self._joining_s = 0.0
        self.gated_s = 0.0
        self.start: Start | None = None
        self._restarts_left = world.plan.torch_restarts
        self._has_failed = self._is_called = False
        self._asked = 0
        self._passed: tuple[Gate, GoRecord] | None = None
        self._members: frozenset[Process] = frozenset()

    @property
    def status(self) -> int:
        """With what it has left: 0 where all went well, -1 where it was killed, or still lives."""
        if self.process.state != "ended":
            return -1
        return 0 if self.ending is None else int(self.ending.code)

    @property
    def joining_s(self) -> float:
        """For how long it has tried to join since its last start, gates apart, in seconds."""
        is_joining = self.place == "joins"
        return self._joining_s + is_joining * (self.world.agenda.now_s - self.came_at_s)

    def _is_at(self, place: str) -> None:
        if self.place == "gate":
            self.gated_s = max(self.gated_s, self.world.agenda.now_s - self.came_at_s)
        self._joining_s = 0.0 if place == "works" else self.joining_s
        self.gated_s = 0.0 if place == "works" else self.gated_s
        self.place, self.came_at_s = place, self.world.agenda.now_s
        self.world.tell(self.process.name, f"is at: {place}")

    # Its life -------------------------------------------------------------------------------------

    def life(self) -> Protocol[None]:
        """Live until the job has ended, for this agent."""
        try:
            draw: float = yield Draw()
            yield Sleep(first_contact_s(self.world.plan.nodes, draw=draw))
            while True:
                yield from self._next_rendezvous()
                how = yield from self._works()
                if how == "done" or (how == "failed" and not self._restarts_left):
                    break
                self._restarts_left -= how == "failed"
            yield from self._shut_down()
        except _LeftError as left:
            self.ending = left.ending
        self._is_at("gone")

    def _next_rendezvous(self) -> Protocol[None]:
        now_s: float = yield Now()
        joining = Joining(join_s=JOIN_S, started_at_s=now_s)
        # Bounded, as in the adapter: ``joining`` ends the job where it was enough.
        while not (yield from self._attempt(joining)):
            pass

    def _attempt(self, joining: Joining) -> Protocol[bool]:
        came_at_s: float = yield Now()
        self._is_at("gate")
        try:
            yield from self._pass_gate()
        except StoreError:
            now_s: float = yield Now()
            if self.memory is not None:
                answered_at_s = self.memory.answered_at_s
                joining.held(came_at_s=came_at_s, answered_at_s=answered_at_s, now_s=now_s)
            yield from self._pause(joining, JoinFailure.UNREACHABLE)
            return False
        now_s = yield Now()
        joining.passed(came_at_s=came_at_s, now_s=now_s)
        self._is_at("joins")
        self.world.checks.joins(self)
        try:
            yield from self._enter()
        except StoreError:
            yield from self._pause(joining, JoinFailure.UNREACHABLE)
            return False
        except JoinFailedError as error:
            yield from self._pause(joining, error.failure)
            return False
        return True

    def _pause(self, joining: Joining, failure: JoinFailure) -> Protocol[None]:
        if failure is JoinFailure.LATE:
            self.world.checks.is_late(self)
        if failure in {JoinFailure.CLOSED, JoinFailure.UNREACHABLE}:
            yield from self._look_how_it_has_ended(is_closed=failure is JoinFailure.CLOSED)
        now_s: float = yield Now()
        draw: float = yield Draw()
        pause_s = joining.pause_s(failure, now_s=now_s, draw=draw)
        if pause_s is None:
            self.world.checks.gives_up(self, failure)
            is_first, elapsed_s = self.over is None, now_s - joining.started_at_s
            ending = ending_of(
                failure, failure.value, is_first=is_first, elapsed_s=elapsed_s, endpoint="the store"
            )
            yield from self._end(ending)
        else:
            yield Sleep(pause_s)

    def _look_how_it_has_ended(self, *, is_closed: bool) -> Protocol[None]:
        if is_closed and self.memory is not None:
            try:
                yield from self._remember(self.memory.keys.incarnation)
            except StoreError:
                self.world.tell(self.process.name, "cannot read why the rendezvous is closed")
            else:
                return
        found = yield from restart_record.kept(self.world.mirror())
        if found is not None:
            raise _LeftError(found)

    # The gate -------------------------------------------------------------------------------------

    def _pass_gate(self) -> Protocol[None]:
        if self.over is None:
            self.memory = self._memory_of("")
            ending = yield from pass_first_gate(self._gate(self.memory))
            if ending is not None:
                yield from self._leave(ending)
            return
        memory = yield from self._remember(self.over.incarnation)
        if not self._is_called:
            yield from self._report(memory)
        left = missed(self.over, self.world.inner.there())
        gate = replace(self._gate(memory), left=left, is_failure=not self._is_called)
        passed = yield from pass_gate(gate)
        if isinstance(passed, GoRecord):
            self._passed = gate, passed
            self.world.checks.passed(self, passed)
            self.world.passed()
        else:
            yield from self._leave(passed)

    def _gate(self, memory: Memory) -> Gate:
        return Gate(memory=memory, config=self.world.plan.restart, dependencies=self.dependencies())

    def dependencies(self) -> tuple[Dependency, ...]:
        """Return what a restart waits for, with nothing remembered of it yet."""
        return tuple(self._dependency(name) for name in DEPENDENCIES)

    def _dependency(self, name: str) -> Dependency:
        config, host = self.world.plan.breaker, self.process.host.name
        circuit = Circuit(name, config=config, keys=self._keys(""), host=host)
        patience = Patience(probe=self._probe, classify=classify, leads=True)
        return Dependency(circuit=circuit, patience=patience)

    def _probe(self, token: CancelToken) -> Request:
        del token
        self._asked += 1
        operation = Operation(process=self.process, kind="restart", number=self._asked)
        request = Request("probe", self.process, operation, attempt=1)
        self.world.storage.submit(request)
        return request

    def _report(self, memory: Memory) -> Protocol[None]:
        if self._has_failed:
            yield from self._report_exit(memory)

    def _report_exit(self, memory: Memory) -> Protocol[None]:
        start = cast("Start", self.start)
        node = self.process.rank
        writer: str = yield Nonce()
        rank, status = node * WORKERS_PER_NODE, start.status(node)
        offered = incident_of_exit(rank=rank, status=status, message="", writer=writer)
        yield from publish_incident(memory.keys, offered)

    def _keys(self, incarnation: str) -> Keys:
        return self.world.keys(incarnation)

    def _memory_of(self, incarnation: str) -> Memory:
        keys = self._keys(incarnation)
        return (self.memory or Memory(keys)).followed_by(keys, mirror=self.world.mirror())

    def _remember(self, incarnation: str) -> Protocol[Memory]:
        memory = self.memory = self._memory_of(incarnation)
        record = yield from restart_record.read(memory)
        if record.ending is not None:
            yield from self._leave(record.ending)
        return memory

    # Joining --------------------------------------------------------------------------------------

    def _enter(self) -> Protocol[None]:
        place = yield from join(self.world.inner, self.process)
        before = "" if self.over is None else self.over.incarnation
        checks = self.world.checks.rounds
        checks.comes(self, place)
        late_s = self.world.late_s(self.process.rank)
        if late_s:
            # Its signs of life are another thread's.
            yield Sleep(late_s)
        checks.waits(self)
        try:
            yield from self._look_who_is_here(place)
            found = yield from learn_name(place, self._keys(""), before=before)
        except StoreError as error:
            checks.leaves(self, is_given_up=isinstance(error, RoundGivenUpError))
            raise
        checks.begins(self, found)
        self.part = Part(start=found, node=place.rank)
        yield from self._remember(found.incarnation)
        self.over, self._members = found, place.members
        self._is_called = self._has_failed = False
        self.start = self.world.started(found.incarnation, place.nodes)
        self._is_at("works")

    def _look_who_is_here(self, place: Place) -> Protocol[None]:
        if self._passed is not None:
            gate, go = self._passed
            yield from charge_missed(gate, go, gone=len(self._members - place.members))
        self._passed = None

    # While all is well ----------------------------------------------------------------------------

    def _works(self) -> Protocol[str]:
        start, agenda = cast("Start", self.start), self.world.agenda
        watching = AgentWatch(self)
        ends_at_s, rate = start.ends_at_s[self.process.rank], self.process.host.clock.rate
        while agenda.now_s < ends_at_s:
            news = yield from watching.look()
            if news.ending is not None:
                yield from self._leave(news.ending)
            if news.is_over or (yield from watching.waiting()):
                self._is_called = True
                return "called"
            yield Sleep(min(_MONITOR_S, max(0.0, ends_at_s - agenda.now_s) * rate))
        if start.is_told(self.process.rank):
            yield from self._stop()
        self._has_failed = not start.is_good
        return "failed" if self._has_failed else "done"

    # The end --------------------------------------------------------------------------------------

    def _stop(self) -> Protocol[None]:
        try:
            yield from self._report_exit(cast("Memory", self.memory))
        except StoreError:
            self.world.tell(self.process.name, "could not tell the others that it stops")
        raise _LeftError(told_to_stop("SIGTERM"))

    def _shut_down(self) -> Protocol[None]:
        try:
            ending = yield from self._ending()
        except StoreError:
            if self._has_failed:
                raise _LeftError(unread("torch's limit, and no store")) from None
            return
        if ending is not None:
            yield from self._leave(ending)

    def _ending(self) -> Protocol[Ending | Apart | None]:
        part = cast("Part", self.part)
        memory = yield from self._remember(part.start.incarnation)
        if not self._has_failed:
            return None
        self._is_at("gate")
        yield from self._pass_gate()
        ending = used_up(part.node, incarnation=part.start.incarnation)
        return (yield from restart_record.end(memory, ending))

    def _end(self, ending: Ending) -> Protocol[None]:
        how: Ending | Apart = ending
        if self.memory is not None:
            try:
                how = yield from restart_record.end(self.memory, ending)
            except StoreError:
                self.world.tell(self.process.name, "could not tell the others of the end")
        yield from self._leave(how)

    def _leave(self, how: Ending | Apart) -> Protocol[None]:
        if isinstance(how, Apart):
            self.world.tell(self.process.name, f"leaves alone: {how.ending.reason}")
            raise _LeftError(how.ending)
        self.world.checks.leaves(self, how)
        linger_s, hosts_store = self.world.plan.restart.linger_s, self.process.rank == 0
        try:
            if not may_start_again(how.code):
                yield Get(RENDEZVOUS_KEY)
                self.world.inner.is_closed = True
            keys = self._keys("")
            yield from take_leave(keys, self.part, hosts_store=hosts_store, linger_s=linger_s)
        except StoreError:
            self.world.tell(self.process.name, "leaves, and the store has gone already")
        raise _LeftError(how)
