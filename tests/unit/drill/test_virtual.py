# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Virtual time goes forward in one order, and chance is what a seed and a name say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.drill.virtual import Agenda, HostClock, SeededDice
from lightning_resilience.errors import ConfigError


instants = st.floats(0, 1e6)


def run_out(agenda: Agenda) -> None:
    """Let everything happen."""
    while len(agenda):
        agenda.step()


def test_entries_of_one_instant_happen_in_the_order_in_which_they_were_made() -> None:
    """A tie is broken by who came first, never by what the entries hold."""
    agenda = Agenda()
    seen: list[str] = []
    for name in ("c", "a", "b"):
        agenda.at(2.0, seen.append, name)
    agenda.at(1.0, seen.append, "first")

    run_out(agenda)

    assert seen == ["first", "c", "a", "b"]


@given(st.lists(instants))
def test_entries_happen_by_time_and_then_by_age(times: list[float]) -> None:
    """The order is that of a stable sort, however many instants are equal."""
    agenda = Agenda()
    seen: list[tuple[float, int]] = []
    for number, when_s in enumerate(times):
        agenda.at(when_s, seen.append, (when_s, number))

    run_out(agenda)

    assert seen == sorted(seen)
    assert agenda.happened == len(times)
    assert agenda.now_s == max(times, default=0.0)


def test_an_entry_made_at_its_own_instant_comes_after_those_that_wait() -> None:
    """What an entry adds for now happens now, behind the others of this instant."""
    agenda = Agenda()
    seen: list[str] = []
    agenda.at(1.0, lambda _: agenda.after(0.0, seen.append, "added"))
    agenda.at(1.0, seen.append, "waiting")

    run_out(agenda)

    assert seen == ["waiting", "added"]
    assert agenda.now_s == 1.0


def test_the_past_happens_now() -> None:
    """An instant that is over is taken for the present one: time never goes back."""
    agenda = Agenda()
    times: list[float] = []
    agenda.at(5.0, lambda _: agenda.at(2.0, lambda _: times.append(agenda.now_s)))

    run_out(agenda)

    assert times == [5.0]


def test_the_next_instant_is_known() -> None:
    """Who waits for the end can see whether, and when, something is still to come."""
    agenda = Agenda()
    before = agenda.next_at_s()
    agenda.after(3.0, print)
    agenda.at(1.5, print)

    assert before is None
    assert agenda.next_at_s() == 1.5
    assert len(agenda) == 2


def test_an_empty_agenda_does_not_step() -> None:
    """A step with nothing to do is a mistake of the caller."""
    with pytest.raises(IndexError):
        Agenda().step()


def test_a_clock_has_an_offset_and_a_rate() -> None:
    """A clock that is ahead and fast shows more, and its seconds are over sooner."""
    clock = HostClock(offset_s=100.0, rate=1.25)

    assert clock.read_s(0.0) == 100.0
    assert clock.read_s(8.0) == 110.0
    assert clock.lasts_s(10.0) == 8.0


@given(
    offset_s=st.floats(-1e6, 1e6),
    rate=st.floats(0.8, 1.2),
    now_s=instants,
    span_s=st.floats(0, 1e3),
)
def test_what_a_clock_shows_is_over_when_it_says_so(
    offset_s: float, rate: float, now_s: float, span_s: float
) -> None:
    """Whoever waits for a duration of its own clock sees that clock gone on by as much."""
    clock = HostClock(offset_s=offset_s, rate=rate)

    shown_s = clock.read_s(now_s + clock.lasts_s(span_s)) - clock.read_s(now_s)

    # The shortest wait, where the span is shorter, and what is lost in rounding.
    assert shown_s == pytest.approx(span_s, abs=2e-6)


@given(offset_s=st.floats(-1e6, 1e6), rate=st.floats(0.8, 1.2), now_s=instants)
def test_whoever_waits_until_an_instant_of_its_clock_gets_there(
    offset_s: float, rate: float, now_s: float
) -> None:
    """A wait for the least that is left lets time pass, however the clocks round."""
    clock = HostClock(offset_s=offset_s, rate=rate)
    until_s = clock.read_s(now_s) + 0.1

    waits = 0
    while (left_s := until_s - clock.read_s(now_s)) > 0:
        now_s += clock.lasts_s(left_s)
        waits += 1
        assert waits < 10


def test_a_negative_duration_is_none() -> None:
    """Who waits for what is over does not wait."""
    assert HostClock(rate=1.2).lasts_s(-3.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_goes_forward(rate: float) -> None:
    """A clock that stands, goes back or has no rate is refused, by its number."""
    with pytest.raises(ConfigError, match=f"rate={rate}"):
        HostClock(rate=rate)


def test_a_replay_draws_the_same() -> None:
    """Equal seeds and names are equal dice."""
    first, second = (SeededDice(7, "rank 3") for _ in range(2))

    assert [first.draw() for _ in range(100)] == [second.draw() for _ in range(100)]
    assert [first.nonce() for _ in range(3)] == [second.nonce() for _ in range(3)]


def test_two_names_have_nothing_in_common() -> None:
    """What one draws depends neither on the other's name nor on how often that one draws."""
    names = ("rank 1", "rank 2", "rank 12", "storage")
    dice = {name: SeededDice(7, name) for name in names}
    drawn = {name: [one.draw() for _ in range(50)] for name, one in dice.items()}
    alone = [SeededDice(7, "rank 2")]

    values = [value for draws in drawn.values() for value in draws]

    assert len(set(values)) == len(values)
    assert [alone[0].draw() for _ in range(50)] == drawn["rank 2"]
    assert len({one.nonce() for one in dice.values()}) == len(names)


def test_a_seed_and_a_name_are_not_confused() -> None:
    """No seed with one name is the same dice as another seed with another name."""
    pairs = ((1, "2/x"), (12, "x"), (1, "x"), (-1, "x"), (1, "12/x"))

    assert len({SeededDice(seed, name).draw() for seed, name in pairs}) == len(pairs)


def test_a_nonce_is_new_each_time_and_costs_no_draw() -> None:
    """Asking for nonces does not change what is drawn."""
    dice, other = SeededDice(1, "a"), SeededDice(1, "a")

    nonces = [dice.nonce() for _ in range(100)]

    assert len(set(nonces)) == 100
    assert dice.draw() == other.draw()


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_hash_seed_of_the_interpreter_has_no_say(hash_seed: str) -> None:
    """A process of another hash seed draws the very same number."""
    code = (
        "from lightning_resilience.drill.virtual import SeededDice\n"
        "print(SeededDice(7, 'rank 3').draw())"
    )
    environ = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )

    assert float(done.stdout) == SeededDice(7, "rank 3").draw()
