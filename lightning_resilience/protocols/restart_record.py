# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The record of a job's restarts: read, changed by compare-and-set, and mirrored.

``core.quota`` has what it means. It has to outlive the store that it is in: each agent remembers
what it has seen, and writes that again where the store came back with less; and after each change,
whoever made it has it written to shared storage too, where a place was named, for the next launcher
of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from lightning_resilience.core import lease, quota
from lightning_resilience.core.events import RestartsNotKept
from lightning_resilience.core.evidence import one_line
from lightning_resilience.core.incident import is_stop
from lightning_resilience.core.leaving import Apart, is_theirs
from lightning_resilience.core.quota import RestartRecord, Ruling
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import Call, Emit, Get, Nonce, Now
from lightning_resilience.protocols.incarnation import present
from lightning_resilience.protocols.shared_cell import create, update


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.core.lease import Sighting
    from lightning_resilience.core.quota import Closed, Ending
    from lightning_resilience.core.restart import GoRecord
    from lightning_resilience.core.restart_config import RestartConfig
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Memory", "Mirror", "charge", "end", "find", "kept", "look", "read", "release", "start"]

_ROUNDS: Final = 4
"""Each loses to a store that came back empty, or to a dozen other agents in a row."""

_Rule: TypeAlias = Callable[[RestartRecord, float, str], Ruling]
_Unless: TypeAlias = "Callable[[], Protocol[bool]]"


class Mirror:
    """Where the record is kept besides the store.

    Args:
        load: Returns what is there, None where nothing is; may raise.
        save: Writes it; may raise.
        timeout_s: How long each may take, in seconds.
        is_needed: Whether either raises what it raised: a person who asks wants to know. False by
            default: a job is not held up by it.
    """

    def __init__(
        self,
        load: Callable[[CancelToken], RestartRecord | None],
        save: Callable[[RestartRecord, CancelToken], None],
        *,
        timeout_s: float,
        is_needed: bool = False,
    ) -> None:
        self._load = load
        self._save = save
        self._timeout_s = timeout_s
        self._is_needed = is_needed

    def loaded(self) -> Protocol[RestartRecord | None]:
        """Return what is there; None also where that cannot be told, unless it is needed."""
        try:
            found: RestartRecord | None = yield Call(self._load, timeout_s=self._timeout_s)
        except Exception as error:
            # Torch's launcher raises an ``Exception`` where it is told to stop.
            if is_stop(error) or self._is_needed:
                raise
            # The store's own record stands without it.
            yield Emit(RestartsNotKept(error=one_line(error)))
            return None
        return found

    def saved(self, record: RestartRecord) -> Protocol[None]:
        """Write it; one that cannot be is written with the next change, unless it is needed."""
        try:
            yield Call(partial(self._save, record), timeout_s=self._timeout_s)
        except Exception as error:
            # As above.
            if is_stop(error) or self._is_needed:
                raise
            yield Emit(RestartsNotKept(error=one_line(error)))


class Memory:
    """What one agent remembers of the record. One thread.

    Args:
        keys: Names of the keys of this run.
        mirror: Where the record is kept besides; None for nowhere.

    Attributes:
        seen: The latest record; None before the first look.
        sighting: Since when this agent has seen exactly that.
        answered_at_s: When the store has answered last, on this agent's clock.
    """

    __slots__ = ("_came", "_go", "answered_at_s", "keys", "mirror", "seen", "sighting")

    def __init__(self, keys: Keys, *, mirror: Mirror | None = None) -> None:
        self.keys = keys
        self.mirror = mirror
        self.seen: RestartRecord | None = None
        self.sighting: Sighting | None = None
        self.answered_at_s = float("-inf")
        self._go: Sighting | None = None
        self._came: Sighting | None = None

    def followed_by(self, keys: Keys, *, mirror: Mirror | None = None) -> Memory:
        """Return what the same agent remembers where other keys count: of the next start."""
        following = Memory(keys, mirror=mirror)
        following.seen, following.sighting = self.seen, self.sighting
        following.answered_at_s, following._go = self.answered_at_s, self._go
        following._came = self._came
        return following

    def came_at_s(self, *, now_s: float) -> float:
        """Return when this agent came to the gate first, after this start of the workers.

        An incident has one deadline: an agent that comes to the gate once more, because the store
        has failed or others have not come, does not get a new one.
        """
        self._came = lease.observe(self._came, (self.keys.incarnation,), now_s=now_s)
        return self._came.first_seen_at_s

    def rest_s(self, go: GoRecord, *, now_s: float) -> float:
        """Return what is left of the delay that was agreed, from when this agent has first seen it.

        An agent that comes to the gate once more, because the store has failed, does not wait anew.
        """
        self._go = lease.observe(self._go, (self.keys.incarnation, go.writer), now_s=now_s)
        return max(0.0, self._go.first_seen_at_s + go.delay_s - now_s)

    def note(self, record: RestartRecord, *, now_s: float) -> float:
        """Take note of what is there; return for how long this agent has seen that, in seconds."""
        self.seen, self.answered_at_s = record, now_s
        self.sighting = lease.observe(self.sighting, (record.epoch, record.writer), now_s=now_s)
        return now_s - self.sighting.first_seen_at_s


def read(memory: Memory) -> Protocol[RestartRecord]:
    """Return the record; make it where there is none, and complete it where it knows less.

    Raises:
        StoreUnavailableError: The store did not answer.
        CorruptRecordError: The record does not decode.
    """
    raw: bytes | None = yield Get(memory.keys.restarts)
    return (yield from look(memory, raw))


def look(memory: Memory, raw: bytes | None) -> Protocol[RestartRecord]:
    """Take note of what a read of the record has shown; see ``read``."""
    key = memory.keys.restarts
    if raw is None:
        raw = (yield from create(key, encode((yield from _known(memory))))).raw
    seen = memory.seen

    def change(found: bytes, writer: str) -> bytes | None:
        there = decode(RestartRecord, found, key=key)
        if seen is None or not quota.outranks(seen, there):
            return None
        return encode(quota.rebuilt(seen, writer=writer, over=there))

    raw = (yield from update(key, raw, change)).raw or raw
    record = decode(RestartRecord, raw, key=key)
    now_s: float = yield Now()
    memory.note(record, now_s=now_s)
    return record


def _known(memory: Memory) -> Protocol[RestartRecord]:
    """Return what is known of restarts where the store knows nothing."""
    writer: str = yield Nonce()
    known = memory.seen
    if known is None and memory.mirror is not None:
        kept = yield from memory.mirror.loaded()
        known = None if kept is None else quota.carried_over(kept)
    return quota.created(writer=writer) if known is None else quota.rebuilt(known, writer=writer)


def charge(
    memory: Memory, config: RestartConfig, closed: Closed, *, is_joined: bool = False
) -> Protocol[Ruling]:
    """Count the end of an incarnation, once for the job.

    Args:
        memory: What this agent remembers.
        config: The quotas.
        closed: What has ended, and why.
        is_joined: Whether agents have joined again already, and it shows only now that it costs
            something: a loss of nodes, which progress does not clear.

    Returns:
        What follows, also where another agent has counted it.

    Note:
        What progress has cleared is in the record no more. So an agent that stood still in between
        looks, after it has read the record, whether agents may join already: then the incident was
        counted, and if not, nobody has changed the record since it was counted.
    """

    def rule(record: RestartRecord, unchanged_s: float, writer: str) -> Ruling:
        return quota.charge(config, record, closed, unchanged_s=unchanged_s, writer=writer)

    unless = None if is_joined else partial(_is_agreed, memory)
    return (yield from _change(memory, rule, unless=unless))


def _is_agreed(memory: Memory) -> Protocol[bool]:
    raw: bytes | None = yield Get(memory.keys.joint("go", 0))
    return raw is not None


def start(memory: Memory) -> Protocol[Ending | None]:
    """Read the record as an agent that begins; return how the job has ended, if that still holds.

    Raises:
        StoreUnavailableError: The store did not answer.
    """

    def rule(record: RestartRecord, unchanged_s: float, writer: str) -> Ruling:
        del unchanged_s
        return quota.Ruling(record=quota.started_again(record, writer=writer), number=0)

    return (yield from _change(memory, rule)).ending


def kept(mirror: Mirror | None) -> Protocol[Ending | None]:
    """Return how a job has ended that a person has to release, as it is kept besides the store.

    For an agent that finds no store: the one that hosts it has left with that, and before this one
    came. None also where nothing is kept, or nobody can tell.

    Args:
        mirror: Where the record is kept; None for nowhere.
    """
    found = None if mirror is None else (yield from mirror.loaded())
    return None if found is None else quota.carried_over(found).ending


def find(memory: Memory) -> Protocol[RestartRecord | None]:
    """Return the record as a new start of the job would find it; None where there is none.

    For a person who looks: nothing is written, neither in the store nor besides.

    Raises:
        StoreUnavailableError: The store did not answer.
        CorruptRecordError: The record does not decode.
    """
    key = memory.keys.restarts
    raw: bytes | None = yield Get(key)
    if raw is not None:
        return decode(RestartRecord, raw, key=key)
    found = None if memory.mirror is None else (yield from memory.mirror.loaded())
    return None if found is None else quota.carried_over(found)


def release(memory: Memory) -> Protocol[RestartRecord | None]:
    """Let the job start again, with all quotas refilled. For a person only.

    What is kept on shared storage is looked at first where the store knows nothing, and is written
    in any case.

    Returns:
        The record after it; None where there is none, and then nothing is written: no job has that
        name, or it was never there.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    if (yield from find(memory)) is None:
        return None
    if memory.mirror is not None:
        kept = yield from memory.mirror.loaded()
        if kept is not None:
            memory.seen = kept

    def rule(record: RestartRecord, unchanged_s: float, writer: str) -> Ruling:
        del unchanged_s
        return quota.Ruling(record=quota.released(record, writer=writer), number=0)

    return (yield from _change(memory, rule)).record


def end(memory: Memory, ending: Ending) -> Protocol[Ending | Apart]:
    """Say how the job has ended, as an agent that had part in its present start.

    Args:
        memory: What this agent remembers; its keys are of the start that it had part in last.
        ending: How the job has ended, as far as this agent knows.

    Returns:
        How it has ended, maybe by another agent's word; what to leave with where it has not, since
        others train in a start without this agent.

    Raises:
        StoreUnavailableError: The store did not answer.
    """

    def rule(record: RestartRecord, unchanged_s: float, writer: str) -> Ruling:
        del unchanged_s
        return quota.Ruling(record=quota.ended(record, ending, writer=writer), number=0)

    ruling = yield from _change(memory, rule, unless=partial(_is_not_ours, memory))
    return ruling.ending or Apart(ending=ending)


def _is_not_ours(memory: Memory) -> Protocol[bool]:
    there = yield from present(memory.keys)
    return is_theirs(there, own=memory.keys.incarnation)


def _change(memory: Memory, rule: _Rule, *, unless: _Unless | None = None) -> Protocol[Ruling]:
    for _ in range(_ROUNDS):
        ruling = yield from _try(memory, rule, unless=unless)
        if ruling is not None:
            return ruling
    message = (
        f"{memory.keys.restarts} could not be changed: other agents were faster, or the store came "
        f"back empty, {_ROUNDS} times in a row."
    )
    raise StoreUnavailableError(message)


def _try(memory: Memory, rule: _Rule, *, unless: _Unless | None) -> Protocol[Ruling | None]:
    """Return the ruling that holds now; None where it has to be made anew."""
    record = yield from read(memory)
    # Order: after the record, whose very bytes are then what may be changed.
    if unless is not None and (yield from unless()):
        return quota.Ruling(record=record, number=quota.failures(record))
    key = memory.keys.restarts
    now_s: float = yield Now()
    unchanged_s = memory.note(record, now_s=now_s)
    last: list[tuple[Ruling, bool]] = []

    def change(raw: bytes, writer: str) -> bytes | None:
        there = decode(RestartRecord, raw, key=key)
        if unless is not None and there != record:
            last.clear()
            return None
        # What another agent has written meanwhile is no older than that.
        ruling = rule(there, unchanged_s if there == record else 0.0, writer)
        last[:] = [(ruling, ruling.record is there)]
        return None if ruling.record is there else encode(ruling.record)

    written = yield from update(key, encode(record), change)
    if not last or not (written.won or last[0][1]):
        return None
    ruling = last[0][0]
    seen_at_s: float = yield Now()
    memory.note(ruling.record, now_s=seen_at_s)
    if written.won and memory.mirror is not None:
        yield from memory.mirror.saved(ruling.record)
    return ruling
