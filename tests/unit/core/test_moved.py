# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is said of the bytes that an abandoned call had moved."""

from __future__ import annotations

import pytest

from lightning_resilience.core.moved import Moved


@pytest.mark.parametrize(
    ("moved", "told"),
    [
        (Moved(), ""),
        (Moved(sent=5), "5 bytes sent"),
        (Moved(written=3, sent=2, read=1), "3 bytes written, 2 bytes sent, 1 bytes read"),
    ],
)
def test_only_what_was_counted_is_told(moved: Moved, told: str) -> None:
    """No zeros: 0 is also what stands where nobody counts."""
    assert moved.told() == told


def test_each_kind_is_summed() -> None:
    """What was there stays as it was."""
    before = Moved(written=1, sent=2, read=3)

    assert before.plus(written=10, sent=20, read=30) == Moved(written=11, sent=22, read=33)
    assert before == Moved(written=1, sent=2, read=3)
