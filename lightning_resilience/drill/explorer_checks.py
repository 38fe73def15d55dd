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
from lightning_resilience.protocols.effects import Delete, Set
from lightning_resilience.protocols.permit import Permit


if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.drill.explored_world import Check, EndCheck, State, Step


__all__ = [
    "all_learn_one_verdict",
    "breaker_is_sound",
    "circuit_is_known",
    "nobody_keeps_a_slot",
    "one_probe_a_claim",
    "slots_are_leases",
    "verdict_is_written_once",
    "writers_sign",
]

_MANY: Final = 4096
# A lease is a sum of waits.
_ROUNDING_S: Final = 1e-6
_HALF_OPEN: Final = BreakerState.HALF_OPEN.value
_OPEN: Final = BreakerState.OPEN.value


@lru_cache(maxsize=_MANY)
def _breaker(raw: bytes) -> BreakerRecord:
    return decode(BreakerRecord, raw, key="breaker")


@lru_cache(maxsize=_MANY)
def _slot(raw: bytes) -> SlotRecord:
    return decode(SlotRecord, raw, key="slot")


@lru_cache(maxsize=_MANY)
def _verdict(raw: bytes) -> FinalRecord:
    return decode(FinalRecord, raw, key="final")


def _wrote(step: Step, nonce: str) -> bool:
    """Tell whether a nonce is the actor's."""
    return nonce.startswith(f"{step.choice.who}.")


def _actor_after(step: Step) -> History | Over:
    """What the actor is after the step."""
    return next(process for process in step.after.processes if process.name == step.choice.who)


def _watched_s(step: Step, key: str) -> float:
    """For how long the actor has read at a key what was there before the step; below 0 if not."""
    if step.actor is None:
        return -1.0
    raw, since_s = step.actor.sights.get(key, (None, 0.0))
    return step.actor.clock_s - since_s if raw == step.before.values[key] else -1.0


def writers_sign(keys: tuple[str, ...]) -> Check:
    """Return the check that every record that is written carries a nonce of its writer's.

    Args:
        keys: Keys of breakers' records and of slots.
    """

    def check(step: Step) -> str:
        if step.before.values is step.after.values or step.actor is None:
            return ""
        for key in keys:
            raw = step.after.values.get(key)
            if raw is None or raw == step.before.values.get(key):
                continue
            writer = _slot(raw).writer if "/slot/" in key else _breaker(raw).writer
            if not _wrote(step, writer):
                return f"{step.choice.who} wrote {key} with the nonce {writer!r}"
        return ""

    return check


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
        if after.reason.startswith("rebuilt"):
            return _of_rebuilt(before, after)
        if after.epoch == before.epoch:
            return _of_one_epoch(before, after)
        return _of_epochs(before, after) or _of_probe(
            step, before=before, after=after, key=key, config=config
        )

    return check


def _of_rebuilt(before: BreakerRecord, after: BreakerRecord) -> str:
    if after.epoch <= before.epoch:
        return f"a rebuilt record of epoch {after.epoch} replaced one of epoch {before.epoch}"
    return ""


def _of_one_epoch(before: BreakerRecord, after: BreakerRecord) -> str:
    if (after.store_id, after.state, after.holder) != (
        before.store_id,
        before.state,
        before.holder,
    ):
        return f"epoch {after.epoch} was {before.state}, and is {after.state} of {after.holder!r}"
    return "" if after.history == before.history else "the history changed within an epoch"


def _of_epochs(before: BreakerRecord, after: BreakerRecord) -> str:
    if after.store_id != before.store_id:
        return f"the record's store changed from {before.store_id!r} to {after.store_id!r}"
    if after.epoch != before.epoch + 1:
        return f"epoch {after.epoch} follows on epoch {before.epoch}"
    if (BreakerState(before.state), BreakerState(after.state)) not in LEGAL:
        return f"{after.state} follows on {before.state}"
    kept = before.history[-(HISTORY_LENGTH - 1) :]
    if after.history[:-1] != kept or after.history[-1].epoch != after.epoch:
        return f"a transition was forgotten: {after.history} follows on {before.history}"
    return ""


def _of_probe(
    step: Step, *, before: BreakerRecord, after: BreakerRecord, key: str, config: BreakerConfig
) -> str:
    who = step.choice.who
    if after.state == _HALF_OPEN:
        due_s = before.open_s if before.state == _OPEN else config.probe_lease_s
        watched_s = _watched_s(step, key)
        if watched_s < due_s - _ROUNDING_S:
            return f"{who} claimed the probe after {watched_s:g} s of {due_s:g} s"
    elif before.state == _HALF_OPEN and not _wrote(step, before.holder):
        return f"{who} applied a result to the claim of {before.holder}"
    return ""


def one_probe_a_claim(key: str) -> Check:
    """Return the check that a probe is sent by its claim alone.

    Whoever sends one has its claim in the store at that moment; and no claim of one store has two
    probes.

    Args:
        key: The record's key.
    """

    def check(step: Step) -> str:
        if step.actor is None:
            return ""
        now = _actor_after(step)
        if len(now.probes) == len(step.actor.probes):
            return ""
        epoch, raw = now.probes[-1], step.after.values.get(key)
        if raw is None or not _wrote(step, _breaker(raw).holder):
            return f"{now.name} probes for epoch {epoch}, and its claim is not in the store"
        for process in step.before.processes:
            if epoch in process.probes and not step.after.lives:
                return f"{now.name} probes for epoch {epoch}, and {process.name} has done so"
        return ""

    return check


def circuit_is_known(key: str, *, known: Mapping[str, int] | None = None) -> Check:
    """Return the check that nobody ends knowing a higher epoch than the store.

    Whoever has looked at the record has seen to it that it is there, and that it is not of an epoch
    below one that was there before. One that rings a bell last of all has not looked since.

    Args:
        key: The record's key.
        known: For each process the epoch that it knew before the scene began; None where all begin
            without.
    """
    before = known or {}

    def check(step: Step) -> str:
        if step.actor is None or isinstance(step.actor.pending, (Set, Delete)):
            return ""
        now = _actor_after(step)
        if not isinstance(now, Over) or now.how != "ended" or now.error:
            return ""
        raw = step.after.values.get(key)
        if raw is None:
            return f"{now.name} has looked, and there is no record"
        epoch = _breaker(raw).epoch
        seen = max(before.get(now.name, 0), _highest_epoch(step.actor, key))
        if epoch < seen:
            return f"{now.name} has seen epoch {seen} and looked again, and now it is {epoch}"
        return ""

    return check


def _highest_epoch(process: History, key: str) -> int:
    node: History | None = process
    highest = 0
    while node is not None:
        raw, _ = node.sights.get(key, (None, 0.0))
        if raw is not None:
            highest = max(highest, _breaker(raw).epoch)
        node = node.parent
    return highest


# --- slots ---------------------------------------------------------------------------------------


def slots_are_leases(keys: tuple[str, ...], *, lease_s: float) -> Check:
    """Return the check of slots.

    Whoever begins a call is in its slot in the store, by a claim that nobody else has; and a held
    slot is changed by its holder, or by whoever has watched it for a lease and makes it its own,
    and by nobody else. So no more are in flight than there are slots, but for those that were taken
    for dead.

    Args:
        keys: The slots' keys.
        lease_s: The lease, in seconds.
    """

    def check(step: Step) -> str:
        if step.actor is None:
            return ""
        said = _of_entry(step)
        if said or step.before.values is step.after.values:
            return said
        for key in keys:
            raw_before, raw_after = step.before.values.get(key), step.after.values.get(key)
            if raw_before == raw_after or raw_before is None:
                continue
            if raw_after is None:
                return f"{key} was deleted"
            said = _of_slot(
                step,
                key=key,
                before=_slot(raw_before),
                after=_slot(raw_after),
                lease_s=lease_s,
            )
            if said:
                return said
        return ""

    return check


def _permit(process: History | Over) -> Permit | None:
    """The permit by which a process calls, if it does."""
    if isinstance(process, Over) or process.call is None:
        return None
    renewal = process.call.renewal
    return renewal if isinstance(renewal, Permit) else None


def _of_entry(step: Step) -> str:
    now = _actor_after(step)
    permit = _permit(now)
    if permit is None or step.actor is None or _permit(step.actor) is not None:
        return ""
    raw, holder = step.after.values.get(permit.key), permit.record.holder
    if raw is None or _slot(raw).holder != holder:
        return f"{now.name} calls by the claim {holder!r}, and {permit.key} holds {raw!r}"
    for other in step.before.processes:
        theirs = _permit(other)
        if theirs is not None and theirs.record.holder == holder:
            return f"{now.name} calls by the claim {holder!r}, and so does {other.name}"
    return ""


def _of_slot(step: Step, *, key: str, before: SlotRecord, after: SlotRecord, lease_s: float) -> str:
    who = step.choice.who
    if before.holder and not _wrote(step, before.holder):
        if not after.holder:
            return f"{who} freed the slot of {before.holder}"
        watched_s = _watched_s(step, key)
        if watched_s < lease_s - _ROUNDING_S:
            return f"{who} took the slot of {before.holder} after {watched_s:g} s of {lease_s:g} s"
    return ""


def nobody_keeps_a_slot(keys: tuple[str, ...]) -> EndCheck:
    """Return the check that whoever has ended well has left its slot, whatever went wrong.

    Args:
        keys: The slots' keys.
    """

    def check(state: State) -> str:
        ended = {
            process.name
            for process in state.processes
            if isinstance(process, Over) and process.how == "ended" and not process.error
        }
        for key in keys:
            raw = state.values.get(key)
            holder = _slot(raw).holder if raw else ""
            if holder.partition(".")[0] in ended:
                return f"{holder} has ended, and is in {key} for ever"
        return ""

    return check


# --- verdicts ------------------------------------------------------------------------------------


def verdict_is_written_once(key: str, *, arrived: tuple[str, ...]) -> Check:
    """Return the check that a verdict never changes, and that nobody returns another one.

    What lies there before is an open ballot. Where the store has lost a verdict, those who return
    one at all still return the same. A success is only where all have come.

    Args:
        key: The verdict's key.
        arrived: Keys of all ranks, where each writes the operation's number, 1.
    """

    def check(step: Step) -> str:
        raw_before, raw_after = step.before.values.get(key), step.after.values.get(key)
        before = None if raw_before is None else _verdict(raw_before)
        after = None if raw_after is None else _verdict(raw_after)
        is_decided = before is not None and not before.is_open
        if is_decided and raw_before != raw_after and step.actor is not None:
            return f"{step.choice.who} changed the verdict from {before} to {after}"
        if raw_before != raw_after and after is not None and not (after.is_open or after.failure):
            absent = [name for name in arrived if step.after.values.get(name) != b"1"]
            if absent:
                return f"{step.choice.who} told a success without {absent}"
        returned = [
            (process.name, process.result)
            for process in step.after.processes
            if isinstance(process, Over) and isinstance(process.result, FinalRecord)
        ]
        for name, result in returned:
            if result.is_open or result != returned[0][1]:
                return f"{name} returned {result}, and {returned[0][0]} {returned[0][1]}"
            if not step.after.lives and result != after:
                return f"{name} returned {result}, and the store says {after}"
        return ""

    return check


def all_learn_one_verdict(state: State) -> str:
    """Check that everybody who lives has learnt the verdict."""
    for process in state.processes:
        ended = isinstance(process, Over) and process.how == "ended"
        if ended and not isinstance(process.result, FinalRecord):
            return f"{process.name} has not learnt the verdict"
    return ""
