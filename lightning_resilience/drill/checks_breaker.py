# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I1 and I2: one probe at a time, one for each claim, and no result changes a later epoch.

Probes are counted where they arrive. A claim is a write that made a new epoch half-open, so whoever
sends a probe must have written one that no probe has been sent for. Two exceptions are stated: a
holder that has stood still since its claim adds one probe at most, and a process that decides alone
probes for itself, no oftener than its open wait.

A result is what storage has answered to a request that began after the epoch did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.events import ProbeStarted
from lightning_resilience.core.lease import CLOCK_RATE_FACTOR
from lightning_resilience.drill.facts import EPSILON_S, Check
from lightning_resilience.drill.scenario import Pause


if TYPE_CHECKING:
    from lightning_resilience.core.events import Event
    from lightning_resilience.core.records import BreakerRecord
    from lightning_resilience.drill.checks_history import OneHistory
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["Claim", "FencedResults", "OneProbe"]

_HALF_OPEN: Final = BreakerState.HALF_OPEN.value
_RECOVERING: Final = BreakerState.RECOVERING.value
# What chance may add to an expected number: six standard deviations, and six for small numbers.
_DEVIATIONS: Final = 6


@dataclass(slots=True)
class Claim:
    """One claim of the probe's permit, as it was written.

    Args:
        epoch: The epoch that it began.
        at_s: When it was written.
        life: In which life of the store.
        request: The probe that was sent for it, or None.
        is_known: Whether its process knows of it: the answer may have been lost.
    """

    epoch: int
    at_s: float
    life: int
    request: Request | None = None
    is_known: bool = False


class OneProbe(Check):
    """Counts probes at storage.

    Args:
        facts: What is true.

    Attributes:
        claims: The latest claim of each process.
    """

    promise = "I1"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.claims: dict[Process, Claim] = {}
        self._running: dict[Request, Claim] = {}
        self._alone_at_s: dict[Process, float] = {}
        self._alone = 0
        self._alone_since_s = 0.0
        self._has_fine_pauses = any(
            isinstance(fault, Pause) and fault.effects for fault in self.scenario.faults
        )

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note a claim, and look whether it was due."""
        del before
        facts = self.facts
        old, new = facts.before, facts.record
        if key != facts.breaker_key or new is None or new.state != _HALF_OPEN:
            return
        if old is None or new.epoch == old.epoch:
            return
        if not process.wrote(new.holder):
            self.fail(f"{process.name} claims the probe for {new.holder!r}")
        lease_s = self.scenario.breaker.probe_lease_s if old.state == _HALF_OPEN else old.open_s
        seen_s = (now_s - facts.before_began_at_s) * process.host.clock.rate
        if seen_s < lease_s - EPSILON_S:
            self.fail(
                f"{process.name} claims the probe {seen_s:.6f} s of its clock after epoch "
                f"{old.epoch} ({old.state}) began; it is due after {lease_s:g} s"
            )
        self.claims[process] = Claim(new.epoch, now_s, facts.life)

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Note that a process knows of its claim."""
        del now_s
        claim = self.claims.get(process)
        if isinstance(event, ProbeStarted) and claim is not None:
            claim.is_known = claim.is_known or event.epoch == claim.epoch

    def began(self, now_s: float, request: Request) -> None:
        """Count a probe."""
        if request.kind != "probe":
            return
        process = request.process
        claim = self.claims.get(process)
        is_alone = self.facts.is_alone(process, request.operation)
        if is_alone and claim is not None and not claim.is_known:
            # Its answer was lost, and this is the probe of the process's own breaker.
            claim = None
        if claim is not None and claim.request is None and self._is_current(claim, process):
            claim.request = request
            self._sent(now_s, request, claim)
        elif is_alone:
            self._sent_alone(now_s, request)
        elif claim is not None and claim.request is not None:
            self.fail(f"{process.name} sends a second probe for its claim of epoch {claim.epoch}")
        else:
            self.fail(f"{process.name} sends a probe without a claim that stands: {claim}")

    def ended(self, now_s: float, request: Request) -> None:
        """Count it no more."""
        del now_s
        if request.kind == "probe":
            self._running.pop(request, None)

    def _is_current(self, claim: Claim, process: Process) -> bool:
        facts = self.facts
        record = facts.record
        stands = record is not None and (record.epoch, record.state) == (claim.epoch, _HALF_OPEN)
        # Where the store has been emptied since, the claim is lost and nobody knows.
        return stands or claim.life != facts.life or facts.stood_still(process, claim.at_s)

    def _sent(self, now_s: float, request: Request, claim: Claim) -> None:
        facts, config = self.facts, self.scenario.breaker
        process = request.process
        # Whoever stands still looks at its clock when it wakes, and between that look and the
        # request only a pause that strikes between two effects can come.
        stood_still = self._has_fine_pauses and facts.stood_still(process, claim.at_s)
        passed_s = (now_s - claim.at_s) * process.host.clock.rate
        left_s = config.probe_lease_s / CLOCK_RATE_FACTOR - config.probe_timeout_s
        if passed_s > left_s + EPSILON_S and not stood_still:
            self.fail(
                f"{process.name} sends its probe {passed_s:.6f} s after its claim; after "
                f"{left_s:.6f} s it may not end within its lease"
            )
        others = [
            other
            for other, its in self._running.items()
            if not other.is_abandoned and not facts.stood_still(other.process, its.at_s)
        ]
        if others and not stood_still:
            names = ", ".join(other.process.name for other in others)
            self.fail(
                f"{process.name} sends a probe while {len(others)} run (of {names}); may be 0"
            )
        self._running[request] = claim

    def _sent_alone(self, now_s: float, request: Request) -> None:
        process, config = request.process, self.scenario.breaker
        last_at_s = self._alone_at_s.get(process)
        rate = process.host.clock.rate
        if last_at_s is not None and (now_s - last_at_s) * rate < config.open_for_s - EPSILON_S:
            self.fail(
                f"{process.name}, alone, probes {(now_s - last_at_s) * rate:.6f} s after its last "
                f"probe; open_for_s is {config.open_for_s:g}"
            )
        self._alone_at_s[process] = now_s
        detour = None if process.circuit is None else process.circuit.detour
        if detour is None or detour.is_isolated:
            # A host that has tripped itself is one, whatever the number of ranks.
            return
        if not self._alone:
            self._alone_since_s = now_s
        self._alone += 1
        rate = self.scenario.clocks.rate
        expected = 1 + (now_s - self._alone_since_s) * rate / config.open_for_s
        most = expected + _DEVIATIONS * (1 + math.sqrt(expected))
        if self._alone > most:
            self.fail(
                f"{self._alone} probes of processes that are alone, where {expected:.1f} are "
                f"expected and {most:.1f} may come by chance"
            )


class FencedResults(Check):
    """Looks whether each result belongs to the epoch that it changes.

    Args:
        facts: What is true.
        history: Knows which writes are transitions.
        probes: Knows who has claimed and sent which probe.
    """

    promise = "I2"

    def __init__(self, facts: Facts, history: OneHistory, probes: OneProbe) -> None:
        super().__init__(facts)
        self._history = history
        self._probes = probes
        self._used: dict[Process, Request] = {}

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look for the result behind a transition."""
        del now_s, before
        old, new = self.facts.before, self.facts.record
        if key != self.facts.breaker_key or old is None or new is None:
            return
        if not self._history.is_step:
            return
        if old.state == _HALF_OPEN and new.state != _HALF_OPEN:
            self._settled(process, old, new)
        elif old.state == _RECOVERING:
            self._ramped(process, old, new)

    def _settled(self, process: Process, old: BreakerRecord, new: BreakerRecord) -> None:
        if not process.wrote(old.holder):
            self.fail(
                f"{process.name} ends epoch {old.epoch}, whose permit is held by {old.holder!r}"
            )
        claim = self._probes.claims.get(process)
        request = None if claim is None or claim.epoch != old.epoch else claim.request
        if new.state == BreakerState.OPEN.value:
            if new.open_s != old.open_s and not self._has_failed(process, request):
                self.fail(
                    f"{process.name} says that the probe of epoch {old.epoch} failed; at storage "
                    f"it {_end_of(request)}"
                )
        elif not self._has_succeeded(request):
            self.fail(
                f"{process.name} says that the probe of epoch {old.epoch} was answered; at storage "
                f"it {_end_of(request)}"
            )

    def _ramped(self, process: Process, old: BreakerRecord, new: BreakerRecord) -> None:
        deeds = self.facts.of(process)
        grows = new.limit > old.limit or new.state == BreakerState.CLOSED.value
        request = deeds.ok if grows else deeds.failed
        if not grows and (deeds.has_abandoned or self._was_cut_off(process)):
            return
        began_at_s = self.facts.before_began_at_s
        if request is None or request.began_at_s < began_at_s:
            self.fail(
                f"{process.name} moves epoch {old.epoch} by a "
                f"{'success' if grows else 'failure'}, and none of its calls that began after the "
                f"epoch did, at {began_at_s:.6f} s, has ended so (the latest {_end_of(request)})"
            )
        if self._used.get(process) is request and not self.scenario.store.late_requests:
            self.fail(f"{process.name} moves epoch {old.epoch} by a result that it has used before")
        self._used[process] = request

    def _has_failed(self, process: Process, request: Request | None) -> bool:
        if request is None:
            return self._was_cut_off(process)
        if request.is_abandoned:
            # Given up at its timeout, that is, and not because its process was interrupted.
            lasted_s = (self.world.agenda.now_s - request.began_at_s) * process.host.clock.rate
            return lasted_s >= self.scenario.breaker.probe_timeout_s - EPSILON_S
        return request.failed is not None and self.facts.counts(request.failed)

    def _has_succeeded(self, request: Request | None) -> bool:
        if request is None or request.ended_at_s is None or request.is_abandoned:
            return False
        return request.failed is None or not self.facts.counts(request.failed)

    @staticmethod
    def _was_cut_off(process: Process) -> bool:
        # What does not arrive is not counted, and fails all the same.
        return process.host.cut_off_from_storage_until_s > 0


def _end_of(request: Request | None) -> str:
    if request is None:
        return "was never seen"
    if request.is_abandoned:
        return "was given up"
    if request.ended_at_s is None:
        return f"began at {request.began_at_s:.6f} s and still runs"
    answer = "succeeded" if request.failed is None else f"failed with {request.failed!r}"
    return f"began at {request.began_at_s:.6f} s and {answer}"
