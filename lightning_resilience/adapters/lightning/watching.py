# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Rank 0's ear: a helper thread that hears what other ranks put on the agenda.

Training must not ask the shared store at every step whether somebody wants something. So a thread
waits for it, in long chunks and on a connection of its own, and leaves what it hears where the
step boundary looks: in an attribute. There is one such thread in a job, and none where there is
only one rank.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from lightning_resilience.core.agenda import aged
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.agenda import listen
from lightning_resilience.runtime.driver import Driver


if TYPE_CHECKING:
    from lightning_resilience.core.agenda import AgendaRecord
    from lightning_resilience.protocols.joint_terms import Member


__all__ = ["Watch"]

_log = logging.getLogger(__name__)


class _TurnedError(Exception):
    """Nobody wants to hear of this item any more."""


class Watch:
    """Hears what is asked for, one item after the other.

    Args:
        member: Who this rank is.
        driver: The session's driver; its store, clock and dice are used, from another thread.
    """

    def __init__(self, member: Member, driver: Driver) -> None:
        self.has_heard = False
        """Whether something is asked for. Cheap to look at, at every step."""
        self._member = member
        self._driver = Driver(
            store=driver.store,
            clock=driver.clock,
            dice=driver.dice,
            sink=driver.sink,
            interrupt=self._raise_if_turned,
        )
        self._lock = threading.Lock()
        self._heard: tuple[AgendaRecord, float] | None = None
        self._is_closed = False
        self._turned = threading.Event()
        self._number = self._hearing = 0
        self._thread = threading.Thread(
            target=self._serve, name="lightning-resilience-watch", daemon=True
        )

    def turn_to(self, number: int) -> None:
        """Forget what was heard, and listen for item ``number`` from now on."""
        with self._lock:
            self._number = number
            self.has_heard = False
        self._turned.set()
        if self._thread.ident is None:
            self._thread.start()

    def heard(self) -> AgendaRecord | None:
        """Return what is asked for, with the time that it has left now; None for nothing."""
        with self._lock:
            heard = self._heard if self.has_heard else None
        if heard is None:
            return None
        record, heard_at_s = heard
        return aged(record, by_s=self._driver.clock.now_s() - heard_at_s)

    def close(self) -> None:
        """Let the thread end, within a second. Idempotent."""
        self._is_closed = True
        self._turned.set()

    def _raise_if_turned(self) -> None:
        if self._is_closed or self._hearing != self._number:
            raise _TurnedError

    def _serve(self) -> None:
        try:
            while self._turned.wait() and not self._is_closed:
                # In this order: whoever turns it after the first line wakes it for another round.
                self._turned.clear()
                self._hearing = self._number
                with contextlib.suppress(_TurnedError):
                    while not self._has_listened(self._hearing):
                        pass
        except ResilienceError as error:
            if not self._is_closed:
                _log.warning("what other ranks ask for is not heard any more: %s", error)
        finally:
            self._driver.close()

    def _has_listened(self, number: int) -> bool:
        """Listen; return whether there was a store, where training goes on without one."""
        try:
            self._hear(number)
        except ResilienceError:
            if self._is_closed or self._member.defer_after_s is None:
                raise
            return False
        return True

    def _hear(self, number: int) -> None:
        record = self._driver.run(listen(self._member, number))
        heard = record, self._driver.clock.now_s()
        with self._lock:
            if number == self._number:
                self._heard, self.has_heard = heard, True
