# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent of a simulated job sees while its workers are well: is there a reason to restart?

It is what ``adapters.rendezvous_watching`` does with torch's own rendezvous.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.joining import Cadence, Watch
from lightning_resilience.core.restart import lost
from lightning_resilience.drill.restart_plan import GRACE_S, KEEP_ALIVE_S
from lightning_resilience.errors import StoreError
from lightning_resilience.protocols.effects import Get, Now
from lightning_resilience.protocols.restart import News, look_around, may_grow


if TYPE_CHECKING:
    from lightning_resilience.drill.restart_agent import Agent
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["RENDEZVOUS_KEY", "AgentWatch"]

RENDEZVOUS_KEY: Final = "rendezvous"
"""Stands for the state of torch's own rendezvous, which is asked of the store."""


class AgentWatch:
    """One agent's look at one start of its workers.

    Args:
        agent: The agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._watch = Watch(grace_s=GRACE_S)
        self._looks = Cadence(every_s=KEEP_ALIVE_S)
        self._growth = Cadence(every_s=KEEP_ALIVE_S)
        self._may_grow = False
        self._turns = itertools.count()

    def look(self) -> Protocol[News]:
        """Look around, once in a while; no news where the store does not answer."""
        now_s: float = yield Now()
        memory = self._agent.memory
        if memory is None or not self._looks.is_due(now_s=now_s):
            return News()
        try:
            return (yield from look_around(memory, next(self._turns)))
        except StoreError:
            return News()

    def waiting(self) -> Protocol[int]:
        """Return how many nodes wait to join, as torch's agent is to see it."""
        try:
            yield Get(RENDEZVOUS_KEY)
        except StoreError:
            now_s: float = yield Now()
            return self._watch.silent(now_s=now_s)
        inner = self._agent.world.inner
        waiting, away = inner.waiting(), lost(self._agent.over, inner.there())
        if waiting and not away and not (yield from self._let_grow()):
            waiting = 0
        return self._watch.answered(waiting, lost=away)

    def _let_grow(self) -> Protocol[bool]:
        now_s: float = yield Now()
        if self._growth.is_due(now_s=now_s):
            try:
                self._may_grow = yield from may_grow(self._agent.dependencies())
            except StoreError:
                self._may_grow = False
        return self._may_grow
