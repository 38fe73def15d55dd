# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All interleavings of agents that come to the gate at the same time, with faults at any point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core import quota
from lightning_resilience.drill.explored_restarts import at_the_gate
from lightning_resilience.protocols import effects as fx, restart, restart_record
from lightning_resilience.protocols.shared_cell import Written
from tests.explorations import explored_well, found_broken


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.drill.explored_world import Scene

    Patch = pytest.MonkeyPatch


SCENES = {
    "two, and all is answered": (at_the_gate(agents=2, most_faults=0, depth=80), 50),
    "two, and one fault": (at_the_gate(agents=2, most_faults=1, depth=80), 1_000),
    "two, and the job is given up": (at_the_gate(agents=2, quota=0, depth=80), 500),
    "a store that comes back empty": (
        at_the_gate(agents=2, most_faults=0, may_be_emptied=True, depth=80),
        1_000,
    ),
    "two, and two faults": (at_the_gate(agents=2, most_faults=2, depth=80), 2_000),
}


@pytest.mark.parametrize("name", SCENES)
def test_no_interleaving_charges_twice_or_tells_two_stories(name: str) -> None:
    """Every promise holds after every step, to the end of every sequence."""
    scene, states = SCENES[name]

    explored_well(scene, states=states, is_whole=True)


def each_charges_for_itself(patch: Patch) -> None:
    """Nobody looks whether it was charged."""
    patch.setattr(quota, "charged", lambda *_: False)


def each_has_its_own_delay(patch: Patch) -> None:
    """What was agreed before is written over."""

    def wrong(key: str, desired: bytes) -> fx.Protocol[Written]:
        yield fx.Set(key, desired)
        return Written(won=True, raw=desired)

    patch.setattr(restart, "create", wrong)


def it_is_agreed_before_it_is_charged(patch: Patch) -> None:
    """The charge comes when somebody has time for it."""

    def wrong(memory: Any, *_: Any) -> fx.Protocol[Any]:
        record = yield from restart_record.read(memory)
        return quota.Ruling(record=record, number=1)

    patch.setattr(restart_record, "charge", wrong)


def the_record_is_written_over(patch: Patch) -> None:
    """A plain write instead of a compare-and-set."""

    def wrong(
        key: str, raw: bytes, change: Callable[[bytes, str], bytes | None]
    ) -> fx.Protocol[Written]:
        nonce: str = yield fx.Nonce()
        desired = change(raw, nonce)
        if desired is None:
            return Written(won=False, raw=raw)
        yield fx.Set(key, desired)
        return Written(won=True, raw=desired)

    patch.setattr(restart_record, "update", wrong)


PLANTED: dict[str, tuple[Callable[[Patch], None], Scene, str]] = {
    "each charges for itself": (
        each_charges_for_itself,
        at_the_gate(agents=2, most_faults=0, depth=40),
        "again",
    ),
    "each has its own delay": (
        each_has_its_own_delay,
        at_the_gate(agents=2, most_faults=0, depth=40),
        "replaced",
    ),
    "it is agreed before it is charged": (
        it_is_agreed_before_it_is_charged,
        at_the_gate(agents=1, most_faults=0, depth=40),
        "nothing is charged",
    ),
    "the record is written over": (
        the_record_is_written_over,
        at_the_gate(agents=2, most_faults=0, depth=40),
        "replaced",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    """The exploration finds what somebody could get wrong here."""
    plant, scene, complaint = PLANTED[name]
    plant(monkeypatch)

    found_broken(scene, complaint)
