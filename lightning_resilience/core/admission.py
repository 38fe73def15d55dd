# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How many may call at once: slots that are leases, and hints for when to come back.

A dependency has ``max_concurrent`` slots, each a cell in the shared store. Whoever wants in changes
a free cell into its own by compare-and-set, and back when it is done. So the number of calls in
flight is bounded by the number of cells, whatever answers are lost; a counter that is added to and
taken from loses permits with each answer that does.

::

             claim: from exactly the free bytes, or from bytes that have not changed for a lease
     free ────────────────────────────────────────────────────────────────▶ held by a nonce
       ▲                                                                         │  ▲
       │                                                                         └──┘ beat: a new
       └──────────── release: from exactly my own bytes ◀───────────────────────      writer nonce

* **A slot is a lease.** Its holder beats while its call runs; one that was watched unchanged for
  ``slot_lease_s`` is *forgiven*: somebody else takes the slot. A holder that was only stopped finds
  other bytes when it comes back, and changes nothing. Time in which the store did not answer is not
  watched: nobody could beat in it.
* **The limit says which slots are usable**: those below it. Lowering it (the ramp, a trip) takes no
  slot away from anybody, it only lets nobody else in.
* **Tickets are hints.** A ticket says when to come, never who may (``core.line``): a free slot is
  taken by whoever claims it. A ticket whose owner gave up or died is passed over once a quarter of
  the slots have let in later ones.
* **The slots show an outage.** A freed cell also says how its call ended. Where the latest call in
  every slot but one in eight has failed, a host votes after one failure of its own, so that the
  requests that it takes to open the circuit do not grow with the number of ranks.
* **The pace is measured.** A freed cell says how long its call took, and those who wait take the
  median of all cells for it.

Collective operations (every rank at the same time) always pass here, also while the circuit is
closed: of N ranks in lock-step, N would otherwise be in flight before any of them could fail. A
single caller passes here only while the circuit recovers.

Sources: the same bound is a semaphore's; slots instead of a count, and the lease on each, because
holders die (J. Gray, D. Cheriton, "Leases", SOSP 1989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import BreakerState, passes
from lightning_resilience.core.lease import (
    CLOCK_RATE_FACTOR,
    Silence,
    listen,
)
from lightning_resilience.core.line import LOOKS_PER_LEASE
from lightning_resilience.core.slots import Slot
from lightning_resilience.core.validation import check_less, check_seconds, option


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_resilience.core.records import BreakerRecord


__all__ = [
    "AdmissionConfig",
    "Slot",
    "choose",
    "heard",
    "lines_up_first",
    "needs_slot",
    "passes_freely",
    "spreads",
    "waits_for_slot",
]

# A beat may be sent late and answered late: two of them must fit into the lease, on any clock.
_BEATS_PER_LEASE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """How long a slot is kept for a holder that says nothing.

    The number of slots is ``max_concurrent`` of the breaker's configuration, where the ramp ends.

    Args:
        slot_lease_s: Silence after which a slot's holder is taken for dead, in seconds, > 0.
        beat_every_s: How often a holder shows that it lives, in seconds, > 0.

    Raises:
        ConfigError: An option is out of range or contradicts the other.
    """

    slot_lease_s: float = option(30.0, why="beats renew long calls")
    beat_every_s: float = option(5.0, why="1.5 · 2 · `beat_every_s` < `slot_lease_s`")

    def __post_init__(self) -> None:
        check_seconds("slot_lease_s", self.slot_lease_s)
        check_seconds("beat_every_s", self.beat_every_s)
        factor = CLOCK_RATE_FACTOR * _BEATS_PER_LEASE
        check_less(
            (f"{factor:g} · (beat_every_s={self.beat_every_s:g})", factor * self.beat_every_s),
            ("slot_lease_s", self.slot_lease_s),
            why="a holder whose beat is late once would be taken for dead",
        )


def needs_slot(record: BreakerRecord, *, collective: bool) -> bool:
    """Tell whether a call has to pass admission.

    Args:
        record: The breaker's record, which lets calls through.
        collective: Whether every rank makes this call at the same time.
    """
    return collective or record.state != BreakerState.CLOSED.value


def passes_freely(record: BreakerRecord, *, collective: bool) -> bool:
    """Tell whether a call may be made without a slot, and without another look.

    Args:
        record: The breaker's record as it was seen last.
        collective: Whether every rank makes this call at the same time.
    """
    return passes(record) and not needs_slot(record, collective=collective)


def waits_for_slot(record: BreakerRecord | None, *, collective: bool, when_open: str) -> bool:
    """Tell whether a call waits where all slots are taken.

    A slot is a place in a queue, and also a caller that does not wait for an ill dependency waits
    there, while the circuit is closed. A collective call waits while it recovers as well: where all
    but the first were refused, all would fail for the one that was let in.

    Args:
        record: The breaker's record as it was seen last, or None.
        collective: Whether every rank makes this call at the same time.
        when_open: ``wait`` or ``raise``.
    """
    closed = record is not None and record.state == BreakerState.CLOSED.value
    return collective or closed or when_open == "wait"


def spreads(record: BreakerRecord, *, collective: bool, when_open: str) -> bool:
    """Tell whether a caller that has waited for the circuit comes back over a spread of time.

    Those who need a slot come by their distance instead.
    """
    return when_open == "wait" and not needs_slot(record, collective=collective)


def lines_up_first(record: BreakerRecord | None, *, may_wait: bool) -> bool:
    """Tell whether a caller draws a ticket before it looks for a free slot.

    While the circuit recovers: then everybody comes at once. Not who cannot wait: its ticket would
    stand in line for nobody, and where all callers are such, none would ever be let in.

    Args:
        record: The breaker's record as it was seen last, or None.
        may_wait: Whether the caller has time to wait.
    """
    return may_wait and record is not None and record.state == BreakerState.RECOVERING.value


def heard(
    silences: Mapping[int, Silence],
    slots: Sequence[Slot],
    *,
    sent_at_s: float,
    seen_at_s: float,
    away_s: float,
    lease_s: float,
) -> dict[int, Silence]:
    """Note for how long each slot has not changed, as this process has watched.

    It is the process that watches, not the call: a caller that does not wait sees a dead holder
    too, with the eyes of those that it made before.

    Args:
        silences: What was known before this look.
        slots: All slots as they were read.
        sent_at_s: When the read was sent, on this process's clock.
        seen_at_s: When it was answered.
        away_s: For how long the caller meant to look away before this look, in seconds; 0 for the
            first of a call.
        lease_s: Lease of a slot, in seconds.
    """
    # Half a lease at most: one look away, in which the store may have been away as well, must not
    # be a whole lease of silence.
    longest_gap_s = max(min(away_s, lease_s / 2), lease_s / LOOKS_PER_LEASE)
    return {
        slot.index: listen(
            silences.get(slot.index),
            _version(slot),
            sent_at_s=sent_at_s,
            seen_at_s=seen_at_s,
            longest_gap_s=longest_gap_s,
        )
        for slot in slots
    }


def _version(slot: Slot) -> tuple[str, ...]:
    return (slot.raw.decode(),)


def _is_silent(slot: Slot, silence: Silence | None, *, lease_s: float) -> bool:
    return (
        silence is not None and silence.version == _version(slot) and silence.watched_s >= lease_s
    )


def choose(
    slots: Sequence[Slot],
    *,
    limit: int,
    silences: Mapping[int, Silence],
    lease_s: float,
    draw: float,
) -> Slot | None:
    """Choose a slot to claim: a free one, else one whose holder was silent for too long.

    Args:
        slots: All slots as they were read, in the order of their numbers.
        limit: Slots below this number may be used.
        silences: For how long each slot has not changed, as this process has watched. That of other
            bytes than were read says nothing: threads share what they watch, and one may have
            noted an older look after a newer one.
        lease_s: Silence after which a holder is taken for dead, in seconds.
        draw: A uniform number in [0, 1): which of several, so that waiters who come together do not
            all want the same.

    Returns:
        The slot, or None where no usable one is to be had.
    """
    usable = slots[:limit]
    chosen = [slot for slot in usable if slot.is_free] or [
        slot for slot in usable if _is_silent(slot, silences.get(slot.index), lease_s=lease_s)
    ]
    return chosen[int(draw * len(chosen))] if chosen else None
