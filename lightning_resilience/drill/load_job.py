# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One start of a simulated job that resumes, and what its ranks tell each other.

How a part of a joint operation has ended is merged as it ships (``core.joint``): the first failure
is the verdict at once, and who is dead is named once it was silent for as long as a job waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.joint import decide_final, error_of
from lightning_resilience.core.records import FinalRecord
from lightning_resilience.core.spool import plan_for
from lightning_resilience.drill.load_rank import Rank


if TYPE_CHECKING:
    from lightning_resilience.core.records import OutcomeRecord
    from lightning_resilience.drill.load_world import LoadWorld
    from lightning_resilience.errors import JointError


__all__ = ["Job", "Load"]

_HEARD_S: Final = 3.0
"""After how long the others know of a failure, in seconds."""

_SILENT_S: Final = 60.0
"""After how long a rank that is dead is known to be lost, in seconds."""


class Load:
    """One load of all ranks of a start, which may search and load again.

    Args:
        job: The start.
        number: Which of its loads it is.

    Attributes:
        name: What all ranks have in common for it, and no other load has.
        refusals: Why readers have refused it, by name.
        verdict: What all ranks return of it; None until then.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.name = f"{job.name}-{number}"
        self.number = number
        self.refusals: dict[str, str] = {}
        self.verdict: FinalRecord | None = None
        self.reports: list[OutcomeRecord] = []
        self._job = job
        self._failed_s: float | None = None

    def reported(self, report: OutcomeRecord, now_s: float) -> None:
        """Note how a rank's part has ended."""
        self.reports.append(report)
        if report.failure and self._failed_s is None:
            self._failed_s = now_s

    @property
    def error(self) -> JointError | None:
        """What all ranks raise; None where it has gone well, or goes on."""
        return None if self.verdict is None else error_of(self.verdict, seq=self.number)

    @property
    def heard_at_s(self) -> float:
        """When all know of a failure; 0 where there is none."""
        return 0.0 if self._failed_s is None else self._failed_s + _HEARD_S

    def decide(self, now_s: float) -> None:
        """Reach the verdict once it can be told."""
        told = {report.rank for report in self.reports}
        missing = [rank.number for rank in self._job.ranks if rank.number not in told]
        is_heard = self._failed_s is not None and self.heard_at_s <= now_s
        if self.verdict is None and (is_heard or self._job.is_lost or not missing):
            lost = () if is_heard else missing
            terms = FinalRecord(op="load", writer="")
            self.verdict = decide_final(terms, self.reports, lost_ranks=lost)


class Job:
    """One start of a job.

    Args:
        world: The world.
        number: Which start it is.

    Attributes:
        answers: What rank 0 has told the others about storage, one after the other.
        loads: Its loads.
        troubles: How much has gone wrong in it.
        is_disturbed: Whether the older process may change something meanwhile.
    """

    def __init__(self, world: LoadWorld, number: int) -> None:
        self.name = f"start {number}"
        self.answers: list[Any] = []
        self.loads: list[Load] = []
        self.unspooled: set[int] = set()
        self.troubles = 0
        self.is_disturbed = False
        self.plan = plan_for(
            (node.number, name, entry) for node in world.nodes for name, entry in node.spool.items()
        )
        self._world = world
        self._died_s: float | None = None
        self.ranks = [
            Rank(world, self, rank) for rank in range(world.plan.nodes * world.plan.ranks)
        ]

    def load(self, number: int) -> Load:
        """Return one of its loads."""
        while len(self.loads) <= number:
            self.loads.append(Load(self, len(self.loads)))
        return self.loads[number]

    @property
    def lost_at_s(self) -> float:
        """When a dead rank is known to be lost; 0 where none is dead."""
        return 0.0 if self._died_s is None else self._died_s + _SILENT_S

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be lost."""
        return self._died_s is not None and self.lost_at_s <= self._world.now_s

    @property
    def heard_at_s(self) -> float:
        """When all know of the failure of its last load; 0 where there is none."""
        return self.loads[-1].heard_at_s if self.loads else 0.0

    @property
    def is_over(self) -> bool:
        """Whether every rank has come to its end."""
        return all(rank.has_ended for rank in self.ranks)

    @property
    def has_resumed(self) -> bool:
        """Whether all ranks live, and have come to the same end."""
        return all(rank.is_alive for rank in self.ranks) and not self.errors

    @property
    def errors(self) -> list[Exception]:
        """What ranks have raised."""
        return [rank.main.error for rank in self.ranks if rank.main.error is not None]

    def dies(self) -> None:
        """Note that a rank is gone."""
        if self._died_s is None:
            self._died_s = self._world.now_s

    def decide(self) -> None:
        """Reach the verdict of its last load once it can be told."""
        if self.loads:
            self.loads[-1].decide(self._world.now_s)
