# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What tests ask of an exploration: that all of it holds, and is enough, or that a bug shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.drill.explorer import explore


if TYPE_CHECKING:
    from lightning_resilience.drill.explored_world import Scene
    from lightning_resilience.drill.explorer import Failure, Report


def explored_well(scene: Scene, *, states: int, paths: int = 0, is_whole: bool = False) -> Report:
    """Explore a scene in which every promise has to hold.

    Args:
        scene: The scene.
        states: How many states there are at least.
        paths: How many sequences of choices.
        is_whole: Whether all of it has to end before its depth.
    """
    report = explore(scene)
    print(report, dict(report.events))  # noqa: T201 - what was covered, for whoever looks
    assert report.failure is None, str(report.failure)
    assert report.states >= states
    assert report.paths >= paths
    assert report.is_whole or not is_whole
    return report


def found_broken(scene: Scene, complaint: str) -> Failure:
    """Explore a scene with a planted bug, which has to be complained about like this."""
    failure = explore(scene).failure
    assert failure is not None
    print(failure)  # noqa: T201 - what was found, for whoever looks
    assert complaint in failure.complaint
    return failure
