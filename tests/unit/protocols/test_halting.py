# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All ranks leave a validation after the same batch, and none has passed it, in any schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import example, given, settings, strategies as st

from lightning_resilience.core.agenda import AgendaItem, AgendaKind, AgendaRecord, record_of
from lightning_resilience.core.halting import (
    OFF,
    OPEN,
    STOP,
    Halt,
    HaltRecord,
    PlaceRecord,
)
from lightning_resilience.core.records import decode, encode
from lightning_resilience.protocols.agenda import take
from lightning_resilience.protocols.effects import Now, Sleep
from lightning_resilience.protocols.halting import close_halt, hold, meet, open_halt, stand
from tests.scenes import member
from tests.scripted_driver import World


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Member

ITEM = 1, record_of(AgendaItem(kind=AgendaKind.STOP, reason="told"), rank=1, writer="w")
LENGTH = "[1000]"


def validate(
    who: Member, batch_s: float, *, begins_at: int, total: int, length: str = LENGTH
) -> Protocol[tuple[str, int]]:
    """Validate as a rank does, one batch after the other, from the one that it is at.

    Args:
        who: The rank.
        batch_s: How long a batch takes, in seconds.
        begins_at: How many batches it has made already.
        total: How many there are.
        length: What it says of that.

    Returns:
        How it has ended, and after which batch.
    """
    halt = Halt(validation=1, world_size=who.world_size, looks_at_s=(yield Now()))
    item = ITEM if who.rank == 0 else None
    for batch in range(begins_at, total + 1):
        now_s: float = yield Now()
        if halt.is_due(batch, now_s=now_s, wants_stop=item is not None):
            yield from meet(who, halt, batch=batch, length=length, item=item)
        if halt.is_reached(batch):
            assert halt.answer is not None
            assert batch == halt.answer.batch
            return "left", batch
        yield Sleep(batch_s)
    if who.rank == 0:
        yield from close_halt(who, 1)
    return "ended", total


@given(
    ranks=st.lists(
        st.tuples(st.floats(0.001, 2.0), st.integers(0, 60), st.floats(0.0, 3.0)),
        min_size=2,
        max_size=4,
    )
)
@example(ranks=[(1.0, 0, 0.0), (0.001, 60, 0.0), (0.3, 5, 2.9)])
@settings(deadline=None, max_examples=150)
def test_all_leave_after_the_same_batch_or_all_reach_the_end(
    ranks: list[tuple[float, int, float]],
) -> None:
    """However fast each is, wherever it is, and whenever it comes."""
    world = World()
    size = len(ranks)
    tasks = [
        world.spawn(
            validate(member(rank=rank, world_size=size), batch_s, begins_at=begins, total=400),
            name=rank,
            at_s=at_s,
        )
        for rank, (batch_s, begins, at_s) in enumerate(ranks)
    ]

    world.run()

    assert [task.error for task in tasks] == [None] * size
    assert len({task.result for task in tasks}) == 1


def test_what_all_ranks_act_on_is_there_when_they_leave() -> None:
    """The answer comes after the item."""
    world = World()
    for rank in range(2):
        world.spawn(
            validate(member(rank=rank), 0.1, begins_at=0, total=400), name=rank, at_s=0.1 * rank
        )
    world.run()

    taken = world.spawn(take(member(rank=1), 1))
    world.run()

    assert isinstance(taken.result, AgendaRecord)
    assert taken.result == ITEM[1]


def test_validations_that_are_not_equally_long_go_on() -> None:
    """All ranks are told so, and none stands any more."""
    world = World()
    tasks = [
        world.spawn(
            validate(member(rank=rank), 0.1, begins_at=0, total=total, length=f"[{total}]"),
            name=rank,
        )
        for rank, total in enumerate((100, 150))
    ]
    world.run()

    assert [task.result for task in tasks] == [("ended", 100), ("ended", 150)]
    assert state_in(world) == OFF


def test_a_rank_that_stands_goes_on_when_rank_0_has_ended() -> None:
    """It does not wait for an answer that nobody gives."""
    world = World()
    world.spawn(validate(member(rank=0), 0.1, begins_at=95, total=100), name=0)
    slow = world.spawn(validate(member(rank=1), 3.0, begins_at=0, total=8), name=1, at_s=0.1)
    world.run()

    assert slow.result == ("ended", 8)


def test_a_raise_that_comes_between_rank_0s_looks_is_taken_into_account() -> None:
    """Rank 0 has read the old limit; its answer is lost, and the next one knows the new limit."""
    world = World()
    zero, one = member(rank=0), member(rank=1)
    world.spawn(open_halt(zero, 1))
    world.run()
    for who in (zero, one):
        world.spawn(stand(who, 1, PlaceRecord(limit=5, length=LENGTH)))
    world.run()
    answering = hold(zero, 1, PlaceRecord(limit=6, length=LENGTH), item=ITEM)

    def fault(_task: Any, _index: int, effect: Any) -> None:
        # Right before rank 0 writes its answer.
        key = one.keys.joint("agenda", 1)
        if getattr(effect, "key", "") == key and not raised:
            raised.append(True)
            world.values[one.keys.joint("place", 1, 1)] = encode(
                PlaceRecord(limit=9, length=LENGTH)
            )
            world.values[one.keys.joint("halt", 1)] = encode(
                HaltRecord(state=OPEN, writer="raised")
            )

    raised: list[bool] = []
    world.fault = fault
    task = world.spawn(answering)
    world.run()

    assert raised
    assert (task.result.state, task.result.batch) == (STOP, 9)


def test_a_store_that_has_lost_everything_lets_ranks_go_on() -> None:
    """There is nothing left that all ranks would see."""
    world = World()
    task = world.spawn(hold(member(rank=1), 1, PlaceRecord(limit=5, length=LENGTH)))
    world.run()

    assert task.result.state == OFF


def state_in(world: World) -> str:
    """Return what the store says of the validation in the end."""
    raw = world.values[member(rank=0).keys.joint("halt", 1)]
    return decode(HaltRecord, raw, key="halt").state
