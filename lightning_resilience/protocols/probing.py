# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One probe of an ill dependency: claim it, send it, and apply what it has shown.

The claim is a compare-and-set from exactly the record that was overdue, so of all who try one wins;
its result is applied to exactly the record that the claim wrote. If the prober dies, its claim is a
record that no longer changes: the nearest waiters see that and take over after the lease. If it is
merely paused, its result names an epoch that is over and changes nothing.

Where the job belongs to a site, whoever holds the probe asks there first (``protocols.site``): only
the highest open circuit is probed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_resilience.core import breaker, lease, waiting
from lightning_resilience.core.breaker import (
    BreakerInput,
    ProbeClaimed,
    ProbeFailed,
    ProbeReleased,
    ProbeSucceeded,
)
from lightning_resilience.core.events import ProbeEnded, ProbeStarted
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.site import reason_of
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.circuit import apply_to
from lightning_resilience.protocols.effects import Call, Draw, Emit, Nonce, Now
from lightning_resilience.protocols.site import ask_site, consult, held


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.breaker import BreakerView
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.core.records import BreakerRecord
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.circuit_memory import Upstream
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Patience", "try_probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How a caller waits for an ill dependency.

    Args:
        probe: A real operation of the failing class; raises where the dependency is still ill.
        classify: Makes an outcome of an exception.
        when_open: ``wait``, or ``raise``: at once, but for the probe where it is due.
        chunk_s: Longest time between two looks at the record, in seconds.
        voice_s: Longest time between two events that say what is awaited, in seconds.
        spread_s: After the wait, callers come back over this time, in seconds, so that they do not
            return in the same instant.
        leads: Whether this caller sees to the probe wherever it stands in line, because it is the
            one for whom all others wait. It sends each that is due also where its host is isolated.
    """

    probe: Callable[[CancelToken], Any]
    classify: Callable[[BaseException], Outcome]
    when_open: str = "wait"
    chunk_s: float = waiting.LONGEST_CHUNK_S
    voice_s: float = waiting.LONGEST_CHUNK_S
    spread_s: float = 1.0
    leads: bool = False


def try_probe(circuit: Circuit, patience: Patience, view: BreakerView) -> Protocol[bool]:
    """Claim the probe and, if this process wins, probe and apply the result.

    Args:
        circuit: What this process remembers.
        patience: Holds the probe.
        view: The record that is overdue by this process's own sight.

    Returns:
        Whether it has won, and has told the others.
    """
    holder: str = yield Nonce()
    claimed_at_s: float = yield Now()
    unchanged_s = claimed_at_s - view.sighting.first_seen_at_s
    taken_over = bool(view.record.holder)
    if not (
        yield from apply_to(circuit, view, ProbeClaimed(holder=holder, unchanged_s=unchanged_s))
    ):
        return False
    mine = circuit.view
    if mine is None or mine.record.holder != holder:
        return False
    epoch = mine.record.epoch
    yield Emit(ProbeStarted(dependency=circuit.dependency, epoch=epoch, taken_over=taken_over))
    try:
        result, succeeded, detail = yield from _probe(
            circuit, patience, mine.record, claimed_at_s=claimed_at_s
        )
    except GeneratorExit:
        raise
    except BaseException:
        # Interrupted: the permit goes back at once instead of at the end of its lease. Where the
        # store is away it does so all the same, and the interruption stays what is raised.
        with suppress(ResilienceError):
            yield from apply_to(circuit, mine, ProbeReleased(epoch=epoch, holder=holder))
        raise
    yield from apply_to(circuit, mine, result)
    yield from _report_end(circuit, epoch, succeeded=succeeded, detail=detail)
    return True


def _probe(
    circuit: Circuit, patience: Patience, mine: BreakerRecord, *, claimed_at_s: float
) -> Protocol[tuple[BreakerInput, bool, str]]:
    config = circuit.config
    epoch, holder = mine.epoch, mine.holder
    up, above = circuit.upstream, (yield from consult(circuit, mine))
    now_s: float = yield Now()
    is_in_time = lease.has_time_left(
        claimed_at_s=claimed_at_s,
        work_s=config.probe_timeout_s,
        lease_s=config.probe_lease_s,
        now_s=now_s,
    )
    if above is not None and up is not None:
        # Also where it is too late for a probe: what stops the job's is known all the same.
        due = is_in_time and waiting.is_probe_due(above, up.circuit.config, now_s=now_s)
        return (yield from _probe_above(circuit, patience, mine, up=up, above=above, due=due))
    if not is_in_time:
        detail = "this process was paused for too long after its claim"
        return ProbeReleased(epoch=epoch, holder=holder), False, detail
    try:
        yield Call(patience.probe, timeout_s=config.probe_timeout_s, is_leased=True)
    except GeneratorExit:
        raise
    except BaseException as error:
        outcome = patience.classify(error)
        if outcome.failure is FailureClass.CANCELLED:
            raise
        if outcome.counts:
            return (
                ProbeFailed(epoch=epoch, holder=holder, reason=outcome.error),
                False,
                outcome.error,
            )
        # It was answered, if only with a refusal: the dependency is up.
        return ProbeSucceeded(epoch=epoch, holder=holder), True, f"answered with {outcome.error}"
    return ProbeSucceeded(epoch=epoch, holder=holder), True, "the probe succeeded"


def _probe_above(
    circuit: Circuit,
    patience: Patience,
    mine: BreakerRecord,
    *,
    up: Upstream,
    above: BreakerView,
    due: bool,
) -> Protocol[tuple[BreakerInput, bool, str]]:
    """Send the site's probe where that is due; the job's waits as long as the site's is open."""
    epoch, holder = mine.epoch, mine.holder
    site, detail = up.circuit, f"held: {reason_of(above.record)}"
    if due:
        draw: float = yield Draw()
        is_sent = site.probe_share.sends(draw=draw)
        site.probe_share = site.probe_share.after(sent=is_sent)
        if is_sent and (yield from ask_site(up, try_probe(site, patience, above))):
            after = site.view or above
            if breaker.passes(after.record):
                well = ProbeSucceeded(epoch=epoch, holder=holder)
                return well, True, "the site's probe succeeded"
            above, detail = after, f"the site's probe failed; {reason_of(after.record)}"
    hold = yield from held(circuit, above.record, claim=(epoch, holder))
    return hold, False, detail


def _report_end(circuit: Circuit, epoch: int, *, succeeded: bool, detail: str) -> Protocol[None]:
    now_s: float = yield Now()
    view = circuit.view
    next_s = None if view is None else waiting.next_probe_in_s(view, circuit.config, now_s=now_s)
    yield Emit(
        ProbeEnded(
            dependency=circuit.dependency,
            epoch=epoch,
            succeeded=succeeded,
            detail=detail,
            next_probe_in_s=next_s,
        )
    )
