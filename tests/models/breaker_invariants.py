# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What holds after every step of a breaker, whatever the input."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lightning_resilience.core.breaker import (
    HISTORY_LENGTH,
    LEGAL,
    AttemptFailed,
    BreakerState,
    ForceReleased,
    HeldUpstream,
    HostVoted,
    ProbeFailed,
    ProbeReleased,
    passes,
)
from lightning_resilience.core.events import BreakerChanged


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerConfig, BreakerInput, BreakerStep
    from lightning_resilience.core.records import BreakerRecord


def check_step(
    config: BreakerConfig, before: BreakerRecord, event: BreakerInput, stepped: BreakerStep
) -> None:
    """Assert everything that must hold of one step."""
    after = stepped.record
    assert stepped.reason
    assert stepped.changed == (after != before)
    if not stepped.changed:
        assert after is before
        assert not [event for event in stepped.events if isinstance(event, BreakerChanged)]
    else:
        assert after.writer != before.writer
        assert after.reason == stepped.reason
        _check_change(before, event, stepped)
    check_record(config, after)


def _check_change(before: BreakerRecord, event: BreakerInput, stepped: BreakerStep) -> None:
    after = stepped.record
    changes = [event for event in stepped.events if isinstance(event, BreakerChanged)]
    assert after.store_id == before.store_id
    if after.epoch == before.epoch:
        assert (before.state, after.state) == ("closed", "closed")
        assert after.votes != before.votes
        assert after.history == before.history
        assert after.generation == before.generation
        assert changes == []
        return
    assert after.epoch == before.epoch + 1
    assert (BreakerState(before.state), BreakerState(after.state)) in LEGAL
    assert after.history[-1].epoch == after.epoch
    assert after.history[:-1] == before.history[-(HISTORY_LENGTH - 1) :]
    assert [(change.previous, change.state, change.epoch) for change in changes] == [
        (before.state, after.state, after.epoch)
    ]
    # Whoever waits for a trip waits on a bell that has not been rung for an earlier one.
    assert after.generation - before.generation == (passes(before) and not passes(after))
    if after.state == "open":
        _check_opening(before, event)


def _check_opening(before: BreakerRecord, event: BreakerInput) -> None:
    if passes(before):
        # A trip: only failures that say something about health come as these.
        assert isinstance(event, HostVoted | AttemptFailed | HeldUpstream)
    else:
        assert isinstance(event, ProbeFailed | ProbeReleased | ForceReleased | HeldUpstream)


def check_record(config: BreakerConfig, record: BreakerRecord) -> None:
    """Assert everything that must hold of one record."""
    state = BreakerState(record.state)
    assert (record.holder != "") == (state is BreakerState.HALF_OPEN)
    assert not record.votes or state is BreakerState.CLOSED
    assert len(set(record.votes)) == len(record.votes) < 8
    assert 0 <= record.failures < config.reopen_failures
    assert record.failures == 0 or state is BreakerState.RECOVERING
    assert config.open_for_s <= record.open_s <= config.max_open_for_s
    assert not record.upstream or not passes(record)
    if state is BreakerState.CLOSED:
        assert record.limit == config.max_concurrent
        assert record.open_s == config.open_for_s
    elif state is BreakerState.RECOVERING:
        assert config.ramp_start <= record.limit < config.max_concurrent
    else:
        assert record.limit == 0
    check_history(record)


def check_history(record: BreakerRecord) -> None:
    """Assert that a history is short, gapless, legal, and ends with the present state."""
    history = record.history
    assert 1 <= len(history) <= HISTORY_LENGTH
    assert (history[-1].epoch, history[-1].state) == (record.epoch, record.state)
    for earlier, later in itertools.pairwise(history):
        assert later.epoch == earlier.epoch + 1
        assert (BreakerState(earlier.state), BreakerState(later.state)) in LEGAL
