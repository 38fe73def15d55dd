# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""FORCED_OPEN: entered and left by an operator only."""

from __future__ import annotations

import pytest

from lightning_resilience.core.breaker import (
    BreakerState,
    ForcedOpen,
    ForceReleased,
    passes,
)
from tests.unit.core.breaker.samples import CONFIG, EPOCH, apply, record_in, variants


FORCED = record_in(BreakerState.FORCED_OPEN, open_s=60.0)


def test_forced_open_does_not_pass() -> None:
    """What an operator holds open lets nothing through."""
    assert not passes(FORCED)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in variants() if kind is not ForceReleased],
    ids=lambda kind: kind.__name__,
)
def test_nothing_but_the_operator_leaves_it(kind: type) -> None:
    """No vote, claim or result moves it, however late or early."""
    for event in variants()[kind]:
        assert apply(FORCED, event).record is FORCED


def test_forcing_twice_changes_nothing() -> None:
    """A second order to open is not a transition."""
    assert not apply(FORCED, ForcedOpen(reason="again")).changed


def test_released_it_is_open_and_a_probe_decides() -> None:
    """Released, it is OPEN with the first open wait; it is never closed by an order."""
    record = apply(FORCED, ForceReleased(reason="done")).record

    assert record.state == "open"
    assert record.open_s == CONFIG.open_for_s
    assert record.limit == 0
    assert record.epoch == EPOCH + 1
    assert record.generation == FORCED.generation
    assert "done" in record.reason
    assert "operator" in record.reason


@pytest.mark.parametrize("state", sorted(set(BreakerState) - {BreakerState.FORCED_OPEN}))
def test_only_what_was_forced_can_be_released(state: BreakerState) -> None:
    """An order to release finds nothing to do in any other state."""
    record = record_in(state)

    assert apply(record, ForceReleased(reason="done")).record is record
