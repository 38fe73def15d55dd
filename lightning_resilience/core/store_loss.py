# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Is the shared store gone for everybody, and what does a save do then that nobody can agree on?

A rank that gets no answer knows nothing: it may be cut off by itself while the others wait for it.
A rank whose host-to-host connection is *refused* knows more: the store's own host has answered,
and has said that no server is there. That is true of the server, and so for every rank. Whoever has
been refused for ``defer_after_s``, with nothing else heard in between, **defers**: it leaves a save
without a verdict, and goes on as if the checkpoint had been spooled.

Why no rank waits long for one that has deferred, although they cannot talk:

* while the server is gone, each of the others is refused as well, and defers by itself;
* where it has come back, it is empty. A rank that is still in the operation finds its own number
  gone. From then on it takes a rank that shows nothing for ``defer_after_s`` for one that has
  deferred, and one with a later number at once; it spoils the ballot, and defers. Whoever comes
  later finds the spoiled ballot. Until all ranks have come again, nobody makes a success.

So a rank waits for at most two such times, and looks, after the first has deferred. What one rank
may still miss is a verdict that another had read before. A failure is told by rank 0 to all, as
soon as there is a store again (``protocols.joint_deferred``). A success must be nothing to miss: no
rank may decide by it what all have to do alike. So a run ends alike for all (``core.run_end``).
Whether a name is taken, a rank answers as the others were told, but for one that the run has used
and freed again: there its books may name another file than theirs.

Only rank 0's saves to its spool are deferred, and what belongs to them: questions, links, removals.
What all ranks need the same answer to (a load, a pause) has no other way, and waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.muster import named
from lightning_resilience.core.records import VERSION, FinalRecord, decode, encode
from lightning_resilience.core.spool import DEFERRABLE
from lightning_resilience.errors import ConfigError, JointUnavailableError


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


__all__ = [
    "DeferredError",
    "Refusals",
    "SettledRecord",
    "StoreTerms",
    "Unsettled",
    "answer_of",
    "default_defer_after_s",
    "deferred_final",
    "gone_error",
    "has_another_way",
    "is_deferred",
    "known_answer",
    "names_in",
    "others_error",
    "store_loss_policy",
    "told_names",
    "undone_error",
    "unsettled_statement",
]

_DEFERRED: Final = "deferred: "
_OF_ONE: Final = DEFERRABLE | {"flush", "clear up"}
_MOST_TOLD: Final = 2**16
"""Bytes of a listing that all ranks are told: some thousand names."""

_MOST_KEPT: Final = 32
"""Operations without a verdict, and failures, of which a rank still knows; a save point has four
operations, and of an older one nobody can do anything any more."""

_LONGEST_BY_DEFAULT_S: Final = 30.0
_SHARE_BY_DEFAULT: Final = 0.25


class DeferredError(JointUnavailableError):
    """Nobody will ever know this operation's verdict. Never leaves a joint operation."""


def gone_error(op: str, *, seq: int, rank: int, cause: str) -> DeferredError:
    """Return the error of a rank that knows that the store's server is gone.

    Args:
        op: Name of the operation.
        seq: Its number.
        rank: The rank.
        cause: The store's last error.
    """
    message = f"nobody listens at the shared store's address: {cause}"
    return DeferredError(message, op=op, seq=seq, first_rank=rank, lost_ranks=(rank,))


def others_error(op: str, *, seq: int, rank: int, absent: Sequence[int]) -> DeferredError:
    """Return the error of a rank that is alone in an operation since the store lost what it held.

    Args:
        op: Name of the operation.
        seq: Its number.
        rank: The rank.
        absent: Ranks that have left it, or may have.
    """
    message = f"the shared store has lost what it held, and rank {named(absent)} may have gone on"
    return DeferredError(message, op=op, seq=seq, first_rank=rank, lost_ranks=(rank,))


def store_loss_policy(on_store_loss: str | None, *, on_outage: str) -> str:
    """Return what a rank does that cannot reach the shared store.

    Args:
        on_store_loss: What the user has said; None for the default.
        on_outage: What a save does while storage is ill.

    Raises:
        ConfigError: Saves are to be deferred, and there is no spool for them.
    """
    if on_store_loss == "defer" and on_outage != "spool":
        message = (
            f"on_store_loss='defer' and on_outage={on_outage!r} contradict each other: what is "
            "deferred waits in the spool. Give on_outage='spool', or on_store_loss='wait'."
        )
        raise ConfigError(message)
    return on_store_loss or ("defer" if on_outage == "spool" else "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTerms:
    """How a rank bears the loss of the shared store.

    Args:
        store_patience_s: How long it may be away, in seconds; 0 gives up at once.
        defer_after_s: How long nobody must have listened at its address, in seconds, before saves
            are deferred; None where they never are.
    """

    store_patience_s: float
    defer_after_s: float | None


def default_defer_after_s(timeout_s: float) -> float:
    """Return ``defer_after_s`` where nobody has said it.

    Args:
        timeout_s: Silence after which a rank is taken for lost, in seconds.
    """
    return min(_LONGEST_BY_DEFAULT_S, _SHARE_BY_DEFAULT * timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Since when this rank has heard nothing of the store but that no server is there.

    Args:
        since_s: When it was refused first, on its own clock; None where it was not.
    """

    since_s: float | None = None

    def failed(self, *, is_refused: bool, now_s: float) -> Refusals:
        """Return what is known after an operation that has failed."""
        if not is_refused:
            return Refusals()
        return self if self.since_s is not None else Refusals(since_s=now_s)

    def show_that_it_is_gone(self, *, after_s: float, now_s: float) -> bool:
        """Tell whether the server is gone for everybody."""
        return self.since_s is not None and now_s - self.since_s >= after_s


class SettledRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says, in a store that has lost what it held, of the operations before.

    Args:
        v: Version of the format.
        before: Number of the operation in which rank 0 is; it has left all before.
        failures: Verdicts of those that had failed, by number.
    """

    v: int = VERSION
    before: int
    failures: dict[str, FinalRecord] = {}


class _Names(msgspec.Struct, frozen=True, kw_only=True):
    v: int = VERSION
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """What a rank knows of operations whose verdict others may have missed, or it itself.

    Args:
        deferred: Numbers of those that it has deferred, and has not heard of since.
        failures: Verdicts that it has returned and that were failures, by number.
    """

    deferred: tuple[int, ...] = ()
    failures: Mapping[int, FinalRecord] = field(default_factory=dict)

    def with_deferred(self, seq: int) -> Unsettled:
        """Return what is known once another one is deferred."""
        return replace(self, deferred=(*self.deferred, seq)[-_MOST_KEPT:])

    def with_verdict(self, seq: int, final: FinalRecord) -> Unsettled:
        """Return what is known once a verdict was returned."""
        if not final.failure:
            return self
        kept = dict([*self.failures.items(), (seq, final)][-_MOST_KEPT:])
        return replace(self, failures=kept)

    def record(self, seq: int) -> SettledRecord:
        """Return what rank 0 tells the others when it comes to an operation."""
        failures = {str(number): final for number, final in self.failures.items()}
        return SettledRecord(before=seq, failures=failures)

    def heard(self, told: SettledRecord | None) -> tuple[Unsettled, dict[int, FinalRecord]]:
        """Return what is still unknown after rank 0 has told, and what had failed of the rest."""
        if told is None:
            return self, {}
        known = [seq for seq in self.deferred if seq < told.before]
        failed = {seq: told.failures[str(seq)] for seq in known if str(seq) in told.failures}
        rest = tuple(seq for seq in self.deferred if seq >= told.before)
        return replace(self, deferred=rest), failed


def deferred_final(op: str, *, subject: str, workers: tuple[int, ...], why: str) -> FinalRecord:
    """Return what a rank returns in the place of a verdict; it is never written anywhere.

    Args:
        op: Name of the operation.
        subject: What it is about.
        workers: Ranks that have work.
        why: Why there is no verdict.
    """
    return FinalRecord(
        op=op, subject=subject, workers=workers, detail=f"{_DEFERRED}{why}", writer=""
    )


def is_deferred(final: FinalRecord) -> bool:
    """Tell whether this stands in the place of a verdict."""
    return not final.writer and final.detail.startswith(_DEFERRED)


def undone_error(op: str, *, seq: int, rank: int, subject: str, cause: str) -> Exception:
    """Return the error of a rank whose work is neither done nor staged, and nobody can be told.

    Args:
        op: Name of the operation.
        seq: Its number.
        rank: The rank.
        subject: What it is about.
        cause: What has failed.
    """
    message = (
        f"{op} of {subject} (joint operation {seq}) is not made, and rank {rank} leaves: the "
        f"shared store is gone, so the other ranks cannot be told, and what was to wait on this "
        f"node does not: {cause.rstrip('.')}. Start the job from its last checkpoint; make room "
        "in the spool's directory where that is what was missing."
    )
    return JointUnavailableError(message, op=op, seq=seq, first_rank=rank, lost_ranks=(rank,))


def has_another_way(
    op: str,
    *,
    workers: tuple[int, ...],
    defer_after_s: float | None,
    is_spooled: bool,
    is_answered: bool,
) -> bool:
    """Tell whether a joint operation is left without a verdict where the store is gone.

    Args:
        op: Its name.
        workers: Ranks that have work.
        defer_after_s: How long the server must be gone; None where nothing is deferred.
        is_spooled: Whether a checkpoint that it saves may wait on the node.
        is_answered: Whether every rank knows the answer to a question by itself.
    """
    is_of_one = op in _OF_ONE and len(workers) == 1
    return defer_after_s is not None and is_of_one and is_spooled and is_answered


def told_names(names: Iterable[str]) -> str:
    """Return what all ranks are told of a directory's names; empty where they are too many."""
    text = encode(_Names(names=tuple(sorted(names)))).decode()
    return text if len(text) <= _MOST_TOLD else ""


def names_in(told: str) -> frozenset[str] | None:
    """Return the names that ``told_names`` has told; None where it has told nothing."""
    if not told:
        return None
    return frozenset(decode(_Names, told.encode(), key="names in a directory").names)


def unsettled_statement(unsettled: Unsettled) -> str:
    """Return what is said at the end of a run of what its ranks never agreed on; empty for nothing.

    Args:
        unsettled: What this rank knows.
    """
    number = len(unsettled.deferred)
    if not number:
        return ""
    return (
        f"the shared store was gone at the end of the run, and has not come back: the last "
        f"{number} operation{'s' if number > 1 else ''} of the ranks had no answer from each "
        "other. What rank 0 has saved since was kept on its node, and is in storage unless a line "
        "of its own says where it lies; the next start of this training on that node publishes it."
    )


def known_answer(name: str, *, saved: bool, names: frozenset[str] | None) -> str:
    """Answer, on every rank alike, whether a checkpoint of a name exists, without asking storage.

    Only this run writes to its directories: what was there when it began, and what it has been
    asked to save since, is all that can be there. What was removed since counts as there: a name
    that is not used again does no harm.

    Args:
        name: The last part of its path.
        saved: Whether the run has been asked to save it.
        names: What was in its directory at the start of the run, told to all ranks; None where
            that could not be told.

    Returns:
        The answer as text; empty where it cannot be told.
    """
    if saved:
        return str(True)
    return "" if names is None else str(name in names)


def answer_of(final: FinalRecord, *, known: str) -> str:
    """Return whether a checkpoint exists, as text.

    Args:
        final: How the question has ended.
        known: What all ranks know of it by themselves.
    """
    return known if is_deferred(final) else final.detail
