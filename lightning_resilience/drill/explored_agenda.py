# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The agenda in a small world: who asks, what all act on, and what must hold of that.

A rank of this world does nothing but its steps' beginnings, one for each item. The broadcast of
rank 0's flag is no part of the store: it is played by keys of its own, with what a collective
promises: nobody is through before all have come. So a rank may be anywhere before it or after it,
and never two items behind.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.agenda import (
    AgendaItem,
    AgendaKind,
    AgendaRecord,
    outranks,
    record_of,
)
from lightning_resilience.core.records import decode
from lightning_resilience.drill.explored_process import Cast, Over
from lightning_resilience.drill.explored_programs import KEYS, rank_of
from lightning_resilience.drill.explored_world import Scene
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import agenda
from lightning_resilience.protocols.effects import Nonce, Set, Sleep, WaitFor


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.drill.explored_world import Check, EndCheck, State, Step
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["agreement"]

_NAMES: Final = ("a", "b", "c")
_AGAIN_S: Final = 1.0
_CHUNK_S: Final = 600.0


# --- who is in it --------------------------------------------------------------------------------


def _insist(make: Callable[[], Protocol[Any]]) -> Protocol[Any]:
    """Do it again at each further step, as the boundary does, until the store has answered."""
    while True:
        try:
            return (yield from make())
        except StoreUnavailableError:  # noqa: PERF203 - each time may fail
            yield Sleep(_AGAIN_S)


def _one(effect: Any) -> Protocol[Any]:  # noqa: ANN401 - any effect
    return (yield effect)


def _await(key: str) -> Protocol[None]:
    # As long as a listener's, or its clock would be far ahead when it is the others' turn.
    while not (yield WaitFor(key, _CHUNK_S)):
        pass


def _broadcast(rank: int, number: int, *, ranks: int) -> Protocol[None]:
    """Learn that there is something to act on, when all others do."""
    yield from _insist(partial(_one, Set(KEYS.joint("here", number, rank), b"1")))
    if rank == 0:
        for other in range(1, ranks):
            yield from _insist(partial(_await, KEYS.joint("here", number, other)))
        yield from _insist(partial(_one, Set(_told(number), b"1")))
    else:
        yield from _insist(partial(_await, _told(number)))


def _told(number: int) -> str:
    return KEYS.joint("told", number)


def _rank(
    rank: int, wanted: AgendaKind | None, *, ranks: int, items: int
) -> Callable[[], Protocol[tuple[AgendaRecord, ...]]]:
    member = rank_of(rank, ranks=ranks)

    def asking(number: int, kind: AgendaKind) -> Protocol[None]:
        nonce: str = yield Nonce()
        item = AgendaItem(kind=kind, reason=f"rank {rank}")
        yield from agenda.ask(member, number, record_of(item, rank=rank, writer=nonce))

    def program() -> Protocol[tuple[AgendaRecord, ...]]:
        wants, acted = wanted, []
        for number in range(1, items + 1):
            if wants is not None:
                yield from _insist(partial(asking, number, wants))
            if rank == 0:
                heard = yield from agenda.listen(member, number)
                yield from _insist(partial(agenda.put, member, number, heard))
            yield from _broadcast(rank, number, ranks=ranks)
            record = yield from agenda.take(member, number)
            acted.append(record)
            if wants is not None and record.kind == wants.value:
                wants = None
        return tuple(acted)

    return program


# --- what must hold ------------------------------------------------------------------------------


def _read(values: Mapping[str, bytes], key: str) -> AgendaRecord | None:
    raw = values.get(key)
    return None if raw is None else decode(AgendaRecord, raw, key=key)


def _asks_grow(items: int) -> Check:
    """What is asked for is replaced by what is more urgent, and by nothing else."""

    def check(step: Step) -> str:
        for number in range(1, items + 1):
            key = KEYS.joint("asked", number)
            before, after = _read(step.before.values, key), _read(step.after.values, key)
            if before is None or after is None or before == after:
                continue
            if not outranks(after, before):
                return f"{step.choice.who} replaced {before.kind} by {after.kind}: less urgent"
        return ""

    return check


def _told_is_there(items: int) -> Check:
    """Nobody is told to look before there is something, and it does not change any more."""

    def check(step: Step) -> str:
        for number in range(1, items + 1):
            key = KEYS.joint("agenda", number)
            if _told(number) not in step.after.values:
                continue
            before, after = step.before.values.get(key), step.after.values.get(key)
            if after is None and number + 1 >= items:
                return f"all are told to look at item {number}, and it is not there"
            if after is not None and before != after and _told(number) in step.before.values:
                return f"{step.choice.who} changed item {number} that all were told of"
        return ""

    return check


def _all_act_alike(kinds: frozenset[str]) -> EndCheck:
    """All ranks have acted on the same items, on each kind that was asked for, once."""

    def check(state: State) -> str:
        first: Any = None
        for process in state.processes:
            if not isinstance(process, Over) or process.how != "ended" or process.error:
                return f"{process.name} has not acted on everything"
            acted: Any = process.result
            first = first or acted
            if acted != first:
                return f"{process.name} acted on {acted}, and others on {first}"
        found = sorted(record.kind for record in first)
        if found != sorted(kinds):
            return f"{sorted(kinds)} were asked for, and all acted on {found}"
        return ""

    return check


def agreement(
    *,
    wanted: tuple[AgendaKind | None, ...],
    **numbers: Any,  # noqa: ANN401 - fields of a scene
) -> Scene:
    """Ranks of which some ask for something, until all have acted on all of it.

    Args:
        wanted: For each rank, what it asks for; None for nothing.
        **numbers: Fields of the scene.
    """
    kinds = frozenset(kind.value for kind in wanted if kind is not None)
    ranks, items = len(wanted), len(kinds)
    asked = " and ".join(kind.value for kind in wanted if kind is not None)
    return Scene(
        **{
            "name": f"{ranks} agree on {asked}",
            "cast": tuple(
                Cast(
                    name=name,
                    program=_rank(rank, kind, ranks=ranks, items=items),
                    clock_s=1000.0 * rank,
                )
                for rank, (name, kind) in enumerate(zip(_NAMES, wanted, strict=False))
            ),
            "values": {},
            # A rank that dies takes the others with it, in the collective.
            "faults": frozenset({"lost", "away", "pause"}),
            "checks": (_asks_grow(items), _told_is_there(items)),
            "end_checks": (_all_act_alike(kinds),),
            **numbers,
        }
    )
