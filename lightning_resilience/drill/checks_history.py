# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I2: a breaker's history is one sequence ordered by (store, epoch), and each transition is legal.

Every write of the record in the shared store is looked at, whoever made it. It is one of these:

* **a transition**: one epoch later, legal, with the history, the generation and the limits that
  belong to it;
* **votes**: the same epoch of a closed circuit, and nothing else is different;
* **a birth**: closed, epoch 1, by somebody who has never seen a record;
* **a rebirth**, where the store has lost everything: one epoch after a record that was really
  there, with what that said; nobody holds a probe's permit in it. Whoever saw a later record may
  overrule one that was reborn from an earlier.

Epochs of a process that decides alone are in none of these, so they are seen here if they leak.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.records import BreakerRecord, StoreIdRecord
from lightning_resilience.drill.facts import Check


if TYPE_CHECKING:
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Process


__all__ = ["OneHistory"]

_REMEMBERED: Final = 32
# As the design says it: what a check believes must not be what it checks.
_PASSING: Final = frozenset({BreakerState.CLOSED, BreakerState.RECOVERING})
_KEPT_EPOCHS: Final = 256
_MOST_VOTES: Final = 8


class OneHistory(Check):
    """Looks at every write of the breaker's record.

    Args:
        facts: What is true.

    Attributes:
        is_step: Whether the write that is being told is a transition from the record before.
    """

    promise = "I2"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._writers: deque[str] = deque(maxlen=_KEPT_EPOCHS)
        self.is_step = False
        # The records of earlier lives of the store, by epoch: what a rebirth may rest on. Two lives
        # may have had one epoch each.
        self._past: dict[int, list[BreakerRecord]] = {}
        self._epochs: deque[BreakerRecord] = deque(maxlen=_KEPT_EPOCHS)
        self._store_ids: set[str] = set()
        self._recorded: set[str] = set()
        self._overruled: set[tuple[str, Process]] = set()

    def emptied(self, now_s: float) -> None:
        """Keep what there was: whoever has seen it may bring it back."""
        del now_s
        # A write whose answer was lost is repeated as it was, and is the first in the new store.
        self._writers.clear()
        for record in self._epochs:
            self._past.setdefault(record.epoch, []).append(record)
        self._epochs.clear()

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a write of the record, or of the store's name."""
        del now_s
        if key == self.facts.keys.store_id:
            self._named(process, key, before)
        if key != self.facts.breaker_key:
            return
        self.is_step = False
        raw = self.values.get(key)
        if raw is None:
            self.fail(f"{process.name} has deleted the breaker's record")
        new = self.facts.record or self.decoded(BreakerRecord, key, raw)
        self._signed(process, new, raw == before)
        if before is None:
            self._born(process, new)
        else:
            self._changed(process, self.facts.before, new)
        self._recorded.add(new.store_id)
        if not self._epochs or self._epochs[-1].epoch != new.epoch:
            self._epochs.append(new)

    def _named(self, process: Process, key: str, before: bytes | None) -> None:
        raw = self.values.get(key)
        if raw is None or before is not None:
            self.fail(f"{process.name} has changed the store's name, which is written once")
        store_id = self.decoded(StoreIdRecord, key, raw).store_id
        # A name whose answer was lost is given again where the store was emptied meanwhile. As long
        # as no record was of the first store of that name, nobody can take one for the other.
        if store_id in self._recorded or not process.wrote(store_id):
            self.fail(f"{process.name} gives the store a name that is not new: {store_id}")
        self._store_ids.add(store_id)

    def _signed(self, process: Process, new: BreakerRecord, is_same: object) -> None:
        if not process.wrote(new.writer):
            self.fail(f"{process.name} signs the breaker's record as {new.writer!r}")
        if new.writer in self._writers and not is_same:
            self.fail(f"{process.name} signs two writes of the breaker's record as {new.writer!r}")
        self._writers.append(new.writer)

    # --- births --------------------------------------------------------------------------------

    def _born(self, process: Process, new: BreakerRecord) -> None:
        name = self.values.get(self.facts.keys.store_id)
        known = None if name is None else self.decoded(StoreIdRecord, "", name).store_id
        # Whoever asked for the name before the store was emptied creates the record after it,
        # however long it could not reach the store meanwhile, and then corrects the name.
        is_late = self.facts.emptied_at_s >= 0
        if new.store_id != known and not (is_late and new.store_id in self._store_ids):
            self.fail(f"the record is of store {new.store_id!r}, and this one is {known!r}")
        if self._is_initial(new):
            if self._remembers(process):
                self.fail(f"{process.name} has seen a record and makes a new one all the same")
        elif not self._is_reborn(new):
            self.fail(f"{process.name} has made a record that no record before leads to: {new}")

    def _remembers(self, process: Process) -> bool:
        # What comes late was sent before it had seen anything.
        late = self.scenario.store.late_requests and self.facts.life
        return process.circuit is not None and process.circuit.view is not None and not late

    def _is_initial(self, new: BreakerRecord) -> bool:
        config = self.scenario.breaker
        state = (new.state, new.epoch, new.generation, new.limit, new.failures, new.holder)
        return (
            state == ("closed", 1, 0, config.max_concurrent, 0, "")
            and not new.votes
            and new.open_s == config.open_for_s
            and [(entry.epoch, entry.state) for entry in new.history] == [(1, "closed")]
        )

    def _is_reborn(self, new: BreakerRecord) -> bool:
        return any(_leads_to(seen, new) for seen in self._past.get(new.epoch - 1, ()))

    # --- changes -------------------------------------------------------------------------------

    def _changed(self, process: Process, old: BreakerRecord | None, new: BreakerRecord) -> None:
        if old is None:
            self.fail("there was a record that does not decode")
        if new.store_id != old.store_id:
            self._renamed(old, new)
        elif new.epoch == old.epoch:
            self._voted(process, old, new)
        elif self._is_reborn(new) and new.epoch > old.epoch:
            if (new.store_id, process) in self._overruled:
                self.fail(f"{process.name} overrules the record of one store twice")
            self._overruled.add((new.store_id, process))
        elif new.epoch == old.epoch + 1 and _goes_on(old, new):
            self.is_step = True
            self._moved(old, new)
        else:
            self.fail(
                f"epoch {old.epoch} ({old.state}) is followed by {new.epoch} ({new.state}), "
                f"history {[(entry.epoch, entry.state) for entry in new.history[-3:]]}"
            )

    def _renamed(self, old: BreakerRecord, new: BreakerRecord) -> None:
        name = self.values.get(self.facts.keys.store_id)
        known = None if name is None else self.decoded(StoreIdRecord, "", name).store_id
        same = msgspec.structs.replace(old, store_id=new.store_id, writer=new.writer)
        if new != same or new.store_id != known or self.facts.emptied_at_s < 0:
            self.fail(f"store {old.store_id!r} has become {new.store_id!r}")

    def _voted(self, process: Process, old: BreakerRecord, new: BreakerRecord) -> None:
        same = msgspec.structs.replace(new, votes=old.votes, reason=old.reason, writer=old.writer)
        if same != old or old.state != BreakerState.CLOSED.value:
            self.fail(f"{process.name} changes {old.state} in epoch {old.epoch} to {new}")
        if new.votes == old.votes:
            self.fail(f"{process.name} writes epoch {old.epoch} again and changes nothing")
        if len(set(new.votes)) != len(new.votes) or len(new.votes) > _MOST_VOTES:
            self.fail(f"{len(new.votes)} votes of {len(set(new.votes))} hosts: {new.votes}")

    def _moved(self, old: BreakerRecord, new: BreakerRecord) -> None:
        before, after = BreakerState(old.state), BreakerState(new.state)
        step = f"{old.state} → {new.state} in epoch {new.epoch}"
        rings = before in _PASSING and after not in _PASSING
        if new.generation != old.generation + rings:
            self.fail(f"{step}: generation {old.generation} is followed by {new.generation}")
        if new.votes:
            self.fail(f"{step}: votes of the epoch before are still there: {new.votes}")
        if bool(new.holder) != (after is BreakerState.HALF_OPEN):
            self.fail(f"{step}: the permit's holder is {new.holder!r}")
        expected = self._limits(old, new)
        seen = (new.limit, new.failures, new.open_s)
        if seen not in expected:
            self.fail(f"{step}: limit, failures, open_s are {seen}, may be {expected}")

    def _limits(self, old: BreakerRecord, new: BreakerRecord) -> tuple[tuple[float, ...], ...]:
        """Return what (limit, failures, open_s) may be after a transition."""
        config = self.scenario.breaker
        most, start = config.max_concurrent, config.ramp_start
        again = (0, 0, min(config.max_open_for_s, 2 * old.open_s))
        as_before, done = (0, 0, old.open_s), (most, 0, config.open_for_s)
        more, less, failures = 2 * old.limit, old.limit // 2, old.failures + 1
        fails = failures >= config.reopen_failures or less < start
        # What may follow, and whether it may.
        table: dict[tuple[str, str], list[tuple[tuple[float, ...], bool]]] = {
            ("closed", "open"): [((0, 0, config.open_for_s), True)],
            ("open", "half_open"): [(as_before, True)],
            ("half_open", "half_open"): [(as_before, True)],
            ("half_open", "open"): [(again, True), (as_before, True)],
            ("half_open", "recovering"): [((start, 0, old.open_s), start < most)],
            ("half_open", "closed"): [(done, start >= most)],
            ("recovering", "recovering"): [
                ((more, old.failures, old.open_s), more < most),
                ((less, failures, old.open_s), not fails),
            ],
            ("recovering", "closed"): [(done, more >= most)],
            ("recovering", "open"): [(again, fails)],
        }
        rows = table.get((old.state, new.state), [])
        return tuple(numbers for numbers, holds in rows if holds)


def _goes_on(old: BreakerRecord, new: BreakerRecord) -> bool:
    history = new.history
    return (
        bool(history)
        and (history[-1].epoch, history[-1].state) == (new.epoch, new.state)
        and history == (*old.history, history[-1])[-_REMEMBERED:]
    )


def _leads_to(seen: BreakerRecord, new: BreakerRecord) -> bool:
    state = "open" if seen.state == "half_open" else seen.state
    told = (new.state, new.generation, new.limit, new.failures, new.open_s)
    return (
        told == (state, seen.generation, seen.limit, seen.failures, seen.open_s)
        and _goes_on(seen, new)
        and not new.votes
        and not new.holder
    )
