# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one process remembers of one breaker: its latest view, its own results, and its limits.

Any thread may use a circuit. What it remembers are immutable values that are replaced whole, so two
threads can at worst forget one failure, never mix two records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import breaker, lease, window
from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker import BreakerState, BreakerView
from lightning_resilience.core.breaker_record import precedes
from lightning_resilience.core.budget import BudgetConfig, share
from lightning_resilience.core.detour import ProbeShare, own_config, try_again_s
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import BreakerRecord, decode
from lightning_resilience.core.site import PROBES, SITE_RUN, Lookout, name_at_site, site_config
from lightning_resilience.protocols.ledger import Ledger
from lightning_resilience.protocols.shortcut import Shortcut


if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_resilience.core.breaker import BreakerConfig
    from lightning_resilience.core.lease import Sighting, Silence


__all__ = [
    "Circuit",
    "Detour",
    "KnownSite",
    "Limits",
    "Link",
    "Upstream",
    "give_detour",
    "give_upstream",
    "learn",
]

_NEVER_S: Final = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the calls that a closed circuit lets through.

    Args:
        admission: How slots are kept.
        budget: How many retries the job may make.
    """

    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)


_DEFAULT_LIMITS: Final = Limits()


class Circuit:
    """What one process remembers of one breaker.

    Args:
        dependency: Name of the dependency with the operation class, for example
            ``s3://bucket:write``.
        config: The breaker's configuration.
        keys: Names of the keys of this run.
        host: Name of this host, for its vote.
        hosts: Hosts that use this dependency, as the adapter declares it for this incarnation.
        limits: How slots are kept, and how many retries the job may make.

    Attributes:
        detour: The way that this process goes alone, where it has one.
        is_own: Whether this process alone uses it, in its own store.
        is_sites: Whether it is that of a site.
        probe_share: Which of the probes that are due this process sends.
        has_slots: Whether this process has seen to it that all slots are there.
        pace_s: How long a call takes, in seconds, as the slots told at the last look, or None.
        silences: For how long this process has watched each slot not change.
        inherited: Whether this process has never seen the circuit let calls through: then it was
            tripped by an earlier start of the job.
        shortcut: The way past the gate for calls that nobody has to decide about.
        ticket: A ticket for a slot that has not been used, with the store that it is of.
        turn: How far the line before the slots had come at the last look.
        upstream: The breaker of the site above it, where there is one.
        wrote: Latest epoch that this process has begun; 0 where there is none, or it was told.
    """

    __slots__ = (
        "admission",
        "budget_key",
        "config",
        "dependency",
        "detour",
        "has_slots",
        "host",
        "hosts",
        "inherited",
        "is_own",
        "is_sites",
        "key",
        "keys",
        "ledger",
        "pace_s",
        "place",
        "probe_share",
        "seen",
        "shortcut",
        "silences",
        "slot_keys",
        "ticket",
        "turn",
        "upstream",
        "view",
        "votes",
        "window",
        "wrote",
    )

    def __init__(
        self,
        dependency: str,
        *,
        config: BreakerConfig,
        keys: Keys,
        host: str,
        hosts: int = 1,
        limits: Limits = _DEFAULT_LIMITS,
    ) -> None:
        self.dependency = dependency
        self.config = config
        self.keys = keys
        self.key = keys.breaker(dependency)
        self.host = host
        self.hosts = hosts
        self.inherited = True
        self.view: BreakerView | None = None
        self.window = window.EMPTY
        self.votes: dict[str, Sighting] = {}
        self.seen: tuple[tuple[int, str], ...] = ()
        self.place: tuple[int, int] | None = None
        self.admission = limits.admission
        self.slot_keys = tuple(
            keys.slot(dependency, index) for index in range(config.max_concurrent)
        )
        self.has_slots = False
        self.pace_s: float | None = None
        self.silences: Mapping[int, Silence] = {}
        self.ticket: tuple[str, int] | None = None
        self.turn = 0
        self.ledger = Ledger(limits.budget)
        self.budget_key = keys.budget(dependency)
        self.shortcut = Shortcut()
        self.detour: Detour | None = None
        self.upstream: Upstream | None = None
        self.wrote = 0
        self.probe_share = ProbeShare()
        self.is_own = False
        self.is_sites = False

    def is_fresh(self, *, now_s: float) -> bool:
        """Tell whether a call may go ahead on the present view without a read."""
        max_age_s = self.config.view_max_age_s
        return breaker.is_fresh(self.view, max_age_s=max_age_s, now_s=now_s)

    def note_calls(self, calls: int, *, now_s: float) -> None:
        """Count calls for the retry budget: the job's, and the own one, should that be needed."""
        self.ledger.note_calls(calls, now_s=now_s)
        if self.detour is not None:
            self.detour.circuit.ledger.note_calls(calls, now_s=now_s)


class Link:
    """Whether the shared store answers this process; one for all its circuits. Any thread.

    Attributes:
        lost_since_s: When it was given up, on this process's clock; None while it answers.
        next_try_at_s: When to ask it again.
        tries: Tries in a row that were not answered.
    """

    __slots__ = ("lost_since_s", "next_try_at_s", "tries")

    def __init__(self) -> None:
        self.lost_since_s: float | None = None
        self.next_try_at_s = _NEVER_S
        self.tries = 0

    def leave_alone(self, *, now_s: float, draw: float) -> None:
        """Note that it did not answer: nobody here asks it for a while."""
        self.tries += 1
        self.next_try_at_s = now_s + try_again_s(self.tries, draw=draw)

    def answered(self) -> None:
        """Note that it answers."""
        self.lost_since_s = None
        self.next_try_at_s = _NEVER_S
        self.tries = 0


class Detour:
    """How one process goes its own way at one dependency.

    Args:
        circuit: Its own breaker. Its record is in the process's own store.
        link: Whether the shared store answers.
        processes: Processes that share the limits.

    Attributes:
        is_isolated: Whether this host's calls fail while those of the others succeed.
        alone_since_s: Since when the store was lost when this process last began to decide alone.
    """

    __slots__ = ("alone_since_s", "circuit", "is_isolated", "link", "processes")

    def __init__(self, circuit: Circuit, *, link: Link, processes: int) -> None:
        self.circuit = circuit
        self.link = link
        self.processes = processes
        self.is_isolated = False
        self.alone_since_s: float | None = None


def give_detour(circuit: Circuit, *, link: Link, processes: int) -> None:
    """Let a process go its own way at a dependency where the shared record is no guide.

    Args:
        circuit: The shared breaker.
        link: Whether the shared store answers this process.
        processes: Processes that share the limits, ≥ 1.
    """
    own = Circuit(
        circuit.dependency,
        config=own_config(circuit.config, processes=processes),
        keys=circuit.keys,
        host=circuit.host,
        limits=Limits(
            admission=circuit.admission, budget=share(circuit.ledger.config, processes=processes)
        ),
    )
    own.is_own = True
    circuit.detour = Detour(own, link=link, processes=processes)


class Upstream:
    """The breaker of the site above that of a job, as one process knows it.

    Args:
        circuit: The site's. Its record is in the site's store, where its host is this job.
        link: Whether that store answers; one for all circuits of the process.
        looks: Whether this process looks at it before it calls, for the whole job.

    Attributes:
        lookout: What this process knows of the age of the votes.
    """

    __slots__ = ("circuit", "link", "lookout", "looks")

    def __init__(self, circuit: Circuit, *, link: Link, looks: bool) -> None:
        self.circuit = circuit
        self.link = link
        self.looks = looks
        self.lookout = Lookout()


def give_upstream(circuit: Circuit, *, link: Link, looks: bool) -> None:
    """Put a job's breaker under that of its site.

    Args:
        circuit: The job's.
        link: Whether the site's store answers this process.
        looks: Whether this process looks at it before it calls, for the whole job.
    """
    site = Circuit(
        name_at_site(circuit.dependency),
        config=site_config(circuit.config),
        keys=Keys(run_id=SITE_RUN, incarnation=""),
        host=circuit.keys.run_id,
        hosts=circuit.config.site_quorum,
    )
    site.probe_share, site.is_sites = PROBES, True
    circuit.upstream = Upstream(site, link=link, looks=looks)


class KnownSite:
    """What a process knows of its site, for who makes its circuits anew. One thread.

    Whether the site's store answers, and how old votes are, is known only to who has looked before.
    """

    __slots__ = ("_found", "_link")

    def __init__(self) -> None:
        self._link = Link()
        self._found: dict[tuple[str, str], Upstream] = {}

    def put_above(self, circuit: Circuit) -> None:
        """Put a job's breaker under that of its site, which this process looks at.

        Args:
            circuit: The job's, with whatever it remembers.
        """
        key = (circuit.dependency, circuit.keys.run_id)
        if key not in self._found:
            give_upstream(circuit, link=self._link, looks=True)
            if circuit.upstream is not None:
                self._found[key] = circuit.upstream
        circuit.upstream = self._found[key]


def learn(circuit: Circuit, raw: bytes, *, read_at_s: float, seen_at_s: float) -> BreakerView:
    """Take note of a record that was read or written.

    Args:
        circuit: What this process remembers.
        raw: The record's exact bytes.
        read_at_s: When the read was sent, for the view's age.
        seen_at_s: When the answer was there, for leases: never earlier than the truth.

    Returns:
        The new view; the present one where that is of a later epoch, because another thread's read
        has overtaken this one.

    Raises:
        CorruptRecordError: The bytes are no record.
    """
    record = decode(BreakerRecord, raw, key=circuit.key)
    known = circuit.view
    if known is not None and precedes(record, known.record):
        return known
    before = None if known is None else known.sighting
    sighting = lease.observe(before, (record.store_id, record.epoch), now_s=seen_at_s)
    view = BreakerView(record=record, raw=raw, read_at_s=read_at_s, sighting=sighting)
    circuit.inherited = circuit.inherited and not breaker.passes(record)
    if sighting is not before:
        circuit.seen = (*circuit.seen, (record.epoch, record.state))[-breaker.HISTORY_LENGTH :]
    if sighting is not before or record.state != BreakerState.CLOSED.value:
        # Failures from before a trip must not count towards the next one, also where this process
        # has seen nothing of that trip but the epochs that have passed.
        circuit.window = window.EMPTY
    circuit.votes = {
        host: lease.observe(circuit.votes.get(host), (record.epoch,), now_s=seen_at_s)
        for host in record.votes
    }
    circuit.view = view
    return view
