# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The small worlds that are explored: each protocol that must not go wrong, with two or three in it.

Every scene states its numbers: who is in it, up to which depth every choice is taken, and what may
go wrong how often. Its processes run the shipped protocols with the shipped defaults, but for what
makes a sequence long without making it different: one or two slots instead of sixteen, and times
that make a lease a few looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightning_resilience.core import breaker
from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.joint import report_of
from lightning_resilience.core.outcome import OK, classify
from lightning_resilience.core.records import (
    Keys,
    OutcomeRecord,
    SlotRecord,
    StoreIdRecord,
    Transition,
    encode,
)
from lightning_resilience.drill import explorer_checks as checks
from lightning_resilience.drill.explored_process import Cast
from lightning_resilience.drill.explorer import Scene
from lightning_resilience.protocols.admission import Permit, enter, leave
from lightning_resilience.protocols.circuit import Circuit, begin, learn, refresh, report
from lightning_resilience.protocols.circuit_memory import Limits
from lightning_resilience.protocols.effects import Call, Now
from lightning_resilience.protocols.joint import Joint, Member, Part, perform
from lightning_resilience.protocols.persistent import Persistence, with_persistence
from lightning_resilience.protocols.probe import Patience, await_passage


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["KEYS", "claims", "forgiveness", "slots", "take_over", "verdict"]

KEYS: Final = Keys(run_id="run", incarnation="1")
DEPENDENCY: Final = "drill://storage:write"
RECORD: Final = KEYS.breaker(DEPENDENCY)
FINAL: Final = KEYS.joint("final", 1)
STORE_ID: Final = "first"
PATIENCE_S: Final = 45.0
NEWCOMER_PATIENCE_S: Final = 600.0
LEASE_S: Final = 30.0
EVERYTHING: Final = frozenset({"crash", "lost", "away", "pause", "interrupt"})
NAMES: Final = ("a", "b", "c")

_TIGHT: Final = BreakerConfig(max_concurrent=1, trip_failures=1)
_ADMISSION: Final = AdmissionConfig(slot_lease_s=LEASE_S)


def _work(_token: CancelToken) -> None:
    """Stands for a request: what comes of it is the explorer's choice."""


_PATIENCE: Final = Patience(probe=_work, classify=classify, spread_s=0.0)


def _circuit(config: BreakerConfig) -> Circuit:
    limits = Limits(admission=_ADMISSION)
    return Circuit(DEPENDENCY, config=config, keys=KEYS, host="host", limits=limits)


def _stored(config: BreakerConfig, *, epoch: int = 1, **fields: Any) -> dict[str, bytes]:  # noqa: ANN401 - fields of a record
    """A store in which somebody has been before: its record, and free slots of slow calls."""
    first = breaker.initial(config, store_id=STORE_ID, writer="before.1")
    entry = Transition(epoch=epoch, state=fields.get("state", first.state), reason="before")
    record = msgspec.structs.replace(first, epoch=epoch, history=(entry,), **fields)
    free = SlotRecord(writer="before.2", took_s=2 * LEASE_S)
    slots = {KEYS.slot(DEPENDENCY, at): encode(free) for at in range(config.max_concurrent)}
    known = StoreIdRecord(store_id=STORE_ID, writer="before.3")
    return {KEYS.store_id: encode(known), RECORD: encode(record), **slots}


def _opened() -> dict[str, bytes]:
    return _stored(_TIGHT, epoch=2, generation=1, state="open", limit=0)


# --- the probe -----------------------------------------------------------------------------------


def _waiter(config: BreakerConfig, patience_s: float) -> Callable[[], Protocol[int]]:
    def program() -> Protocol[int]:
        circuit = _circuit(config)
        now_s: float = yield Now()
        view = yield from await_passage(
            circuit, _PATIENCE, operation="save", deadline_at_s=now_s + patience_s
        )
        # The record of an epoch that is over may have been rebuilt since: it speaks of now.
        return view.record.epoch

    return program


def _awaited(
    name: str,
    values: Mapping[str, bytes],
    *,
    config: BreakerConfig,
    ills: tuple[int, ...],
    patience_s: float = PATIENCE_S,
    **numbers: Any,  # noqa: ANN401 - fields of a scene
) -> Scene:
    waiter = _waiter(config, patience_s)
    cast = tuple(
        Cast(name=who, program=waiter, clock_s=1000.0 * at, ills=ill)
        for at, (who, ill) in enumerate(zip(NAMES, ills, strict=False))
    )
    return Scene(
        **{
            "name": name,
            "cast": cast,
            "values": values,
            "checks": (
                checks.breaker_is_sound(RECORD, config),
                checks.circuit_is_known(RECORD),
                checks.one_probe_a_claim(RECORD),
            ),
            "newcomer": Cast(name="n", program=_waiter(config, NEWCOMER_PATIENCE_S)),
            **numbers,
        }
    )


def claims(*, ills: tuple[int, ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Waiters at an open circuit: one claims the probe, and its result is for all.

    Args:
        ills: For each waiter, how many of its probes may find the dependency ill.
        **numbers: Fields of the scene.
    """
    return _awaited(f"{len(ills)} claim", _opened(), config=_TIGHT, ills=ills, **numbers)


def take_over(*, ills: tuple[int, ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Waiters at a half-open circuit whose prober is dead.

    Args:
        ills: For each waiter, how many of its probes may find the dependency ill.
        **numbers: Fields of the scene.
    """
    values = _stored(
        _TIGHT, epoch=3, generation=1, state="half_open", limit=0, holder="before.4"
    )
    return _awaited(f"{len(ills)} take over", values, config=_TIGHT, ills=ills, **numbers)


# --- slots ---------------------------------------------------------------------------------------


def _caller(
    config: BreakerConfig, patience_s: float, *, calls: int = 1, store_patience_s: float = 0.0
) -> Callable[[], Protocol[None]]:
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
            yield from _call(entered[1])

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


def _admitted(
    name: str,
    values: Mapping[str, bytes],
    *,
    config: BreakerConfig,
    cast: Iterable[Mapping[str, Any]],
    calls: int = 1,
    store_patience_s: float = 0.0,
    **numbers: Any,  # noqa: ANN401 - fields of a scene
) -> Scene:
    caller = _caller(config, 2 * LEASE_S, calls=calls, store_patience_s=store_patience_s)
    keys = tuple(KEYS.slot(DEPENDENCY, at) for at in range(config.max_concurrent))
    numbers = {"most_faults": 1, **numbers}
    return Scene(
        **{
            "name": name,
            "cast": tuple(
                Cast(**{"name": who, "program": caller, "clock_s": 1000.0 * at, **options})
                for at, (who, options) in enumerate(zip(NAMES, cast, strict=False))
            ),
            "values": values,
            "checks": (checks.slots_are_leases(keys, lease_s=LEASE_S),),
            "end_checks": (checks.nobody_keeps_a_slot(keys, faults=numbers["most_faults"]),),
            "newcomer": Cast(name="n", program=_caller(config, NEWCOMER_PATIENCE_S)),
            **numbers,
        }
    )


def slots(*, limit: int, cast: tuple[Mapping[str, Any], ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Callers at free slots.

    Args:
        limit: How many slots there are.
        cast: For each caller, options of its ``Cast``.
        **numbers: Fields of the scene.
    """
    config = BreakerConfig(max_concurrent=limit)
    name = f"{limit} slots for {len(cast)}"
    return _admitted(name, _stored(config), config=config, cast=cast, **numbers)


def forgiveness(*, limit: int, cast: tuple[Mapping[str, Any], ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Callers at slots whose holders are dead.

    Args:
        limit: How many slots there are.
        cast: For each caller, options of its ``Cast``.
        **numbers: Fields of the scene.
    """
    config = BreakerConfig(max_concurrent=limit)
    values = _stored(config)
    for at in range(limit):
        held = SlotRecord(holder=f"before.{at}", writer="before.2", took_s=2 * LEASE_S)
        values[KEYS.slot(DEPENDENCY, at)] = encode(held)
    return _admitted(
        f"{len(cast)} forgive {limit}", values, config=config, cast=cast, **numbers
    )


# --- a store that came back empty ----------------------------------------------------------------


def _reporter(config: BreakerConfig, *, failures: int) -> Callable[[], Protocol[None]]:
    def program() -> Protocol[None]:
        circuit = _circuit(config)
        view = yield from begin(circuit, new_incarnation=False)
        failed = classify(ConnectionResetError("the dependency is ill"))
        for _ in range(failures):
            yield from report(circuit, failed, epoch=view.record.epoch)
            view = circuit.view or view
        yield from refresh(circuit)

    return program


def _witness(epoch: int, *, looks: int) -> Callable[[], Protocol[None]]:
    raw = _stored(_TIGHT, epoch=epoch, generation=1, state="open", limit=0)[RECORD]

    def program() -> Protocol[None]:
        circuit = _circuit(_TIGHT)
        now_s: float = yield Now()
        learn(circuit, raw, read_at_s=now_s, seen_at_s=now_s)
        for _ in range(looks):
            yield from refresh(circuit)

    return program


def memories(*, epochs: tuple[int, ...], looks: int = 2, **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Processes that remember a store which has come back empty, and each another epoch of it.

    Args:
        epochs: For each process, the epoch that it has seen last.
        looks: How often each of them looks.
        **numbers: Fields of the scene.
    """
    known = dict(zip(NAMES, epochs, strict=False))
    return Scene(
        **{
            "name": f"{len(epochs)} remember",
            "cast": tuple(
                Cast(name=who, program=_witness(epoch, looks=looks))
                for who, epoch in known.items()
            ),
            "values": {},
            "checks": (
                checks.breaker_is_sound(RECORD, _TIGHT),
                checks.circuit_is_known(RECORD, known=known),
            ),
            **numbers,
        }
    )


def reports(*, failures: tuple[int, ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Processes that report failures to a store which may come back empty at any point.

    Args:
        failures: For each process, how many failures it reports.
        **numbers: Fields of the scene.
    """
    cast = tuple(
        Cast(name=who, program=_reporter(_TIGHT, failures=count))
        for who, count in zip(NAMES, failures, strict=False)
    )
    return Scene(
        **{
            "name": f"{len(failures)} report",
            "cast": cast,
            "values": _stored(_TIGHT),
            "may_be_emptied": True,
            "checks": (checks.breaker_is_sound(RECORD, _TIGHT), checks.circuit_is_known(RECORD)),
            **numbers,
        }
    )


# --- verdicts ------------------------------------------------------------------------------------


def _saver(
    rank: int, *, workers: tuple[int, ...], ranks: int, is_gated: bool
) -> Callable[[], Protocol[FinalRecord]]:
    member = Member(
        keys=KEYS,
        rank=rank,
        world_size=ranks,
        timeout_s=8.0,
        beat_s=2.0,
        on_outage="wait",
        store_patience_s=5.0,
    )

    def run(_started_at_s: float) -> Protocol[str]:
        yield Call(_work, timeout_s=60.0)
        return f"by {rank}"

    def outcome(error: BaseException) -> OutcomeRecord:
        return report_of(error, rank=rank, outcome=classify(error))

    def program() -> Protocol[FinalRecord]:
        joint = Joint(
            op="save",
            seq=1,
            digest="d",
            subject="a.ckpt",
            workers=workers,
            circuit=_circuit(_TIGHT) if is_gated else None,
            patience=_PATIENCE,
            deadline_s=60.0,
        )
        part = Part(run=run, detail=str, outcome=outcome) if rank in workers else None
        return (yield from perform(member, joint, part)).final

    return program


def verdict(
    *,
    workers: tuple[int, ...],
    cast: tuple[Mapping[str, Any], ...],
    is_gated: bool = False,
    **numbers: Any,  # noqa: ANN401 - fields of a scene
) -> Scene:
    """Ranks that save together.

    Args:
        workers: Ranks that have work.
        cast: For each rank, options of its ``Cast``.
        is_gated: Whether they find the circuit open, and wait for it first.
        **numbers: Fields of the scene.
    """
    ranks = len(cast)
    gate = (checks.breaker_is_sound(RECORD, _TIGHT), checks.one_probe_a_claim(RECORD))
    programs = [
        _saver(rank, workers=workers, ranks=ranks, is_gated=is_gated) for rank in range(ranks)
    ]
    return Scene(
        **{
            "name": f"{len(workers)} of {ranks} save" + " at an open gate" * is_gated,
            "cast": tuple(
                Cast(**{"name": who, "program": program, "clock_s": 1000.0, **options})
                for who, program, options in zip(NAMES, programs, cast, strict=False)
            ),
            "values": _opened() if is_gated else {},
            "checks": (checks.verdict_is_written_once(FINAL), *(gate if is_gated else ())),
            "end_checks": (checks.all_learn_one_verdict,),
            **numbers,
        }
    )
