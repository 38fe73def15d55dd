# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A pause between two steps: who asks for it, and what all ranks do then.

Every rank looks at what it remembers of its breakers after every k-th step, and asks nobody for
that. A rank that finds one open puts a pause on the agenda. All ranks then enter the same joint
operation, which is a gate and nothing behind it: the rank that asked waits for the circuit as a
save does, probe included, and the others wait for its word. None is in a collective, so the pause
may outlast the process group's timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_resilience.core.events import TrainingPaused, TrainingResumed
from lightning_resilience.core.pausing import asks, is_time_to_look, sight_of


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.core.agenda import AgendaItem, AgendaRecord
    from lightning_resilience.core.pausing import Sight


__all__ = ["Pausing"]


class Pausing:
    """The action for the agenda's kind ``pause``, and what asks for it.

    Args:
        trainer: The Trainer.
        session: This rank's session.
        ask: Puts an item on the agenda.
        every: After how many steps this rank looks at its breakers, 0 for never.
    """

    def __init__(
        self, trainer: Any, session: Session, *, ask: Callable[[AgendaItem], None], every: int
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._ask = ask
        self._every = every
        self._steps = 0
        self._past: dict[str, Sight] = {}

    def before_step(self) -> None:
        """Ask for a pause where a breaker of this rank is open. Asks nobody to find that out."""
        done, self._steps = self._steps, self._steps + 1
        if not is_time_to_look(done, every=self._every):
            return
        session = self._session
        item = asks(
            session.alone.breakers.records(), on_outage=session.member.on_outage, past=self._past
        )
        if item is not None:
            self._ask(item)

    def __call__(self, record: AgendaRecord) -> None:
        """Pause with all ranks until the circuit lets calls through.

        Args:
            record: What all ranks have agreed.

        Raises:
            JointError: The same on every rank: the circuit was open for longer than ``deadline_s``.
        """
        session = self._session
        clock = session.driver.clock
        began_at_s = clock.now_s()
        step = self._trainer.global_step
        emit = session.driver.sink.emit
        emit(TrainingPaused(dependency=record.detail, step=step, reason=record.reason))
        try:
            session.pause(record.detail, worker=record.rank)
        finally:
            lasted_s = clock.now_s() - began_at_s
            emit(TrainingResumed(dependency=record.detail, step=step, elapsed_s=lasted_s))
        seen = session.alone.breakers.records().get(record.detail)
        if seen is not None:
            self._past[record.detail] = sight_of(seen)
