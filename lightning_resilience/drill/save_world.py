# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated run that saves, is killed, and starts again: a storage, and one process at a time.

Its promises are looked after from outside (``drill.checks_saves``), after every effect.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from lightning_resilience.drill.checks_saves import SaveChecks
from lightning_resilience.drill.save_looks import Format, Looks
from lightning_resilience.drill.save_process import FailedError, KilledError, Process
from lightning_resilience.drill.save_spool import SpoolingProcess
from lightning_resilience.drill.save_storage import SaveStorage
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from lightning_resilience.core.spooled import SpoolEntry
    from lightning_resilience.drill.save_plan import Chance, SavePlan


__all__ = ["SaveWorld"]


class SaveWorld:
    """A storage, and the processes of one run, one after the other.

    Args:
        plan: The run.
        chance: Who decides what goes wrong.
    """

    def __init__(self, plan: SavePlan, chance: Chance) -> None:
        self.plan = plan
        self.storage = SaveStorage()
        one_file = plan.form in {Format.FILE, Format.FOREIGN}
        self.looks = Looks(storage=self.storage, form=plan.form, is_local=plan.renames and one_file)
        self.checks = SaveChecks(self.storage, self.looks)
        self.story: list[str] = []
        self.staged = count(1)
        self.saves = count(1)
        self.node: dict[str, SpoolEntry] = {}
        self.left = {
            "faults": plan.faults,
            "crashes": plan.crashes,
            "moves": plan.moves,
            "damages": plan.damages,
        }
        self._chance = chance
        self.storage.seen = self._seen

    def run(self) -> None:
        """Let the run come to its end, whatever happens.

        Raises:
            DrillFailedError: A promise was not kept.
        """
        # A start that fails has used up a crash or a fault.
        starts = 1 + self.plan.crashes + self.plan.faults
        for _ in range(starts):
            process = SpoolingProcess(self) if self.plan.is_spooling else Process(self)
            try:
                process.live()
            except (KilledError, FailedError, CheckpointError) as error:
                self.tell(f"the process ends: {type(error).__name__} {error}")
                process.die()
            else:
                self.checks.finished()
                process.die()
                return
        self.checks.never_starts(starts)

    def choose(self, options: list[tuple[str, str]], *, calm: float) -> str:
        """Return what happens next.

        Args:
            options: What may, and what of it there is a limited number of; the first is the usual.
            calm: How often it should be the first, where chance decides.
        """
        open_ = [name for name, kind in options if not kind or self.left[kind] > 0]
        self.checks.is_on = not self._chance.is_repeating
        chosen = open_[self._chance.choose(open_, calm=calm)]
        kind = next(kind for name, kind in options if name == chosen)
        if kind:
            self.left[kind] -= 1
            self.tell(f"* {chosen}")
        self.checks.is_on = not self._chance.is_repeating
        return chosen

    def _seen(self, what: str) -> None:
        self.tell(f"  {what}")
        self.checks.happened(what)

    def tell(self, what: str) -> None:
        """Add a line to the story."""
        self.story.append(what)
