# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One round: a seed becomes a schedule of faults, sixteen processes live through it in lock-step.

The ranks are told one thing at a time, all at once, and the next when all that live have done it,
as training's collectives would have it. Faults strike at an instant, or the first that comes into
reach from then on: a caller that a slot has let in, a prober before its probe is sent, a worker.
A round ends when all faults are over and every living rank has done everything once more.
"""

from __future__ import annotations

import multiprocessing.connection
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import BreakerRecord, decode
from tests.integration.breaker_ranks import HANG_S
from tests.integration.promise_checks import FOREVER_S, Absence, Loss, Recording
from tests.integration.promise_ranks import ADMISSION, CONFIG, HOSTS, RANKS


if TYPE_CHECKING:
    from tests.integration.contention_ranks import Crew, StoreServer
    from tests.integration.promise_ranks import Storage


ORDERS: Final = ("collective", "joint", "single")
# Longer than what somebody takes for death: the lease of a slot or probe, a worker's silence.
LONG_S: Final = {"caller": 2.0, "any": 1.4, "worker": 1.9, "waiter": 1.2, "prober": 2.6}
SHORT_S: Final = 0.4
TEST: Final = "tests/integration/test_promises_on_real_processes.py"


@dataclass(kw_only=True)
class Fault:
    """Something that goes wrong.

    Args:
        what: ``outage``, ``kill``, ``stop`` or ``store``.
        at_s: When, or from when on, in seconds after the round's start.
        whom: ``any`` rank, the next ``caller``, ``prober`` or ``worker``, or the next ``waiter``:
            a rank without work as it comes to a joint operation; empty for the others.
        for_s: How long it lasts, in seconds: an outage from when it is first felt; a death lasts.
    """

    what: str
    at_s: float
    whom: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        """As it is printed."""
        whom = f" {self.whom}" if self.whom else ""
        lasts = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"{self.what}{whom} from {self.at_s:.2f} s{lasts}"


BRIEF: Final = (
    ("kill", "prober", 0.0),
    ("kill", "caller", 0.0),
    ("kill", "worker", 0.0),
    ("kill", "any", 0.0),
    ("stop", "prober", SHORT_S),
    ("stop", "caller", SHORT_S),
)
STRIKES: Final = (*BRIEF, *(("stop", whom, length_s) for whom, length_s in LONG_S.items()))


def plan(seed: int) -> list[Fault]:
    """Return the faults of a round, in order of time."""
    dice = random.Random(seed)
    # In one round of ten the first probe comes too early.
    lasts_s = dice.uniform(0.3, 1.2) if seed % 10 else CONFIG.open_for_s + 0.3
    faults = [Fault(what="outage", at_s=dice.uniform(0.1, 0.5), for_s=lasts_s)]
    # All ranks wait for one that is stopped, so one long stop in a round is enough.
    strikes = [STRIKES[seed % len(STRIKES)], dice.choice(BRIEF)]
    for what, whom, for_s in strikes if seed % 3 == 1 else strikes[:1]:
        faults += _strikes(what, whom, for_s * dice.uniform(1.0, 1.1), dice.uniform(0.05, 0.5))
    if seed % 4 == 0:
        faults.append(Fault(what="store", at_s=dice.uniform(0.1, 1.5)))
    elif seed % 4 == 2:
        for_s = dice.uniform(0.5, 1.8)
        faults.append(Fault(what="store", at_s=dice.uniform(0.1, 0.6), for_s=for_s))
    return sorted(faults, key=lambda fault: fault.at_s)


def _strikes(what: str, whom: str, for_s: float, at_s: float) -> list[Fault]:
    # With all slots in the hands of the stopped, those who wait are there to forgive them.
    number = CONFIG.max_concurrent if whom == "caller" and for_s > ADMISSION.slot_lease_s else 1
    return [Fault(what=what, at_s=at_s, whom=whom, for_s=for_s) for _ in range(number)]


@dataclass
class _Wake:
    rank: int
    at_s: float
    stopped_at_s: float


@dataclass
class Round:
    """A round under way.

    Args:
        seed: It decides the schedule.
        crew: The processes.
        storage: The dependency.
        server: The store's server.
        faults: What strikes; the seed's plan where nothing is given.
    """

    seed: int
    crew: Crew
    storage: Storage
    server: StoreServer
    faults: list[Fault] | None = None
    alive: set[int] = field(default_factory=lambda: set(range(RANKS)))
    pending: set[int] = field(default_factory=set)
    struck: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recording = Recording(config=CONFIG, admission=ADMISSION, ranks=RANKS, hosts=HOSTS)
        self._dice = random.Random(self.seed)
        self._due = plan(self.seed) if self.faults is None else list(self.faults)
        self._armed: list[Fault] = []
        self._wakes: list[_Wake] = []
        self._store_back_at_s: float | None = None
        self._outage_lasts_s = 0.0
        self._lost_at_s = 0.0
        # Requests strike from threads of the server.
        self._lock = threading.RLock()
        self._run_id = f"round-{self.seed}"
        self._seq = 0
        self._worker = 0
        self._began_at_s = FOREVER_S

    def play(self) -> Recording:
        """Live through it, and return what was recorded."""
        try:
            return self._play()
        finally:
            self._end()

    def _play(self) -> Recording:
        self._tell("begin", self._run_id, self.server.port, self.storage.server_address[1])
        self._hear("begin")
        self.storage.on_knock = lambda rank: self._strike("prober", rank)
        self.storage.on_call = lambda rank: self._strike("caller", rank)
        self._began_at_s = time.monotonic()
        self._keep_time()
        while not self._is_over():
            self._do_all()
        # What has met nobody in reach does so no more.
        self._armed.clear()
        self._do_all()
        self._tell("report")
        for rank, report in self._hear("report").items():
            self.recording.seen[rank] = [_decoded(*each) for each in report["seen"]]
            self.recording.told += report["told"]
            self.recording.errors += report["errors"]
        self.recording.seen[-1] = self._look()
        assert not self.storage.inside(), self._text("requests are left behind")
        self.recording.served = self.storage.served
        return self.recording

    def _do_all(self) -> None:
        first = self.seed % len(ORDERS)
        for order in ORDERS[first:] + ORDERS[:first]:
            with self._lock:
                self._worker = self._dice.choice(sorted(self.alive))
            self._seq += order == "joint"
            self._tell(order, self._seq, self._worker)
            if order == "joint":
                self._strike("worker", self._worker)
                waiters = sorted(self.alive - {self._worker})
                self._strike("waiter", self._dice.choice(waiters))
            self._hear(order)

    # Lock-step --------------------------------------------------------------------------------

    def _tell(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self.pending = set(self.alive)
        for rank in sorted(self.pending):
            # It may be killed at any time.
            with suppress(OSError):
                self.crew.pipes[rank].send((name, arguments))

    def _hear(self, order: str) -> dict[int, Any]:
        heard = {}
        gives_up_at_s = time.monotonic() + HANG_S
        while self.pending:
            assert time.monotonic() < gives_up_at_s, self._text(
                f"ranks {sorted(self.pending)} hang in {order!r}"
            )
            self._keep_time()
            pipes = {self.crew.pipes[rank]: rank for rank in self.pending}
            for pipe in multiprocessing.connection.wait(list(pipes), timeout=0.01):
                rank = pipes[pipe]  # type: ignore[index] # they are all connections
                self.pending.discard(rank)
                try:
                    value, error = self.crew.pipes[rank].recv()
                except (EOFError, OSError):
                    assert rank not in self.alive, self._text(f"rank {rank} has died")
                    continue
                assert error == "", self._text(f"rank {rank} in {order!r}: {error}")
                heard[rank] = value
        return heard

    def _text(self, what: str) -> str:
        return f"{what}; faults: {self.struck}. {again(self.seed)}"

    # Faults -----------------------------------------------------------------------------------

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        while self._due and now_s - self._began_at_s >= self._due[0].at_s:
            self._begin(self._due.pop(0), now_s)
        with self._lock:
            for wake in [wake for wake in self._wakes if now_s >= wake.at_s]:
                self._wakes.remove(wake)
                self._wake(wake)
        felt_at_s = self.storage.felt_at_s
        if felt_at_s is not None and now_s >= felt_at_s + self._outage_lasts_s:
            self.storage.heal()
        if self._store_back_at_s is not None and now_s >= self._store_back_at_s:
            self._store_back_at_s = None
            self.server.start()
            self.recording.losses.append(Loss(at_s=self._lost_at_s, until_s=time.monotonic()))

    def _begin(self, fault: Fault, now_s: float) -> None:
        if fault.what == "outage":
            self.storage.is_ill, self._outage_lasts_s = True, fault.for_s
            self.struck.append(str(fault))
        elif fault.what == "store":
            self.recording.seen[-2] = self._look()
            self._lost_at_s = time.monotonic()
            self.server.kill()
            self._store_back_at_s = now_s + fault.for_s
            self.struck.append(str(fault))
        else:
            with self._lock:
                self._armed.append(fault)
            # Not one that is stopped: nothing would strike it, and the round would wait for ever.
            self._strike("any", self._dice.choice(sorted(self.alive - self.storage.stopped)))

    def _strike(self, whom: str, rank: int) -> None:
        """Let a fault that waits for such a rank strike it."""
        with self._lock:
            fault = next((fault for fault in self._armed if fault.whom == whom), None)
            if fault is None or rank not in self.alive or rank in self.storage.stopped:
                return
            self._armed.remove(fault)
            self.struck.append(f"{fault}: rank {rank}")
            at_s = time.monotonic()
            if fault.what == "kill":
                self.alive.discard(rank)
                self.recording.absences.append(Absence(rank=rank, at_s=at_s))
                self.crew.kill(rank)
                return
            self.storage.stopped.add(rank)
            self.crew.stop(rank)
            self._wakes.append(_Wake(rank, at_s + fault.for_s, at_s))

    def _wake(self, wake: _Wake) -> None:
        self.crew.go_on(wake.rank)
        self.storage.stopped.discard(wake.rank)
        absence = Absence(rank=wake.rank, at_s=wake.stopped_at_s, until_s=time.monotonic())
        self.recording.absences.append(absence)

    def _is_over(self) -> bool:
        return not (
            self._due
            or self._wakes
            or self.storage.is_ill
            or self._store_back_at_s is not None
            or {fault.whom for fault in self._armed} - {"prober"}
            or time.monotonic() - self._began_at_s < 1.0
        )

    def _look(self) -> list[tuple[str, BreakerRecord]]:
        """Read what is in the store now."""
        keys = Keys(run_id=self._run_id, incarnation="1")
        store = TorchStore.connect("127.0.0.1", self.server.port)
        try:
            found = [(keys.breaker(name), store.get(keys.breaker(name))) for name in HOSTS]
        finally:
            store.close()
        return [_decoded(key, raw) for key, raw in found if raw is not None]

    def _end(self) -> None:
        """Leave nothing behind: the dead get successors, the stopped go on, the store is there."""
        with self._lock:
            for wake in self._wakes:
                self._wake(wake)
            self.storage.on_knock = self.storage.on_call = lambda _: None
        if self._store_back_at_s is not None:
            self.server.start()
        for rank in range(RANKS):
            if rank not in self.alive or rank in self.pending:
                self.crew.renew(rank)


def _decoded(key: str, raw: bytes) -> tuple[str, BreakerRecord]:
    return key.rpartition("/")[2], decode(BreakerRecord, raw, key=key)


def again(seed: int) -> str:
    """Say how a round is run once more."""
    return f"Run it again: pytest -s -p no:randomly '{TEST}' -k 'seed-{seed}-'"
