# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a server that has ended is started again."""

from __future__ import annotations

import pytest

from lightning_resilience.core.supervision import Supervision


def test_one_that_ends_at_once_is_given_up_after_a_while() -> None:
    """With longer and longer pauses."""
    supervision = Supervision()

    pauses = [supervision.pause_s(served_s=0.1, draw=0.999) for _ in range(7)]

    waited = [pause for pause in pauses if pause is not None]
    assert waited == sorted(waited)
    assert waited[-1] == pytest.approx(10.0, rel=0.01)
    assert pauses[6] is None


def test_one_that_has_served_has_all_attempts_anew() -> None:
    """However often it has ended before."""
    supervision = Supervision()
    for _ in range(100):
        assert supervision.pause_s(served_s=61.0, draw=0.5) is not None

    assert supervision.in_a_row == 1
