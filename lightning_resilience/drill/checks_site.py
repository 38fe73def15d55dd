# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I11, I1, I2, I3 and I7: jobs of a site stay away together, and the site's store hurts none.

==================  ================================================================================
check               what it raises for
==================  ================================================================================
I1 OneSiteProbe     a probe by a job for itself while the site's circuit is open, and a second one
                    in an epoch of the site's
I2 SiteQuorum       a site's circuit that opens with fewer jobs ill by themselves, within
                    ``window_s``, than it needs
I2 SiteHistory      a change of any breaker's record that is no legal transition
I3 JobsEnd          a job that is still there long after the last fault
I7 QuietSite        more asked of the site while all is well than a read for each old view
I11 HeldBySite      a call, by who looks at the site, long after its circuit has opened
I11 HeldInVain      a job's circuit that is opened because of the site's by who makes no call then
I11 NotHurt         a call that takes long because of the site's store, where nothing else is ill;
                    and a probe that is not sent because it took too long to ask the site
==================  ================================================================================

What a process has just read may be a little old, and whoever has stood still, or does not reach the
site's store and has said so, is not to blame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from lightning_resilience.core.breaker import passes
from lightning_resilience.core.breaker_record import LEGAL, BreakerState
from lightning_resilience.core.events import ProbeEnded, SiteLost, SiteReturned
from lightning_resilience.core.records import BreakerRecord, decode
from lightning_resilience.core.site import SITE_RUN
from lightning_resilience.drill import scenario as given
from lightning_resilience.drill.observer import Observer
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from lightning_resilience.core.event import Event
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.site_world import SiteWorld
    from lightning_resilience.drill.storage_model import Request


__all__ = ["SITE_CHECKS", "SiteChecks"]

SITE_CHECKS: Final = {
    "I1": ("OneSiteProbe",),
    "I2": ("SiteQuorum", "SiteHistory"),
    "I3": ("JobsEnd",),
    "I7": ("QuietSite",),
    "I11": ("HeldBySite", "HeldInVain", "NotHurt"),
}
"""Names of the checks by promise."""

_NEVER_S: Final = float("-inf")
# Two clocks differ by this factor at most, and by so much more by rounding and by messages.
_CLOCKS: Final = 1.25
_ANSWERS_S: Final = 3.0
# To create what is there once: the site's name, the record, and a look whether they fit.
_FIRST_LOOK: Final = 6
_LONGEST_CALL_S: Final = 3.0


class SiteChecks(Observer):
    """Who looks at what jobs of a site do.

    Args:
        world: The world.

    Attributes:
        observers: Who wants to be told of what happens in the world.
    """

    def __init__(self, world: SiteWorld) -> None:
        self._world = world
        self._site_run = f"lr/{SITE_RUN}/"
        self._record: BreakerRecord | None = None
        self._open_since_s: float | None = None
        self._probed: set[tuple[str, int]] = set()
        self._ill: set[str] = set()
        self._ill_at_s: dict[str, float] = {}
        self._is_blind: set[Process] = set()
        self._was_blind_at_s: dict[str, float] = {}
        self._asked: dict[Process, int] = {}
        self._calling: set[Process] = set()
        self._has_made_it: set[Process] = set()
        self._has_ever_opened = False
        self.observers = (self,)

    def _fail(self, check: str, what: str) -> NoReturn:
        agenda = self._world.agenda
        raise DrillFailedError(
            f"{check} does not hold at {agenda.now_s:.3f} s: {what}",
            seed=self._world.seed,
            step=agenda.happened,
            check=check,
        )

    # What happens ---------------------------------------------------------------------------------

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Count what is asked of the site."""
        del now_s
        self._count(process, key)

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a change of a breaker's record."""
        self._count(process, key)
        if "/breaker/" not in key:
            return
        is_sites = key.startswith(self._site_run)
        store = self._world.site if is_sites else self._world.store
        record = decode(BreakerRecord, store.cells.values[key], key=key)
        former = None if before is None else decode(BreakerRecord, before, key=key)
        if former is not None:
            self._check_history(key, former, record, is_sites=is_sites)
        if is_sites:
            self._site_wrote(now_s, former, record)
            if former is None:
                self._has_made_it.add(process)
        else:
            self._job_wrote(now_s, process, record)

    def site_went(self) -> None:
        """Note that the site's store is away, and all that was in it maybe with it."""
        self._record, self._open_since_s = None, None

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Note who does not reach the site, as it says."""
        if isinstance(event, ProbeEnded):
            self._check_asked_in_time(process, event)
        elif self._world.is_agent(process):
            # It makes no calls, and lets nobody through.
            return
        if isinstance(event, SiteLost):
            self._is_blind.add(process)
        elif isinstance(event, SiteReturned):
            self._is_blind.discard(process)
            self._was_blind_at_s[self._world.job_of(process)] = now_s

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note that a job is ill no longer than it is there."""
        del what
        job = self._world.job_of(process)
        alive = (each.is_alive for each in self._world.workers(job))
        if job in self._ill and not any(alive):
            self._ill.discard(job)
            self._ill_at_s[job] = now_s

    def began(self, now_s: float, request: Request) -> None:
        """Look at who comes to storage while the site's circuit is open."""
        process, since_s = request.process, self._open_since_s
        if since_s is None or self._goes_alone(process, now_s):
            return
        open_s = now_s - max(since_s, process.woken_at_s)
        if request.kind == "probe":
            self._check_probe(process, open_s=open_s)
            return
        longest_s = _CLOCKS * self._world.plan.breaker.view_max_age_s + _ANSWERS_S
        if self._world.looks(process) and open_s > longest_s:
            what = f"{process.name} calls, and the site's circuit is open since {open_s:.1f} s"
            self._fail("I11 HeldBySite", what)

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Note who calls."""
        del now_s
        self._calling.add(operation.process)

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look at how long a call has taken where nothing but the site can have held it."""
        self._calling.discard(operation.process)
        lasted_s = now_s - operation.began_at_s
        if lasted_s > _LONGEST_CALL_S and not self._has_a_reason(operation.process):
            what = f"{operation.process.name} has waited {lasted_s:.1f} s, and storage is well"
            self._fail("I11 NotHurt", what)

    # What follows from it -------------------------------------------------------------------------

    def _has_a_reason(self, process: Process) -> bool:
        """Tell whether a call may take long, because of what goes wrong, or others have found."""
        ranks = {each.rank for each in self._world.workers(self._world.job_of(process))}
        return self._has_ever_opened or any(
            _concerns(fault, host=process.host.number, ranks=ranks)
            for fault in self._world.plan.faults
        )

    def _check_asked_in_time(self, process: Process, event: ProbeEnded) -> None:
        was_paused = process.woken_at_s != _NEVER_S or process in self._has_made_it
        if event.detail.startswith("this process was paused") and not was_paused:
            what = f"{process.name} has asked the site for so long that its probe was not sent"
            self._fail("I11 NotHurt", what)

    def _goes_alone(self, process: Process, now_s: float) -> bool:
        """Tell whether a job may have been let through by one of its own that saw no site."""
        job = self._world.job_of(process)
        is_blind = any(self._world.job_of(each) == job for each in self._is_blind)
        return is_blind or now_s - self._was_blind_at_s.get(job, _NEVER_S) < _LONGEST_CALL_S

    def _count(self, process: Process, key: str) -> None:
        if key.startswith(self._site_run):
            self._asked[process] = self._asked.get(process, 0) + 1

    def _site_wrote(
        self, now_s: float, former: BreakerRecord | None, record: BreakerRecord
    ) -> None:
        self._record = record
        if passes(record):
            self._open_since_s = None
            return
        self._has_ever_opened = True
        if self._open_since_s is None:
            self._open_since_s = now_s
        if former is None or passes(former):
            self._check_quorum(now_s)

    def _job_wrote(self, now_s: float, process: Process, record: BreakerRecord) -> None:
        job = self._world.job_of(process)
        if record.upstream and process not in self._calling:
            what = f"{process.name} opens the circuit of {job} for the site's, and does not wait"
            self._fail("I11 HeldInVain", what)
        if job in self._ill:
            self._ill_at_s[job] = now_s
        if passes(record) or record.upstream:
            self._ill.discard(job)
        else:
            self._ill.add(job)
            self._ill_at_s[job] = now_s

    def _check_history(
        self, key: str, former: BreakerRecord, record: BreakerRecord, *, is_sites: bool
    ) -> None:
        # What was seen in a site's store that is no more is no news.
        is_rebuilt = record.reason.startswith("rebuilt") and not is_sites
        states = BreakerState(former.state), BreakerState(record.state)
        is_same = record.epoch == former.epoch and record.state == former.state
        is_next = record.epoch == former.epoch + 1 and states in LEGAL
        if not (is_rebuilt or is_same or is_next):
            what = f"{key} went from {former.state} ({former.epoch}) to {record}"
            self._fail("I2 SiteHistory", what)

    def _check_quorum(self, now_s: float) -> None:
        breaker = self._world.plan.breaker
        longest_s = _CLOCKS * breaker.window_s + _ANSWERS_S
        ill = {job for job, at_s in self._ill_at_s.items() if now_s - at_s <= longest_s}
        ill |= self._ill
        if len(ill) < breaker.site_quorum:
            what = f"the site's circuit opens because of {sorted(ill)}, of {breaker.site_quorum}"
            self._fail("I2 SiteQuorum", what)

    def _check_probe(self, process: Process, *, open_s: float) -> None:
        record = self._record
        if record is None or open_s <= _ANSWERS_S:
            return
        if record.state == BreakerState.OPEN.value:
            what = f"{process.name} probes for its job, {open_s:.1f} s after the site's has opened"
            self._fail("I1 OneSiteProbe", what)
        # A store that came back empty may count anew.
        epoch = (record.store_id, record.epoch)
        if epoch in self._probed:
            what = f"{process.name} sends the second probe of epoch {record.epoch}"
            self._fail("I1 OneSiteProbe", what)
        self._probed.add(epoch)

    # The end --------------------------------------------------------------------------------------

    def never_ends(self, bound_s: float) -> None:
        """Say who is still there."""
        names = [each.name for each in self._world.processes if each.is_alive]
        self._fail("I3 JobsEnd", f"{names} are there {bound_s:.0f} s after the last fault")

    def is_over(self) -> None:
        """Look at what all jobs have asked of their site, where nothing went wrong."""
        plan, site = self._world.plan, self._world.plan.site
        is_lossy = site.lost_requests or site.lost_answers or site.late_requests
        if plan.faults or plan.gone or is_lossy:
            return
        views = _CLOCKS * self._world.agenda.now_s / plan.breaker.view_max_age_s + 1
        for process in self._world.processes:
            looks = views if self._world.is_agent(process) else min(views, plan.calls)
            most = looks + _FIRST_LOOK if self._world.looks(process) else 0
            asked = self._asked.get(process, 0)
            if asked > most:
                what = f"{process.name} has asked the site {asked} times, and {most:.0f} are enough"
                self._fail("I7 QuietSite", what)


def _concerns(fault: given.Fault, *, host: int, ranks: set[int]) -> bool:
    match fault:
        case given.StoragePartition():
            return host in fault.hosts
        case given.Crash() | given.Pause():
            return not ranks.isdisjoint(fault.ranks)
    # Storage is everybody's.
    return True
