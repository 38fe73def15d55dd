# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts, the processes on them, and the operations that these make.

A process runs one program, a generator of effects, from its start to its end. It has its host's
clock, dice of its own, and a store of its own for what it decides alone. It can stand still: then
whatever comes for it waits until it wakes, in the order in which it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.cells import Cells
from lightning_resilience.drill.scenario import JOINT_KINDS


if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from lightning_resilience.drill.call_model import RunningCall
    from lightning_resilience.drill.store_model import Watch
    from lightning_resilience.drill.virtual import HostClock, SeededDice
    from lightning_resilience.protocols.circuit_memory import Circuit
    from lightning_resilience.protocols.effects import Effect


__all__ = ["ENDS", "WORKER", "Host", "Operation", "Process", "Strike"]

WORKER: Final = 0
"""The rank that works in joint saves."""

_NEVER_S: Final = float("-inf")
_BY_ALL: Final = frozenset({"collective", "load"})
ENDS: Final = ("flush", "clear up")
"""Joint operations at the end of a run: rank 0 works in them, as in a save."""


class Host:
    """One host: its clock, and the ways to store and storage.

    Args:
        number: Its number, from 0.
        clock: What its processes read.

    Attributes:
        cut_off_until_s: Until when the way to the store is cut, on the virtual clock.
        cut_off_from_storage_until_s: Until when the way to storage is.
    """

    __slots__ = ("clock", "cut_off_from_storage_until_s", "cut_off_until_s", "name", "number")

    def __init__(self, number: int, clock: HostClock) -> None:
        self.number = number
        self.name = f"host{number}"
        self.clock = clock
        self.cut_off_until_s = _NEVER_S
        self.cut_off_from_storage_until_s = _NEVER_S

    def is_cut_off(self, now_s: float) -> bool:
        """Tell whether the way to the store is cut."""
        return now_s < self.cut_off_until_s

    def is_cut_off_from_storage(self, now_s: float) -> bool:
        """Tell whether the way to storage is cut."""
        return now_s < self.cut_off_from_storage_until_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Something that happens to a process after so many more effects.

    Args:
        what: ``crash``, ``pause`` or ``interrupt``.
        for_s: How long a pause lasts, in seconds of the virtual clock.
    """

    what: str
    for_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """One operation of one process, as its program sees it.

    Args:
        process: Who makes it.
        kind: As in the scenario's workload, or one of ``ENDS``.
        number: Its number among the process's operations; of a joint one, the sequence number.

    Attributes:
        place: Where in the process's training it is, in words.
        began_at_s: When it began, on the virtual clock.
        ended_at_s: When it ended, or None.
        attempts: Requests for which it has come to storage so far.
        store_operations: What it had cost the store when it ended.
        result: What it returned.
        error: What it raised.
        unsettled: Numbers of joint operations of whose end its process did not know afterwards.
    """

    process: Process
    kind: str
    number: int
    place: str = ""
    began_at_s: float = 0.0
    ended_at_s: float | None = None
    attempts: int = 0
    store_operations: int = 0
    result: Any = None
    error: BaseException | None = None
    unsettled: tuple[int, ...] = ()

    @property
    def is_joint(self) -> bool:
        """True where it ends with one verdict for all ranks."""
        return self.kind in JOINT_KINDS or self.kind in ENDS

    @property
    def is_made_by_all(self) -> bool:
        """True where every rank calls storage at the same time, and so needs a slot always."""
        return self.kind in _BY_ALL

    @property
    def is_of_one(self) -> bool:
        """True where rank 0 works, and the others wait for it."""
        return self.is_joint and not self.is_made_by_all

    @property
    def has_work(self) -> bool:
        """True where this process has something to do, and does not only wait for another one."""
        return not self.is_of_one or self.process.rank == WORKER

    @property
    def is_guarded(self) -> bool:
        """True where it asks storage; otherwise it waits for what does."""
        return self.kind != "flush"


def _not_begun() -> Generator[Effect, Any, Any]:
    yield from ()


class Process:
    """One process of the job.

    Args:
        rank: Its rank.
        incarnation: Which start of the job it belongs to, from 1.
        host: Where it runs.
        dice: Its chance.

    Attributes:
        program: What it runs.
        circuit: What it remembers of the breaker, once it has begun.
        state: ``running``, ``ended``, ``failed``, ``crashed`` or ``interrupted``.
        error: What its program raised, where it failed.
        turn: Changes whenever it goes on; what was meant for an earlier turn comes too late.
        woken_at_s: When it last woke from standing still, on the virtual clock.
        paused_at_s: When it last began to stand still, on the virtual clock.
        own: Its own store, for what it decides alone.
        on_its_own: What performs operations on that, once it was needed.
        watch: Its wait for a key of the shared store; kept while it does something else.
        store_operations: Operations that it has sent to the store.
        effects: Effects that it has asked for.
        operation: The operation that it makes now, or its last.
    """

    __slots__ = (
        "call",
        "circuit",
        "dice",
        "effects",
        "error",
        "host",
        "hurries",
        "inbox",
        "incarnation",
        "is_paused",
        "name",
        "on_its_own",
        "operation",
        "own",
        "paused_at_s",
        "program",
        "rank",
        "state",
        "store_operations",
        "strikes",
        "turn",
        "waiting_turn",
        "watch",
        "woken_at_s",
    )

    def __init__(self, rank: int, incarnation: int, *, host: Host, dice: SeededDice) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.name = f"rank {rank}" if incarnation == 1 else f"rank {rank}'{incarnation}"
        self.host = host
        self.dice = dice
        self.program: Generator[Effect, Any, Any] = _not_begun()
        self.circuit: Circuit | None = None
        self.state = "running"
        self.error: Exception | None = None
        self.turn = 0
        self.is_paused = False
        self.paused_at_s = _NEVER_S
        self.woken_at_s = _NEVER_S
        self.inbox: list[tuple[int, Any]] = []
        self.strikes: list[tuple[int, Strike]] = []
        self.own = Cells()
        self.on_its_own: dict[type, Callable[[Any], Any]] = {}
        self.watch: Watch | None = None
        self.waiting_turn = -1
        self.call: RunningCall | None = None
        self.hurries = False
        self.effects = 0
        self.store_operations = 0
        self.operation: Operation | None = None

    @property
    def is_alive(self) -> bool:
        """True until it ends, by itself or not."""
        return self.state == "running"

    def wrote(self, nonce: str) -> bool:
        """Tell whether a nonce is one of this process's."""
        return nonce.startswith(self.dice.name + ".")
