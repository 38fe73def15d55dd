# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's own handler in our hands: whatever it is asked ends, and a signal is heard meanwhile."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from lightning_resilience.adapters import rendezvous_etcd as in_etcd, rendezvous_inner as within
from lightning_resilience.adapters.rendezvous_calls import ASKED_S, Question, call, no_sign


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from lightning_resilience.ports import CancelToken


__all__ = ["HeldHandler"]

_CLOSED_S: Final = 10.0
_RENEWED_S: Final = 1.0
"""How long a new client is waited for, in seconds; one that comes later is used then."""

T = TypeVar("T")


class HeldHandler:
    """Torch's handler, asked in threads of its own. The agent's main thread.

    Args:
        handler: The handler.
        silent_s: How long it may be without any answer while it joins, in seconds.
        asked_s: How long a question may take, in seconds.
        closed_s: How long closing may take, in seconds. Whoever leaves has little time, but others
            may write at the same time.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        *,
        silent_s: float,
        asked_s: float = ASKED_S,
        closed_s: float = _CLOSED_S,
    ) -> None:
        self.handler = handler
        self._silent_s, self._asked_s, self._closed_s = silent_s, asked_s, closed_s
        cut = partial(within.cut, handler)
        self._waiting = Question(lambda: int(handler.num_nodes_waiting()), cut=cut)
        self._closed = Question(lambda: bool(handler.is_closed()), cut=cut)
        self._renewal: Question[TCPStore] | None = None

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join.

        Raises:
            RendezvousConnectionError: No answer in time, and whatever else torch raises.
        """
        return self._waiting.ask(within_s=self._asked_s)

    def is_closed(self) -> bool:
        """Tell whether the rendezvous is closed; raises as above."""
        return self._closed.ask(within_s=self._asked_s)

    def join(self) -> RendezvousInfo:
        """Join the next round; it takes for as long as others are waited for.

        Raises:
            RendezvousError: What torch's handler raises.
            RendezvousConnectionError: Torch has read no state for ``silent_s``.
        """
        # Torch waits for the last sign of life as well, but for ever.
        within.stop(self.handler)

        def joined(token: CancelToken) -> RendezvousInfo:
            with in_etcd.understood():
                info = within.with_own_client(self.handler.next_rendezvous())
            if token.cancelled:
                within.stop(self.handler)
            token.raise_if_cancelled()
            return info

        # While others are waited for, torch reads the state every second.
        return self._change(
            joined, within_s=self._silent_s, sign=partial(within.read_at_s, self.handler)
        )

    def set_closed(self) -> None:
        """Close the rendezvous for all; raises as above."""
        self._change(lambda _token: self.handler.set_closed(), within_s=self._closed_s)  # type: ignore[no-untyped-call]

    def shut_down(self) -> bool:
        """Leave, and close the rendezvous for all; raises as above."""
        return self._change(lambda _token: bool(self.handler.shutdown()), within_s=self._closed_s)

    def renew(self) -> bool:
        """Give the handler a new client, where its own broke and the server is there.

        Returns:
            Whether it has one.
        """
        connect = within.new_client(self.handler)
        if connect is None:
            return False
        self._renewal = self._renewal or Question(connect)
        try:
            fresh = self._renewal.ask(within_s=_RENEWED_S)
        except (RuntimeError, OSError, RendezvousConnectionError):
            return False
        within.use_client(self.handler, fresh)
        return True

    def let_go(self) -> None:
        """Let it ask nobody any more, and tell no longer that its node is there."""
        within.sever(self.handler)
        with contextlib.suppress(RendezvousConnectionError):
            within.stop(self.handler)

    def _change(
        self,
        work: Callable[[CancelToken], T],
        *,
        within_s: float,
        sign: Callable[[], float] = no_sign,
    ) -> T:
        return call(work, within_s=within_s, leave=partial(within.sever, self.handler), sign=sign)
