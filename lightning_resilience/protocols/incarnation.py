# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A start of the workers gets its name, and ends with what all agents have read of it.

::

    a round of the rendezvous is complete
        node 0      announces it, then names it, write-once, in the round's own store
        the others  read that
    a node is missed instead
        whoever has waited for long enough gives the round up, write-once, under the same key
    the workers     tell how far they have come, rank 0 after each verified checkpoint
    the job ends    each agent acknowledges the ending, under its number in the start that it had
                    part in; the one that hosts the store leaves last

It is announced first, since nobody begins before it is named: whoever is about to end the job for
all, and has no part in it, finds that there is a start of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.backoff import delay_s
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.restart import (
    IncarnationRecord,
    ProgressRecord,
    advanced,
    incarnation_of,
)
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import Draw, Get, MultiGet, Nonce, Now, Set, Sleep
from lightning_resilience.protocols.shared_cell import create, update


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.protocols.effects import Protocol


__all__ = [
    "ROUND_KEY",
    "Part",
    "RoundGivenUpError",
    "acknowledge",
    "announce",
    "await_acknowledged",
    "give_up",
    "name_for",
    "name_round",
    "present",
    "progress_of",
    "read_name",
    "take_leave",
    "tell_progress",
]

ROUND_KEY: Final = "lr/incarnation"
"""In the store that the rendezvous has made for one round."""

_POLL_BASE_S: Final = 0.02
_POLL_CAP_S: Final = 1.0


class RoundGivenUpError(StoreUnavailableError):
    """A round of the rendezvous has no name: not all its nodes came to it. The store answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What part an agent had in a start of the workers.

    Args:
        start: The start.
        node: Number of its node in it.
    """

    start: IncarnationRecord
    node: int


def present(keys: Keys) -> Protocol[IncarnationRecord | None]:
    """Return the present start of the workers; None before the first."""
    raw: bytes | None = yield Get(keys.present)
    return None if raw is None else decode(IncarnationRecord, raw, key=keys.present)


def name_for(*, nodes: int, before: str) -> Protocol[IncarnationRecord]:
    """Return a name for the start of the workers that begins, to be announced. On node 0.

    It asks nobody: a look at the key in the round's own store would wake those who wait for it.

    Args:
        nodes: How many nodes have part in it.
        before: The incarnation before, as this agent knows it; empty for the first.
    """
    nonce: str = yield Nonce()
    return incarnation_of(before, nodes=nodes, nonce=nonce)


def name_round(record: IncarnationRecord) -> Protocol[IncarnationRecord]:
    """Name the start of the workers that begins. On node 0, in the round's own store.

    Args:
        record: What was announced.

    Returns:
        The one that stands, to be announced once more: this agent may have named the round before.

    Raises:
        RoundGivenUpError: The others have waited for it in vain, and are gone.
        StoreUnavailableError: The store did not answer.
    """
    written = yield from create(ROUND_KEY, encode(record))
    return _named(written.raw)


def give_up(*, nodes: int) -> Protocol[IncarnationRecord]:
    """Let a round have no name any more, where some node is missed: then nobody waits for one.

    Args:
        nodes: How many nodes the round has.

    Returns:
        The name that it has been given meanwhile.

    Raises:
        RoundGivenUpError: It has none, and will have none.
        StoreUnavailableError: The store did not answer.
    """
    writer: str = yield Nonce()
    none = IncarnationRecord(incarnation="", nodes=nodes, writer=writer)
    written = yield from create(ROUND_KEY, encode(none))
    return _named(written.raw)


def _named(raw: bytes) -> IncarnationRecord:
    found = decode(IncarnationRecord, raw, key=ROUND_KEY)
    if not found.incarnation:
        message = (
            f"not all {found.nodes} nodes of this round of the rendezvous, node 0 among them, came "
            "to it before they could be taken for gone, so the round has to be made anew"
        )
        raise RoundGivenUpError(message)
    return found


def announce(keys: Keys, record: IncarnationRecord) -> Protocol[None]:
    """Tell which start of the workers is the present one. On node 0, in the job's store.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    mine = encode(record)

    def change(found: bytes, writer: str) -> bytes | None:
        # Its writer is the one that has named it: what is announced is said once.
        del writer
        return None if found == mine else mine

    there = yield from create(keys.present, mine)
    yield from update(keys.present, there.raw, change)


def read_name(*, deadline_at_s: float) -> Protocol[IncarnationRecord]:
    """Return the name that node 0 has given to a start of the workers, in the round's own store.

    Args:
        deadline_at_s: When to give up, on this process's clock.

    Raises:
        RoundGivenUpError: Another agent has waited for long enough.
        StoreUnavailableError: The store did not answer, or node 0 has not named it in time: its
            agent is probably gone, and the rendezvous has to be made anew.
    """
    attempt = 0
    while True:
        raw: bytes | None = yield Get(ROUND_KEY)
        if raw is not None:
            return _named(raw)
        now_s: float = yield Now()
        if now_s >= deadline_at_s:
            message = (
                "the agent of node 0 has not named this round of the rendezvous in time; it has "
                "probably ended, so the round has to be made anew"
            )
            raise StoreUnavailableError(message)
        attempt += 1
        yield from _pause(attempt, rest_s=deadline_at_s - now_s)


def tell_progress(keys: Keys, *, step: int, checkpoint_step: int) -> Protocol[None]:
    """Tell how far the job has come. On rank 0, after a verified checkpoint.

    Args:
        keys: Names of the keys of this run.
        step: Training step that was completed.
        checkpoint_step: Step of the newest verified checkpoint; -1 without one.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    key = keys.progress

    def change(raw: bytes, writer: str) -> bytes | None:
        told = ProgressRecord(step=step, checkpoint_step=checkpoint_step, writer=writer)
        record = advanced(decode(ProgressRecord, raw, key=key), told)
        return None if record is None else encode(record)

    nonce: str = yield Nonce()
    first = ProgressRecord(step=step, checkpoint_step=checkpoint_step, writer=nonce)
    written = yield from create(key, encode(first))
    if not written.won:
        yield from update(key, written.raw, change)


def progress_of(keys: Keys) -> Protocol[ProgressRecord | None]:
    """Return how far the job has come; None where nobody has told."""
    raw: bytes | None = yield Get(keys.progress)
    return None if raw is None else decode(ProgressRecord, raw, key=keys.progress)


def take_leave(
    keys: Keys, part: Part | None, *, hosts_store: bool, linger_s: float
) -> Protocol[None]:
    """Let the others read how the job has ended. On each agent that leaves with that.

    Whoever had no part in any start has no number, and none of those who had waits for it: it says
    nothing, and where it hosts the store, it waits for those of the present start.

    Args:
        keys: Names of the keys of this run.
        part: What part this agent had last; None where it never had.
        hosts_store: Whether the others can read only while this agent is there.
        linger_s: How long it waits for them at most, in seconds.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    if part is not None:
        yield from acknowledge(_of(keys, part.start), part.node)
    if hosts_store:
        start = (yield from present(keys)) if part is None else part.start
        if start is not None:
            yield from await_acknowledged(_of(keys, start), start.nodes, linger_s=linger_s)


def _of(keys: Keys, start: IncarnationRecord) -> Keys:
    return msgspec.structs.replace(keys, incarnation=start.incarnation)


def acknowledge(keys: Keys, node: int) -> Protocol[None]:
    """Say that this node has read how the job has ended."""
    yield Set(keys.joint("acknowledged", node), b"1")


def await_acknowledged(keys: Keys, nodes: int, *, linger_s: float) -> Protocol[bool]:
    """Wait until all nodes have read how the job has ended. On the node that hosts the store.

    Args:
        keys: Names of the keys of this run.
        nodes: How many there are.
        linger_s: For how long at most, in seconds.

    Returns:
        Whether all have.
    """
    names = tuple(keys.joint("acknowledged", node) for node in range(nodes))
    started_at_s: float = yield Now()
    attempt = 0
    while True:
        values: list[bytes | None] = yield MultiGet(names)
        if None not in values:
            return True
        now_s: float = yield Now()
        rest_s = started_at_s + linger_s - now_s
        if rest_s <= 0:
            return False
        attempt += 1
        yield from _pause(attempt, rest_s=rest_s)


def _pause(attempt: int, *, rest_s: float) -> Protocol[None]:
    draw: float = yield Draw()
    pause_s = delay_s(attempt, base_s=_POLL_BASE_S, cap_s=_POLL_CAP_S, draw=draw)
    yield Sleep(min(max(pause_s, _POLL_BASE_S), rest_s))
