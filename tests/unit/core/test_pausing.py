# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When a rank asks all ranks to pause, and what the progress bar says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from lightning_resilience.core import pausing
from lightning_resilience.core.agenda import AgendaKind
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.breaker_record import BreakerState, initial, passes
from lightning_resilience.core.events import (
    DependencyAwaited,
    StoreReturned,
    TrainingPaused,
    TrainingResumed,
    VerdictReached,
)
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord


def seen(state: BreakerState, *, epoch: int = 7) -> BreakerRecord:
    """What a rank has seen of a breaker."""
    record = initial(BreakerConfig(), store_id="store", writer="w")
    return msgspec.structs.replace(record, state=state.value, epoch=epoch, reason="3 failures")


@pytest.mark.parametrize("state", BreakerState)
def test_a_pause_is_asked_for_where_a_breaker_lets_nothing_through(state: BreakerState) -> None:
    """In every state that stops a save, and in no other; the item says which breaker and why."""
    item = pausing.asks({"s3://b:write": seen(state)}, on_outage="wait", past={})

    assert (item is None) == passes(seen(state))
    if item is not None:
        assert (item.kind, item.detail, item.left_s) == (AgendaKind.PAUSE, "s3://b:write", None)
        assert state.value in item.reason
        assert "3 failures" in item.reason


def test_a_policy_that_does_not_wait_does_not_pause() -> None:
    """With ``fail`` there is nothing to wait for: the next save ends the job."""
    records = {"s3://b:write": seen(BreakerState.OPEN)}

    assert pausing.asks(records, on_outage="fail", past={}) is None


def test_what_was_waited_for_once_is_not_waited_for_again() -> None:
    """A rank that has learnt nothing since asks for nothing; a new epoch is a new reason."""
    before = {"s3://b:write": seen(BreakerState.OPEN)}
    past = {name: pausing.sight_of(record) for name, record in before.items()}
    after = {"s3://b:write": seen(BreakerState.OPEN, epoch=11)}

    assert pausing.asks(before, on_outage="wait", past=past) is None
    assert pausing.asks(after, on_outage="wait", past=past) is not None


def test_one_breaker_after_the_other_is_waited_for() -> None:
    """Of several that are open, the first by name that has not been waited for yet."""
    record = seen(BreakerState.OPEN)
    records = {"b": record, "a": record, "closed": seen(BreakerState.CLOSED)}

    first = pausing.asks(records, on_outage="wait", past={})
    second = pausing.asks(records, on_outage="wait", past={"a": pausing.sight_of(record)})

    assert [item and item.detail for item in (first, second)] == ["a", "b"]


@pytest.mark.parametrize(
    ("option", "looks"),
    [("at_save_points", []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])],
)
def test_a_rank_looks_after_every_so_many_steps(option: str | int, looks: list[int]) -> None:
    """Never at save points only, where the save does it."""
    every = pausing.steps(JointConfig(pause_training=option).pause_training)

    assert [step for step in range(7) if pausing.is_time_to_look(step, every=every)] == looks


@pytest.mark.parametrize("option", ["sometimes", "", 0, -1, 1.5, True, None])
def test_other_values_of_the_option_are_refused(option: object) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match="pause_training"):
        JointConfig(pause_training=option)  # type: ignore[arg-type] # what a user may give


def test_the_bar_tells_of_waiting_until_it_is_over() -> None:
    """It says what is waited for, at a save and in a pause, and nothing of anything else."""
    name = "s3://b:write"
    awaited = DependencyAwaited(
        dependency=name, operation="save", state="open", elapsed_s=0.0, next_probe_in_s=1.0
    )
    paused = TrainingPaused(dependency=name, step=3, reason="why")
    resumed = TrainingResumed(dependency=name, step=3, elapsed_s=1.0)
    verdict = VerdictReached(
        op="save", seq=1, outcome="ok", first_rank=None, detail="", elapsed_s=1.0
    )

    texts = [pausing.banner(event) for event in (awaited, paused)]

    assert texts == ["paused, waits for s3://b:write"] * 2
    assert [pausing.banner(event) for event in (resumed, verdict)] == ["", ""]
    assert pausing.banner(StoreReturned(op="save", lost_for_s=1.0)) is None
