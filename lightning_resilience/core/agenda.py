# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What all ranks do together at a step boundary, because one of them asked for it.

A rank that learns something which concerns all (it was told to stop, a save in the background has
failed, storage is ill) must not act on it by itself: the others would meet its absence in a
collective. It puts an *item* on the agenda instead, and at the next boundary between two training
steps all ranks act on the same item.

* One item at a time: the most urgent. Who has asked for another one asks again at the next
  boundary, so nothing is lost, and nothing has to be merged.
* An item stands for all of its kind: two failed saves end the run once.
* Rank 0 decides what is acted on, and whether there is time to save; the others read it. So no two
  clocks are ever compared: an item says how much time is *left*.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from lightning_resilience.core.records import VERSION
from lightning_resilience.errors import JointUnavailableError


if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = [
    "ASK_AGAIN_S",
    "AgendaItem",
    "AgendaKind",
    "AgendaRecord",
    "acts_now",
    "aged",
    "fits",
    "grace_s",
    "leaves_alone",
    "looks",
    "most_urgent",
    "outranks",
    "record_of",
    "vanished_error",
    "with_save",
]

ASK_AGAIN_S: Final = 2.0
"""Seconds after which a rank asks again that was not answered: what it wrote may be lost."""

_DEFAULT_GRACE_S: Final = 30.0
_LONGEST_GRACE_S: Final = 3600.0
_LEAVING_S: Final = 2.0
_SAVE_MARGIN: Final = 1.5
_ALONE_SHARE: Final = 0.5
_HASTE_S: Final = 20.0
_STEPS_BETWEEN_LOOKS: Final = 10


class AgendaKind(str, enum.Enum):
    """What all ranks do, the most urgent first."""

    STOP = "stop"
    """A signal has told a rank to stop: all save, and leave ``fit``."""
    FAIL = "fail"
    """Something that no rank waits for has failed, such as a background save: all raise."""
    PAUSE = "pause"
    """Storage is ill beyond what the policy can absorb: all wait for it."""
    SAVE = "save"
    """A rank would like a checkpoint now."""


_URGENCY: Final = {kind.value: place for place, kind in enumerate(AgendaKind)}
_KindName: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=rf"\A({'|'.join(kind.value for kind in AgendaKind)})\Z")
]
_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgendaItem:
    """What one rank asks for.

    Args:
        kind: What all ranks shall do.
        reason: Why, in one line; all ranks report it.
        detail: What the action has to know besides: for ``STOP`` the signal's name, for ``FAIL``
            the failure class.
        left_s: How long this process may still run, in seconds from now; None where nobody has said
            that it has to end.
    """

    kind: AgendaKind
    reason: str
    detail: str = ""
    left_s: float | None = None


class AgendaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An item in the shared store: asked for by one rank, or agreed for all.

    Args:
        v: Version of the format.
        kind: Name of an ``AgendaKind``.
        rank: Who asked.
        reason: Why.
        detail: What the action has to know besides.
        left_s: How long the asking process may still run, in seconds from this write; None where
            nothing ends it.
        saves: Whether a checkpoint is to be saved first; decided by rank 0.
        writer: Nonce of this write.
    """

    v: int = VERSION
    kind: _KindName
    rank: _Rank
    reason: str = ""
    detail: str = ""
    left_s: float | None = None
    saves: bool = False
    writer: str


def record_of(item: AgendaItem, *, rank: int, writer: str) -> AgendaRecord:
    """Return the record of an item that ``rank`` asks for.

    Args:
        item: The item.
        rank: Who asks.
        writer: A fresh nonce.
    """
    return AgendaRecord(
        kind=item.kind.value,
        rank=rank,
        reason=item.reason,
        detail=item.detail,
        left_s=item.left_s,
        writer=writer,
    )


def outranks(one: AgendaRecord, other: AgendaRecord) -> bool:
    """Tell whether ``one`` is acted on before ``other``; of two of a kind, the lower rank's is."""
    return (_URGENCY[one.kind], one.rank) < (_URGENCY[other.kind], other.rank)


def most_urgent(records: Iterable[AgendaRecord]) -> AgendaRecord | None:
    """Return what is acted on first, or None where nobody has asked for anything."""
    return min(records, key=lambda one: (_URGENCY[one.kind], one.rank), default=None)


def grace_s(
    option_s: float | None,
    *,
    is_warning: bool,
    ends_in_s: float | None,
    launcher_s: float | None = None,
) -> float:
    """Return how long this process may still run once it was told to stop, in seconds.

    Args:
        option_s: What the user says, in seconds; it counts where it is given.
        is_warning: Whether a signal other than SIGTERM came: one that is sent some time before.
        ends_in_s: In how many seconds the scheduler ends the job, if it says so. No more than an
            hour of it is believed, because two hosts' clocks stand behind it.
        launcher_s: How long the launcher leaves between SIGTERM and SIGKILL, if it says so.

    Returns:
        The option; or what the launcher says; or 30 s, which torchrun's agent and SLURM leave by
        default between the two; after a warning as long as the job still has, if that is more.
    """
    if option_s is not None:
        return option_s
    left_s = _DEFAULT_GRACE_S if launcher_s is None else launcher_s
    if not is_warning or ends_in_s is None:
        return left_s
    return min(max(ends_in_s, left_s), _LONGEST_GRACE_S)


def fits(left_s: float | None, *, save_s: float | None) -> bool:
    """Tell whether a checkpoint can still be saved.

    Args:
        left_s: How long the process may still run, in seconds; None for ever.
        save_s: How long the last save took, in seconds; None where there was none, and then it is
            tried: it is published whole or not at all, so nothing but the time can be lost.
    """
    if left_s is None:
        return True
    return left_s > _LEAVING_S + _SAVE_MARGIN * (save_s or 0.0)


def with_save(record: AgendaRecord, *, save_s: float | None) -> AgendaRecord:
    """Return the record as it is agreed: with the decision whether to save first.

    Args:
        record: What was asked for.
        save_s: How long the last save took, in seconds; None where there was none.
    """
    return msgspec.structs.replace(record, saves=fits(record.left_s, save_s=save_s))


def aged(record: AgendaRecord, *, by_s: float) -> AgendaRecord:
    """Return a record that was heard ``by_s`` seconds ago, with the time that is left now."""
    if record.left_s is None:
        return record
    return msgspec.structs.replace(record, left_s=record.left_s - by_s)


def acts_now(record: AgendaRecord, *, is_between_updates: bool) -> bool:
    """Tell whether all ranks act on an item at this boundary, or rank 0 waits for another one.

    Args:
        record: The item.
        is_between_updates: Whether no gradients are accumulated now. A checkpoint has none in it,
            so one that is saved in between does not resume exactly; better than none it is.
    """
    return is_between_updates or (record.left_s is not None and record.left_s < _HASTE_S)


def looks(step: int) -> bool:
    """Tell whether all ranks look at the agenda before this step, the ``step``-th of this fit.

    Where no step begins with a broadcast (older releases of Lightning), each look is a collective
    of ours: one in ten steps has it, the first among them.
    """
    return step % _STEPS_BETWEEN_LOOKS == 0


def leaves_alone(left_s: float, *, granted_s: float) -> bool:
    """Tell whether a rank that was told to stop stops waiting for an agreement.

    Args:
        left_s: How long it may still run, in seconds.
        granted_s: How long it could when it was told.

    Returns:
        True once half of it has passed: what is left is for the others, who have to find out.
    """
    return left_s < _ALONE_SHARE * granted_s


def vanished_error(number: int, *, rank: int) -> JointUnavailableError:
    """Return the error of a rank that was told to look at the agenda, and finds nothing there.

    Args:
        number: Number of the item.
        rank: This rank.
    """
    message = (
        f"All ranks were told to act on item {number} of the agenda, and rank {rank} does not find "
        "it in the shared store: rank 0 could not write it there before it had to stop, or the "
        "store has lost it. Look at rank 0's log, and at the host of the rendezvous store."
    )
    return JointUnavailableError(message, op="agenda", seq=number, first_rank=0)
