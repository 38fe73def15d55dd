# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A place in training is a step and a count, so that ranks in lock-step say the same."""

from __future__ import annotations

from lightning_resilience.adapters.lightning.whereabouts import Whereabouts


def test_operations_of_one_step_are_counted_and_the_next_step_begins_anew() -> None:
    """A rank that has made one call more says another place at once, also within a step."""
    steps = iter([0, 0, 7, 7, 7, 8])
    place = Whereabouts(lambda: next(steps))

    assert [place() for _ in range(6)] == [
        "step 0, call 1",
        "step 0, call 2",
        "step 7, call 1",
        "step 7, call 2",
        "step 7, call 3",
        "step 8, call 1",
    ]
