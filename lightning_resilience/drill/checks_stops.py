# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I4: workers that are told to stop at start after start cost nothing, and are no storm either.

==================  ================================================================================
check               what it raises for
==================  ================================================================================
I4 BoundedStops     a start after workers were told to stop, with no progress since they were told
                    before, that is restarted at once, or too soon for so many of them; a stop that
                    is counted twice, or not
==================  ================================================================================

Delays are drawn, so a single one may be short. Together they are as long as so many may be, but for
a share that chance does not reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.backoff import upper_bound_s
from lightning_resilience.core.quota import Cause, RestartRecord, charged
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import GoRecord
from lightning_resilience.drill.observer import Observer


if TYPE_CHECKING:
    from lightning_resilience.drill.checks_restarts import RecordChecks
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.restart_world import RestartWorld


__all__ = ["StopChecks"]

_NEVER_S: Final = float("-inf")
_ENOUGH: Final = 7
_LEAST_SHARE: Final = 0.04
"""Of the longest delays of ``_ENOUGH`` stops or more: less comes once in a million rows."""


class StopChecks(Observer):
    """Who looks at starts whose workers were told to stop.

    Args:
        world: The world.
        records: Who says that a promise was not kept.
    """

    def __init__(self, world: RestartWorld, records: RecordChecks) -> None:
        self._world = world
        self._records = records
        self._last = ""
        self._seen = {self._last}
        self._delays_s: list[float] = []
        self._progressed_at_s = self._written_at_s = _NEVER_S

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at the record, at what is agreed, and at progress."""
        raw = self._world.store.cells.values.get(key)
        keys = self._world.keys("")
        if raw is None:
            return
        if key == keys.restarts:
            self._noted_in(decode(RestartRecord, raw, key=key), process, now_s=now_s)
        elif key == keys.progress:
            self._progressed_at_s = now_s
            self._delays_s.clear()
        elif "/go/" in key and before is None:
            self._agreed(decode(GoRecord, raw, key=key), key.split("/")[2][1:])

    def emptied(self, now_s: float) -> None:
        """Note that nobody may know any more of what was."""
        del now_s
        self._delays_s.clear()

    def _noted_in(self, record: RestartRecord, process: Process, *, now_s: float) -> None:
        plan = self._world.plan
        if (now_s - self._written_at_s) * plan.clocks.rate >= plan.restart.restart_window_s:
            self._delays_s.clear()
        self._written_at_s = now_s
        if self._records.emptied_at_s > _NEVER_S and record.stopped in self._seen - {self._last}:
            # Whoever remembers the store that was lost has written what there was.
            self._delays_s.clear()
        self._last = record.stopped
        self._seen.add(record.stopped)
        stops = len(self._seen - {""})
        # With a store that is lost goes what was agreed, so that one may be counted again.
        if record.stops > stops and self._records.emptied_at_s == _NEVER_S:
            what = f"{process.name} has counted {record.stops} stops, and there were {stops}"
            self._records.fail("I4 BoundedStops", what)

    def _agreed(self, go: GoRecord, incarnation: str) -> None:
        key = self._world.keys("").restarts
        raw = self._world.store.cells.values.get(key)
        record = None if raw is None else decode(RestartRecord, raw, key=key)
        start = self._world.starts.get(incarnation)
        if go.cause != Cause.PREEMPTED or record is None or start is None:
            return
        # What has cost something, by what another agent has seen, is no stop.
        if charged(record, incarnation) or start.began_at_s <= self._progressed_at_s:
            return
        self._delays_s.append(go.delay_s)
        count = len(self._delays_s)
        told = f"{count} starts in a row were told to stop, the last {incarnation}, and"
        if record.stops < count:
            self._records.fail("I4 BoundedStops", f"{told} {record.stops} of them are counted")
        if count > 1 and not go.delay_s:
            self._records.fail("I4 BoundedStops", f"{told} that is restarted at once")
        config = self._world.plan.restart
        base_s, cap_s = config.restart_base_delay_s, config.restart_max_delay_s
        longest_s = sum(upper_bound_s(each, base_s=base_s, cap_s=cap_s) for each in range(1, count))
        if count > _ENOUGH and sum(self._delays_s) < _LEAST_SHARE * longest_s:
            what = f"they were restarted after {sum(self._delays_s):.2f} s together"
            self._records.fail("I4 BoundedStops", f"{told} {what}, of at most {longest_s:.2f} s")
