# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What agents tell each other between two starts of the workers, and when they may come.

A start of the workers has a name, its *incarnation*, ``<number>-<nonce>``, so that nothing that
belongs to an earlier one is ever believed; torch's own count is kept by each agent for itself. When
it is over, agents come to the next rendezvous through a gate, in this order:

1. the job has not ended, and no person has to release it;
2. what has ended the workers is told by all who know of it, and the nearest to the cause stands;
3. what the job shares is well: nobody joins while its circuit is open;
4. the incident is charged, once for the job (``core.quota``);
5. one ``GoRecord`` is written for the incarnation that is over, by whoever comes first, with the
   delay before the restart: one number for the job, timed by each agent from when it has seen it;
6. the job has not ended meanwhile, and the circuit has not opened again.

Nobody enters the rendezvous before there is a ``GoRecord``: agents that are still held up by the
gate would let the others' time to join run out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from lightning_resilience.core.backoff import delay_s
from lightning_resilience.core.records import VERSION


if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_resilience.core.restart_config import RestartConfig


__all__ = [
    "GoRecord",
    "IncarnationRecord",
    "ProgressRecord",
    "StorageRecord",
    "advanced",
    "first_contact_s",
    "incarnation_of",
    "lost",
    "mark_of_round",
    "missed",
    "next_incarnation",
    "restart_delay_s",
    "run_of_circuits",
    "with_told",
]

_FIRST_CONTACT_PER_NODE_S: Final = 0.02
_SPREAD_BY_TORCH_S: Final = 0.3
_FIRST_CONTACT_MOST_S: Final = 30.0
_MOST_URLS: Final = 32
_INCARNATION: Final = re.compile(r"(\d+)-")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Step = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class IncarnationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The present start of the workers.

    Args:
        v: Version of the format.
        incarnation: Its name; empty, in a round's own store only, for one that was given up.
        nodes: How many nodes have part in it.
        writer: Nonce of this write.
    """

    v: int = VERSION
    incarnation: str
    nodes: Annotated[int, msgspec.Meta(ge=1)]
    writer: str


class GoRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Agents may join the rendezvous that follows an incarnation; written once.

    Args:
        v: Version of the format.
        delay_s: How long after it has seen this an agent joins, in seconds.
        cause: Value of the ``core.quota.Cause`` for which the workers are restarted.
        number: Failures without progress, the last included; 0 where none has been charged.
        writer: Nonce of this write.
    """

    v: int = VERSION
    delay_s: _Seconds
    cause: str
    number: _Count = 0
    writer: str


class StorageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a job load and save, as they have told it: a restart waits for it.

    Args:
        v: Version of the format.
        urls: Directories of checkpoints, without credentials.
        run_id: Under which run the workers keep their circuits; empty for the agents' own.
        writer: Nonce of this write.
    """

    v: int = VERSION
    urls: tuple[str, ...] = ()
    run_id: str = ""
    writer: str


def with_told(
    found: StorageRecord | None, urls: Iterable[str], *, run_id: str, writer: str
) -> StorageRecord | None:
    """Return the record of what the workers use; None where it says that already.

    Args:
        found: What is there; None where nothing is.
        urls: Directories, without credentials.
        run_id: Under which run the workers keep their circuits now; empty for the agents' own.
        writer: A fresh nonce.
    """
    there = StorageRecord(writer=writer) if found is None else found
    new = tuple(dict.fromkeys(url for url in urls if url not in there.urls))
    if not new and run_id == there.run_id:
        return None
    # A job whose every fit has a directory of its own must not make it grow for ever.
    return StorageRecord(urls=(*there.urls, *new)[-_MOST_URLS:], run_id=run_id, writer=writer)


def run_of_circuits(told: StorageRecord, own: str) -> str:
    """Return under which run the circuits are that a restart waits for.

    A user's own run id is in the program, which an agent does not see: the workers tell it.

    Args:
        told: What the workers have told.
        own: What the agents call the run.
    """
    return told.run_id or own


class ProgressRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job has come; only ever further.

    Args:
        v: Version of the format.
        step: Training step that was last told of.
        checkpoint_step: Step of the newest verified checkpoint; -1 before the first.
        writer: Nonce of this write.
    """

    v: int = VERSION
    step: _Step = -1
    checkpoint_step: _Step = -1
    writer: str


def next_incarnation(before: str, *, nonce: str) -> str:
    """Return a name for the start of the workers that follows ``before``; empty for the first.

    The number is for people. What tells two starts apart is the nonce: a store that came back empty
    begins to count anew.
    """
    found = _INCARNATION.match(before)
    return f"{int(found.group(1)) + 1 if found else 1}-{nonce}"


def incarnation_of(before: str, *, nodes: int, nonce: str) -> IncarnationRecord:
    """Return the record of the start of the workers that follows ``before``."""
    return IncarnationRecord(
        incarnation=next_incarnation(before, nonce=nonce), nodes=nodes, writer=nonce
    )


def mark_of_round(workers: str, *, before: str, is_static: bool) -> str:
    """Return what only the agents of one very round of the rendezvous have in common.

    Rounds are counted from 0 again in a store that came back empty, and an agent of an older one
    may still write there. The store for the workers is another one in each round. All rounds of a
    static rendezvous have one store; its agents have had part in the same starts.

    Args:
        workers: Address of the store that node 0 has made for the workers of this round; empty
            where there is none.
        before: The incarnation before, as this agent knows it; empty for the first.
        is_static: Whether all rounds of the rendezvous have one store.
    """
    return before if is_static else workers


def lost(over: IncarnationRecord | None, there: int | None) -> int:
    """Return how many nodes of a start of the workers are not there any more.

    Args:
        over: That start; None before the first.
        there: Nodes that are there now; None where nobody knows.
    """
    return 0 if over is None or there is None else max(0, over.nodes - there)


def missed(over: IncarnationRecord | None, there: int | None) -> int:
    """Return how many nodes an agent misses at the gate, where it is counted among those there.

    Args:
        over: The start of the workers that is over; None before the first.
        there: Nodes that have part in its round, as the rendezvous says; None where nobody knows.

    Note:
        A rendezvous that knows of nobody, not even of who asks, has come back empty with its store.
        It says nothing of who has left; the next round shows that.
    """
    return lost(over, there or None)


def advanced(found: ProgressRecord, told: ProgressRecord) -> ProgressRecord | None:
    """Return the record of further progress; None where it is no further than what was found."""
    new = (max(found.step, told.step), max(found.checkpoint_step, told.checkpoint_step))
    if new == (found.step, found.checkpoint_step):
        return None
    return msgspec.structs.replace(told, step=new[0], checkpoint_step=new[1])


def restart_delay_s(config: RestartConfig, number: int, *, draw: float) -> float:
    """Return how long agents wait before they join again, with full jitter.

    Args:
        config: The bounds.
        number: ``Ruling.delays``: failures without progress, the last included, or stops before the
            last; none is no delay: nodes that come, or a job that was told to move once, need not
            be waited for.
        draw: A uniform number in [0, 1) of whoever decides; one for the job.
    """
    if number < 1:
        return 0.0
    base_s, cap_s = config.restart_base_delay_s, config.restart_max_delay_s
    return delay_s(number, base_s=base_s, cap_s=cap_s, draw=draw)


def first_contact_s(nodes: int, *, draw: float) -> float:
    """Return how long an agent waits before it first asks for the store, in seconds.

    All nodes of a job are started at once. The window grows with their number, so that the server
    is asked by some 50 a second at most. Torch lets each of them wait itself, in a window of 0.3 s
    for any number: enough for 15, which need not wait twice.

    Args:
        nodes: How many nodes the job may have.
        draw: A uniform number in [0, 1).
    """
    window_s = max(0.0, nodes * _FIRST_CONTACT_PER_NODE_S - _SPREAD_BY_TORCH_S)
    return draw * min(window_s, _FIRST_CONTACT_MOST_S)
