# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""News of a world that does not run: what checks are told, made up one by one.

Nothing here is simulated. A test says what the store has written and what has reached storage, in
whatever order it likes, so that each check is seen to look at what it says it looks at.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.breaker_record import initial
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import (
    BreakerRecord,
    BudgetRecord,
    FinalRecord,
    SlotRecord,
    StoreIdRecord,
    Transition,
    encode,
)
from lightning_resilience.drill.checks import all_checks
from lightning_resilience.drill.observer import Observers
from lightning_resilience.drill.process import Operation, Process
from lightning_resilience.drill.scenario import Scenario
from lightning_resilience.drill.storage_model import Request
from lightning_resilience.drill.virtual import SeededDice
from lightning_resilience.drill.workload import DEPENDENCY
from lightning_resilience.drill.world import World
from lightning_resilience.errors import DrillFailedError, RetriesExhaustedError
from lightning_resilience.protocols.circuit_memory import Circuit, Link, give_detour, learn


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.core.events import Event


CONFIG = BreakerConfig(max_concurrent=4)
KEYS = Keys(run_id="drill", incarnation="1")
BREAKER = KEYS.breaker(DEPENDENCY)
BUDGET = KEYS.budget(DEPENDENCY)

RESET = ConnectionResetError("connection reset by storage")


class News:
    """A world, its checks, and four ranks on as many hosts of which a test makes up what they do.

    Args:
        options: Fields of the scenario.
    """

    def __init__(self, **options: Any) -> None:
        scenario = Scenario(**{"ranks": 4, "hosts": 4, "breaker": CONFIG, **options})
        self.world = World(scenario, 7)
        self.to = Observers(all_checks(self.world))
        self.ranks = [
            Process(rank, 1, host=self.world.hosts[rank], dice=SeededDice(7, f"r{rank}i1"))
            for rank in range(4)
        ]
        self.world.processes.extend(self.ranks)

    # --- time and the store --------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """The present instant."""
        return self.world.agenda.now_s

    def at(self, now_s: float) -> News:
        """Let it be later."""
        self.world.agenda.now_s = now_s
        return self

    @property
    def record(self) -> BreakerRecord:
        """The breaker's record in the store."""
        return msgspec.json.decode(self.world.store.cells.values[BREAKER], type=BreakerRecord)

    def write(self, rank: int, key: str, value: bytes | None) -> None:
        """Let a rank write or delete a key."""
        values = self.world.store.cells.values
        before = values.pop(key, None)
        if value is not None:
            values[key] = value
        for wrote in self.to.wrote:
            wrote(self.now_s, self.ranks[rank], key, before=before)

    def read(self, rank: int) -> None:
        """Let a rank read the breaker's record."""
        for read in self.to.read:
            read(self.now_s, self.ranks[rank], BREAKER)

    def look(self, rank: int) -> None:
        """Let a rank read the breaker's record and all slots."""
        self.read(rank)
        for read in self.to.read:
            read(self.now_s, self.ranks[rank], KEYS.slot(DEPENDENCY, CONFIG.max_concurrent - 1))

    def remember(self, rank: int) -> None:
        """Let a rank have the present record in mind."""
        process = self.ranks[rank]
        process.circuit = Circuit(DEPENDENCY, config=CONFIG, keys=KEYS, host=process.host.name)
        learn(process.circuit, encode(self.record), read_at_s=0.0, seen_at_s=0.0)

    def empty(self) -> None:
        """Let the store lose everything."""
        self.world.store.cells.values.clear()
        for emptied in self.to.emptied:
            emptied(self.now_s)

    # --- the breaker ---------------------------------------------------------------------------

    def name_store(self, rank: int = 0) -> str:
        """Let a rank name the store."""
        name = self.ranks[rank].dice.nonce()
        self.write(rank, KEYS.store_id, encode(StoreIdRecord(store_id=name, writer=name)))
        return name

    def create(self, rank: int = 0, **changes: Any) -> None:
        """Let a rank make the record of a breaker that nobody has used."""
        store_id = self.name_store(rank)
        record = initial(CONFIG, store_id=store_id, writer=self.ranks[rank].dice.nonce())
        self.write(rank, BREAKER, encode(msgspec.structs.replace(record, **changes)))

    def change(self, rank: int, **changes: Any) -> None:
        """Let a rank change the record without a new epoch."""
        writer = self.ranks[rank].dice.nonce()
        changed = msgspec.structs.replace(self.record, **{"writer": writer, **changes})
        self.write(rank, BREAKER, encode(changed))

    def move(self, rank: int, state: str, **changes: Any) -> None:
        """Let a rank make a transition, right but for what is said otherwise."""
        old = self.record
        entry = Transition(epoch=old.epoch + 1, state=state, reason="as the test says")
        passing = {"closed", "recovering"}
        right = {
            "epoch": entry.epoch,
            "state": state,
            "votes": (),
            "generation": old.generation + (old.state in passing and state not in passing),
            "history": (*old.history, entry)[-32:],
            "limit": {"recovering": CONFIG.ramp_start, "closed": CONFIG.max_concurrent}.get(
                state, 0
            ),
            "holder": self.ranks[rank].dice.nonce() if state == "half_open" else "",
        }
        self.change(rank, **{**right, **changes})

    def trip(self) -> None:
        """Let the circuit open as it should: two hosts, three failures each."""
        self.create()
        for rank in (0, 1):
            self.fail(rank, times=CONFIG.trip_failures)
        self.change(0, votes=("host0",))
        self.move(1, "open", open_s=CONFIG.open_for_s)

    def claim(self, rank: int = 0, *, after_s: float | None = None, **changes: Any) -> None:
        """Let a rank claim the probe once the open wait is over."""
        self.at(self.now_s + (self.record.open_s if after_s is None else after_s))
        self.move(rank, "half_open", **changes)

    # --- storage -------------------------------------------------------------------------------

    def begin(self, rank: int, kind: str = "single") -> Operation:
        """Let a rank begin an operation."""
        process = self.ranks[rank]
        number = 1 if process.operation is None else process.operation.number + 1
        operation = Operation(process=process, kind=kind, number=number, began_at_s=self.now_s)
        process.operation = operation
        for began in self.to.operation_began:
            began(self.now_s, operation)
        return operation

    def end(self, rank: int, *, cost: int = 0, result: Any = None, error: Any = None) -> None:
        """Let a rank end its operation."""
        operation = self.ranks[rank].operation
        assert operation is not None
        operation.ended_at_s, operation.store_operations = self.now_s, cost
        operation.result, operation.error = result, error
        for ended in self.to.operation_ended:
            ended(self.now_s, operation)

    def send(self, rank: int, kind: str = "call") -> Request:
        """Let a request of a rank reach storage."""
        process = self.ranks[rank]
        operation = process.operation or self.begin(rank)
        operation.attempts += kind == "call"
        request = Request(kind, process, operation, attempt=operation.attempts)
        request.began_at_s, request.reached = self.now_s, True
        for began in self.to.began:
            began(self.now_s, request)
        return request

    def answer(self, request: Request, failed: Exception | None = None) -> None:
        """Let storage answer a request."""
        request.ended_at_s, request.failed = self.now_s, failed
        for ended in self.to.ended:
            ended(self.now_s, request)

    def fail(self, rank: int, *, times: int = 1) -> None:
        """Let calls of a rank fail, each of an operation of its own."""
        for _ in range(times):
            self.begin(rank)
            self.answer(self.send(rank), RESET)
            self.end(rank, error=RetriesExhaustedError("given up"))

    def say(self, rank: int, event: Event) -> None:
        """Let a rank report a fact."""
        for emitted in self.to.emitted:
            emitted(self.now_s, self.ranks[rank], event)

    # --- processes -----------------------------------------------------------------------------

    def pause(self, rank: int) -> None:
        """Let a rank stand still and wake at once."""
        self.ranks[rank].woken_at_s = self.now_s

    def crash(self, rank: int) -> None:
        """Kill a rank."""
        self.ranks[rank].state = "crashed"
        for changed in self.to.changed:
            changed(self.now_s, self.ranks[rank], "crashed")

    def go_alone(self, rank: int) -> Circuit:
        """Let a rank decide alone; return its own breaker."""
        process = self.ranks[rank]
        circuit = Circuit(DEPENDENCY, config=CONFIG, keys=KEYS, host=process.host.name)
        give_detour(circuit, link=Link(), processes=4)
        assert circuit.detour is not None
        circuit.detour.link.lost_since_s = 0.0
        process.circuit = circuit
        return circuit.detour.circuit

    # --- slots, budget and verdicts ------------------------------------------------------------

    def slot(self, rank: int, index: int, **fields: Any) -> None:
        """Let a rank write a slot."""
        key = KEYS.slot(DEPENDENCY, index)
        raw = self.world.store.cells.values.get(key)
        before = SlotRecord(writer="") if raw is None else msgspec.json.decode(raw, type=SlotRecord)
        writer = self.ranks[rank].dice.nonce()
        changed = msgspec.structs.replace(before, **{"writer": writer, **fields})
        self.write(rank, key, encode(changed))

    def take(self, rank: int, index: int, **fields: Any) -> None:
        """Let a rank look, and claim a slot."""
        self.look(rank)
        nonce = self.ranks[rank].dice.nonce()
        self.slot(rank, index, **{"holder": nonce, "writer": nonce, **fields})

    def budget(self, rank: int, **fields: Any) -> None:
        """Let a rank write the budget."""
        raw = self.world.store.cells.values.get(BUDGET)
        writer = self.ranks[rank].dice.nonce()
        if raw is None:
            empty = (0,) * 5
            before = BudgetRecord(origin=writer, bucket=0, retries=empty, calls=empty, writer="")
        else:
            before = msgspec.json.decode(raw, type=BudgetRecord)
        changed = msgspec.structs.replace(before, **{"writer": writer, **fields})
        self.write(rank, BUDGET, encode(changed))

    def verdict(self, rank: int, number: int, **fields: Any) -> FinalRecord:
        """Let a rank write a verdict, and lay out the ballot before where there is nothing."""
        if KEYS.joint("final", number) not in self.world.store.cells.values:
            self.final(rank, number, is_open=True, is_draft=True)
            self.final(rank, number, is_open=True)
        return self.final(rank, number, **fields)

    def final(self, rank: int, number: int, **fields: Any) -> FinalRecord:
        """Let a rank write a draft, a ballot or a verdict over whatever there is."""
        writer = self.ranks[rank].dice.nonce()
        final = FinalRecord(**{"op": "save", "workers": (0,), "writer": writer, **fields})
        self.write(rank, KEYS.joint("final", number), encode(final))
        return final


@contextmanager
def broken(check: str) -> Iterator[None]:
    """Expect that a check, and no other one, sees its promise broken."""
    with pytest.raises(DrillFailedError) as caught:
        yield
    assert caught.value.check == check
