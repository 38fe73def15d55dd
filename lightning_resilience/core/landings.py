# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When may a name in storage be used again, after a request about it was given up?

A call that does not return is abandoned, but what it has *sent* cannot be called back: a rename, a
PutObject whose body is gone, the completion of an upload may still be carried out, and would then
put an older checkpoint over a newer one. Before that point nothing is lost: the call asks its token
just after it has said that it is about to send, so one that was abandoned by then sends nothing.

===============================  ===========================  ======================================
the earlier request              is waited for by             because, carried out late, it would
===============================  ===========================  ======================================
writes, sent or still wanted     writes and removals          replace the newer, or bring back what
                                                              was removed
writes, abandoned and not sent   nobody                       never be sent
removes                          writes                       remove the newer
===============================  ===========================  ======================================

Whoever waits does so within a bound, and then fails in a way that is repeated. It ends when the
earlier call does, whatever came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


__all__ = ["BEFORE_SENDING", "Act", "Request", "blocks", "patience_s", "refusal"]


class Act(str, Enum):
    """What a caller does about a request of its own."""

    SAY = "say"
    """Say that from here on it may be carried out."""
    ASK = "ask"
    """Ask its token whether it was abandoned, and send nothing then."""


BEFORE_SENDING: Final = (Act.SAY, Act.ASK)
"""What comes between the wait for earlier requests and the sending, in this order: whoever was
abandoned before is stopped, and whoever is abandoned after is seen to have sent."""

# A wait that took all of it would be taken for a stall, and would not be told from one.
_SHARE_OF_STALL_TIMEOUT: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Something that is asked of storage about one name.

    Args:
        key: The name; of a directory, also all that is below it.
        is_removal: Whether it removes; otherwise it writes.
        is_sent: Whether it may have been sent.
        is_abandoned: Whether its caller has given up.
    """

    key: str
    is_removal: bool = False
    is_sent: bool = False
    is_abandoned: bool = False


def blocks(earlier: Request, later: Request) -> bool:
    """Tell whether a request that has not ended must be waited for before a later one is made."""
    if not _overlap(earlier.key, later.key):
        return False
    if earlier.is_removal:
        return not later.is_removal
    return earlier.is_sent or not earlier.is_abandoned


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def patience_s(stall_timeout_s: float) -> float:
    """Return for how long an earlier request is waited for, in seconds.

    Args:
        stall_timeout_s: When an attempt that shows no progress is abandoned.
    """
    return _SHARE_OF_STALL_TIMEOUT * stall_timeout_s


def refusal(earlier: Request, *, shown: str, waited_s: float) -> str:
    """Say why a name cannot be used yet, and what to do.

    Args:
        earlier: What has not ended.
        shown: The name, without credentials.
        waited_s: For how long it was waited for.
    """
    what = "a removal" if earlier.is_removal else "a write"
    state = "was given up after it was sent" if earlier.is_abandoned else "is under way"
    return (
        f"{shown} cannot be used yet: {what} of it {state}, has not ended within {waited_s:g} s, "
        "and may still be carried out. It is tried again; where that lasts, look at the storage, "
        "or save under another name."
    )
