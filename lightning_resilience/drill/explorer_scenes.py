# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The small worlds that are explored: each protocol with two or three processes in it.

Every scene states its numbers: who is in it, up to which depth every choice is taken, and what may
go wrong how often. Its processes run the shipped protocols with the shipped defaults, but for what
makes a sequence long without making it different: one or two slots instead of sixteen, and times
that make a lease a few looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.records import SlotRecord, StoreIdRecord, Transition, encode
from lightning_resilience.drill import explorer_checks as checks
from lightning_resilience.drill.explored_process import Cast
from lightning_resilience.drill.explored_programs import (
    DEPENDENCY,
    KEYS,
    LEASE_S,
    TIGHT,
    caller,
    guarded,
    reporter,
    saver,
    waiter,
    witness,
)
from lightning_resilience.drill.explored_world import Scene


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_resilience.drill.explored_world import Check


__all__ = [
    "EVERYTHING",
    "RECORD",
    "claims",
    "forgiveness",
    "memories",
    "outage",
    "reports",
    "slots",
    "take_over",
    "verdict",
]

RECORD: Final = KEYS.breaker(DEPENDENCY)
"""Key of the breaker's record."""
EVERYTHING: Final = frozenset({"crash", "lost", "away", "pause", "interrupt"})
"""All kinds of faults."""

_FINAL: Final = KEYS.joint("final", 1)
_STORE_ID: Final = "first"
_NAMES: Final = ("a", "b", "c")
_PATIENCE_S: Final = 25.0
_NEWCOMER_PATIENCE_S: Final = 600.0


def _stored(config: BreakerConfig, *, epoch: int = 1, **fields: Any) -> dict[str, bytes]:  # noqa: ANN401 - fields of a record
    """A store in which somebody has been before: its record, and free slots of slow calls."""
    first = breaker.initial(config, store_id=_STORE_ID, writer="before.1")
    entry = Transition(epoch=epoch, state=fields.get("state", first.state), reason="before")
    record = msgspec.structs.replace(first, epoch=epoch, history=(entry,), **fields)
    free = SlotRecord(writer="before.2", took_s=2 * LEASE_S)
    slots = {KEYS.slot(DEPENDENCY, at): encode(free) for at in range(config.max_concurrent)}
    known = StoreIdRecord(store_id=_STORE_ID, writer="before.3")
    return {KEYS.store_id: encode(known), RECORD: encode(record), **slots}


def _record_checks(known: Mapping[str, int]) -> tuple[Check, ...]:
    return (
        checks.writers_sign((RECORD,)),
        checks.breaker_is_sound(RECORD, TIGHT),
        checks.circuit_is_known(RECORD, known=known),
    )


def _opened() -> dict[str, bytes]:
    return _stored(TIGHT, epoch=2, generation=1, state="open", limit=0)


# --- the probe -----------------------------------------------------------------------------------


def _awaited(
    name: str,
    values: Mapping[str, bytes],
    *,
    ills: tuple[int, ...],
    **numbers: Any,  # noqa: ANN401 - fields of a scene
) -> Scene:
    cast = tuple(
        Cast(name=who, program=waiter(_PATIENCE_S), clock_s=1000.0 * at, ills=ill)
        for at, (who, ill) in enumerate(zip(_NAMES, ills, strict=False))
    )
    return Scene(
        **{
            "name": name,
            "cast": cast,
            "values": values,
            "checks": (*_record_checks({}), checks.one_probe_a_claim(RECORD)),
            "newcomer": Cast(name="n", program=waiter(_NEWCOMER_PATIENCE_S)),
            **numbers,
        }
    )


def claims(*, ills: tuple[int, ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Waiters at an open circuit: one claims the probe, and its result is for all.

    Args:
        ills: For each waiter, how many of its probes may find the dependency ill.
        **numbers: Fields of the scene.
    """
    return _awaited(f"{len(ills)} claim", _opened(), ills=ills, **numbers)


def take_over(*, ills: tuple[int, ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Waiters at a half-open circuit whose prober is dead.

    Args:
        ills: For each waiter, how many of its probes may find the dependency ill.
        **numbers: Fields of the scene.
    """
    values = _stored(TIGHT, epoch=3, generation=1, state="half_open", limit=0, holder="before.4")
    return _awaited(f"{len(ills)} take over", values, ills=ills, **numbers)


def outage(*, limit: int, ills: tuple[int, ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Whole guarded calls at an open circuit: wait, probe, come back in turn, call, report.

    Args:
        limit: How many slots there are.
        ills: For each caller, how many of its probes and calls may find the dependency ill.
        **numbers: Fields of the scene.
    """
    config = BreakerConfig(max_concurrent=limit)
    keys = tuple(KEYS.slot(DEPENDENCY, at) for at in range(limit))
    return Scene(
        **{
            "name": f"{len(ills)} come through an outage",
            "cast": tuple(
                Cast(name=who, program=guarded(config), clock_s=1000.0 * at, ills=ill)
                for at, (who, ill) in enumerate(zip(_NAMES, ills, strict=False))
            ),
            "values": _stored(config, epoch=2, generation=1, state="open", limit=0),
            "checks": (
                checks.writers_sign((RECORD, *keys)),
                checks.breaker_is_sound(RECORD, config),
                checks.one_probe_a_claim(RECORD),
                checks.slots_are_leases(keys, lease_s=LEASE_S),
            ),
            "end_checks": (checks.nobody_keeps_a_slot(keys),),
            "newcomer": Cast(name="n", program=guarded(config)),
            **numbers,
        }
    )


# --- slots ---------------------------------------------------------------------------------------


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
    program = caller(config, 2 * LEASE_S, calls=calls, store_patience_s=store_patience_s)
    keys = tuple(KEYS.slot(DEPENDENCY, at) for at in range(config.max_concurrent))
    return Scene(
        **{
            "name": name,
            "cast": tuple(
                Cast(**{"name": who, "program": program, "clock_s": 1000.0 * at, **options})
                for at, (who, options) in enumerate(zip(_NAMES, cast, strict=False))
            ),
            "values": values,
            "checks": (checks.writers_sign(keys), checks.slots_are_leases(keys, lease_s=LEASE_S)),
            "end_checks": (checks.nobody_keeps_a_slot(keys),),
            "newcomer": Cast(name="n", program=caller(config, _NEWCOMER_PATIENCE_S)),
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
    return _admitted(f"{len(cast)} forgive {limit}", values, config=config, cast=cast, **numbers)


# --- a store that came back empty ----------------------------------------------------------------


def _remembered(epoch: int) -> bytes:
    return _stored(TIGHT, epoch=epoch, generation=1, state="open", limit=0)[RECORD]


def memories(*, epochs: tuple[int, ...], looks: int = 2, **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Processes that remember a store which has come back empty, and each another epoch of it.

    Args:
        epochs: For each process, the epoch that it has seen last.
        looks: How often each of them looks.
        **numbers: Fields of the scene.
    """
    known = dict(zip(_NAMES, epochs, strict=False))
    return Scene(
        **{
            "name": f"{len(epochs)} remember",
            "cast": tuple(
                Cast(name=who, program=witness(_remembered(epoch), looks=looks))
                for who, epoch in known.items()
            ),
            "values": {},
            "checks": _record_checks(known),
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
        Cast(name=who, program=reporter(failures=count))
        for who, count in zip(_NAMES, failures, strict=False)
    )
    return Scene(
        **{
            "name": f"{len(failures)} report",
            "cast": cast,
            "values": _stored(TIGHT),
            "may_be_emptied": True,
            "checks": _record_checks({}),
            **numbers,
        }
    )


# --- verdicts ------------------------------------------------------------------------------------


def verdict(
    *,
    workers: tuple[int, ...],
    cast: tuple[Mapping[str, Any], ...],
    absent: int = 0,
    is_gated: bool = False,
    **numbers: Any,  # noqa: ANN401 - fields of a scene
) -> Scene:
    """Ranks that save together.

    Args:
        workers: Ranks that have work.
        cast: For each rank, options of its ``Cast``.
        absent: How many ranks there are besides, who never come.
        is_gated: Whether they find the circuit open, and wait for it first.
        **numbers: Fields of the scene.
    """
    ranks = len(cast) + absent
    # As all ranks do before the first of them begins: the launcher starts them together.
    enlisted = {KEYS.joint("arrived", rank): b"0" for rank in range(ranks)}
    gate = (checks.breaker_is_sound(RECORD, TIGHT), checks.one_probe_a_claim(RECORD))
    programs = [
        saver(rank, workers=workers, ranks=ranks, is_gated=is_gated) for rank in range(ranks)
    ]
    return Scene(
        **{
            "name": f"{len(workers)} of {ranks} save"
            + " at an open gate" * is_gated
            + f", and {absent} are absent" * bool(absent),
            "cast": tuple(
                Cast(**{"name": who, "program": program, "clock_s": 1000.0, **options})
                for who, program, options in zip(_NAMES, programs, cast, strict=False)
            ),
            "values": {**enlisted, **(_opened() if is_gated else {})},
            "checks": (
                checks.verdict_is_written_once(_FINAL, arrived=tuple(enlisted)),
                *(gate if is_gated else ()),
            ),
            "end_checks": (checks.all_learn_one_verdict,),
            **numbers,
        }
    )
