# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own, in lock-step, and the HTTP server that all of them depend on.

The server counts who is in it, also where a caller is killed or stopped, and each request says what
has let its caller through. A call stays in it while its caller is stopped, as an upload would; a
probe is one small object, and is answered. Right before a rank sends a probe, after its last look
at the clock, it knocks at the server, which is where a fault may strike it.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.joint import report_of
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import BreakerRecord, SlotRecord, decode
from lightning_resilience.protocols.circuit import Circuit, begin
from lightning_resilience.protocols.circuit_memory import Limits, Link, give_detour
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.joint import Joint, Member, Part, perform
from lightning_resilience.protocols.joint_fence import enlist
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.integration.breaker_ranks import HANG_S, Recorder
from tests.integration.contention_ranks import POLICY, WatchedStore
from tests.integration.promise_checks import FOREVER_S, Claim, Served, Told


if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from lightning_resilience.core.records import OutcomeRecord
    from lightning_resilience.ports import CancelToken, SharedStore
    from lightning_resilience.protocols.effects import Protocol


RANKS = 16
READ, WRITE = "storage:read", "storage:write"
# Every rank reads; one writes, for all.
HOSTS = {READ: RANKS, WRITE: 1}
# Small, and within the relations that BreakerConfig asks for.
CONFIG = BreakerConfig(
    trip_failures=2,
    view_max_age_s=0.2,
    open_for_s=2.05,
    max_open_for_s=2.05,
    probe_timeout_s=0.15,
    probe_lease_s=2.0,
    max_concurrent=4,
)
ADMISSION = AdmissionConfig(slot_lease_s=1.2, beat_every_s=0.2)
LIMITS = Limits(admission=ADMISSION, budget=BudgetConfig(retry_floor=1000))
SILENCE_S = 1.6
STORE_PATIENCE_S = 0.3
LASTS_S = 0.02
_WELL, _ILL = 200, 503


# --- the dependency --------------------------------------------------------------------------


class Storage(http.server.ThreadingHTTPServer):
    """What all ranks need, on a port of loopback; counts every request.

    Attributes:
        served: What has reached it.
        is_ill: Whether it refuses.
        stopped: Ranks whose calls stay in it.
        felt_at_s: When the present outage was first felt.
        on_knock: Told which rank is about to send the one probe for which all ranks wait; it is
            answered afterwards.
        on_call: Told of each call that a slot has let in, once it is counted.
    """

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.is_ill = False
        self.felt_at_s: float | None = None
        self.stopped: set[int] = set()
        self.on_knock: Callable[[int], None] = lambda _: None
        self.on_call: Callable[[int], None] = lambda _: None
        self._lock = threading.Lock()
        storage = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                told = json.loads(self.headers["X-Told"])
                self.send_response_only(storage.serve(told, self.connection))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Keep the test's output clean."""

        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *_: Any) -> None:
        """Say nothing: callers are killed here."""

    def serve(self, told: dict[str, Any], connection: socket.socket) -> int:
        """Count one request, let it last its time, and return the status of its answer."""
        if told["kind"] == "knock":
            if (told["way"], told["dependency"]) == ("shared", READ):
                self.on_knock(told["rank"])
            return _WELL
        claim = told.pop("claim")
        with self._lock:
            served = Served(
                **told, claim=Claim(**claim) if claim else None, began_at_s=time.monotonic()
            )
            self.served.append(served)
        if served.kind != "probe" and claim:
            self.on_call(served.rank)
        self._last(served, connection)
        with self._lock:
            served.went_well = not self.is_ill
            served.ended_at_s = time.monotonic()
            if self.is_ill and self.felt_at_s is None:
                self.felt_at_s = served.ended_at_s
        return _WELL if served.went_well else _ILL

    def _last(self, served: Served, connection: socket.socket) -> None:
        ends_at_s = served.began_at_s + LASTS_S
        while time.monotonic() < ends_at_s or (
            served.kind != "probe" and served.rank in self.stopped
        ):
            is_gone = bool(select.select([connection], [], [], LASTS_S / 2)[0])
            if is_gone:
                return

    def heal(self) -> None:
        """Be well from now on."""
        with self._lock:
            self.is_ill, self.felt_at_s = False, None

    def inside(self) -> list[Served]:
        """Requests that are in it now."""
        with self._lock:
            return [served for served in self.served if served.ended_at_s == FOREVER_S]


def put(port: int, told: dict[str, Any]) -> None:
    """Send one request to the dependency; raises where it is ill."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    try:
        connection.request("PUT", "/object", headers={"X-Told": json.dumps(told)})
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != _WELL:
        message = f"the dependency answered {status}"
        raise ConnectionResetError(message)


# --- a rank ----------------------------------------------------------------------------------


class WitnessStore(WatchedStore):
    """A store that remembers every record of a breaker that was read or written through it."""

    def __init__(self, inner: SharedStore) -> None:
        super().__init__(inner, lost="", seed=0)
        self.seen: list[tuple[str, bytes]] = []
        self._used = 0

    def _note(self, key: str, raw: bytes | None) -> None:
        if raw and "/breaker/" in key and (key, raw) not in self.seen[-4:]:
            self.seen.append((key, raw))

    def get(self, key: str) -> bytes | None:
        """As the port."""
        raw = super().get(key)
        self._note(key, raw)
        return raw

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """As the port."""
        values = super().multi_get(keys)
        for key, raw in zip(keys, values, strict=True):
            self._note(key, raw)
        return values

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As the port."""
        raw = super().compare_and_set(key, expected, desired)
        # The expectation comes back where the key is gone: that is no record.
        if raw != expected:
            self._note(key, raw)
        return raw

    def slot_claim(self) -> dict[str, Any] | None:
        """The claim of a slot that was made since the last call, and has let this one in."""
        changes, self._used = self.changes[self._used :], len(self.changes)
        for change in reversed(changes):
            if change.has_won and "/slot/" in change.key:
                record = decode(SlotRecord, change.raw, key=change.key)
                # A beat has a writer of its own.
                if record.holder and record.writer == record.holder:
                    number = int(change.key.rpartition("/")[2])
                    return {
                        "number": number,
                        "holder": record.holder,
                        "sent_at_s": change.sent_at_s,
                    }
        return None

    def probe_claim(self, key: str) -> dict[str, Any] | None:
        """The claim of a probe that this process has made last."""
        for change in reversed(self.changes):
            if change.has_won and change.key == key:
                record = decode(BreakerRecord, change.raw, key=key)
                if record.holder:
                    return {
                        "store_id": record.store_id,
                        "number": record.epoch,
                        "holder": record.holder,
                        "sent_at_s": change.sent_at_s,
                    }
        return None


class PromiseRank:
    """One rank, in its own process: it does what all ranks are told at the same time."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def begin(self, run_id: str, store_port: int, port: int) -> None:
        """Take part in a round, with nothing left of the one before."""
        self.end()
        self.port = port
        self.told: list[Told] = []
        self.errors: list[str] = []
        self.recorder = Recorder()
        self.store = WitnessStore(TorchStore.connect("127.0.0.1", store_port, timeout_s=2.0))
        self.driver = Driver(
            store=self.store,
            clock=SystemClock(),
            dice=SystemDice(rank=self.rank),
            sink=self.recorder,
        )
        self.keys = Keys(run_id=run_id, incarnation="1")
        link = Link()
        self.circuits = {}
        for dependency, hosts in HOSTS.items():
            circuit = Circuit(
                dependency,
                config=CONFIG,
                keys=self.keys,
                host=f"h{self.rank}",
                hosts=hosts,
                limits=LIMITS,
            )
            give_detour(circuit, link=link, processes=RANKS)
            self.driver.run(begin(circuit, new_incarnation=False))
            self.circuits[dependency] = circuit
        self.member = self.driver.run(enlist(self._member()))

    def end(self) -> None:
        """Leave the store."""
        if hasattr(self, "store"):
            self.driver.close()
            self.store.close()

    def _member(self) -> Member:
        return Member(
            keys=self.keys,
            rank=self.rank,
            world_size=RANKS,
            timeout_s=SILENCE_S,
            beat_s=SILENCE_S / 6,
            on_outage="wait",
            store_patience_s=SILENCE_S,
        )

    def collective(self, _seq: int, _worker: int) -> None:
        """Make the guarded call that every rank makes."""
        self._guarded("collective")

    def single(self, _seq: int, _worker: int) -> None:
        """Make a guarded call of one's own."""
        self._guarded("single")

    def joint(self, seq: int, worker: int) -> None:
        """Take part in a joint operation in which one rank has work."""
        began_at_s = time.monotonic()
        joint = Joint(
            op="save",
            seq=seq,
            digest="",
            subject="a",
            workers=(worker,),
            circuit=self.circuits[WRITE],
            patience=self._patience(WRITE),
            deadline_s=HANG_S,
        )
        part = self._part() if self.rank == worker else None
        ended: dict[str, Any]
        try:
            ended = {"final": self.driver.run(perform(self.member, joint, part)).final}
        except Exception as error:  # noqa: BLE001 - the test looks at it
            lost_ranks = getattr(error, "lost_ranks", ())
            ended = {"error": type(error).__name__, "lost_ranks": lost_ranks}
        ended |= {"ended_at_s": time.monotonic()}
        self.told.append(
            Told(rank=self.rank, seq=seq, worker=worker, began_at_s=began_at_s, **ended)
        )

    def _part(self) -> Part:
        def run(started_at_s: float) -> Protocol[Any]:
            call = self._call("joint", WRITE, store_patience_s=SILENCE_S)
            yield from guard(self.circuits[WRITE], call, started_at_s)
            return f"by {self.rank}"

        def outcome(error: BaseException) -> OutcomeRecord:
            return report_of(error, rank=self.rank, outcome=classify(error))

        return Part(run=run, detail=str, outcome=outcome)

    def _guarded(self, kind: str) -> None:
        call = self._call(
            kind,
            READ,
            collective=kind == "collective",
            may_go_alone=True,
            store_patience_s=STORE_PATIENCE_S,
        )
        try:
            self.driver.run(guard(self.circuits[READ], call))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(f"{kind} of rank {self.rank}: {error!r}, {error.__cause__!r}")

    def _call(self, kind: str, dependency: str, **options: Any) -> GuardedCall:
        def work(_token: CancelToken) -> None:
            claim = self.store.slot_claim()
            way = "shared" if claim else self._way(dependency)
            self._put(kind, dependency, way=way, claim=claim)

        return GuardedCall(
            work=work,
            operation=kind,
            target="a",
            policy=POLICY,
            patience=self._patience(dependency),
            **options,
        )

    def _patience(self, dependency: str) -> Patience:
        def probe(_token: CancelToken) -> None:
            way, claim = self._probe_claim(dependency)
            who = {"way": way, "dependency": dependency, "rank": self.rank}
            put(self.port, {"kind": "knock", **who})
            self._put("probe", dependency, way=way, claim=claim)

        return Patience(probe=probe, classify=classify, chunk_s=1.0, voice_s=HANG_S, spread_s=0.05)

    def _put(self, kind: str, dependency: str, *, way: str, claim: dict[str, Any] | None) -> None:
        told = {"kind": kind, "dependency": dependency, "rank": self.rank}
        put(self.port, {**told, "way": way, "claim": claim})

    def _way(self, dependency: str) -> str:
        detour = self.circuits[dependency].detour
        assert detour is not None
        if detour.is_isolated:
            return "isolated"
        return "shared" if detour.link.lost_since_s is None else "lost"

    def _probe_claim(self, dependency: str) -> tuple[str, dict[str, Any] | None]:
        circuit = self.circuits[dependency]
        assert circuit.detour is not None
        own = circuit.detour.circuit.view
        # A result is always applied to the own record, so a holder there is of this very probe.
        if own is not None and own.record.holder:
            way = "isolated" if circuit.detour.is_isolated else "lost"
            claim = {
                "store_id": own.record.store_id,
                "number": own.record.epoch,
                "holder": own.record.holder,
                "sent_at_s": own.read_at_s,
            }
            return way, claim
        return "shared", self.store.probe_claim(circuit.key)

    def report(self) -> dict[str, Any]:
        """What this rank has seen and was told."""
        return {"seen": self.store.seen, "told": self.told, "errors": self.errors}


def live(connection: Connection, rank: int) -> None:
    """Be a rank until the test lets go."""
    # Torch prints a stack for every connection that breaks; what matters here is reported.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    me = PromiseRank(rank)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        value, error = None, ""
        try:
            value = getattr(me, name)(*arguments)
        except Exception as raised:  # noqa: BLE001 - the test looks at it
            error = repr(raised)
        connection.send((value, error))
