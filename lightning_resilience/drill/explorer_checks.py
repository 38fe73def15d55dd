# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What must hold after every step of an explored world, as seen from outside.

The checks look at bytes in the store and at what processes send, never into a protocol. What they
ask of a lease is not what the protocols compute, but what it is for: whoever takes over must have
read the same bytes over a whole lease of its own clock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import HISTORY_LENGTH, LEGAL, BreakerState
from lightning_resilience.core.records import BreakerRecord, FinalRecord, SlotRecord, decode
from lightning_resilience.drill.explored_process import History, Over
from lightning_resilience.protocols.admission import Permit


if TYPE_CHECKING:
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.drill.explorer import Check, EndCheck, State, Step


__all__ = [
    "all_learn_one_verdict",
    "breaker_is_sound",
    "circuit_is_known",
    "nobody_keeps_a_slot",
    "nobody_raised",
    "one_probe_a_claim",
    "slots_are_leases",
    "verdict_is_written_once",
]

_MANY: Final = 4096
_HALF_OPEN: Final = BreakerState.HALF_OPEN.value
_OPEN: Final = BreakerState.OPEN.value


@lru_cache(maxsize=_MANY)
def _breaker(raw: bytes) -> BreakerRecord:
    return decode(BreakerRecord, raw, key="breaker")


@lru_cache(maxsize=_MANY)
def _slot(raw: bytes) -> SlotRecord:
    return decode(SlotRecord, raw, key="slot")


def _wrote(step: Step, nonce: str) -> bool:
    """Tell whether a nonce is the actor's."""
    return nonce.startswith(f"{step.choice.who}.")


def _watched_s(step: Step, key: str) -> float:
    """For how long the actor has read at a key what was there before the step; below 0 if not."""
    if step.actor is None:
        return -1.0
    raw, since_s = step.actor.sights.get(key, (None, 0.0))
    return step.actor.clock_s - since_s if raw == step.before.values[key] else -1.0


# --- the breaker's record ------------------------------------------------------------------------


def breaker_is_sound(key: str, config: BreakerConfig) -> Check:
    """Return the check of a breaker's record.

    Epochs follow on each other, each transition is legal, none is forgotten (a lost update), a
    probe is claimed and taken over only when it is due by the claimant's own sight, and its result
    is applied by its own claim only.

    Args:
        key: The record's key.
        config: The breaker's configuration.
    """

    def check(step: Step) -> str:
        if step.before.values is step.after.values or step.actor is None:
            return ""
        raw_before, raw_after = step.before.values.get(key), step.after.values.get(key)
        if raw_before == raw_after or raw_before is None:
            return ""
        if raw_after is None:
            return "the breaker's record was deleted"
        before, after = _breaker(raw_before), _breaker(raw_after)
        if not _wrote(step, after.writer):
            return f"{step.choice.who} wrote a record with the nonce {after.writer!r}"
        if after.reason.startswith("rebuilt"):
            return _of_rebuilt(before, after)
        return _of_epochs(before, after) or _of_probe(step, key, before, after, config)

    return check


def _of_rebuilt(before: BreakerRecord, after: BreakerRecord) -> str:
    if after.epoch <= before.epoch:
        return f"a rebuilt record of epoch {after.epoch} replaced one of epoch {before.epoch}"
    return ""


def _of_epochs(before: BreakerRecord, after: BreakerRecord) -> str:
    if after.store_id != before.store_id:
        return f"the record's store changed from {before.store_id!r} to {after.store_id!r}"
    if after.epoch == before.epoch:
        if (after.state, after.holder) != (before.state, before.holder):
            return f"epoch {after.epoch} was {before.state} and is {after.state} of another holder"
        return "" if after.history == before.history else "the history changed without an epoch"
    if after.epoch != before.epoch + 1:
        return f"epoch {after.epoch} follows on epoch {before.epoch}"
    if (BreakerState(before.state), BreakerState(after.state)) not in LEGAL:
        return f"{after.state} follows on {before.state}"
    kept = before.history[-(HISTORY_LENGTH - 1) :]
    if after.history[:-1] != kept or after.history[-1].epoch != after.epoch:
        return f"a transition was forgotten: {after.history} follows on {before.history}"
    return ""


def _of_probe(
    step: Step, key: str, before: BreakerRecord, after: BreakerRecord, config: BreakerConfig
) -> str:
    who = step.choice.who
    if after.state == _HALF_OPEN:
        due_s = before.open_s if before.state == _OPEN else config.probe_lease_s
        watched_s = _watched_s(step, key)
        if after.epoch != before.epoch and watched_s < due_s:
            return f"{who} claimed the probe after {watched_s:g} s of {due_s:g} s"
    elif before.state == _HALF_OPEN and not _wrote(step, before.holder):
        return f"{who} applied a result to the claim of {before.holder}"
    return ""


def one_probe_a_claim(step: Step) -> str:
    """Check that no two processes have sent a probe for one claim, nor one of them twice."""
    if step.actor is None or step.before.lives != step.after.lives:
        return ""
    sent: dict[int, str] = {}
    for process in step.after.processes:
        for epoch in process.probes:
            if epoch in sent and not step.after.lives:
                return f"{sent[epoch]} and {process.name} both probed for the claim of epoch {epoch}"
            sent[epoch] = process.name
    return ""


def circuit_is_known(key: str) -> EndCheck:
    """Return the check that nobody who has ended knows a higher epoch than the store.

    Whoever has spoken to the store has seen to it that the record is there, and not of an epoch
    below one that it had seen before.

    Args:
        key: The record's key.
    """

    def check(state: State) -> str:
        raw = state.values.get(key)
        for process in state.processes:
            if not isinstance(process, Over) or process.how != "ended" or process.error:
                continue
            if not isinstance(process.result, int):
                continue
            if raw is None:
                return f"{process.name} has ended, and there is no record"
            if _breaker(raw).epoch < process.result:
                return (
                    f"{process.name} has seen epoch {process.result}, and the record is of epoch "
                    f"{_breaker(raw).epoch}"
                )
        return ""

    return check


# --- slots ---------------------------------------------------------------------------------------


def slots_are_leases(keys: tuple[str, ...], *, lease_s: float) -> Check:
    """Return the check of slots.

    No two processes hold one slot by one claim; whoever holds a slot is in it, or was taken for
    dead; and a held slot is changed by its holder, or by whoever has watched it for a lease and
    makes it its own, and by nobody else.

    Args:
        keys: The slots' keys.
        lease_s: The lease, in seconds.
    """

    def check(step: Step) -> str:
        said = _of_holders(step.after)
        if said or step.before.values is step.after.values or step.actor is None:
            return said
        for key in keys:
            raw_before, raw_after = step.before.values.get(key), step.after.values.get(key)
            if raw_before == raw_after or raw_before is None:
                continue
            if raw_after is None:
                return f"{key} was deleted"
            said = _of_slot(step, key, _slot(raw_before), _slot(raw_after), lease_s=lease_s)
            if said:
                return said
        return ""

    return check


def _of_holders(state: State) -> str:
    held: dict[str, str] = {}
    for _, process in state.alive():
        if process.call is None or not isinstance(process.call.renewal, Permit):
            continue
        holder = process.call.renewal.record.holder
        if holder in held:
            return f"{held[holder]} and {process.name} hold one slot by the claim {holder!r}"
        held[holder] = process.name
    return ""


def _of_slot(
    step: Step, key: str, before: SlotRecord, after: SlotRecord, *, lease_s: float
) -> str:
    who = step.choice.who
    if not _wrote(step, after.writer):
        return f"{who} wrote a slot with the nonce {after.writer!r}"
    if after.turn < before.turn:
        return f"{who} set the turn back from {before.turn} to {after.turn}"
    if not before.holder or _wrote(step, before.holder):
        return ""
    if not after.holder:
        return f"{who} freed the slot of {before.holder}"
    watched_s = _watched_s(step, key)
    if watched_s < lease_s:
        return f"{who} took the slot of {before.holder} after {watched_s:g} s of {lease_s:g} s"
    return ""


def nobody_keeps_a_slot(keys: tuple[str, ...], *, faults: int) -> EndCheck:
    """Return the check that a slot is left by whoever was in it, where nothing went wrong.

    Args:
        keys: The slots' keys.
        faults: Faults that a sequence may have.
    """

    def check(state: State) -> str:
        for key in keys:
            raw = state.values.get(key)
            holder = _slot(raw).holder if raw else ""
            if holder and state.faults == faults:
                return f"nothing went wrong, and {holder} is in {key} for ever"
        return ""

    return check


# --- verdicts ------------------------------------------------------------------------------------


def verdict_is_written_once(key: str) -> Check:
    """Return the check that a verdict never changes, and that nobody returns another one.

    Args:
        key: The verdict's key.
    """

    def check(step: Step) -> str:
        before, after = step.before.values.get(key), step.after.values.get(key)
        if before is not None and before != after:
            return f"{step.choice.who} changed the verdict from {before!r} to {after!r}"
        for process in step.after.processes:
            if isinstance(process, Over) and isinstance(process.result, FinalRecord):
                if after is None or decode(FinalRecord, after, key=key) != process.result:
                    return f"{process.name} returned {process.result}, the store says {after!r}"
        return ""

    return check


def all_learn_one_verdict(state: State) -> str:
    """Check that everybody who lives has learnt the verdict."""
    for process in state.processes:
        if isinstance(process, Over) and process.how == "ended":
            if not isinstance(process.result, FinalRecord):
                return f"{process.name} has not learnt the verdict: {process.error}"
    return ""


def nobody_raised(state: State) -> str:
    """Check that everybody who lives got through, where the store has always answered."""
    for process in state.processes:
        if isinstance(process, Over) and process.error:
            return f"{process.name} did not get through: {process.error}"
    return ""
