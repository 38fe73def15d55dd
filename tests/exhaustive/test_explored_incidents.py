# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All interleavings of ranks that leave at the same time, with faults at any point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.drill.explored_incidents import leaving
from lightning_resilience.drill.explorer_scenes import EVERYTHING
from lightning_resilience.protocols import effects as fx, incident
from lightning_resilience.protocols.shared_cell import Written
from tests.explorations import explored_well, found_broken


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.drill.explored_world import Scene

    Patch = pytest.MonkeyPatch


SCENES = {
    "all is answered": (
        leaving(kinds=("echo", "error", "signal"), most_faults=0, depth=60),
        30,
    ),
    "an echo, a cause and a request": (
        leaving(kinds=("echo", "error", "signal"), faults=EVERYTHING, most_faults=2, depth=60),
        1_000,
    ),
    "two causes and an echo": (
        leaving(kinds=("error", "error", "echo"), most_faults=3, depth=60),
        1_000,
    ),
    "a store that comes back empty": (
        leaving(kinds=("signal", "error", "echo"), may_be_emptied=True, depth=60),
        1_000,
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_no_interleaving_loses_a_cause(name: str) -> None:
    """Every promise holds after every step, to the end of every sequence."""
    scene, states = SCENES[name]

    explored_well(scene, states=states, is_whole=True)


def the_last_one_stands(patch: Patch) -> None:
    """Whoever comes last has the say."""
    patch.setattr(incident, "outranks", lambda *_: True)


def the_first_one_stands(patch: Patch) -> None:
    """Whoever comes first has the say, echo or not."""
    patch.setattr(incident, "outranks", lambda *_: False)


def a_plain_write(patch: Patch) -> None:
    """The record is written without a look at what is there."""

    def wrong(key: str, expected: bytes, desired: bytes) -> fx.Protocol[Written]:
        del expected
        yield fx.Set(key, desired)
        return Written(won=True, raw=desired)

    patch.setattr(incident, "write", wrong)


def the_bell_comes_first(patch: Patch) -> None:
    """The others are woken before there is anything to be read."""
    right = incident._stand

    def wrong(key: str, mine: Any) -> fx.Protocol[Any]:
        yield fx.Set(key.replace("incident", "failed"), b"1")
        return (yield from right(key, mine))

    patch.setattr(incident, "_stand", wrong)


def nobody_is_woken(patch: Patch) -> None:
    """The bell is written under another name."""
    patch.setattr(incident, "Set", lambda key, value: fx.Set(f"{key}/typo", value))


PLANTED: dict[str, tuple[Callable[[Patch], None], Scene, str]] = {
    "the last one stands": (
        the_last_one_stands,
        leaving(kinds=("error", "signal"), depth=30),
        "replaced",
    ),
    "the first one stands": (
        the_first_one_stands,
        leaving(kinds=("error", "echo"), depth=30),
        "stands",
    ),
    "a plain write": (a_plain_write, leaving(kinds=("error", "echo"), depth=30), "replaced"),
    "the bell comes first": (
        the_bell_comes_first,
        leaving(kinds=("error", "echo"), most_faults=0, depth=30),
        "rang, and no incident is there",
    ),
    "nobody is woken": (nobody_is_woken, leaving(kinds=("error",), depth=30), "nobody was woken"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    """The exploration finds what somebody could get wrong here."""
    plant, scene, complaint = PLANTED[name]
    plant(monkeypatch)

    found_broken(scene, complaint)
