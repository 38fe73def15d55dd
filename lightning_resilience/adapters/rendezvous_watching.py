# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent answers torch while its workers are well: is there a reason to restart them?

===========================================  =======================================================
what is seen                                 then
===========================================  =======================================================
other agents are at the gate                 yes: the start of the workers is over
nodes of the round are not there any more    yes: torch itself would wait for the workers to notice
nodes wait to join                           yes, unless what they would load is ill: then later
the rendezvous does not answer               what was seen last, for as long as a node may be silent
===========================================  =======================================================

It costs one request at the job's store each ``keep_alive_interval``, beside torch's own.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import RendezvousError

from lightning_resilience.adapters import rendezvous_inner as within
from lightning_resilience.adapters.rendezvous_gate import dependencies_of
from lightning_resilience.core.incident import is_stop
from lightning_resilience.core.joining import Cadence, Watch
from lightning_resilience.core.restart import lost
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.restart import News, look_around, may_grow
from lightning_resilience.runtime.system import SystemClock


if TYPE_CHECKING:
    from lightning_resilience.adapters.rendezvous_connection import Connection
    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.restart import IncarnationRecord
    from lightning_resilience.ports import Dice
    from lightning_resilience.protocols.restart_record import Memory


__all__ = ["Watching"]

_log = logging.getLogger(__name__)


class Watching:
    """One agent's look at one start of its workers. The agent's main thread.

    Args:
        connection: To the job's store, and to the handler within.
        options: Checked options.
        memory: What this agent remembers of restarts.
        begun: The start of the workers.
        dice: This agent's, that no other agent has.
    """

    def __init__(
        self,
        connection: Connection,
        options: RendezvousOptions,
        *,
        memory: Memory,
        begun: IncarnationRecord,
        dice: Dice,
    ) -> None:
        self._connection = connection
        self._options = options
        self._memory = memory
        self._begun = begun
        self._clock, self._dice = SystemClock(), dice
        self._watch = Watch(grace_s=options.grace_s)
        self._looks = Cadence(every_s=options.keep_alive_s)
        self._growth = Cadence(every_s=options.keep_alive_s)
        self._may_grow = False
        self._turns = itertools.count()

    def look(self) -> News:
        """Look around, once in a while; no news where the store does not answer."""
        if not self._looks.is_due(now_s=self._clock.now_s()):
            return News()
        try:
            return self._connection.store().run(look_around(self._memory, next(self._turns)))
        except (StoreUnavailableError, RendezvousError) as error:
            _log.debug("no news: %s", error)
            return News()

    def waiting(self) -> int:
        """Return how many nodes wait to join, as torch's agent is to see it."""
        try:
            handler = self._connection.handler()
            waiting = self._connection.num_nodes_waiting()
        except Exception as error:
            # Torch's agent ends for any of them; and has to, where it was told to stop.
            if is_stop(error):
                raise
            return self._silent(error)
        there = within.participants(handler)
        away = lost(self._begun, there)
        if waiting and not away and not self._let_grow():
            waiting = 0
        return self._watch.answered(waiting, lost=away)

    def _let_grow(self) -> bool:
        """Tell whether nodes that wait may be let in: what they would load is well."""
        if self._growth.is_due(now_s=self._clock.now_s()):
            try:
                found = dependencies_of(self._options, self._connection, self._memory.keys)
                self._may_grow = self._connection.store().run(may_grow(found))
            except (StoreUnavailableError, RendezvousError) as error:
                _log.debug("nodes that wait are not let in yet: %s", error)
                self._may_grow = False
        return self._may_grow

    def _silent(self, error: Exception) -> int:
        now_s = self._clock.now_s()
        waiting = self._watch.silent(now_s=now_s)
        if self._watch.may_try(now_s=now_s, draw=self._dice.draw()):
            _log.info("the rendezvous does not answer: %s", error)
            self._connection.renew()
        return waiting
