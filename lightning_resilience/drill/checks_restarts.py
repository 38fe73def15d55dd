# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I4 and I8: a job restarts no oftener than its quota says, and all agents hear the same of it.

All of it is seen where it is written: in the record of restarts, and in what is agreed for a start
of the workers that is over.

==================  ================================================================================
check               what it raises for
==================  ================================================================================
I4 OneCharge        an incident that is charged twice, or a charge for what never was a start
I4 HonestCharges    a restart for nothing after workers have failed; a charge for a failure where
                    none has failed, or for what the workers were asked to do
I4 BoundedRestarts  more restarts within the window than the quota allows, without progress
I4 KeptCharges      a record that has forgotten what an agent that lives has seen
I8 OneGo            agents that are told different things about one restart
I8 OneEnding        an ending that is undone, but for one that a scheduler has heeded
I8 OwnEnding        an agent that ends a job whose workers train in a start without it
I8 OwnNumber        an agent that acknowledges an ending in another one's place
==================  ================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from lightning_resilience.core.exit_codes import ExitCode, may_start_again
from lightning_resilience.core.incident import IncidentKind, IncidentRecord
from lightning_resilience.core.quota import Cause, RestartRecord
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import GoRecord
from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.restart_workers import FAILS
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.restart_agent import Agent
    from lightning_resilience.drill.restart_world import RestartWorld


__all__ = ["RecordChecks"]

_FAILURES: Final = frozenset({Cause.FAILED.value, Cause.KILLED.value})
_COMES_BY_S: Final = 60.0
"""Whoever lives has come to the store within this time, in seconds, unless something hinders it."""
_JUST_S: Final = 1.0


class RecordChecks(Observer):
    """Who looks at what is written.

    Args:
        world: The world.

    Attributes:
        gos: What was agreed, by incarnation.
        agreed_at_s: When that was, by the nonce of who wrote it.
        emptied_at_s: When the store has lost everything last.
        heeded: Starts after whose end the job was started again by a scheduler.
    """

    def __init__(self, world: RestartWorld) -> None:
        self.gos: dict[str, GoRecord] = {}
        self.agreed_at_s: dict[str, float] = {}
        self.emptied_at_s = float("-inf")
        self.heeded: set[str] = set()
        self._world = world
        self._life = 0
        self._told_at_s: dict[str, float] = {}
        self._charged: dict[str, int] = {}
        self._restarts: list[tuple[float, str]] = []

    def fail(self, check: str, what: str) -> NoReturn:
        """Say that a promise was not kept."""
        agenda = self._world.agenda
        message = f"{check} does not hold: {what}."
        raise DrillFailedError(message, seed=self._world.seed, step=agenda.happened, check=check)

    def emptied(self, now_s: float) -> None:
        """Note that what is in the store now was put there by who remembers."""
        self._life += 1
        self.emptied_at_s = now_s

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at what was written."""
        raw = self._world.store.cells.values.get(key)
        if key == self._world.keys("").restarts and raw is not None:
            found = None if before is None else decode(RestartRecord, before, key=key)
            self._record_changed(process, found, decode(RestartRecord, raw, key=key))
        elif "/incident/" in key:
            self._told_at_s.setdefault(_incarnation(key), now_s)
        elif "/acknowledged/" in key:
            self._acknowledged(process, key)
        elif "/go/" in key and raw is not None:
            self._agreed(now_s, key, decode(GoRecord, raw, key=key), is_new=before is None)

    # The record -----------------------------------------------------------------------------------

    def _record_changed(
        self, process: Process, before: RestartRecord | None, after: RestartRecord
    ) -> None:
        if before is not None:
            self._ending_changed(process, before, after)
        names = [each.incarnation for each in after.charges]
        if len(set(names)) < len(names):
            self.fail("I4 OneCharge", f"{process.name} has written one twice: {names}")
        had = set() if before is None else {each.incarnation for each in before.charges}
        for each in after.charges:
            if each.incarnation not in had:
                self._new_charge(process, each.incarnation, each.cause)
        if after.ending is not None and (before is None or before.ending is None):
            self._ended(process, after)
        if before is not None and after.restarts < before.restarts:
            what = f"{process.name} has replaced {before.restarts} restarts by {after.restarts}"
            self.fail("I4 KeptCharges", what)

    def _new_charge(self, process: Process, incarnation: str, cause: str) -> None:
        life = self._charged.get(incarnation)
        if life is not None and life == self._life:
            self.fail("I4 OneCharge", f"{process.name} has charged {incarnation} again")
        self._charged[incarnation] = self._life
        start = self._world.starts.get(incarnation)
        if start is None:
            self.fail("I4 OneCharge", f"{incarnation} was charged, and never was a start")
        has_failed = start.fate.kind in FAILS
        # What was told of it may be lost with the store: then nobody has said anything.
        is_lost = self._world.agenda.now_s - self.emptied_at_s < _COMES_BY_S
        if cause in _FAILURES and life is None and not has_failed and not is_lost:
            what = f"{process.name} has charged {incarnation} as {cause}, and no worker failed"
            self.fail("I4 HonestCharges", what)

    def _ended(self, process: Process, after: RestartRecord) -> None:
        """Look whether a job that is given up has used one of its quotas up."""
        plan, ending = self._world.plan, after.ending
        self._ended_by(process)
        is_local = plan.torch_restarts < len(self._world.starts)
        if ending is None or ending.code != ExitCode.DEAD_LETTERED or is_local:
            return
        causes = [each.cause for each in after.charges]
        errors = [(each.fingerprint, each.step) for each in after.charges if each.fingerprint]
        is_used_up = (
            sum(each in _FAILURES for each in causes) > plan.restart.restart_quota
            or causes.count(Cause.KILLED) > plan.restart.killed_quota
            or causes.count(Cause.LEFT) > plan.restart.membership_quota
            or errors[-1:] * plan.restart.same_failure_limit
            == errors[-plan.restart.same_failure_limit :]
        )
        if not is_used_up:
            what = f"{process.name} has given the job up, with no more than {causes}"
            self.fail("I4 HonestCharges", what)

    def _ended_by(self, process: Process) -> None:
        """Look whether workers train in a start that the one who ends the job has no part in."""
        world = self._world
        agents = {each.process: each for each in world.agents}
        part = agents[process].part
        own = "" if part is None else part.start.incarnation
        for each in world.living:
            start = each.start if each.place == "works" else None
            # One that is over has workers only of agents that stand still, and have not seen that.
            if start is None or start.incarnation in {own, *self.gos}:
                continue
            for_s = world.agenda.now_s - start.began_at_s
            # With the store all agents have lost what it said of the start.
            if for_s > _COMES_BY_S and self.emptied_at_s < start.began_at_s:
                what = f"{process.name}, last in {own or 'no start'}, has ended the job"
                others = f"{start.incarnation} has trained for {for_s:.0f} s"
                self.fail("I8 OwnEnding", f"{what}, and {others}")

    def _acknowledged(self, process: Process, key: str) -> None:
        start = self._world.starts.get(_incarnation(key))
        if start is None:
            # Its nodes have found, before any of them began, that the job has ended.
            return
        number = int(key.rsplit("/", 1)[1])
        if number >= len(start.nodes) or start.nodes[number] != process.rank:
            what = f"{process.name} has written {key}, and the start's nodes are {start.nodes}"
            self.fail("I8 OwnNumber", what)

    def _ending_changed(
        self, process: Process, before: RestartRecord, after: RestartRecord
    ) -> None:
        was, is_now = before.ending, after.ending
        if was is None or was == is_now:
            return
        agents = {each.process: each for each in self._world.agents}
        agent = agents.get(process)
        begins = agent is not None and agent.over is None
        if is_now is None and may_start_again(was.code) and begins:
            self.heeded.add(was.incarnation)
            return
        self.fail("I8 OneEnding", f"{process.name} has replaced {was} by {is_now}")

    # What was agreed ------------------------------------------------------------------------------

    def _agreed(self, now_s: float, key: str, go: GoRecord, *, is_new: bool) -> None:
        incarnation = _incarnation(key)
        if not is_new:
            self.fail("I8 OneGo", f"what was agreed after {incarnation} was changed to {go}")
        self.gos[incarnation] = go
        self.agreed_at_s[go.writer] = now_s
        incident = self._incident(incarnation)
        start = self._world.starts.get(incarnation)
        # Who is called by nodes that come may be just before whoever tells of a failure.
        told_s = now_s - self._told_at_s.get(incarnation, now_s)
        if go.cause == Cause.GROWN.value and incident is not None and told_s > _JUST_S:
            what = f"{incarnation} has ended by {incident.error}, and is restarted for nothing"
            self.fail("I4 HonestCharges", what)
        has_failed = start is not None and start.has_failed(now_s)
        if go.cause == Cause.PREEMPTED.value and has_failed:
            what = f"workers of {incarnation} have failed, and it is restarted as {go.cause}"
            self.fail("I4 HonestCharges", what)
        if go.cause in _FAILURES:
            self._restarted(now_s, go, incarnation)
            if incident is not None and incident.kind == IncidentKind.SIGNAL.value:
                what = f"{incarnation} was told to stop, and that is charged as {go.cause}"
                self.fail("I4 HonestCharges", what)
        if go.cause == Cause.LEFT.value:
            self._restarted(now_s, go, incarnation)
            self._left(incident, incarnation, told_s=told_s)

    def _left(self, incident: IncidentRecord | None, incarnation: str, *, told_s: float) -> None:
        """Look whether a loss of nodes that costs something is one that nobody has asked for."""
        if incident is None or not incident.by_agent or told_s <= _JUST_S:
            return
        if incident.kind == IncidentKind.SIGNAL.value:
            what = f"an agent of {incarnation} was told to stop, and that is charged"
            self.fail("I4 HonestCharges", what)

    def _restarted(self, now_s: float, go: GoRecord, incarnation: str) -> None:
        world, config = self._world, self._world.plan.restart
        key = world.keys("").restarts
        raw = world.store.cells.values.get(key)
        record = None if raw is None else decode(RestartRecord, raw, key=key)
        causes = {} if record is None else {each.incarnation: each.cause for each in record.charges}
        is_missing = incarnation not in causes and record is not None and record.ending is None
        is_lost = now_s - self.emptied_at_s <= _COMES_BY_S
        if is_missing and not is_lost and not self._is_over(incarnation):
            what = f"{incarnation} is restarted as {go.cause}, and the record says {causes}"
            self.fail("I4 OneCharge", what)
        if record is None or self._may_have_forgotten(now_s):
            return
        # Who was killed may have been told of only after the charge.
        self._restarts.append((now_s, causes.get(incarnation, go.cause)))
        window_s = config.restart_window_s / world.plan.clocks.rate
        since = [cause for at_s, cause in self._restarts if now_s - at_s < window_s]
        quotas = {
            "killed_quota": (sum(each == Cause.KILLED for each in since), config.killed_quota),
            "restart_quota": (sum(each in _FAILURES for each in since), config.restart_quota),
            "membership_quota": (
                sum(each == Cause.LEFT for each in since),
                config.membership_quota,
            ),
        }
        for name, (count, quota) in quotas.items():
            if count > quota:
                what = f"{count} restarts within {window_s:g} s, and {name} is {quota}"
                self.fail("I4 BoundedRestarts", f"{what}: {self._restarts}")

    def _is_over(self, incarnation: str) -> bool:
        """Tell whether a later start has begun since: its progress may have cleared the charge."""
        number = self._world.starts[incarnation].number
        return len(self._world.starts) > number

    def starts(self, incarnation: str) -> None:
        """Look whether a new start of the workers may be."""
        plan, kept = self._world.plan, self._world.kept
        held = None if kept is None or plan.is_mirror_ill else kept.ending
        if held is not None and held.code == ExitCode.DEAD_LETTERED:
            what = f"{incarnation} begins, and nobody has released the job that ended with {held}"
            self.fail("I8 OneEnding", what)

    def progressed(self) -> None:
        """Note that a checkpoint was verified: failures before it count no longer."""
        self._restarts = [each for each in self._restarts if each[1] == Cause.LEFT.value]

    def _may_have_forgotten(self, now_s: float) -> bool:
        """Tell whether nobody may know any more what was in a store that was lost."""
        if self.emptied_at_s < 0:
            return False
        plan = self._world.plan
        if plan.is_mirrored and not plan.is_mirror_ill and not plan.faults:
            return False
        self._restarts.clear()
        return now_s - self.emptied_at_s < plan.restart.restart_window_s

    def _incident(self, incarnation: str) -> IncidentRecord | None:
        key = self._world.keys(incarnation).joint("incident", 0)
        raw = self._world.store.cells.values.get(key)
        return None if raw is None else decode(IncidentRecord, raw, key=key)

    # What agents know -----------------------------------------------------------------------------

    def passed(self, agent: Agent, go: GoRecord, *, since_s: float) -> None:
        """Look whether an agent has been told what all have."""
        agreed = None if agent.over is None else self.gos.get(agent.over.incarnation)
        if agreed != go and self.emptied_at_s < since_s:
            what = f"{agent.process.name} was told {go}, and what stands is {agreed}"
            self.fail("I8 OneGo", what)


def _incarnation(key: str) -> str:
    return key.split("/")[2][1:]
