# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When jobs that share a storage stay away from it together: a breaker above those of the jobs.

A job that finds a storage ill trips for itself. Several jobs that do so at the same storage have
one reason, and each that probes by itself, and each that has not noticed yet, is load on what is
ill. So a site may have a store of its own, in which there is one breaker for each dependency, with
the same record and the same states, whose "hosts" are jobs::

    a job's circuit opens ──▶ its vote at the site ──▶ site_quorum of them ──▶ the site's opens
                                                                                   │
    every job that is about to call sees that, and its own circuit opens  ◀────────┘

* **Open upstream is open here.** A job copies what it sees into its own record (``upstream``), so
  that all its ranks and agents stay away by the rules that they have anyway.
* **Only the highest open circuit is probed.** Whoever holds the probe of a job's circuit looks at
  the site first. While the site's is open it leaves storage alone, or sends the *site's* probe
  where that is due, under that record's own lease. Once it lets calls through, each job's own probe
  decides when the job comes back, so jobs come back one probe at a time, and spread.
* **One job that is ill is ill by itself**: its vote alone opens nothing, unless ``site_quorum`` is
  1. What a job has copied is no evidence, so it never votes because of it.
* **An old vote is no evidence.** Jobs end without a word, and nobody may have looked for hours. No
  clock is shared that would say how old a vote is, so a vote counts only for who has seen the
  record *without* it less than ``window_s`` ago, on its own clock. Jobs that are ill look again and
  again: the first of them sees the others appear.
* **The site's circuit has no ramp.** A ramp asks for results, and one job that is ill by itself
  would reopen it for all. Each job has a ramp of its own.
* **What a store has lost is over.** Whoever makes the site's record anew makes it closed, however
  it was when that process has seen it last: that may be long ago, and jobs that are still ill vote
  again. Only what a person holds open stays so.
* **Whose probe failed may pass over the next one**, by the dice: a job with a broken link would
  otherwise keep the site open for all, if its looks always came first.

The site's store is a help and never a need: where it does not answer in time, or holds no record,
a job says so once, goes by its own circuit, and asks again later and later.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core import breaker_record
from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.detour import ProbeShare


if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.core.records import BreakerRecord


__all__ = [
    "PROBES",
    "SITE_RUN",
    "Lookout",
    "is_for_good",
    "look_again_s",
    "name_at_site",
    "needs_look",
    "outlived",
    "reason_of",
    "site_config",
    "watch",
    "witnessed",
]

SITE_RUN: Final = "@site"
"""Takes the place of the run id in the keys of a site: no run is called so."""

PROBES: Final = ProbeShare(0.5)
"""Of the site's probes that are due when a job looks, it sends one of two, and one of three for
certain."""

_NEVER_S: Final = float("-inf")


def name_at_site(dependency: str) -> str:
    """Return the name of the site's breaker for what a job calls ``dependency``."""
    return f"{dependency}@site"


def site_config(config: BreakerConfig) -> BreakerConfig:
    """Return the configuration of a site's breaker, of that of a job's.

    Args:
        config: The job's.

    Returns:
        The same times; a vote each of ``site_quorum`` jobs; and no ramp.
    """
    return replace(config, quorum_fraction=1.0, max_concurrent=1, ramp_start=1)


def needs_look(view: BreakerView | None, config: BreakerConfig, *, now_s: float) -> bool:
    """Tell whether a job that is about to call has to look at the site's record first.

    Args:
        view: What this process knows of it.
        config: Its configuration.
        now_s: Now, on this process's clock.

    Returns:
        False where it let calls through less than ``view_max_age_s`` ago.
    """
    is_fresh = breaker_record.is_fresh(view, max_age_s=config.view_max_age_s, now_s=now_s)
    return not is_fresh or view is None or not breaker_record.passes(view.record)


def is_for_good(record: BreakerRecord) -> bool:
    """Tell whether what a process has seen of a site's record holds however old it is.

    Args:
        record: As it was.

    Returns:
        True where a person holds the circuit open: only a person lets it go.
    """
    return record.state == BreakerState.FORCED_OPEN.value


def outlived(seen: BreakerRecord, config: BreakerConfig) -> BreakerRecord:
    """Return what is still true of a site's record where its store has lost it.

    Args:
        seen: The record, as one process has seen it last, however long ago.
        config: Its configuration.

    Returns:
        The very record where a person holds it open; otherwise one that lets calls through.
    """
    if is_for_good(seen):
        return seen
    return msgspec.structs.replace(
        seen,
        state=BreakerState.CLOSED.value,
        limit=config.max_concurrent,
        open_s=config.open_for_s,
        failures=0,
    )


def look_again_s(config: BreakerConfig, *, draw: float) -> float:
    """Return in how many seconds a job that is held looks at the site again.

    Args:
        config: The job's.
        draw: A uniform number in [0, 1).

    Returns:
        From one to two times ``open_for_s``, and no more than ``max_open_for_s``: jobs that were
        held at one instant come back over a time, and none sooner than it would have probed.
    """
    longest_s = min(2 * config.open_for_s, config.max_open_for_s)
    return config.open_for_s + draw * (longest_s - config.open_for_s)


def reason_of(record: BreakerRecord) -> str:
    """Return why a job's circuit is open, from the record of the site's."""
    return f"the circuit of the site is {record.state} (epoch {record.epoch}: {record.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookout:
    """What one process knows of the age of the votes in a record that it looks at now and then.

    Args:
        store_id: The store that it looked at last; empty where it has not looked yet.
        looked_at_s: When it sent its last look, on its own clock.
        absent_at_s: For each vote that was there, when it was last seen not to be there.
    """

    store_id: str = ""
    looked_at_s: float = _NEVER_S
    absent_at_s: Mapping[str, float] = field(default_factory=dict)


def watch(before: Lookout, view: BreakerView) -> Lookout:
    """Note what another look has shown.

    Args:
        before: What this process knew.
        view: What it has read.
    """
    record = view.record
    is_same = before.store_id == record.store_id
    last_s = before.looked_at_s if is_same else _NEVER_S
    absent_at_s = {
        vote: before.absent_at_s.get(vote, last_s) if is_same else _NEVER_S for vote in record.votes
    }
    return Lookout(store_id=record.store_id, looked_at_s=view.read_at_s, absent_at_s=absent_at_s)


def witnessed(lookout: Lookout, config: BreakerConfig, *, now_s: float) -> tuple[str, ...]:
    """Return the votes that were cast less than ``window_s`` ago for certain.

    Args:
        lookout: What this process knows.
        config: The site's configuration.
        now_s: Now, on this process's clock.
    """
    return tuple(
        vote for vote, at_s in lookout.absent_at_s.items() if now_s - at_s < config.window_s
    )
