# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ask the job's budget for a retry, and wait where it is denied.

The charge comes before the backoff, by compare-and-set, so that it is counted once whatever answers
are lost. Whoever is denied writes nothing, waits until a bucket ends, and asks again; the breaker
is read with the budget each time, because an open circuit makes the question void.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import budget as core
from lightning_resilience.core.events import RetryDenied
from lightning_resilience.core.records import BudgetRecord, decode, encode
from lightning_resilience.errors import BudgetExhaustedError
from lightning_resilience.protocols.circuit import accept
from lightning_resilience.protocols.effects import Draw, Emit, MultiGet, Nonce, Now, Sleep
from lightning_resilience.protocols.shared_cell import create, update


if TYPE_CHECKING:
    from lightning_resilience.core.budget import Ruling
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["charge"]


# Little against the backoff that follows.
_SPREAD_S: Final = 0.25


def charge(
    circuit: Circuit,
    *,
    operation: str,
    may_wait: bool,
    voice_s: float,
    deadline_at_s: float,
    spreads: bool = False,
) -> Protocol[bool]:
    """Charge one retry to the job, waiting for it where that is allowed.

    Args:
        circuit: What this process remembers of the breaker and its budget.
        operation: What is to be repeated, for the events.
        may_wait: Whether to wait where the budget denies.
        voice_s: Longest time between two events that say what is awaited, in seconds.
        deadline_at_s: When to give up, on this process's clock.
        spreads: Whether others have made this call at the same time, and ask for the same.

    Returns:
        True where the retry may be made; False where the deadline would pass before it may.

    Raises:
        BudgetExhaustedError: It is denied, and the policy is not to wait.
    """
    # Who was let in together fails together; those who came a moment later mostly find that the
    # circuit has opened, and need not be charged at all.
    if spreads:
        first_draw: float = yield Draw()
        yield Sleep(first_draw * _SPREAD_S)
    while True:
        ruling = yield from _ask(circuit)
        if ruling is None or ruling.granted:
            return True
        if not may_wait and ruling.wait_s > 0:
            raise _denied(circuit, ruling)
        # Over a whole bucket, or all who were denied would ask in the same instant.
        draw: float = yield Draw()
        wait_s = ruling.wait_s + draw * core.bucket_s(circuit.ledger.config)
        now_s: float = yield Now()
        if now_s + wait_s >= deadline_at_s:
            return False
        while wait_s > 0:
            yield Emit(_said(circuit, ruling, operation=operation, wait_s=wait_s))
            yield Sleep(min(wait_s, voice_s))
            wait_s -= voice_s


def _ask(circuit: Circuit) -> Protocol[Ruling | None]:
    """Return the ruling, or None where the circuit is not closed and nothing is charged."""
    ledger, key = circuit.ledger, circuit.budget_key
    sent_at_s: float = yield Now()
    values: list[bytes | None] = yield MultiGet((circuit.key, key))
    state, found = values
    if state is not None:
        # The next call need not ask again.
        view = yield from accept(circuit, state, sent_at_s=sent_at_s)
        if not core.is_charged(view.record):
            return None
    if found is None:
        origin: str = yield Nonce()
        found = (yield from create(key, encode(core.created(origin=origin)))).raw
    now_s: float = yield Now()
    unchanged_s, uncharged_s = ledger.note_record(decode(BudgetRecord, found, key=key), now_s=now_s)
    untold = ledger.take_untold(now_s=now_s)
    last: list[Ruling] = []

    def change(raw: bytes, writer: str) -> bytes | None:
        record = decode(BudgetRecord, raw, key=key)
        seen = raw == found
        ruling = core.rule(
            ledger.config,
            record,
            unchanged_s=unchanged_s if seen else 0.0,
            uncharged_s=uncharged_s if seen else 0.0,
            calls=untold.recent,
            writer=writer,
        )
        last[:] = [ruling]
        return None if ruling.record is record else encode(ruling.record)

    written = yield from update(key, found, change)
    ruling = last[0]
    if written.won:
        # What was written here is seen from here on, not only from the next time on.
        seen_at_s: float = yield Now()
        ledger.note_record(ruling.record, now_s=seen_at_s)
    if not (ruling.granted and written.won):
        ledger.put_back(untold)
    if ruling.granted and not written.won:
        # Others were faster every time, or the store came back empty. That is no denial: also who
        # is not to wait for the budget asks again.
        return replace(ruling, granted=False, wait_s=0.0)
    return ruling


def _said(circuit: Circuit, ruling: Ruling, *, operation: str, wait_s: float) -> RetryDenied:
    return RetryDenied(
        dependency=circuit.dependency,
        operation=operation,
        used=ruling.used,
        quota=ruling.quota,
        window_s=circuit.ledger.config.budget_window_s,
        next_try_in_s=wait_s,
    )


def _denied(circuit: Circuit, ruling: Ruling) -> BudgetExhaustedError:
    window_s = circuit.ledger.config.budget_window_s
    message = (
        f"The retry budget of {circuit.dependency} is exhausted: {ruling.used} of {ruling.quota} "
        f"retries of the whole job in {window_s:g} s were made, and the policy is not to wait. "
        "Look at why so many calls fail; if the dependency is well, raise retry_floor or "
        "retry_ratio."
    )
    return BudgetExhaustedError(
        message,
        dependency=circuit.dependency,
        used=ruling.used,
        quota=ruling.quota,
        window_s=window_s,
    )
