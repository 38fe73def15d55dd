# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""No window ever holds more retries than the quota, whoever looks when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from lightning_resilience.core import budget, lease
from lightning_resilience.core.breaker import BreakerConfig, BreakerState, initial
from lightning_resilience.core.budget import BudgetConfig, Ruling
from lightning_resilience.core.records import BudgetRecord
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from lightning_resilience.core.lease import Sighting


WINDOW_S = 60.0
BUCKET_S = 15.0


def config(**options: Any) -> BudgetConfig:
    """A budget without a share of calls, so that its quota is its floor."""
    return BudgetConfig(**{"retry_ratio": 0.0, "retry_floor": 3, **options})


def record(*retries: int, calls: tuple[int, ...] = (), bucket: int = 7) -> BudgetRecord:
    """A record with so many retries in its buckets, the present one first."""
    return BudgetRecord(
        origin="o",
        bucket=bucket,
        retries=(*retries, 0, 0, 0, 0, 0)[:5],
        calls=(*calls, 0, 0, 0, 0, 0)[:5],
        writer="before",
    )


def ask(
    found: BudgetRecord,
    *,
    unchanged_s: float = 0.0,
    uncharged_s: float = 0.0,
    calls: int = 0,
    **options: Any,
) -> Ruling:
    """Ask for one retry."""
    return budget.rule(
        config(**options),
        found,
        unchanged_s=unchanged_s,
        uncharged_s=uncharged_s,
        calls=calls,
        writer="after",
    )


@dataclass
class Observer:
    """A process with a clock of its own, which knows of a bucket what it has itself seen.

    Args:
        ahead_s: Its clock's offset.
    """

    ahead_s: float
    bucket: Sighting | None = None
    charge: Sighting | None = None

    def look(self, found: BudgetRecord, *, at_s: float) -> tuple[float, float]:
        """Note what is there; for how long it has seen the bucket, and that with its retries."""
        now_s = at_s + self.ahead_s
        bucket = (found.origin, found.bucket)
        self.bucket = lease.observe(self.bucket, bucket, now_s=now_s)
        self.charge = lease.observe(self.charge, (*bucket, found.retries[0]), now_s=now_s)
        return now_s - self.bucket.first_seen_at_s, now_s - self.charge.first_seen_at_s


@dataclass
class Job:
    """Several observers of one budget, one true clock, and all that was granted.

    Args:
        config: The budget.
        observers: Who asks.
    """

    config: BudgetConfig
    observers: list[Observer]
    now_s: float = 0.0
    record: BudgetRecord = field(default_factory=lambda: budget.created(origin="o"))
    granted: list[float] = field(default_factory=list)

    def ask(self, who: int, *, calls: int = 0) -> Ruling:
        """Let an observer look, and charge where it is granted, in one instant."""
        unchanged_s, uncharged_s = self.observers[who].look(self.record, at_s=self.now_s)
        ruling = budget.rule(
            self.config,
            self.record,
            unchanged_s=unchanged_s,
            uncharged_s=uncharged_s,
            calls=calls,
            writer="w",
        )
        self.observers[who].look(ruling.record, at_s=self.now_s)
        self.record = ruling.record
        if ruling.granted:
            self.granted.append(self.now_s)
        return ruling

    def most_in_a_window(self) -> int:
        """Largest number of grants in any half-open stretch of the window's length."""
        window_s = self.config.budget_window_s
        return max(
            (sum(0 <= at - start < window_s for at in self.granted) for start in self.granted),
            default=0,
        )


# --- options ---------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_table() -> None:
    """One retry for ten calls, and 20 a minute that are always there."""
    assert BudgetConfig() == BudgetConfig(retry_ratio=0.1, retry_floor=20, budget_window_s=60.0)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(("retry_ratio", value, r"\[0, 1\]") for value in (-0.1, 1.01, math.nan, True, "1", None)),
        *(("retry_floor", value, "whole number ≥ 1") for value in (0, -1, 1.5, True, "2", None)),
        *(
            ("budget_window_s", value, "finite number of seconds > 0")
            for value in (0, -1.0, math.inf, math.nan, False, "60", None)
        ),
    ],
)
def test_what_is_out_of_range_is_refused(name: str, value: Any, allowed: str) -> None:
    """The text names the option, its value and what is allowed."""
    with pytest.raises(ConfigError, match=allowed) as caught:
        BudgetConfig(**{name: value})

    assert f"{name}={value!r}" in str(caught.value)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    """A budget without a share of calls, and one of a retry per call."""
    assert BudgetConfig(retry_ratio=0).retry_ratio == 0
    assert BudgetConfig(retry_ratio=1, retry_floor=1).retry_floor == 1


# --- what is counted -------------------------------------------------------------------------


@pytest.mark.parametrize("state", BreakerState)
def test_only_a_closed_circuit_charges(state: BreakerState) -> None:
    """What follows an open circuit is bounded by the probe, the ramp and the slots."""
    breaker = initial(BreakerConfig(), store_id="s", writer="w")

    charged = budget.is_charged(msgspec.structs.replace(breaker, state=state.value))

    assert charged is (state is BreakerState.CLOSED)


def test_a_bucket_is_a_quarter_of_the_window() -> None:
    """Four buckets and the present one: no retry is forgotten before the window is over."""
    assert budget.bucket_s(config(budget_window_s=100.0)) == 25.0


def test_a_fresh_budget_has_the_floor() -> None:
    """Nobody has used it, and whoever rebuilt it is told apart by the origin."""
    fresh = budget.created(origin="me")

    assert (fresh.origin, fresh.writer, fresh.bucket) == ("me", "me", 0)
    assert budget.used(fresh) == 0
    assert budget.quota(BudgetConfig(), fresh) == 20


def test_all_five_buckets_count_in_full() -> None:
    """Neither retries nor calls are weighted by their age."""
    found = record(1, 2, 3, 4, 5, calls=(10, 20, 30, 40, 59))

    assert budget.used(found) == 15
    assert budget.quota(BudgetConfig(), found) == 20 + 15


@pytest.mark.parametrize(
    ("calls", "elapsed_s", "counted"),
    [(100, 0.0, 100), (100, 60.0, 100), (100, 120.0, 50), (7, 120.0, 3), (1, 1e9, 0), (0, 99.0, 0)],
)
def test_of_old_calls_only_a_windows_share_counts(
    calls: int, elapsed_s: float, counted: int
) -> None:
    """A process that never retried for an hour does not bring an hour's calls at once."""
    assert budget.recent_calls(calls, elapsed_s=elapsed_s, window_s=60.0) == counted


# --- one ruling ------------------------------------------------------------------------------


def test_a_granted_retry_is_charged_to_the_present_bucket() -> None:
    """One more retry, the calls that were told, and a fresh writer; nothing else changes."""
    found = record(1, 1, calls=(5, 6))

    ruling = ask(found, calls=4)

    assert ruling.granted
    assert ruling.record == msgspec.structs.replace(record(2, 1, calls=(9, 6)), writer="after")
    assert (ruling.used, ruling.quota, ruling.wait_s) == (3, 3, 0.0)


def test_a_denied_retry_changes_nothing() -> None:
    """The very record comes back, the calls are not told, and the wait is to the bucket's end."""
    found = record(2, 1)

    ruling = ask(found, unchanged_s=4.0, calls=9)

    assert not ruling.granted
    assert ruling.record is found
    assert (ruling.used, ruling.quota, ruling.wait_s) == (3, 3, 11.0)


def test_calls_make_room_at_once() -> None:
    """The calls that are told with a retry count for this very retry."""
    found = record(3)

    assert not ask(found, calls=9, retry_ratio=0.1).granted
    assert ask(found, calls=10, retry_ratio=0.1).granted


def test_who_is_denied_puts_away_a_bucket_that_has_ended() -> None:
    """Else a budget would stay exhausted for as long as it is: its calls are still not told."""
    ruling = ask(record(0, 1, 1, 1, 0), unchanged_s=BUCKET_S, calls=9)

    assert not ruling.granted
    assert ruling.record == msgspec.structs.replace(record(0, 0, 1, 1, 1, bucket=8), writer="after")


def test_the_oldest_bucket_makes_room_when_the_present_one_ends() -> None:
    """Before the end of the present bucket it counts in full, after it not at all."""
    found = record(0, 0, 0, 0, 3)

    assert not ask(found, unchanged_s=BUCKET_S - 0.001).granted
    assert ask(found, unchanged_s=BUCKET_S).granted


@pytest.mark.parametrize("ended", [1, 2, 3, 4, 5, 100])
def test_a_bucket_charged_until_now_is_kept_for_a_window_from_now(ended: int) -> None:
    """However late an observer looks, what others have just charged is as young as that."""
    found = record(3, 1, 1, 1, 1)

    ruling = ask(found, unchanged_s=ended * BUCKET_S, retry_floor=100)

    older = (0,) * (ended - 1) + (1, 1, 1)
    assert ruling.record.retries == (1, 3, *older[:3])
    assert ruling.record.bucket == found.bucket + ended


@pytest.mark.parametrize(
    ("quiet_s", "kept"),
    [
        (0.0, (3, 0, 0, 2)),
        (14.9, (3, 0, 0, 2)),
        (15.0, (0, 3, 0, 2)),
        (30.0, (0, 0, 3, 2)),
        (45.0, (0, 0, 0, 5)),
    ],
)
def test_a_bucket_is_as_old_as_nobody_has_charged_it(quiet_s: float, kept: tuple[int, ...]) -> None:
    """Of a bucket that was seen for three, the retries age by what was seen since the last."""
    ruling = ask(record(3, 2), unchanged_s=45.0, uncharged_s=quiet_s, retry_floor=100)

    assert ruling.record.retries == (1, *kept)


def test_after_a_quiet_window_all_is_forgotten() -> None:
    """Where nobody has charged for five buckets, nothing counts any more, calls included."""
    found = record(3, 2, calls=(50, 50))

    ruling = ask(found, unchanged_s=75.0, uncharged_s=75.0, calls=4)

    assert ruling.granted
    assert ruling.record == msgspec.structs.replace(
        record(1, calls=(4,), bucket=12), writer="after"
    )


@given(
    retries=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    unchanged_s=st.floats(0.0, 200.0),
    later_s=st.floats(0.0, 200.0),
    quiet=st.floats(0.0, 1.0),
)
def test_who_has_watched_for_less_grants_no_more(
    retries: list[int], unchanged_s: float, later_s: float, quiet: float
) -> None:
    """An observer that first looked later sees at least as many retries, and waits no less."""
    found = record(*retries)

    newcomer, veteran = (
        ask(found, unchanged_s=seen_s, uncharged_s=quiet * seen_s, retry_floor=5)
        for seen_s in (unchanged_s, unchanged_s + later_s)
    )

    assert newcomer.used - newcomer.granted >= veteran.used - veteran.granted
    assert newcomer.granted <= veteran.granted


@given(
    retries=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    unchanged_s=st.floats(0.0, 200.0),
    calls=st.integers(0, 200),
)
def test_a_ruling_is_consistent(retries: list[int], unchanged_s: float, calls: int) -> None:
    """What is granted is below the quota and written; a denial waits for less than two buckets."""
    found = record(*retries)

    ruling = ask(found, unchanged_s=unchanged_s, calls=calls, retry_ratio=0.1)

    assert ruling.granted is (ruling.used - ruling.granted < ruling.quota)
    assert (ruling.wait_s == 0.0) is ruling.granted
    assert 0.0 <= ruling.wait_s <= BUCKET_S
    if ruling.granted:
        assert budget.used(ruling.record) == ruling.used
        assert ruling.record.writer == "after"
    else:
        assert budget.used(ruling.record) <= budget.used(found)
        assert (ruling.record is found) is (unchanged_s < BUCKET_S)


# --- any window ------------------------------------------------------------------------------


# Mostly less than a bucket, often exactly some of them, and now and then very late. Eighths: no sum
# of them is rounded.
WAITS_S = [0.0, 0.125, 5.0, 7.5, 14.875, 15.0, 15.125, 30.0, 45.0, 60.0, 74.875, 75.0, 200.0]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(WAITS_S),
        st.integers(0, 2),
        st.integers(1, 4),
    ),
    max_size=40,
)


@settings(max_examples=400)
@given(steps=STEPS, offsets=st.tuples(*[st.integers(-1000, 1000)] * 3))
def test_no_window_holds_more_than_the_quota(
    steps: list[tuple[float, int, int]], offsets: tuple[int, ...]
) -> None:
    """Whoever asks when, by clocks of the same rate, at most the floor is granted in any window."""
    job = Job(config(), [Observer(float(offset)) for offset in offsets])

    for wait_s, who, times in steps:
        job.now_s += wait_s
        for _ in range(times):
            job.ask(who)

    assert job.most_in_a_window() <= 3


def test_an_observer_of_long_ago_does_not_forget_what_others_have_just_charged() -> None:
    """Who saw the bucket begin and looks again after five knows nothing of its latest retries."""
    job = Job(config(), [Observer(0.0), Observer(0.0)])
    job.ask(0)
    job.now_s = 74.0
    granted = [job.ask(1).granted for _ in range(3)]
    job.now_s = 75.0

    late = [job.ask(0).granted for _ in range(3)]

    assert granted == [True, True, False]
    assert late == [False, False, False]
    assert job.most_in_a_window() == 2


@given(
    steps=st.lists(
        st.tuples(st.floats(0.0, 40.0), st.integers(0, 2), st.integers(0, 30)), max_size=40
    )
)
def test_no_window_holds_more_than_the_share_of_its_calls(
    steps: list[tuple[float, int, int]],
) -> None:
    """With a share of calls, what is granted is bounded by the floor and the calls still told."""
    job = Job(config(retry_ratio=0.1), [Observer(0.0) for _ in range(3)])
    told = 0

    for wait_s, who, calls in steps:
        job.now_s += wait_s
        told += calls if job.ask(who, calls=calls).granted else 0

    assert job.most_in_a_window() <= 3 + told // 10


@given(quiet_s=st.floats(75.0, 500.0), used=st.integers(1, 3))
def test_an_exhausted_budget_recovers(quiet_s: float, used: int) -> None:
    """After a quiet window all is there at once; used up, it comes back within five buckets."""
    job = Job(config(), [Observer(0.0)])
    for _ in range(used):
        job.ask(0)
    job.now_s += quiet_s

    again = [job.ask(0).granted for _ in range(4)]
    while not job.ask(0).granted:
        job.now_s += 1.0

    assert again == [True, True, True, False]
    assert WINDOW_S <= job.now_s - quiet_s <= 5 * BUCKET_S + 5


# --- a share ---------------------------------------------------------------------------------


@given(
    floor=st.integers(1, 10**6),
    ratio=st.floats(0.0, 1.0),
    window_s=st.floats(1.0, 3600.0),
    processes=st.integers(1, 10**5),
)
def test_all_shares_together_never_exceed_the_whole(
    floor: int, ratio: float, window_s: float, processes: int
) -> None:
    """N shares grant no more retries per time than the budget of all, and each grants one."""
    whole = BudgetConfig(retry_ratio=ratio, retry_floor=floor, budget_window_s=window_s)

    part = budget.share(whole, processes=processes)

    together = processes * part.retry_floor / part.budget_window_s
    assert together <= floor / window_s * (1 + 1e-9)
    assert part.retry_floor >= 1
    assert part.budget_window_s >= window_s
    assert part.retry_ratio == ratio


@pytest.mark.parametrize(
    ("processes", "floor", "window_s"),
    [(1, 20, 60.0), (2, 10, 60.0), (3, 6, 60.0), (20, 1, 60.0), (40, 1, 120.0)],
)
def test_a_share_below_one_is_a_longer_window(processes: int, floor: int, window_s: float) -> None:
    """Rounded down while there is at least one for each, stretched in time after that."""
    part = budget.share(BudgetConfig(), processes=processes)

    assert part.retry_floor == floor
    assert part.budget_window_s == pytest.approx(window_s)
