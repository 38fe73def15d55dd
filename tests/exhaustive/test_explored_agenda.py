# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All interleavings of two or three ranks that ask for something, with a fault at any point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.agenda import AgendaKind, AgendaRecord
from lightning_resilience.core.records import decode, encode
from lightning_resilience.drill.explored_agenda import agreement
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import agenda, effects as fx
from tests.explorations import explored_well, found_broken


if TYPE_CHECKING:
    from lightning_resilience.drill.explored_world import Scene
    from lightning_resilience.protocols.joint import Member

    Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.timeout(300)

STOP, FAIL, PAUSE = AgendaKind.STOP, AgendaKind.FAIL, AgendaKind.PAUSE

# The scene, and how many states and sequences of choices it must have at least.
EXPLORATIONS: dict[str, tuple[Scene, int, int]] = {
    "the other asks": (agreement(wanted=(None, STOP), depth=16), 10_000, 10**5),
    "both ask for the same": (agreement(wanted=(STOP, STOP), depth=18), 5_000, 10**5),
    "both ask, the other more urgently": (
        agreement(wanted=(PAUSE, STOP), depth=16),
        8_000,
        10**5,
    ),
    "both ask, rank 0 more urgently": (agreement(wanted=(STOP, FAIL), depth=16), 5_000, 10**5),
    "the other asks, two faults": (
        agreement(wanted=(None, FAIL), most_faults=2, depth=11),
        10_000,
        10**4,
    ),
    "two of three ask": (agreement(wanted=(None, PAUSE, STOP), depth=8), 8_000, 10**4),
}


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_no_interleaving_lets_ranks_act_on_different_items(name: str) -> None:
    """All act on the same, on each kind once, and on nothing that is not there."""
    scene, states, paths = EXPLORATIONS[name]

    report = explored_well(scene, states=states, paths=paths)

    assert set(report.choices) >= scene.faults


def asks_overwrite(patch: Patch) -> None:
    """An ask is a plain write."""

    def wrong(member: Member, number: int, record: AgendaRecord) -> fx.Protocol[None]:
        yield fx.Set(member.keys.joint("asked", number), encode(record))

    patch.setattr(agenda, "ask", wrong)


def what_is_asked_is_taken(patch: Patch) -> None:
    """Ranks act on what they find asked for, and need nobody who decides."""
    right = agenda.take

    def wrong(member: Member, number: int) -> fx.Protocol[Any]:
        raw: bytes | None = yield fx.Get(member.keys.joint("asked", number))
        if raw is None:
            return (yield from right(member, number))
        return decode(AgendaRecord, raw, key="asked")

    patch.setattr(agenda, "take", wrong)


def all_are_told_whatever_happens(patch: Patch) -> None:
    """Rank 0 tells all ranks to look although the store has not answered it."""
    right = agenda.put

    def wrong(member: Member, number: int, record: AgendaRecord) -> fx.Protocol[None]:
        try:
            yield from right(member, number, record)
        except StoreUnavailableError:
            return

    patch.setattr(agenda, "put", wrong)


def numbers_stay(patch: Patch) -> None:
    """What was asked for once is heard again for the next item."""
    right = agenda.listen

    def wrong(member: Member, _number: int) -> fx.Protocol[AgendaRecord]:
        return (yield from right(member, 1))

    patch.setattr(agenda, "listen", wrong)


PLANTED = {
    "asks overwrite": (asks_overwrite, "less urgent"),
    "what is asked for is taken": (what_is_asked_is_taken, "not over"),
    "all are told whatever happens": (all_are_told_whatever_happens, "it is not there"),
    "an item is heard twice": (numbers_stay, "were asked for, and all acted on"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    """The exploration finds what somebody might write."""
    plant, complaint = PLANTED[name]
    plant(monkeypatch)

    found_broken(agreement(wanted=(PAUSE, STOP), depth=12), complaint)
