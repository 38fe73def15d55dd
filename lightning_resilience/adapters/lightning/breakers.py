# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The breakers of one rank: found by URL, waited for with patience, and reported on.

One breaker stands before each storage and operation class that the job uses; its name is made from
the URL alone, so that every rank has the same one.
"""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.storage import dependency_of, parent_of
from lightning_resilience.core.store_loss import DeferredError
from lightning_resilience.core.waiting import VOICE_S, chunk_s
from lightning_resilience.errors import StoreError
from lightning_resilience.protocols.circuit import Circuit, Limits, begin, refresh
from lightning_resilience.protocols.circuit_memory import Link, give_detour, give_upstream
from lightning_resilience.protocols.member_patience import patience_of
from lightning_resilience.protocols.persistent import with_persistence
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.topology import host_name, read_topology


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.core.breaker import BreakerConfig, BreakerView
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.core.records import BreakerRecord
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint import Member
    from lightning_resilience.runtime.driver import Driver


__all__ = ["BreakerReport", "Breakers", "Policy"]

# Long against the time that a storage takes to answer, and short against any outage.
_SPREAD_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerReport:
    """What one rank knows of one breaker.

    Args:
        state: State of the shared record.
        epoch: Epoch of the shared record.
        history: Its last transitions as (epoch, state, reason), the same on every rank.
        seen: The (epoch, state) that this rank saw on the way; a part of the history.
    """

    state: str
    epoch: int
    history: tuple[tuple[int, str, str], ...]
    seen: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How this job retries, breaks and classifies.

    Args:
        retry: The retry policy.
        breaker: The breakers' configuration.
        classify: Makes an outcome of an exception.
        limits: How slots are kept, and how many retries the job may make.
        strict: Whether calls outside joint operations fail where the shared store is away.
    """

    retry: RetryPolicy
    breaker: BreakerConfig
    classify: Callable[..., Outcome]
    limits: Limits = field(default_factory=Limits)
    strict: bool = False


class Breakers:
    """The breakers that this rank has used.

    Args:
        member: Who this rank is.
        policy: How to retry, break and classify.
        driver: Runs protocols.
        link: Whether the shared store answers this process.
        hosts: Hosts on which ranks load checkpoints.
    """

    def __init__(
        self, member: Member, *, policy: Policy, driver: Driver, link: Link, hosts: int = 1
    ) -> None:
        self.policy = policy
        self._link, self._site = link, Link()
        # Every rank loads. Rank 0 alone writes: there is nobody to come back at the same time as.
        self._hosts = {"read": hosts, "write": 1}
        self._spread_s = {"read": min(_SPREAD_S, member.world_size - 1.0), "write": 0.0}
        self._member = member
        self._driver = driver
        self._circuits: dict[str, Circuit] = {}
        self._urls: dict[str, str] = {}
        self._begun: set[str] = set()

    def circuit(self, url: str, kind: str) -> Circuit:
        """Return this process's memory of the breaker before ``url``; asks nobody."""
        name = f"{dependency_of(url)}:{kind}"
        circuit = self._circuits.get(name)
        if circuit is None:
            circuit = self._circuits[name] = Circuit(
                name,
                config=self.policy.breaker,
                keys=self._member.keys,
                host=host_name(platform.node(), read_topology()),
                hosts=self._hosts[kind],
                limits=self.policy.limits,
            )
            give_detour(circuit, link=self._link, processes=self._member.world_size)
            if self._driver.site is not None:
                give_upstream(circuit, link=self._site, looks=self._member.rank == 0)
            self._urls[name] = url
        return circuit

    def place_of(self, name: str) -> tuple[str, str]:
        """Return what this rank has asked for behind a breaker first, and the operation class.

        Args:
            name: The breaker's name; one that this rank has not used has its storage as a whole.
        """
        dependency, _, kind = name.rpartition(":")
        return self._urls.get(name, dependency), kind

    def records(self) -> dict[str, BreakerRecord]:
        """Return the records that this rank has seen last, by name; asks nobody. Any thread."""
        views = ((name, circuit.view) for name, circuit in [*self._circuits.items()])
        return {name: view.record for name, view in views if view is not None}

    def joint_circuit(self, url: str, kind: str, may_be_deferred: bool = False) -> Circuit:  # noqa: FBT001, FBT002
        """Return the breaker before ``url``; the first time, its record is read.

        Args:
            url: Something in its storage.
            kind: ``read`` or ``write``.
            may_be_deferred: Whether what it is for needs none where the shared store is gone.

        Raises:
            JointUnavailableError: The shared store did not answer for too long.
        """
        circuit = self.circuit(url, kind)
        if circuit.dependency not in self._begun:
            beginning = begin(circuit, new_incarnation=self._member.rank == 0)
            with contextlib.suppress(DeferredError):
                self.run("begin", beginning, may_be_deferred=may_be_deferred)
                self._begun.add(circuit.dependency)
        return circuit

    def run(self, op: str, protocol: Protocol[Any], *, may_be_deferred: bool = False) -> Any:
        """Run a protocol that is not joint, and repeat its store operations as a joint one does.

        Raises:
            JointUnavailableError: The shared store did not answer for too long.
        """
        persistence = patience_of(self._member, op, seq=0, may_be_deferred=may_be_deferred)
        return self._driver.run(with_persistence(protocol, persistence))

    def patience(
        self, url: str, kind: str, storage: Storage, *, on_outage: str | None = None
    ) -> Patience:
        """Return how to wait for the storage of ``url``, and how to find out that it is well.

        Args:
            url: Something in it.
            kind: ``read`` or ``write``.
            storage: Clients of storage.
            on_outage: What is done while it is ill, None for what the member says.
        """
        directory = parent_of(url)
        chunk = chunk_s(joint_timeout_s=self._member.timeout_s)
        return Patience(
            probe=self._probe(storage, directory, kind),
            classify=partial(self.policy.classify, reading=kind == "read"),
            when_open="raise" if (on_outage or self._member.on_outage) == "fail" else "wait",
            chunk_s=chunk,
            voice_s=VOICE_S if self._member.rank == 0 else chunk,
            spread_s=self._spread_s[kind],
            leads=kind == "write",
        )

    def _probe(self, storage: Storage, directory: str, kind: str) -> Callable[[CancelToken], None]:
        if kind == "read":
            return partial(storage.probe_read, directory)

        def probe(token: CancelToken) -> None:
            storage.probe_write(directory, self._driver.dice.nonce(), token)

        return probe

    def reports(self, *, hurry: bool = False) -> dict[str, BreakerReport]:
        """Read every breaker's record once more, and return what this rank knows of it.

        Where the shared store does not answer, it is what this rank saw last; with ``hurry``, where
        it does not answer at once.
        """
        # A store that has just not answered is not asked again: each question may take its timeout.
        answers = True
        for circuit in self._circuits.values():
            answers = answers and self._refresh(circuit, hurry=hurry)
        return self.known()

    def known(self) -> dict[str, BreakerReport]:
        """Return what this rank knows of every breaker, and ask nobody. Any thread."""
        return {
            name: _report(circuit.view, circuit.seen)
            for name, circuit in [*self._circuits.items()]
            if circuit.view is not None
        }

    def _refresh(self, circuit: Circuit, *, hurry: bool) -> bool:
        try:
            self._driver.run(refresh(circuit), hurry=hurry)
        except StoreError:
            return False
        return True


def _report(view: BreakerView, seen: tuple[tuple[int, str], ...]) -> BreakerReport:
    record = view.record
    return BreakerReport(
        state=record.state,
        epoch=record.epoch,
        history=tuple((entry.epoch, entry.state, entry.reason) for entry in record.history),
        seen=seen,
    )
