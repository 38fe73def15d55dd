# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A model of torch's own rendezvous: who joins, when a round is complete, who is there no more.

It is what agents read in the store, so an agent that cannot reach that learns nothing from it, and
with the store all of it is lost. A round is complete with all nodes, or a last call after enough of
them have joined. Whoever comes then waits, until all who have part in it have come back for the
next one, or are gone: a node is, that has given no sign of itself for long enough. Rounds are
counted from 0 again in a store that came back empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.joining import JoinFailure
from lightning_resilience.drill.restart_plan import GRACE_S, LAST_CALL_S


if TYPE_CHECKING:
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.virtual import Agenda


__all__ = ["Inner", "JoinFailedError", "Place"]


_FIRST_PORT: Final = 29500


class JoinFailedError(Exception):
    """Joining has failed.

    Args:
        failure: Why.
    """

    def __init__(self, failure: JoinFailure) -> None:
        super().__init__(f"joining has failed: {failure.value}")
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's place in a complete round.

    Args:
        rank: Which node of it.
        nodes: All its nodes, by number.
        members: Their agents, as the rendezvous tells them apart.
        store: Prefix of the keys of the round's own store.
        workers: Address of the store that its node 0 has made for the workers.
        number: Which round of the job it is, whatever became of the store: for those who look.
    """

    rank: int
    nodes: tuple[int, ...]
    members: frozenset[Process]
    store: str
    workers: str
    number: int


class Inner:
    """The rendezvous of one job.

    Args:
        agenda: The virtual clock.
        least: How many nodes a round must have.
        most: How many it may have.

    Attributes:
        is_closed: Whether nobody may join any more.
    """

    def __init__(self, agenda: Agenda, *, least: int, most: int) -> None:
        self.is_closed = False
        self._agenda = agenda
        self._least = least
        self._most = most
        self._round = self._completed = 0
        self._is_complete = False
        self._closes_at_s: float | None = None
        self._members: dict[Process, None] = {}
        self._ranks: dict[Process, int] = {}
        self._waiting: dict[Process, None] = {}
        self._absent: dict[Process, float] = {}

    def lose(self) -> None:
        """Forget everything: the store has."""
        self._round = 0
        self._is_complete = self.is_closed = False
        self._closes_at_s = None
        for each in (self._members, self._ranks, self._waiting, self._absent):
            each.clear()

    def leave(self, process: Process) -> None:
        """Leave the round that is over, or the wait for the next one."""
        self._waiting.pop(process, None)
        self._members.pop(process, None)
        self._sweep()

    def look(self, process: Process) -> Place | None:
        """Join, or look whether the round is complete.

        Returns:
            The node's place; None where it has to wait.

        Raises:
            JoinFailedError: The rendezvous is closed.
        """
        if self.is_closed:
            raise JoinFailedError(JoinFailure.CLOSED)
        self._sweep()
        if self._is_complete and process not in self._members:
            self._waiting[process] = None
            return None
        if not self._is_complete:
            self._waiting.pop(process, None)
            self._members[process] = None
            self._complete()
        if not self._is_complete:
            return None
        nodes = tuple(sorted(each.rank for each in self._ranks))
        return Place(
            rank=self._ranks[process],
            nodes=nodes,
            members=frozenset(self._ranks),
            store=f"torch.rendezvous/{self._round}/",
            workers=f"host{nodes[0]}:{_FIRST_PORT + self._completed}",
            number=self._completed,
        )

    def waiting(self) -> int:
        """Return how many nodes wait to join."""
        self._sweep()
        return len(self._waiting)

    def there(self) -> int:
        """Return how many nodes have part in the round, and are still there."""
        self._sweep()
        return len(self._members)

    def _complete(self) -> None:
        count, now_s = len(self._members), self._agenda.now_s
        if count < self._least:
            self._closes_at_s = None
        elif self._closes_at_s is None:
            self._closes_at_s = now_s + LAST_CALL_S
        is_over = self._closes_at_s is not None and now_s >= self._closes_at_s
        if count >= self._most or is_over:
            self._is_complete = True
            self._completed += 1
            ordered = sorted(self._members, key=lambda each: each.rank)
            self._ranks = {each: rank for rank, each in enumerate(ordered)}

    def _sweep(self) -> None:
        """Let those go who have given no sign of themselves, and begin anew without any."""
        now_s = self._agenda.now_s
        for process in (*self._members, *self._waiting):
            is_there = process.is_alive and not process.is_paused
            if is_there and not process.host.is_cut_off(now_s):
                self._absent.pop(process, None)
            elif now_s - self._absent.setdefault(process, now_s) >= GRACE_S:
                self._members.pop(process, None)
                self._waiting.pop(process, None)
        if self._is_complete and not self._members:
            self._is_complete, self._closes_at_s = False, None
            self._round += 1
