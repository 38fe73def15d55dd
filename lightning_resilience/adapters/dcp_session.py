# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Joint operations of ranks that ``torch.distributed.checkpoint`` has brought together.

There is no moment at which all ranks open a session, as there is with a Trainer: a writer is made
for one save, and the next one for another. So sessions are kept by the process. A save or a load
takes one that nobody uses, the ranks agree where to go on (``core.meeting``), and afterwards it is
free again. Two that run at the same time have two, and are never mixed up.

A rank that is alone makes the same calls without the others: nothing is agreed, and what storage
raises comes as it is.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.standalone import Standalone, standalone
from lightning_resilience.config import check_relations, read_environment
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.meeting import Offer, Terms
from lightning_resilience.protocols.joint import JointResult, Member


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lightning_resilience.adapters.dcp_options import DcpOptions
    from lightning_resilience.adapters.lightning.work import Work


__all__ = ["DcpSession", "Seat", "group_timeout_s", "seat"]

_DEFAULT_TIMEOUT_S = 1800.0


class DcpSession(Session):
    """One rank's part in the saves or the loads that follow each other."""

    alone_detail = ""

    def catch_up(self, seq: int) -> None:
        """Go on after the operation that any rank has come to."""
        self._seq = seq

    def told(self, op: str) -> tuple[str, ...]:
        """Return what every rank has told in ``op``, the last operation; one rank calls this."""
        if self.member.world_size == 1:
            return (self.alone_detail,)
        return super().told(op)

    def _joint(self, op: str, url: str, work: Work | None, **how: Any) -> JointResult:
        if self.member.world_size > 1:
            return super()._joint(op, url, work, **how)
        result = self._by_itself(op, work, **how)
        self.alone_detail = result.final.detail
        return result


@dataclass(slots=True, kw_only=True)
class Seat:
    """One rank's place in a save or a load, before and after the ranks have agreed.

    Args:
        options: What the user has chosen.
        connection: This process's connection to the shared store.
        session: The session that is there; None where none was free.
    """

    options: DcpOptions
    connection: Standalone
    session: DcpSession | None = None

    @property
    def offer(self) -> Offer:
        """Where this rank could go on."""
        if self.session is None:
            return Offer()
        member = self.session.member
        return Offer(
            incarnation=member.keys.incarnation,
            seq=self.session.operations,
            world_size=member.world_size,
        )

    def take(self, terms: Terms) -> DcpSession:
        """Return the session of these terms, which may be a new one."""
        session = self.session
        if session is None or not _fits(session, terms):
            session = self.session = self._open(terms)
        session.catch_up(terms.seq)
        return session

    def leave(self) -> None:
        """Let the next save or load have the session. Idempotent."""
        session, self.session = self.session, None
        # This thread may be gone before anybody could let its helper go.
        self.connection.driver.close()
        if session is not None:
            with _lock:
                _free.append((self.options, self.connection, session))

    def _open(self, terms: Terms) -> DcpSession:
        options, connection = self.options, self.connection
        timeout_s = group_timeout_s()
        check_relations(
            options.retry,
            options.breaker,
            options.joint,
            budget=options.budget,
            process_group_timeout_s=timeout_s if terms.world_size > 1 else None,
        )
        run_id = connection.keys.run_id
        joint_timeout_s = options.joint.timeout_s(process_group_timeout_s=timeout_s)
        store_terms = options.joint.store_terms(process_group_timeout_s=timeout_s)
        return DcpSession(
            member=Member(
                keys=Keys(run_id=run_id, incarnation=terms.incarnation),
                rank=terms.rank,
                world_size=terms.world_size,
                timeout_s=joint_timeout_s,
                beat_s=options.joint.beat_s(process_group_timeout_s=timeout_s),
                on_outage=options.joint.on_outage,
                # There is no spool for it, so nothing is deferred.
                store_patience_s=store_terms.store_patience_s,
            ),
            policy=options.policy,
            driver=connection.driver,
            storage=options.storage(
                read_environment(), run_id=run_id, nonce=connection.driver.dice.nonce
            ),
            hosts=connection.topology.hosts,
        )


_lock = threading.Lock()
_free: list[tuple[DcpOptions, Standalone, DcpSession]] = []


def _fits(session: DcpSession, terms: Terms) -> bool:
    member = session.member
    there = (member.keys.incarnation, member.world_size, member.rank)
    return there == (terms.incarnation, terms.world_size, terms.rank)


def seat(options: DcpOptions) -> Seat:
    """Return a place for this rank, with a session that these options have left free, if any.

    Args:
        options: What the user has chosen.

    Raises:
        ConfigError: The shared store or an environment variable is not allowed.
    """
    connection = standalone(options.store, run_id=options.run_id)
    with _lock:
        same = [each for each in _free if each[0] == options]
        # One whose connection was lost, or was that of this process's parent, is of no use.
        found = next((each for each in same if each[1] is connection), None)
        _free[:] = [each for each in _free if each not in same or each[1] is connection]
        if found is not None:
            _free.remove(found)
            return Seat(options=options, connection=connection, session=found[2])
    return Seat(options=options, connection=connection)


def group_timeout_s(group: ProcessGroup | None = None) -> float:
    """Return the timeout of a process group in seconds; torch's default without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return _DEFAULT_TIMEOUT_S
    found = group or dist.group.WORLD
    timeouts = []
    # Torch has no public names for these.
    for device in getattr(found, "_device_types", ()):
        options = getattr(found._get_backend(device), "options", None)  # type: ignore[union-attr]  # noqa: SLF001
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            timeouts.append(timeout.total_seconds())
    return min(timeouts, default=_DEFAULT_TIMEOUT_S)
