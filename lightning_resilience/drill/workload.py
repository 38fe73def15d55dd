# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What every rank of a simulated job does: rounds of guarded calls and joint operations.

The programs are what the adapters make of a user's training: calls of one rank's own, calls that
all make at the same time, joint saves on which one rank works, and joint loads, in which all do.
Some ranks may leave one out, or make one twice, as under a condition that is not the same on all.
Where saves may be deferred, the run ends as it does there (``core.run_end``). A call that fails is
caught, as a careful user's is; a joint operation that fails ends its rank, as an
exception does that nobody catches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.joint import error_of, report_of
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.run_end import RunEnd, rest_of
from lightning_resilience.core.waiting import VOICE_S, chunk_s
from lightning_resilience.drill.process import ENDS, WORKER, Operation
from lightning_resilience.drill.scenario import JOINT_KINDS, Stray
from lightning_resilience.drill.storage_model import Request
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.circuit import Circuit, begin
from lightning_resilience.protocols.circuit_memory import Limits, Link, give_detour
from lightning_resilience.protocols.effects import Draw, Sleep
from lightning_resilience.protocols.guard import Guarded, GuardedCall, guard
from lightning_resilience.protocols.joint import Joint, Member, Part, perform
from lightning_resilience.protocols.joint_fence import enlist
from lightning_resilience.protocols.persistent import Persistence, with_persistence
from lightning_resilience.protocols.probe import Patience


if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from lightning_resilience.core.keys import Keys
    from lightning_resilience.drill.observer import Observers
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.scenario import Scenario
    from lightning_resilience.drill.storage_model import StorageModel
    from lightning_resilience.drill.virtual import Agenda
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Effect, Protocol
    from lightning_resilience.protocols.joint import JointResult


__all__ = ["DEPENDENCY", "STAGED", "Job"]

DEPENDENCY: Final = "drill://storage:write"

STAGED: Final = "staged"
"""What a save has come to that waits on the node of the rank that has made it."""

_LEFT: Final = "left"
_HALF: Final = 0.5
_STAGING_S: Final = 0.02
_LOOK_S: Final = 0.05
_LONGEST_SETUP_S: Final = 120.0
_LONGEST_BEAT_S: Final = 5.0
_BEATS_PER_TIMEOUT: Final = 4
_MOST_CAUSES: Final = 20
_STORE_PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the processes of one incarnation have in common.

    Args:
        scenario: The world.
        keys: Names of the keys of this incarnation.
        agenda: The virtual clock, for the record of what was done when.
        storage: The dependency.
        observers: Are told of operations.

    Attributes:
        enlisted: Ranks whose setup is done.
        trained: How many rounds each rank has left behind.
        strayed: Which fault has led which process out of lock-step already.
    """

    scenario: Scenario
    keys: Keys
    agenda: Agenda
    storage: StorageModel
    observers: Observers
    enlisted: set[int] = field(default_factory=set)
    trained: dict[int, int] = field(default_factory=dict)
    strayed: set[tuple[int, Process]] = field(default_factory=set)

    def program(self, process: Process) -> Generator[Effect, Any, Any]:
        """Return what a process runs from its start to its end."""
        scenario, work = self.scenario, self.scenario.workload
        circuit = self._circuit(process)
        process.circuit = circuit
        member = self._member(process)
        if work.has_joint or not scenario.may_go_alone:
            # As the callback does: nobody is let through before the record was read.
            beginning = _begin(circuit, member)
            try:
                member = yield from with_persistence(beginning, _persistence(member))
            except ResilienceError:
                # The store was away for too long, and the job does not start.
                return
            self.enlisted.add(process.rank)
            if not (yield from self._all_have_begun()):
                return
        number, end = 0, RunEnd()
        for turn in range(work.rounds):
            if turn:
                yield Sleep(work.every_s)
                yield from self._train_together(process, turn)
            place = 0
            for kind in self._lived(process):
                draw: float = yield Draw()
                yield Sleep(draw * work.spread_s)
                number, place = number + 1, place + 1
                operation = Operation(process=process, kind=kind, number=number)
                operation.place = f"step {turn}, call {place}"
                if not (yield from self._make(operation, circuit, member)):
                    return
                end = end.begun(_name_of(kind))
        yield from self._end(process, circuit, member, end=end, number=number)

    def _end(
        self, process: Process, circuit: Circuit, member: Member, *, end: RunEnd, number: int
    ) -> Protocol[None]:
        """End the run as all ranks do: wait for what may have been left, then for the rest."""
        is_due = end.is_due and member.defer_after_s is not None
        for kind in ENDS:
            if not is_due:
                return
            number += 1
            operation = Operation(process=process, kind=kind, number=number)
            operation.place = "the end"
            if not (yield from self._make(operation, circuit, member)):
                return
            is_due = bool(rest_of(operation.result.final))

    def _lived(self, process: Process) -> Iterator[str]:
        """Yield the operations of a round as this rank makes them."""
        for kind in self.scenario.workload.kinds:
            times = self._times(process) if kind in JOINT_KINDS else 1
            yield from (kind,) * times

    def _times(self, process: Process) -> int:
        for index, fault in enumerate(self.scenario.faults):
            if not isinstance(fault, Stray) or process.rank not in fault.ranks:
                continue
            if fault.at_s <= self.agenda.now_s and (index, process) not in self.strayed:
                self.strayed.add((index, process))
                return 2 * fault.twice
        return 1

    def _all_have_begun(self) -> Protocol[bool]:
        """Wait for the setup of all ranks, which ends with a collective of the framework's."""
        waited_s = 0.0
        while len(self.enlisted) < self.scenario.ranks:
            if waited_s >= _LONGEST_SETUP_S:
                return False
            # Nothing depends on how often it looks.
            pause_s = max(_LOOK_S, waited_s / 10)
            yield Sleep(pause_s)
            waited_s += pause_s
        return True

    def _train_together(self, process: Process, turn: int) -> Protocol[None]:
        """Wait, where saves may be deferred, for a collective of training: it keeps ranks together.

        As long as a process group does: whoever is not there by then is not waited for.
        """
        self.trained[process.rank] = turn
        work = self.scenario.workload
        waited_s = 0.0
        while work.defer_after_s and waited_s < work.joint_timeout_s:
            if min(self.trained.get(rank, 0) for rank in range(self.scenario.ranks)) >= turn:
                return
            pause_s = max(_LOOK_S, waited_s / 10)
            yield Sleep(pause_s)
            waited_s += pause_s

    def _circuit(self, process: Process) -> Circuit:
        scenario = self.scenario
        circuit = Circuit(
            DEPENDENCY,
            config=scenario.breaker,
            keys=self.keys,
            host=process.host.name,
            hosts=scenario.hosts,
            limits=Limits(admission=scenario.admission, budget=scenario.budget),
        )
        if scenario.may_go_alone:
            give_detour(circuit, link=Link(), processes=scenario.ranks)
        return circuit

    def _member(self, process: Process) -> Member:
        scenario = self.scenario
        timeout_s = scenario.workload.joint_timeout_s
        return Member(
            keys=self.keys,
            rank=process.rank,
            world_size=scenario.ranks,
            timeout_s=timeout_s,
            beat_s=min(_LONGEST_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT),
            on_outage=scenario.workload.on_outage,
            store_patience_s=timeout_s,
            defer_after_s=scenario.workload.defer_after_s or None,
        )

    def _make(self, operation: Operation, circuit: Circuit, member: Member) -> Protocol[bool]:
        """Make an operation; return whether the process goes on after it."""
        process = operation.process
        process.operation = operation
        operation.began_at_s = self.agenda.now_s
        before = process.store_operations
        for began in self.observers.operation_began:
            began(self.agenda.now_s, operation)
        try:
            if operation.is_joint:
                operation.result = yield from self._join(operation, circuit, member)
            else:
                operation.result = yield from self._call(operation, circuit)
        except GeneratorExit:
            raise
        except BaseException as error:
            operation.error = error
            if not isinstance(error, Exception):
                self._has_ended(operation, before)
                raise
        self._has_ended(operation, before)
        return not operation.is_joint or operation.error is None

    def _has_ended(self, operation: Operation, before: int) -> None:
        operation.ended_at_s = self.agenda.now_s
        operation.store_operations = operation.process.store_operations - before
        for ended in self.observers.operation_ended:
            ended(self.agenda.now_s, operation)
        if operation.error is not None:
            # Its frames would keep all that the operation has held.
            operation.error = _without_frames(operation.error)

    def _patience(self, operation: Operation) -> Patience:
        work = self.scenario.workload
        when_open = work.when_open
        if operation.is_joint:
            # As the callback does.
            when_open = "raise" if work.on_outage == "fail" else "wait"
        return Patience(
            probe=partial(self._submit, operation, "probe"),
            classify=classify,
            when_open=when_open,
            chunk_s=chunk_s(joint_timeout_s=self.scenario.workload.joint_timeout_s),
            voice_s=VOICE_S,
            spread_s=min(1.0, self.scenario.ranks - 1.0),
            leads=operation.kind == "joint",
        )

    def _submit(self, operation: Operation, kind: str, _token: CancelToken) -> Request:
        if kind == "call":
            operation.attempts += 1
        request = Request(kind, operation.process, operation, attempt=operation.attempts)
        self.storage.submit(request)
        return request

    def _guarded(self, operation: Operation) -> GuardedCall:
        scenario = self.scenario
        is_joint = operation.is_joint
        return GuardedCall(
            work=partial(self._submit, operation, "call"),
            operation=operation.kind,
            target=f"{operation.number}.ckpt",
            policy=scenario.retry,
            patience=self._patience(operation),
            collective=operation.is_made_by_all,
            may_go_alone=scenario.may_go_alone and not is_joint,
            store_patience_s=None if is_joint else _STORE_PATIENCE_S,
        )

    def _call(self, operation: Operation, circuit: Circuit) -> Protocol[Guarded]:
        return guard(circuit, self._guarded(operation))

    def _work(
        self, operation: Operation, circuit: Circuit, started_at_s: float
    ) -> Protocol[Guarded]:
        if operation.is_guarded:
            return (yield from guard(circuit, self._guarded(operation), started_at_s))
        draw: float = yield Draw()
        pause_s = draw * self.scenario.workload.joint_timeout_s / _BEATS_PER_TIMEOUT
        yield Sleep(pause_s)
        # Something is left to be removed in every other run.
        return Guarded(value=_LEFT * (draw < _HALF), attempts=0, elapsed_s=pause_s)

    def _join(
        self, operation: Operation, circuit: Circuit, member: Member
    ) -> Protocol[JointResult]:
        joint = Joint(
            op=_name_of(operation.kind),
            seq=operation.number,
            digest=operation.place,
            subject=f"{operation.number}.ckpt",
            workers=(WORKER,) if operation.is_of_one else tuple(range(member.world_size)),
            circuit=circuit if operation.is_guarded else None,
            patience=self._patience(operation),
            deadline_s=self.scenario.retry.deadline_s,
            may_be_deferred=operation.is_of_one and member.defer_after_s is not None,
        )
        part = None
        if operation.has_work:
            part = Part(
                run=partial(self._work, operation, circuit),
                detail=lambda done: str(done.value),
                outcome=lambda error: report_of(error, rank=member.rank, outcome=classify(error)),
                instead=_stage,
            )
        try:
            result: JointResult = yield from perform(member, joint, part)
        finally:
            operation.unsettled = member.unsettled.deferred
        operation.result = result
        if result.error is not None and not isinstance(result.error, Exception):
            raise result.error
        failure = error_of(result.final, seq=joint.seq)
        if failure is not None:
            raise failure
        return result


def _name_of(kind: str) -> str:
    return "save" if kind == "joint" else kind


def _stage(_why: str) -> Protocol[Guarded]:
    # On the node's own disk, which asks nobody.
    yield Sleep(_STAGING_S)
    return Guarded(value=STAGED, attempts=0, elapsed_s=_STAGING_S)


def _begin(circuit: Circuit, member: Member) -> Protocol[Member]:
    yield from begin(circuit, new_incarnation=member.rank == 0)
    return (yield from enlist(member))


def _persistence(member: Member) -> Persistence:
    def unavailable(lost_for_s: float, error: Exception) -> Exception:
        return ResilienceError(f"no answer from the store for {lost_for_s:.1f} s: {error}")

    return Persistence(op="begin", patience_s=member.store_patience_s, error=unavailable)


def _without_frames(error: BaseException) -> BaseException:
    link: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if link is None:
            break
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
