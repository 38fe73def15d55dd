# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A job's dealings with the breaker of its site: look, vote, and be held; ``core.site`` has why.

::

    before a call, where this job's circuit lets it through   heed         at most one read per view
    before nodes are let in, which nobody here waits for      is_held      the same
    right after this process has opened the job's circuit     tell_trip    a vote
    whoever holds the job's probe, before it asks storage     consult      a vote, or a look

So while all is well one process of a job looks, when it is about to call, and while the job's
circuit is open the one that holds its probe. The site's store has its own effects (``AtSite``), and
no failure of it ever leaves this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from lightning_resilience.core import site as core
from lightning_resilience.core.breaker import BreakerState, HeldUpstream, HostVoted, VoteDropped
from lightning_resilience.core.breaker_record import passes
from lightning_resilience.core.events import SiteLost, SiteReturned
from lightning_resilience.errors import StoreError
from lightning_resilience.protocols.circuit import apply, apply_to, current, drop_old_votes, refresh
from lightning_resilience.protocols.effects import (
    Add,
    AtSite,
    CompareAndSet,
    Delete,
    Draw,
    Emit,
    Get,
    MultiGet,
    Now,
    Set,
)
from lightning_resilience.protocols.transform import transform


if TYPE_CHECKING:
    from typing import Any

    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.core.records import BreakerRecord
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.circuit_memory import Upstream
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["ask_site", "consult", "heed", "held", "is_held", "tell_trip"]

T = TypeVar("T")

_STORE_EFFECTS = (Get, MultiGet, Set, Delete, CompareAndSet, Add)


def heed(circuit: Circuit) -> Protocol[None]:
    """Open the job's circuit where the site's is, before this process calls.

    Only for who waits then, or calls again: nobody else would probe what it has opened.

    Args:
        circuit: The job's.

    Raises:
        StoreUnavailableError: The *job's* store did not answer.
    """
    up = circuit.upstream
    if up is None or not up.looks:
        return
    if circuit.view is not None and not passes(circuit.view.record):
        # Whoever holds the probe looks at the site. But what this process has seen may be over.
        own = yield from current(circuit)
        if not passes(own.record):
            return
    view = yield from _new_look(up)
    if view is None:
        return
    if not passes(view.record):
        yield from apply(circuit, (yield from held(circuit, view.record)))
    elif up.circuit.host in view.record.votes:
        yield from _withdraw(circuit, up)


def is_held(circuit: Circuit) -> Protocol[bool]:
    """Tell whether the site's circuit is open, for who does not wait for it.

    Nothing is written to the job's: a circuit that is opened needs somebody who comes to probe it.

    Args:
        circuit: The job's.

    Returns:
        False also where the site cannot be asked.
    """
    up = circuit.upstream
    if up is None or not up.looks:
        return False
    view = yield from _new_look(up)
    return view is not None and not passes(view.record)


def tell_trip(circuit: Circuit) -> Protocol[None]:
    """Vote at the site where this process has just opened the job's circuit.

    Args:
        circuit: The job's.
    """
    up, view = circuit.upstream, circuit.view
    if up is None or view is None or circuit.wrote != view.record.epoch:
        return
    if view.record.state == BreakerState.OPEN.value and not view.record.upstream:
        circuit.wrote = 0
        yield from ask_site(up, _vote(up, view.record, insists=True))


def consult(circuit: Circuit, mine: BreakerRecord) -> Protocol[BreakerView | None]:
    """Look at the site, before the probe of the job's circuit is sent.

    Args:
        circuit: The job's.
        mine: Its record, with this process's claim.

    Returns:
        What stops the job's probe: the site's circuit, which lets nothing through; None where
        nothing does.
    """
    up = circuit.upstream
    if up is None:
        return None
    view = yield from ask_site(up, _look(up) if mine.upstream else _vote(up, mine))
    return None if view is None or passes(view.record) else view


def held(
    circuit: Circuit, record: BreakerRecord, *, claim: tuple[int, str] | None = None
) -> Protocol[HeldUpstream]:
    """Return what opens the job's circuit because of the site's.

    Args:
        circuit: The job's.
        record: The site's.
        claim: Epoch and holder of the job's probe that is held back; None where there is none.
    """
    draw: float = yield Draw()
    return HeldUpstream(
        upstream=record.epoch,
        open_s=core.look_again_s(circuit.config, draw=draw),
        reason=core.reason_of(record),
        claim=claim,
    )


def ask_site(up: Upstream, inner: Protocol[T]) -> Protocol[T | None]:
    """Run a protocol at the site's store, where that answers.

    Args:
        up: The site's circuit; ``inner`` works on it.
        inner: What to run.

    Returns:
        What ``inner`` returns; None where the store does not answer, was left alone because it has
        just not answered, or holds something that is no record.
    """
    now_s: float = yield Now()
    link = up.link
    if now_s < link.next_try_at_s:
        inner.close()
        return None
    try:
        found = yield from transform(inner, _at_site)
    except StoreError as error:
        lost_at_s: float = yield Now()
        draw: float = yield Draw()
        link.leave_alone(now_s=lost_at_s, draw=draw)
        if link.lost_since_s is None:
            link.lost_since_s = lost_at_s
            yield Emit(SiteLost(dependency=up.circuit.dependency, error=str(error)))
        return None
    if link.lost_since_s is not None:
        answered_at_s: float = yield Now()
        lost_for_s = answered_at_s - link.lost_since_s
        yield Emit(SiteReturned(dependency=up.circuit.dependency, lost_for_s=lost_for_s))
    link.answered()
    return found


def _at_site(effect: Effect) -> Protocol[Any]:
    if isinstance(effect, _STORE_EFFECTS):
        return (yield AtSite(effect))
    return (yield effect)


def _new_look(up: Upstream) -> Protocol[BreakerView | None]:
    """Look at the site where the last look is old; None where it is not, or nothing is known."""
    now_s: float = yield Now()
    if not core.needs_look(up.circuit.view, up.circuit.config, now_s=now_s):
        return None
    return (yield from ask_site(up, _tidy_look(up)))


def _tidy_look(up: Upstream) -> Protocol[BreakerView]:
    view = yield from _look(up)
    now_s: float = yield Now()
    return (yield from drop_old_votes(up.circuit, view, now_s=now_s))


def _look(up: Upstream) -> Protocol[BreakerView]:
    view = yield from refresh(up.circuit)
    up.lookout = core.watch(up.lookout, view)
    return view


def _vote(up: Upstream, record: BreakerRecord, *, insists: bool = False) -> Protocol[BreakerView]:
    """Vote, unless the site's circuit is open already.

    Who holds the job's probe does not insist: it has time for one write, and votes again at the
    next one where another job was faster.
    """
    view = yield from _look(up)
    if not passes(view.record):
        return view
    site = up.circuit
    now_s: float = yield Now()
    vote = HostVoted(
        host=site.host,
        hosts=site.config.site_quorum,
        reason=f"the circuit of {site.host} opened: {record.reason}",
        witnessed=core.witnessed(up.lookout, site.config, now_s=now_s),
    )
    if insists:
        return (yield from apply(site, vote))
    yield from apply_to(site, view, vote)
    return site.view or view


def _withdraw(circuit: Circuit, up: Upstream) -> Protocol[None]:
    # Its own view may be from before another process has opened the job's circuit, and voted.
    view = yield from refresh(circuit)
    if passes(view.record):
        yield from ask_site(up, apply(up.circuit, VoteDropped(host=up.circuit.host)))
