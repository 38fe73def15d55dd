# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Rank 0's ear: a helper thread that hears what other ranks put on the agenda.

Training must not ask the shared store at every step whether somebody wants something. So a thread
waits for it, in long chunks and on a connection of its own, and leaves what it hears where the
step boundary looks: in an attribute. There is one such thread in a job, and none where there is
only one rank.
"""

from __future__ import annotations

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


class _ClosedError(Exception):
    """Nobody wants to know any more."""


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
            interrupt=self._raise_if_closed,
        )
        self._heard: tuple[AgendaRecord, float] | None = None
        self._is_closed = False
        self._turned = threading.Semaphore(0)
        self._number = 0
        self._thread = threading.Thread(
            target=self._serve, name="lightning-resilience-watch", daemon=True
        )

    def turn_to(self, number: int) -> None:
        """Forget what was heard, and listen for item ``number`` from now on."""
        self._number = number
        self.has_heard = False
        self._turned.release()
        if self._thread.ident is None:
            self._thread.start()

    def heard(self) -> AgendaRecord | None:
        """Return what is asked for, with the time that it has left now; None for nothing."""
        if not self.has_heard or self._heard is None:
            return None
        record, heard_at_s = self._heard
        return aged(record, by_s=self._driver.clock.now_s() - heard_at_s)

    def close(self) -> None:
        """Let the thread end, within a second. Idempotent."""
        self._is_closed = True
        self._turned.release()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise _ClosedError

    def _serve(self) -> None:
        try:
            while self._turned.acquire() and not self._is_closed:
                self._hear(self._number)
        except _ClosedError:
            pass
        except ResilienceError as error:
            if not self._is_closed:
                _log.warning("what other ranks ask for is not heard any more: %s", error)
        finally:
            self._driver.close()

    def _hear(self, number: int) -> None:
        record = self._driver.run(listen(self._member, number))
        if number == self._number:
            self._heard = record, self._driver.clock.now_s()
            self.has_heard = True
