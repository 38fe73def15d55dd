# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs that share a storage and a site's store: storage ill for all, for one, no site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.drill.job_kinds import SITES
from lightning_resilience.drill.scenario import Crash, Outage, StoragePartition, Store
from lightning_resilience.drill.site_plan import SitePlan


OPENED = "drill://storage:write@site', epoch=2, previous='closed', state='open'"
HELD = "the circuit of the site is"
OUTAGE = Outage(at_s=0.0, for_s=120.0)
BASE = SitePlan(jobs=3, starts_s=(0.0, 1.0, 2.0))


def well(plan: SitePlan, seed: int = 0) -> Any:
    """Run a plan in which every promise has to be kept."""
    run = SITES.of_plan(plan, seed)
    assert not run.check, "\n".join(SITES.told(run))
    return run


def told(run: Any) -> str:
    """Return the story of a run as one text."""
    return "\n".join(run.story)


@pytest.mark.parametrize("seed", range(10))
def test_storage_that_is_ill_for_all_is_probed_for_all(seed: int) -> None:
    """The site's circuit opens, jobs are held, and storage sees fewer probes than without."""
    run = well(replace(BASE, faults=(OUTAGE,)), seed)
    without = well(replace(BASE, faults=(OUTAGE,), gone=((0.0, 5000.0, True),)), seed)

    assert OPENED in told(run)
    assert HELD in told(run)
    assert told(run).count("storage: probe") < told(without).count("storage: probe")


@pytest.mark.parametrize("seed", range(10))
def test_storage_that_is_ill_for_one_job_holds_up_no_other(seed: int) -> None:
    """The site's circuit stays closed, and the others never wait."""
    cut = StoragePartition(at_s=0.0, for_s=120.0, hosts=(0,))
    run = well(replace(BASE, faults=(cut,)), seed)

    assert "VoteCast" in told(run)
    assert OPENED not in told(run)
    assert HELD not in told(run)


@pytest.mark.parametrize("seed", range(10))
def test_a_site_that_is_gone_changes_nothing_but_what_is_said(seed: int) -> None:
    """Each job trips, probes and comes back by itself, and says once that it has no site."""
    run = well(replace(BASE, faults=(OUTAGE,), gone=((0.0, 5000.0, True),)), seed)

    assert told(run).count("SiteLost") == BASE.jobs
    assert HELD not in told(run)


@pytest.mark.parametrize("effects", range(1, 120, 3))
def test_a_job_may_die_at_any_effect(effects: int) -> None:
    """With a claim of the site's, a vote, or half a trip: the others come back."""
    crash = Crash(at_s=0.0, ranks=(0,), effects=effects)

    well(replace(BASE, faults=(OUTAGE, crash)), effects)


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_the_quorum_decides_how_many_jobs_it_takes(quorum: int) -> None:
    """Two jobs that are ill open the site's circuit where two are enough."""
    cut = StoragePartition(at_s=0.0, for_s=200.0, hosts=(0, 1))
    breaker = BreakerConfig(window_s=300.0, site_quorum=quorum)
    run = well(replace(BASE, breaker=breaker, faults=(cut,)))

    assert (OPENED in told(run)) is (quorum <= 2)


def test_a_site_that_loses_messages_breaks_no_promise() -> None:
    """Nor does a claim or a vote whose answer was lost."""
    lossy = Store(timeout_s=0.5, lost_requests=0.1, lost_answers=0.2, late_requests=0.05)

    for seed in range(20):
        well(replace(BASE, site=lossy, faults=(OUTAGE,)), seed)
