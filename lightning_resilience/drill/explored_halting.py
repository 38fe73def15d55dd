# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Leaving a validation, in a small world: ranks at different batches, and what must hold of them.

Each rank validates a few batches at its own pace, rank 0 wants all to stop, and no rank waits for
another one in a collective. So any of them may be anywhere when it hears of it, or have ended.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.agenda import AgendaItem, AgendaKind, record_of
from lightning_resilience.core.halting import STOP, Halt, HaltRecord
from lightning_resilience.core.records import decode
from lightning_resilience.drill.explored_process import Cast, Over
from lightning_resilience.drill.explored_programs import KEYS, rank_of
from lightning_resilience.drill.explored_world import Scene
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import halting
from lightning_resilience.protocols.effects import Now, Sleep


if TYPE_CHECKING:
    from lightning_resilience.drill.explored_world import State, Step
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint import Member


__all__ = ["leaving"]

_NAMES: Final = ("a", "b", "c")
_BATCH_S: Final = 1.0
_ITEM: Final = record_of(AgendaItem(kind=AgendaKind.STOP, reason="told"), rank=0, writer="told")


# --- who is in it --------------------------------------------------------------------------------


def _validate(rank: int, *, ranks: int, batch: int, batches: int) -> Protocol[tuple[str, int]]:
    member = rank_of(rank, ranks=ranks)
    item = (1, _ITEM) if rank == 0 else None
    halt = Halt(validation=1, world_size=ranks, looks_at_s=(yield Now()))
    while batch <= batches:
        now_s: float = yield Now()
        if halt.is_due(batch, now_s=now_s, wants_stop=item is not None):
            yield from halting.meet(member, halt, batch=batch, length=f"[{batches}]", item=item)
        if halt.is_reached(batch):
            return "left", batch
        yield Sleep(_BATCH_S)
        batch += 1
    if rank == 0 and halt.limit is not None:
        yield from _closed(member)
    return "ended", batches


def _closed(member: Member) -> Protocol[None]:
    try:
        yield from halting.close_halt(member, 1)
    except StoreUnavailableError:
        return


# --- what must hold ------------------------------------------------------------------------------


def _answer(state: State) -> HaltRecord | None:
    raw = state.values.get(KEYS.joint("halt", 1))
    return None if raw is None else decode(HaltRecord, raw, key="halt")


def _answer_stays(step: Step) -> str:
    """Once all are told what to do, nobody is told anything else, and the item is there."""
    before, after = _answer(step.before), _answer(step.after)
    if before is not None and before.state != "open" and before != after:
        return f"{step.choice.who} changed the answer {before} to {after}"
    if (
        after is not None
        and after.state == STOP
        and KEYS.joint("agenda", 1) not in step.after.values
    ):
        return "all are told to stop, and what they act on is not there"
    return ""


def _all_leave_alike(state: State) -> str:
    """All have left after the same batch, the one that they were told; or all have ended."""
    found: list[Any] = []
    for process in state.processes:
        if not isinstance(process, Over) or process.how != "ended" or process.error:
            return f"{process.name} has neither left nor ended its validation"
        found.append(process.result)
    if len(set(found)) > 1:
        return f"the ranks have left at {found}"
    answer = _answer(state)
    if found[0][0] == "left" and (answer is None or answer.batch != found[0][1]):
        return f"all have left after batch {found[0][1]}, and were told {answer}"
    return ""


def leaving(
    *,
    at: tuple[int, ...],
    batches: int,
    **numbers: Any,  # noqa: ANN401 - fields of a scene
) -> Scene:
    """Ranks that validate, until all have left or ended.

    Args:
        at: For each rank, how many batches it has made when it begins.
        batches: How many there are.
        **numbers: Fields of the scene.
    """
    ranks = len(at)
    return Scene(
        **{
            "name": f"{ranks} leave at {at} of {batches}",
            "cast": tuple(
                Cast(
                    name=name,
                    program=partial(_validate, rank, ranks=ranks, batch=batch, batches=batches),
                    clock_s=1000.0 * rank,
                )
                for rank, (name, batch) in enumerate(zip(_NAMES, at, strict=False))
            ),
            "values": {},
            # A rank that dies leaves by itself, which the others are told in another way.
            "faults": frozenset({"lost", "away", "pause"}),
            "checks": (_answer_stays,),
            "end_checks": (_all_leave_alike,),
            **numbers,
        }
    )
