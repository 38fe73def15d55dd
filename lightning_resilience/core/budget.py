# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How many retries the whole job may make: a budget in the shared store, charged in advance.

A breaker opens on failures in a row. A dependency that fails every third call never trips one, and
N ranks that each retry a few times add load just when there is too much. So retries are counted
for the job, per dependency: within any ``budget_window_s`` at most

    ``retry_floor + retry_ratio · calls``

are granted, whatever the number of ranks.

* **Charged at the decision.** A retry is charged before its backoff begins, so that those who wait
  in the backoff are counted: charged at the attempt, all of them would pass together.
* **Never given back.** A retry that then succeeds was load all the same.
* **Denied is not failed.** The caller waits and asks again, up to its deadline.
* **Whole buckets, no weights.** The window is cut into four. The present bucket and the four before
  it count in full, so that no window of that length ever holds more than the quota. (Weighting the
  oldest by its age grants up to twice the quota to retries that come in bursts.)
* **Aged by local sight.** A bucket ends when an observer has itself seen it for a quarter of the
  window; that is never more than its true age, so it errs towards denying. What was charged to it
  is younger: it has the age for which nobody has charged it since. Clocks at rates within 1.5 of
  each other may let a window see two quotas; clocks at the same rate, one.
* **Calls are counted where they are made** and told with the next charge, as calls of the last
  window; who never retries never writes. What is not told counts as nothing: again towards denying.

Attempts that follow an open circuit are not charged: one probe, the ramp and the slots bound them,
and the job would otherwise need minutes to get through its own recovery.

Sources: retry budgets as a share of calls with a floor, Finagle ``RetryBudget`` and Google SRE book
ch. 21; charging in advance avoids what Envoy's issue 30205 describes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.records import BudgetRecord
from lightning_resilience.core.validation import check_seconds, check_share, check_whole, option


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord


__all__ = [
    "BudgetConfig",
    "Ruling",
    "bucket_s",
    "created",
    "is_charged",
    "quota",
    "recent_calls",
    "rule",
    "share",
    "used",
]

_PARTS: Final = 4
_BUCKETS: Final = _PARTS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """How many retries all ranks together may make at one dependency.

    Args:
        retry_ratio: Retries per call, in [0, 1].
        retry_floor: Retries per window that are always there, ≥ 1.
        budget_window_s: The window, in seconds, > 0.

    Raises:
        ConfigError: An option is out of range.
    """

    retry_ratio: float = option(0.1, why="one retry for ten calls")
    retry_floor: int = option(
        20, why="≥ 8 hosts · (`trip_failures` − 1), else denial prevents the trip"
    )
    budget_window_s: float = option(60.0, why="longer than a backoff at its cap")

    def __post_init__(self) -> None:
        check_share("retry_ratio", self.retry_ratio, zero=True)
        check_whole("retry_floor", self.retry_floor, minimum=1)
        check_seconds("budget_window_s", self.budget_window_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The answer to a request for one retry.

    Args:
        granted: Whether it may be made.
        record: What to write; the very record that was given where nothing changes.
        wait_s: Where denied, how long until a bucket ends by this observer's sight, in seconds.
        used: Retries that count, this one included where it is granted.
        quota: Retries that may be made in a window.
    """

    granted: bool
    record: BudgetRecord
    wait_s: float
    used: int
    quota: int


def is_charged(record: BreakerRecord) -> bool:
    """Tell whether a retry under this record costs budget: only a closed circuit lets it come."""
    return record.state == BreakerState.CLOSED.value


def bucket_s(config: BudgetConfig) -> float:
    """Return the length of a bucket, in seconds."""
    return config.budget_window_s / _PARTS


def used(record: BudgetRecord) -> int:
    """Return how many retries count now."""
    return sum(record.retries)


def quota(config: BudgetConfig, record: BudgetRecord) -> int:
    """Return how many may count."""
    return config.retry_floor + math.floor(config.retry_ratio * sum(record.calls))


def recent_calls(calls: int, *, elapsed_s: float, window_s: float) -> int:
    """Return how many of the calls made in ``elapsed_s`` seconds belong to the last window."""
    return calls if elapsed_s <= window_s else math.floor(calls * window_s / elapsed_s)


def created(*, origin: str) -> BudgetRecord:
    """Return the record of a budget that nobody has used."""
    return BudgetRecord(
        origin=origin, bucket=0, retries=(0,) * _BUCKETS, calls=(0,) * _BUCKETS, writer=origin
    )


def rule(
    config: BudgetConfig,
    record: BudgetRecord,
    *,
    unchanged_s: float,
    uncharged_s: float,
    calls: int,
    writer: str,
) -> Ruling:
    """Decide on one retry.

    Args:
        config: The budget.
        record: The record as it was read.
        unchanged_s: For how long this observer has seen the present bucket, in seconds.
        uncharged_s: For how long it has seen the bucket with the same retries, in seconds.
        calls: Calls of the last window that this process has not told yet.
        writer: A fresh nonce for the record that is written.

    Returns:
        The ruling. A denied request writes nothing, so that asking again costs nobody anything; it
        is asked again with the same calls.
    """
    ended = math.floor(unchanged_s / bucket_s(config))
    aged = _aged(record, ended, quiet=min(ended, math.floor(uncharged_s / bucket_s(config))))
    told = msgspec.structs.replace(aged, calls=(aged.calls[0] + calls, *aged.calls[1:]))
    most = quota(config, told)
    if used(told) >= most:
        wait_s = (ended + 1) * bucket_s(config) - unchanged_s
        # A bucket that has ended is put away also by who is denied, or the budget would stay as it
        # is for as long as it is exhausted.
        kept = msgspec.structs.replace(aged, writer=writer) if ended else record
        return Ruling(granted=False, record=kept, wait_s=wait_s, used=used(told), quota=most)
    retries = (told.retries[0] + 1, *told.retries[1:])
    charged = msgspec.structs.replace(told, retries=retries, writer=writer)
    return Ruling(granted=True, record=charged, wait_s=0.0, used=used(charged), quota=most)


def _aged(record: BudgetRecord, ended: int, *, quiet: int) -> BudgetRecord:
    if not ended:
        return record
    return msgspec.structs.replace(
        record,
        bucket=record.bucket + ended,
        retries=_moved(record.retries, ended, quiet=quiet),
        calls=_moved(record.calls, ended, quiet=quiet),
    )


def _moved(counts: tuple[int, ...], ended: int, *, quiet: int) -> tuple[int, ...]:
    # Others may have charged the present bucket until now, however long ago this observer first saw
    # it. Only what is behind it has aged by all the time that was seen.
    moved = [0] * _BUCKETS
    for place, count in enumerate(counts):
        age = place + ended if place else 1 + quiet
        if age < _BUCKETS:
            moved[age] += count
    return tuple(moved)


def share(config: BudgetConfig, *, processes: int) -> BudgetConfig:
    """Return the budget of one of several processes that cannot see each other.

    Args:
        config: The budget of all.
        processes: How many there are, ≥ 1.

    Returns:
        The same number of retries per time in all, at least one at a time each: a floor below one
        becomes a window that is as much longer.
    """
    floor = config.retry_floor / processes
    if floor >= 1:
        return replace(config, retry_floor=math.floor(floor))
    return replace(config, retry_floor=1, budget_window_s=config.budget_window_s / floor)
