# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What the processes of small worlds run: one short use of a shipped protocol each.

A program is made anew for every run, and shares nothing with another: whatever it knows of the
others, it has from the store.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.joint import report_of
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import OK, classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.protocols.admission import enter
from lightning_resilience.protocols.circuit import Circuit, begin, learn, refresh, report
from lightning_resilience.protocols.circuit_memory import Limits
from lightning_resilience.protocols.effects import Call, Now
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.joint import Joint, Member, Part, perform
from lightning_resilience.protocols.permit import Permit, leave
from lightning_resilience.protocols.persistent import Persistence, with_persistence
from lightning_resilience.protocols.probe import Patience, await_passage


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.records import FinalRecord, OutcomeRecord
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = [
    "DEPENDENCY",
    "KEYS",
    "LEASE_S",
    "TIGHT",
    "caller",
    "guarded",
    "rank_of",
    "reporter",
    "saver",
    "waiter",
    "witness",
]

KEYS: Final = Keys(run_id="run", incarnation="1")
DEPENDENCY: Final = "drill://storage:write"
TIGHT: Final = BreakerConfig(max_concurrent=1, trip_failures=1)
"""One slot, and one failure that opens the circuit."""
LEASE_S: Final = 30.0


def _work(_token: CancelToken) -> None:
    """Stands for a request: what comes of it is the explorer's choice."""


_PATIENCE: Final = Patience(probe=_work, classify=classify, spread_s=0.0)


def _circuit(config: BreakerConfig) -> Circuit:
    limits = Limits(admission=AdmissionConfig(slot_lease_s=LEASE_S))
    return Circuit(DEPENDENCY, config=config, keys=KEYS, host="host", limits=limits)


def waiter(patience_s: float) -> Callable[[], Protocol[int]]:
    """Return who waits for an ill dependency, and probes it where that is due.

    Args:
        patience_s: For how long, in seconds of its clock.
    """

    def program() -> Protocol[int]:
        circuit = _circuit(TIGHT)
        now_s: float = yield Now()
        view = yield from await_passage(
            circuit, _PATIENCE, operation="save", deadline_at_s=now_s + patience_s
        )
        return view.record.epoch

    return program


def caller(
    config: BreakerConfig, patience_s: float, *, calls: int = 1, store_patience_s: float = 0.0
) -> Callable[[], Protocol[None]]:
    """Return who takes a slot, calls, and leaves it.

    Args:
        config: Says how many slots there are.
        patience_s: For how long it waits for a slot, in seconds of its clock.
        calls: How often.
        store_patience_s: For how long it asks a store again that does not answer, in seconds.
    """
    persistence = Persistence(
        op="save", patience_s=store_patience_s, error=lambda _lost_for_s, error: error
    )

    def program() -> Protocol[None]:
        circuit = _circuit(config)
        for _ in range(calls):
            now_s: float = yield Now()
            entering = enter(
                circuit, operation="save", voice_s=patience_s, deadline_at_s=now_s + patience_s
            )
            entered = yield from with_persistence(entering, persistence)
            if entered is None:
                raise TimeoutError("no slot came free")
            _, permit = entered
            if permit is None:
                yield Call(_work)
            else:
                yield from _call(permit)

    return program


def _call(permit: Permit) -> Protocol[None]:
    try:
        yield Call(_work, renewal=permit)
    except GeneratorExit:
        raise
    except BaseException as error:
        yield from leave(permit, classify(error))
        if not isinstance(error, Exception):
            raise
    else:
        yield from leave(permit, OK)


def guarded(config: BreakerConfig) -> Callable[[], Protocol[None]]:
    """Return who makes one guarded call, at the same time as all others.

    Args:
        config: The breaker's.
    """
    call = GuardedCall(
        work=_work,
        operation="save",
        target="a.ckpt",
        policy=RetryPolicy(),
        patience=_PATIENCE,
        collective=True,
        store_patience_s=5.0,
    )

    def program() -> Protocol[None]:
        yield from guard(_circuit(config), call)

    return program


def reporter(*, failures: int) -> Callable[[], Protocol[None]]:
    """Return who reports failures, and looks at the record last.

    Args:
        failures: How many.
    """

    def program() -> Protocol[None]:
        circuit = _circuit(TIGHT)
        view = yield from begin(circuit, new_incarnation=False)
        failed = classify(ConnectionResetError("the dependency is ill"))
        for _ in range(failures):
            yield from report(circuit, failed, epoch=view.record.epoch)
            view = circuit.view or view
        yield from refresh(circuit)

    return program


def witness(raw: bytes, *, looks: int) -> Callable[[], Protocol[None]]:
    """Return who looks at the record, and remembers one of a store that is no more.

    Args:
        raw: The record that it remembers.
        looks: How often it looks.
    """

    def program() -> Protocol[None]:
        circuit = _circuit(TIGHT)
        now_s: float = yield Now()
        learn(circuit, raw, read_at_s=now_s, seen_at_s=now_s)
        for _ in range(looks):
            yield from refresh(circuit)

    return program


def rank_of(rank: int, *, ranks: int) -> Member:
    """Return a rank of a job that has not enlisted, with short times.

    Args:
        rank: The rank.
        ranks: How many there are.
    """
    return Member(
        keys=KEYS,
        rank=rank,
        world_size=ranks,
        timeout_s=8.0,
        beat_s=2.0,
        on_outage="wait",
        store_patience_s=5.0,
    )


def saver(
    rank: int, *, workers: tuple[int, ...], ranks: int, is_gated: bool
) -> Callable[[], Protocol[FinalRecord]]:
    """Return a rank of a job that saves once, together. It has enlisted before.

    Args:
        rank: The rank.
        workers: Ranks that have work.
        ranks: How many there are.
        is_gated: Whether the circuit of their storage has to let them through.
    """
    member = rank_of(rank, ranks=ranks)
    member.last_seq = 0

    def run(_started_at_s: float) -> Protocol[str]:
        yield Call(_work, timeout_s=60.0)
        return f"by {rank}"

    def outcome(error: BaseException) -> OutcomeRecord:
        return report_of(error, rank=rank, outcome=classify(error))

    def program() -> Protocol[FinalRecord]:
        # Its own each time: it keeps in mind how its operations have ended.
        mine = replace(member)
        joint = Joint(
            op="save",
            seq=1,
            digest="d",
            subject="a.ckpt",
            workers=workers,
            circuit=_circuit(TIGHT) if is_gated else None,
            patience=_PATIENCE,
            deadline_s=60.0,
        )
        part = Part(run=run, detail=str, outcome=outcome) if rank in workers else None
        return (yield from perform(mine, joint, part)).final

    return program
