# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The promises, and who looks whether they are kept: after every event, in every simulated world.

======  ==========================================================  ===============================
name    promise                                                     held by
======  ==========================================================  ===============================
I1      one probe at a time, at most one for each claim             ``OneProbe``
I2      a breaker's history is one sequence of legal steps          ``OneHistory``
I2      a circuit opens by votes for calls that have failed         ``HonestVotes``
I2      no result changes a later epoch                             ``FencedResults``
I2      a restarted job begins without old votes                    ``ClearedVotes``
I3      the circuit closes once the dependency is well              ``Closes``
I3      everybody comes to an end                                   ``Ends``
I3      a probe that is due is claimed by a waiter that looks       ``DueClaims``
I3      who waits is woken                                          ``RungBells``
I3      a verdict comes when the last worker has reported           ``PromptVerdicts``
I4      retries stay within the budget, and are charged first       ``PaidRetries``
I4      retries do not come in step                                 ``SpreadRetries``
I5      a slot has one holder, and is a lease                       ``SlotCells``
I5      who reaches storage was let in, and no more than may be     ``Admitted``
I5      a dead holder's slot is had again                           ``DeadHolders``
I6      every save ends in exactly one way, and none is lost        ``checks_saves``
I7      a call costs one read, and none while the view is fresh     ``CheapCalls``
I7      what a waiter asks the store is bounded                     ``BoundedCost``
I8      no two ranks return different verdicts                      ``OneVerdict``
I8      who defers has reason to, and leaves nobody behind          ``Deferrals``
I8      all ranks end a run alike                                   ``SameEnd``
I8      who is taken for lost has been silent                       ``LostRanks``
I8      a verdict is what the workers' outcomes make it             ``HonestVerdicts``
I9      resume never finds a torn checkpoint                        ``checks_saves``
I3, I4  a job that is started again and again                       ``checks_restarts``
I8      all of its agents hear the same                             ``checks_restarts``
I10     they come through the gate together                         ``checks_gate``
errors  what is raised is the answer to something that happened     ``KnownErrors``
keys    nothing is left in the store for ever                       ``BoundedKeys``
======  ==========================================================  ===============================

They look from outside: at the writes that the store performs, at the requests that reach storage,
at what operations return. None trusts what a process says of itself, but for which breaker it
follows: what it decides alone never leaves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.drill.checks_breaker import FencedResults, OneProbe
from lightning_resilience.drill.checks_budget import PaidRetries
from lightning_resilience.drill.checks_conduct import BoundedCost, BoundedKeys, KnownErrors
from lightning_resilience.drill.checks_deferred import Deferrals, SameEnd
from lightning_resilience.drill.checks_duties import (
    ClearedVotes,
    DueClaims,
    LostRanks,
    RungBells,
    SpreadRetries,
)
from lightning_resilience.drill.checks_history import OneHistory
from lightning_resilience.drill.checks_joint import OneVerdict
from lightning_resilience.drill.checks_liveness import Closes, Ends, liveness_bound_s
from lightning_resilience.drill.checks_load import Admitted, CheapCalls, DeadHolders
from lightning_resilience.drill.checks_outcomes import HonestVerdicts, PromptVerdicts
from lightning_resilience.drill.checks_slots import SlotCells
from lightning_resilience.drill.checks_votes import HonestVotes
from lightning_resilience.drill.facts import Facts


if TYPE_CHECKING:
    from lightning_resilience.drill.observer import Observer
    from lightning_resilience.drill.world import World


__all__ = ["all_checks", "liveness_bound_s"]


def all_checks(world: World) -> list[Observer]:
    """Return who looks after every promise, for ``World(…, make_observers=all_checks)``.

    Args:
        world: The world, before anything has happened in it.

    Returns:
        Observers that raise ``DrillFailedError`` as soon as a promise is not kept.
    """
    facts = Facts(world)
    history, probes, slots = OneHistory(facts), OneProbe(facts), SlotCells(facts)
    return [
        facts,
        history,
        probes,
        FencedResults(facts, history, probes),
        HonestVotes(facts, history),
        slots,
        Admitted(facts, slots),
        DeadHolders(facts, slots),
        PaidRetries(facts),
        CheapCalls(facts),
        OneVerdict(facts),
        Deferrals(facts),
        SameEnd(facts),
        HonestVerdicts(facts),
        PromptVerdicts(facts),
        DueClaims(facts),
        RungBells(facts),
        ClearedVotes(facts),
        LostRanks(facts),
        SpreadRetries(facts),
        Closes(facts),
        Ends(facts, is_joint=False),
        Ends(facts, is_joint=True),
        KnownErrors(facts),
        BoundedCost(facts),
        BoundedKeys(facts),
    ]
