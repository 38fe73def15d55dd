# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Names of everything that is stored in the shared store; ``core.records`` has what they hold.

``<run>`` is the run id, ``<inc>`` the incarnation, which changes with every start of the
worker group, so that keys of an earlier attempt are never believed. In a store of several jobs
``<run>`` is ``@site`` (``core.site``):

==============================================  ====================================================
key                                             value
==============================================  ====================================================
``lr/<run>/store_id``                           ``StoreIdRecord``: which server this is, write-once
``lr/<run>/breaker/<dependency>``               ``BreakerRecord``; survives a restart
``lr/<run>/bell/<dependency>/<gen>``            set when the circuit of that trip lets calls through
``lr/<run>/i<inc>/waiting/<dependency>/<gen>``  counter: tickets of the waiters of that trip, a hint
``lr/<run>/slot/<dependency>/<j>``              ``SlotRecord``: who may call, one cell a slot
``lr/<run>/turn/<dependency>``                  counter: tickets of who waits for a slot, a hint
``lr/<run>/budget/<dependency>``                ``BudgetRecord``: retries of the whole job
``lr/owner``                                    ``OwnerRecord``: of the store's host, write-once
``lr/<run>/restarts``                           ``RestartRecord``: of the whole job
``lr/<run>/incarnation``                        ``IncarnationRecord``: the present start
``lr/<run>/progress``                           ``ProgressRecord``: only ever further
``lr/<run>/storage``                            ``StorageRecord``: what a restart waits for
``lr/<run>/i<inc>/acknowledged/<node>``         the node has read how the job has ended
``lr/<run>/i<inc>/go/0``                        ``GoRecord``: agents may join again, write-once
``lr/<run>/i<inc>/arrived/<rank>``              number of the joint operation that the rank is at
``lr/<run>/i<inc>/gate/<seq>/<round>``          ``GateRecord``, write-once
``lr/<run>/i<inc>/beat/<rank>``                 changes while the rank works
``lr/<run>/i<inc>/out/<seq>/<rank>``            ``OutcomeRecord``
``lr/<run>/i<inc>/count/<seq>``                 counter of outcomes, a hint
``lr/<run>/i<inc>/final/<seq>``                 ``FinalRecord``: a ballot, then once the verdict
``lr/<run>/i<inc>/done/<seq>``                  bell: the verdict is there
``lr/<run>/i<inc>/left/<rank>``                 operation in which the rank was interrupted
``lr/<run>/i<inc>/incident/0``                  ``IncidentRecord``: which rank left first, and why
``lr/<run>/i<inc>/failed/0``                    bell: the incident is there
``lr/<run>/i<inc>/cleaned/0``                   first operation whose keys are still there
``lr/<run>/i<inc>/settled/0``                     ``SettledRecord``: how those before have ended
``lr/<run>/i<inc>/asked/<n>``                   ``AgendaRecord``: most urgent that is asked for
``lr/<run>/i<inc>/agenda/<n>``                  ``AgendaRecord``: what all ranks act on
``lr/<run>/i<inc>/halt/<v>``                    ``HaltRecord``: whether all leave a validation
``lr/<run>/i<inc>/place/<v>/<rank>``            ``PlaceRecord``: how far the rank goes in it
==============================================  ====================================================
"""

from __future__ import annotations

import msgspec


__all__ = ["Keys"]


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Names of all keys of one run and incarnation.

    Args:
        run_id: The run; several runs may share one store.
        incarnation: The worker group's start; never the restart count, which is kept per agent.
    """

    run_id: str
    incarnation: str

    @property
    def store_id(self) -> str:
        """Key of the store's identity."""
        return f"lr/{self.run_id}/store_id"

    def breaker(self, dependency: str) -> str:
        """Key of a breaker's record."""
        return f"lr/{self.run_id}/breaker/{dependency}"

    def bell(self, dependency: str, generation: int) -> str:
        """Key that is set when the circuit of trip ``generation`` lets calls through again."""
        return f"lr/{self.run_id}/bell/{dependency}/{generation}"

    def waiting(self, dependency: str, generation: int) -> str:
        """Counter of places in line for trip ``generation``, anew for each start of the job."""
        return f"lr/{self.run_id}/i{self.incarnation}/waiting/{dependency}/{generation}"

    def slot(self, dependency: str, index: int) -> str:
        """Key of one slot of a dependency's admission."""
        return f"lr/{self.run_id}/slot/{dependency}/{index}"

    def turn(self, dependency: str) -> str:
        """Counter that hands out tickets to those who wait for a slot."""
        return f"lr/{self.run_id}/turn/{dependency}"

    def budget(self, dependency: str) -> str:
        """Key of a dependency's retry budget."""
        return f"lr/{self.run_id}/budget/{dependency}"

    @property
    def owner(self) -> str:
        """Key that says whose store this is; the only one that all runs have in common."""
        return "lr/owner"

    @property
    def restarts(self) -> str:
        """Key of the record of restarts."""
        return f"lr/{self.run_id}/restarts"

    @property
    def present(self) -> str:
        """Key that names the present start of the workers."""
        return f"lr/{self.run_id}/incarnation"

    @property
    def progress(self) -> str:
        """Key of how far the job has come."""
        return f"lr/{self.run_id}/progress"

    @property
    def storage(self) -> str:
        """Key of what the workers load and save."""
        return f"lr/{self.run_id}/storage"

    def joint(self, part: str, number: int, last: int | None = None) -> str:
        """Key of a part of joint operations in this incarnation.

        Args:
            part: Which part.
            number: The operation's number; for ``arrived``, ``beat`` and ``left``, the rank; for
                ``acknowledged``, the node; for
                ``asked`` and ``agenda``, the item's; for ``halt`` and ``place``, the validation's.
            last: The rank or the round, where there is one per rank or round.
        """
        prefix = f"lr/{self.run_id}/i{self.incarnation}/{part}/{number}"
        return prefix if last is None else f"{prefix}/{last}"
