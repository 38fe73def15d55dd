# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A rank that works or waits shows that it lives."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.beating import with_beat
from tests.scripted_driver import Away, Fault, Task, World


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Effect, Protocol


BEAT = fx.Beat("beat", 5.0)


def one(*effects: Effect) -> Protocol[Any]:
    """A protocol of one effect, or several."""
    result = None
    for effect in effects:
        result = yield effect
    return result


def beats_of(*effects: Effect, away: bool = False) -> tuple[Task, list[float], list[bytes]]:
    """Run effects under a beat; return the task, and when and what it beat."""
    world = World()
    instants, values = [], []

    def fault(_task: Task, _index: int, performed: Effect) -> Fault | None:
        if isinstance(performed, fx.Set) and performed.key == "beat":
            instants.append(world.now_s)
            values.append(performed.value)
            return Away() if away else None
        return None

    world.fault = fault
    task = world.spawn(with_beat(one(*effects), BEAT))
    world.run()
    return task, instants, values


@pytest.mark.parametrize(
    "effect", [fx.Sleep(33.0), fx.WaitFor("never", 33.0), fx.Local(fx.WaitFor("never", 33.0))]
)
def test_a_long_wait_is_cut_into_pieces_with_a_beat_between(effect: Effect) -> None:
    """While it sleeps or waits, a rank is never silent for longer than a beat."""
    task, instants, values = beats_of(effect)

    gaps = [after - before for before, after in pairwise([0.0, *instants, task.ended_at_s or 0.0])]
    assert max(gaps) <= 5.1
    assert len(set(values)) == len(values) == 6
    assert task.ended_at_s == pytest.approx(33.0, abs=0.1)


def test_each_beat_changes_the_value() -> None:
    """Two beats never write the same bytes, or the second would be silence."""
    _, _, values = beats_of(fx.Sleep(100.0))

    assert len(set(values)) == len(values)


@pytest.mark.parametrize(
    "effect",
    [
        fx.Sleep(5.0),
        fx.WaitFor("never", 5.0),
        fx.Get("key"),
        fx.Local(fx.WaitFor("never", 5.0)),
        fx.Local(fx.Get("key")),
    ],
)
def test_what_is_short_is_left_alone(effect: Effect) -> None:
    """An effect no longer than a beat costs nothing extra."""
    task, instants, _ = beats_of(effect)

    assert instants == []
    assert [each for each in task.performed if not isinstance(each, fx.Now)] == [effect]


@pytest.mark.parametrize("duration_s", [0.7, 2.0, 4.8, 5.0])
@pytest.mark.parametrize("kind", ["sleep", "wait", "own wait"])
def test_a_series_of_short_waits_is_no_silence(kind: str, duration_s: float) -> None:
    """None of them is as long as a beat, and all together they are many."""
    wait = fx.WaitFor("never", duration_s)
    effects: dict[str, Effect] = {
        "sleep": fx.Sleep(duration_s),
        "wait": wait,
        "own wait": fx.Local(wait),
    }

    task, instants, values = beats_of(*[effects[kind]] * 60)

    gaps = [after - before for before, after in pairwise([0.0, *instants, task.ended_at_s or 0.0])]
    assert max(gaps) <= 5.1
    assert min(gaps[:-1]) >= 5.0
    assert len(set(values)) == len(values) == pytest.approx(60 * duration_s / 5.0, abs=1.1)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_wait_ends_with_the_key(is_own: bool) -> None:  # noqa: FBT001 - data
    """A key that appears ends a wait that is cut into pieces, and the answer is True."""
    world = World()
    wait = fx.WaitFor("bell", 100.0)
    task = world.spawn(with_beat(one(fx.Local(wait) if is_own else wait), BEAT))
    ring = ring_after(12.0, is_own=is_own)
    world.spawn(ring, name=task.name)

    world.run()

    assert task.result is True
    assert task.ended_at_s == pytest.approx(12.0, abs=0.1)


def ring_after(duration_s: float, *, is_own: bool = False) -> Protocol[None]:
    """Set the bell after a while."""
    yield fx.Sleep(duration_s)
    ring = fx.Set("bell", b"1")
    yield fx.Local(ring) if is_own else ring


def test_a_call_is_given_the_beat() -> None:
    """The driver writes the beat during a call: the call says which key and how often."""
    task, _, _ = beats_of(fx.Call(lambda _token: "value", timeout_s=60.0))

    (call,) = task.performed
    assert isinstance(call, fx.Call)
    assert call.beat == BEAT
    assert task.result == "value"


def test_a_beat_that_cannot_be_written_is_left_out() -> None:
    """The work is more important than the sign of life."""
    task, instants, _ = beats_of(fx.Sleep(33.0), away=True)

    assert task.error is None
    assert len(instants) == 6
    assert task.ended_at_s == pytest.approx(33.0, abs=0.1)
