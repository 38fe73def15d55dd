# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All interleavings of ranks that leave a validation together, with a fault at any point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.halting import OPEN, STOP, Halt, HaltRecord, PlaceRecord, limit_of
from lightning_resilience.core.records import decode, encode
from lightning_resilience.drill.explored_halting import leaving
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import effects as fx, halting
from tests.explorations import explored_well, found_broken


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.drill.explored_world import Scene
    from lightning_resilience.protocols.joint import Member

    Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.timeout(300)

# The scene, and how many states and sequences of choices it must have at least.
EXPLORATIONS: dict[str, tuple[Scene, int, int]] = {
    "at the same batch": (leaving(at=(0, 0), batches=12, depth=13), 5_000, 10**5),
    "rank 0 is behind": (leaving(at=(0, 3), batches=12, depth=13), 5_000, 10**5),
    "rank 0 is ahead, and near the end": (leaving(at=(3, 0), batches=6, depth=13), 5_000, 10**5),
    "rank 0 has ended soon": (leaving(at=(2, 0), batches=3, depth=13), 2_000, 10**5),
    "two faults": (leaving(at=(0, 3), batches=12, depth=9, most_faults=2), 5_000, 10**4),
    "three ranks": (leaving(at=(0, 2, 1), batches=12, depth=7), 3_000, 10**4),
}


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_no_interleaving_lets_ranks_leave_at_different_batches(name: str) -> None:
    """All leave after the same batch, or all reach the end, and the answer never changes."""
    scene, states, paths = EXPLORATIONS[name]

    report = explored_well(scene, states=states, paths=paths)

    assert set(report.choices) >= scene.faults


def the_nearest_limit_is_agreed(patch: Patch) -> None:
    """Ranks leave after the nearest limit, which others may have passed."""

    def wrong(places: Sequence[PlaceRecord]) -> int:
        return min(place.limit for place in places)

    patch.setattr(halting, "agreed_batch", wrong)


def limits_are_raised_in_silence(patch: Patch) -> None:
    """A limit is raised by a new place alone, which rank 0 may just have read."""

    def wrong(
        member: Member, validation: int, place: PlaceRecord, *, item: Any = None
    ) -> fx.Protocol[HaltRecord]:
        _, record = yield from halting._settled(member, validation, item)
        if record.state == OPEN:
            yield from halting.stand(member, validation, place)
        return record

    patch.setattr(halting, "hold", wrong)


def the_place_comes_last(patch: Patch) -> None:
    """A limit is raised in the cell first, and rank 0 may read the older place after that."""
    right = halting.hold

    def wrong(
        member: Member, validation: int, place: PlaceRecord, *, item: Any = None
    ) -> fx.Protocol[HaltRecord]:
        key = member.keys.joint("place", validation, member.rank)
        raw: bytes | None = yield fx.Get(key)
        before = place if raw is None else decode(PlaceRecord, raw, key=key)
        record = yield from right(member, validation, before, item=item)
        if record.state == OPEN:
            yield from halting.stand(member, validation, place)
        return record

    patch.setattr(halting, "hold", wrong)


def what_was_not_heard_does_not_bind(patch: Patch) -> None:
    """A rank whose place was not answered for believes that it has said nothing."""

    def wrong(member: Member, halt: Halt, place: PlaceRecord) -> fx.Protocol[None]:
        ask = halting.open_halt if member.rank == 0 else halting.look
        try:
            record = yield from ask(member, halt.validation)
            if record is not None and record.state == OPEN:
                yield from halting.stand(member, halt.validation, place)
                halt.limit = place.limit
        except StoreUnavailableError:
            halt.looks_at_s = (yield fx.Now()) + 10.0

    patch.setattr(halting, "_first", wrong)


def answers_overwrite(patch: Patch) -> None:
    """Rank 0 writes its answer whatever is there."""

    def wrong(
        member: Member, validation: int, item: Any, *, opened: bytes
    ) -> fx.Protocol[HaltRecord | None]:
        del item, opened
        answer = HaltRecord(state=STOP, batch=limit_of(3, raises=1), writer="rank 0")
        yield fx.Set(member.keys.joint("halt", validation), encode(answer))
        return answer

    patch.setattr(halting, "_answer", wrong)


PLANTED = {
    "the nearest limit": (the_nearest_limit_is_agreed, "the ranks have left at"),
    "a raise in silence": (limits_are_raised_in_silence, "the ranks have left at"),
    "the place comes last": (the_place_comes_last, "the ranks have left at"),
    "unheard, unbound": (what_was_not_heard_does_not_bind, "the ranks have left at"),
    "an answer for nobody": (answers_overwrite, "is not there"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    """The exploration finds what somebody might write."""
    plant, complaint = PLANTED[name]
    plant(monkeypatch)

    found_broken(leaving(at=(0, 3), batches=12, depth=14), complaint)
