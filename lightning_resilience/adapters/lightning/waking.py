# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Wake the thread that trains, once another rank has left, from whatever collective it is in.

It has a moment to leave by itself: a wait of ours ends at once, a rank that fails too has its own
exception, and where all ranks leave by themselves, their process group stays whole. Then this
process's part in its groups is ended, and again while the thread is still there, because it may
have entered another group.

No process is ended by force. A rank that is in long work of its own ends at its next collective,
one in a collective that cannot be ended stays until the group's timeout or until its launcher ends
it, as without us, and the log says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.adapters.process_groups import abort_nccl, cut, gloo_addresses
from lightning_resilience.core.events import CollectivesEnded


if TYPE_CHECKING:
    import threading

    from lightning_resilience.ports import EventSink


__all__ = ["wake"]

_GRACE_S: Final = 1.0
_ROUNDS: Final = 3


def wake(sink: EventSink, *, has_left: threading.Event, woken: threading.Event) -> None:
    """End this process's collectives until the thread that trains has left.

    Args:
        sink: Where it is reported.
        has_left: Set once it has.
        woken: Set before something is ended, so that the thread's next exception is known as an
            echo.

    Note:
        For another thread. Bounded: a few seconds, plus the group's store where that is away.
    """
    # Order: read before the moment of grace, because the store may go with the rank that has left.
    addresses = gloo_addresses()
    for _ in range(_ROUNDS):
        if has_left.wait(_GRACE_S):
            return
        woken.set()
        connections = cut(addresses)
        has_nccl = abort_nccl()
        sink.emit(CollectivesEnded(connections=connections, nccl=has_nccl))
        addresses = gloo_addresses() or addresses
