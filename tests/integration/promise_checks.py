# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which promises does a recording of real processes break? Pure functions on what was counted.

A ``Recording`` holds what the server of the dependency has counted, what was in the shared store,
what each rank was told about joint operations, and which faults there were. All instants are of the
one monotonic clock that the processes of a host share. Each check returns what it finds broken, in
words, so that a test can feed it a made-up recording and see the break named.

What the promises allow on top of their bare numbers is counted out here, fault by fault:

* **I1**: a prober that was stopped after its last look at the clock sends late, and each such stop
  adds one probe. A process without the store sends a probe that is due with probability 1/N, so
  their number is held against a binomial bound. A host that has failed and found no quorum probes
  for itself; before a trip those are fewer than the quorum.
* **I5**: a call whose slot was taken by another counts as forgiven only where its caller was
  stopped for about a lease, or the store was lost with all slots. A process that goes alone has its
  own share, which is one slot.
* **I8**: what is allowed is an error that names its rank.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker import BreakerState, quorum
from lightning_resilience.core.breaker_record import LEGAL
from lightning_resilience.core.lease import CLOCK_RATE_FACTOR


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker import BreakerConfig
    from lightning_resilience.core.records import BreakerRecord, FinalRecord, Transition


FOREVER_S: Final = math.inf
# Sixteen processes and the tests share two cores: a thread may run this much later than it could.
SCHEDULING_S: Final = 1.0
# Chance that a bound on chance is broken by chance.
_UNLIKELY: Final = 1e-6
_REBUILT: Final = "rebuilt"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a caller says has let it through: the cell that it wrote.

    Args:
        store_id: The store that it belongs to; empty for slots, which do not know it.
        number: Epoch of the breaker's record, or number of the slot.
        holder: Nonce of the claim.
        sent_at_s: When it was sent.
    """

    number: int
    holder: str
    sent_at_s: float
    store_id: str = ""


@dataclass(kw_only=True)
class Served:
    """A request that the server has counted.

    Args:
        kind: ``probe``, or the kind of call.
        dependency: The breaker that it is made under.
        rank: Its caller.
        way: ``shared``, or ``lost`` or ``isolated`` where the caller goes alone.
        claim: What let it through; None where nothing had to.
        began_at_s: When it was there.
        ended_at_s: When it was answered, or its caller was gone.
        went_well: How it was answered.
    """

    kind: str
    dependency: str
    rank: int
    began_at_s: float
    way: str = "shared"
    claim: Claim | None = None
    ended_at_s: float = FOREVER_S
    went_well: bool = False

    def is_in_at(self, at_s: float) -> bool:
        """Whether it is in the server at an instant."""
        return self.began_at_s <= at_s < self.ended_at_s


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A rank was stopped, or killed: then it lasts for ever."""

    rank: int
    at_s: float
    until_s: float = FOREVER_S


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The store's server was killed, and was back, empty, later."""

    at_s: float
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Told:
    """How a joint operation ended on one rank: with a verdict, or an exception."""

    rank: int
    seq: int
    worker: int
    began_at_s: float
    ended_at_s: float
    final: FinalRecord | None = None
    error: str = ""
    lost_ranks: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Recording:
    """All that is known of one round.

    Args:
        config: The breakers' configuration.
        admission: How slots are kept.
        ranks: How many ranks there are, each a host of its own.
        hosts: Hosts that use each breaker.
        served: What the server has counted.
        absences: Stops and deaths.
        losses: Deaths of the store's server.
        seen: The records of breakers that each rank has read or written, in order; the test's own
            last look stands under -1.
        told: How joint operations ended.
        errors: Calls that ended with an exception.
    """

    config: BreakerConfig
    admission: AdmissionConfig
    ranks: int
    hosts: dict[str, int]
    served: list[Served] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    seen: dict[int, list[tuple[str, BreakerRecord]]] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def probes(self, dependency: str, way: str) -> list[Served]:
        """Probes that were sent one way, as they came."""
        return self._of(dependency, way, is_probe=True)

    def calls(self, dependency: str, way: str) -> list[Served]:
        """Calls that came one way, as they came."""
        return self._of(dependency, way, is_probe=False)

    def _of(self, dependency: str, way: str, *, is_probe: bool) -> list[Served]:
        chosen = [
            each
            for each in self.served
            if (each.dependency, each.way, each.kind == "probe") == (dependency, way, is_probe)
        ]
        return sorted(chosen, key=lambda each: each.began_at_s)

    def stopped_s(self, rank: int, since_s: float, until_s: float) -> float:
        """For how long a rank was stopped between two instants, in seconds."""
        return sum(
            max(0.0, min(until_s, absence.until_s) - max(since_s, absence.at_s))
            for absence in self.absences
            if absence.rank == rank
        )

    def stopped_ranks(self, since_s: float, until_s: float) -> set[int]:
        """Which ranks were stopped, or dead, at some time between two instants."""
        ranks = {absence.rank for absence in self.absences}
        return {rank for rank in ranks if self.stopped_s(rank, since_s, until_s) > 0}

    def lost_store(self, since_s: float, until_s: float) -> bool:
        """Whether the store was away, or replaced, between two instants."""
        return any(loss.at_s <= until_s and since_s <= loss.until_s for loss in self.losses)

    def has_lost_a_rank_and_the_store(self, until_s: float) -> bool:
        """Whether a rank was killed, and the store lost, before an instant."""
        died = any(each.until_s == FOREVER_S and each.at_s < until_s for each in self.absences)
        return died and self.lost_store(0.0, until_s)


def broken(recording: Recording) -> list[str]:
    """Return every break of a promise, in words."""
    return [
        *one_probe_at_a_time(recording),
        *few_probes_alone(recording),
        *one_history(recording),
        *no_more_than_the_limit(recording),
        *one_verdict(recording),
        *nothing_unexpected(recording),
    ]


# --- I1 --------------------------------------------------------------------------------------


def one_probe_at_a_time(recording: Recording) -> Iterator[str]:
    """I1 for the shared breakers: never two probes at once, one a claim, and a lease apart."""
    for dependency in recording.hosts:
        probes = recording.probes(dependency, "shared")
        yield from _one_a_claim(dependency, probes)
        yield from _claims_apart(recording, dependency, probes)
        in_time = [probe for probe in probes if not is_late(recording, probe)]
        for probe in in_time:
            for other in in_time:
                if other is not probe and other.is_in_at(probe.began_at_s):
                    yield f"I1: ranks {other.rank} and {probe.rank} probe {dependency} at once"


def _one_a_claim(dependency: str, probes: Sequence[Served]) -> Iterator[str]:
    for probe in probes:
        if probe.claim is None:
            yield f"I1: rank {probe.rank} probes {dependency} without a claim"
    claims = Counter((p.claim.store_id, p.claim.number) for p in probes if p.claim is not None)
    for (store_id, epoch), number in claims.items():
        if number > 1:
            yield f"I1: {number} probes of {dependency} in epoch {epoch} of store {store_id}"


def _claims_apart(recording: Recording, dependency: str, probes: Sequence[Served]) -> Iterator[str]:
    # A claimer has seen the record unchanged for a lease, or for the longer open wait, before it
    # sends its claim; and it saw it no earlier than it was written. So this needs no room.
    shortest_s = min(recording.config.probe_lease_s, recording.config.open_for_s)
    sent = sorted(probe.claim.sent_at_s for probe in probes if probe.claim is not None)
    for before_s, after_s in pairwise(sent):
        if after_s - before_s < shortest_s:
            yield f"I1: two claims of {dependency} within {after_s - before_s:.2f} s"


def is_late(recording: Recording, probe: Served) -> bool:
    """Whether a probe was sent so late that its caller was stopped after its look at the clock."""
    if probe.claim is None:
        return False
    config, claimed_at_s = recording.config, probe.claim.sent_at_s
    in_time_s = config.probe_lease_s / CLOCK_RATE_FACTOR - config.probe_timeout_s
    return (
        probe.began_at_s - claimed_at_s > in_time_s
        and recording.stopped_s(probe.rank, claimed_at_s, probe.began_at_s) > 0
    )


def few_probes_alone(recording: Recording) -> Iterator[str]:
    """I1 for processes that go alone: only those that have to, and with the promised chance."""
    for dependency, hosts in recording.hosts.items():
        for way in ("lost", "isolated"):
            probes = recording.probes(dependency, way)
            yield from _one_a_claim_of_each(dependency, probes)
        yield from _chance_is_kept(recording, dependency)
        yield from _few_are_isolated(recording, dependency, hosts)


def _one_a_claim_of_each(dependency: str, probes: Sequence[Served]) -> Iterator[str]:
    claims = Counter((probe.rank, probe.claim and probe.claim.holder) for probe in probes)
    for (rank, holder), number in claims.items():
        if number > 1 or holder is None:
            yield f"I1: rank {rank}, alone, has sent {number} probes of {dependency} by one claim"


def alone_until_s(loss: Loss) -> float:
    """Return until when a process may still go alone after the store is back.

    It asks the store less and less often while it is away: its last pause is at most twice as long
    as all before it, and a second.
    """
    return loss.until_s + 2 * (loss.until_s - loss.at_s) + 1.0 + SCHEDULING_S


def _chance_is_kept(recording: Recording, dependency: str) -> Iterator[str]:
    probes = recording.probes(dependency, "lost")
    trials = 0
    for loss in recording.losses:
        trials += recording.ranks * int(
            (alone_until_s(loss) - loss.at_s) / recording.config.open_for_s
        )
    for probe in probes:
        if not any(
            loss.at_s <= probe.began_at_s <= alone_until_s(loss)
            or recording.stopped_s(probe.rank, loss.at_s, probe.began_at_s)
            for loss in recording.losses
        ):
            yield f"I1: rank {probe.rank} probes {dependency} alone, and the store was there"
    most = _most_of(trials, 1 / recording.ranks)
    if len(probes) > most:
        yield (
            f"I1: {len(probes)} probes of {dependency} without the store; {trials} dice of "
            f"1/{recording.ranks} give {trials / recording.ranks:.1f}, and hardly more than {most}"
        )


def _most_of(trials: int, share: float) -> int:
    """Return the number of successes that is exceeded with a chance of ``_UNLIKELY`` at most."""
    left = 1.0
    for successes in range(trials + 1):
        chance = share**successes * (1 - share) ** (trials - successes)
        left -= math.comb(trials, successes) * chance
        if left <= _UNLIKELY:
            return successes
    return trials


def _few_are_isolated(recording: Recording, dependency: str, hosts: int) -> Iterator[str]:
    probers = {probe.rank for probe in recording.probes(dependency, "isolated")}
    needed = quorum(hosts, fraction=recording.config.quorum_fraction)
    known = _states(recording, dependency)
    trips = sum(
        (state, known.get((store_id, epoch - 1))) == ("open", "closed")
        for (store_id, epoch), state in known.items()
    )
    # Votes without a quorum may stand at the end.
    most = (needed - 1) * (trips + 1)
    if len(probers) > most:
        yield f"I1: {len(probers)} hosts probe {dependency} for themselves, after {trips} trips"


# --- I2 --------------------------------------------------------------------------------------


def one_history(recording: Recording) -> Iterator[str]:
    """I2: all that anybody has seen of a breaker fits into one legal sequence."""
    for dependency in recording.hosts:
        for rank, seen in recording.seen.items():
            records = [record for name, record in seen if name == dependency]
            yield from _goes_forward(dependency, rank, records)
            for record in records:
                yield from _history_is_whole(dependency, rank, record)
        yield from _agree(recording, dependency)
        yield from _legal(recording, dependency)
        yield from _closed_by_a_probe(recording, dependency)


def _goes_forward(dependency: str, rank: int, records: Sequence[BreakerRecord]) -> Iterator[str]:
    stores: list[str] = []
    epochs: dict[str, int] = {}
    for record in records:
        where = f"{dependency}, as rank {rank} saw it, store {record.store_id}"
        if record.store_id == "local":
            yield f"I2: what {where} says was decided by one process alone"
        if record.store_id not in stores:
            stores.append(record.store_id)
        elif stores[-1] != record.store_id:
            yield f"I2: {where} comes back after {stores[-1]}"
        if record.epoch < epochs.get(record.store_id, 0):
            yield f"I2: {where} goes from epoch {epochs[record.store_id]} back to {record.epoch}"
        epochs[record.store_id] = record.epoch


def _history_is_whole(dependency: str, rank: int, record: BreakerRecord) -> Iterator[str]:
    last = record.history[-1]
    if (last.epoch, last.state) != (record.epoch, record.state):
        yield f"I2: {dependency}, rank {rank}: epoch {record.epoch} is not the last of its history"
    for before, after in pairwise(record.history):
        if after.epoch != before.epoch + 1:
            yield f"I2: {dependency}, rank {rank}: epoch {after.epoch} follows {before.epoch}"


def _own_history(record: BreakerRecord) -> tuple[Transition, ...]:
    """The part of a history that was made in the record's own store."""
    began = [i for i, entry in enumerate(record.history) if entry.reason.startswith(_REBUILT)]
    return record.history[began[-1] :] if began else record.history


def _states(recording: Recording, dependency: str) -> dict[tuple[str, int], str]:
    return {
        (record.store_id, entry.epoch): entry.state
        for record in _records(recording, dependency)
        for entry in _own_history(record)
    }


def _records(recording: Recording, dependency: str) -> Iterator[BreakerRecord]:
    for seen in recording.seen.values():
        yield from (record for name, record in seen if name == dependency)


def _agree(recording: Recording, dependency: str) -> Iterator[str]:
    states: dict[tuple[str, int], set[str]] = defaultdict(set)
    holders: dict[tuple[str, int], set[str]] = defaultdict(set)
    for record in _records(recording, dependency):
        holders[record.store_id, record.epoch].add(record.holder)
        for entry in _own_history(record):
            states[record.store_id, entry.epoch].add(f"{entry.state}: {entry.reason}")
    for what in (states, holders):
        for (store_id, epoch), values in what.items():
            if len(values) > 1:
                yield (
                    f"I2: epoch {epoch} of {dependency} in store {store_id} is told in "
                    f"{len(values)} ways: {sorted(values)}"
                )


def _legal(recording: Recording, dependency: str) -> Iterator[str]:
    known: dict[tuple[str, int], Transition] = {
        (record.store_id, entry.epoch): entry
        for record in _records(recording, dependency)
        for entry in _own_history(record)
    }
    for (store_id, epoch), after in known.items():
        before = known.get((store_id, epoch - 1))
        if before is None or after.reason.startswith(_REBUILT):
            continue
        if (BreakerState(before.state), BreakerState(after.state)) not in LEGAL:
            yield f"I2: {dependency} goes from {before.state} to {after.state} in epoch {epoch}"


def _closed_by_a_probe(recording: Recording, dependency: str) -> Iterator[str]:
    known = _states(recording, dependency)
    answered = {
        (probe.claim.store_id, probe.claim.number)
        for probe in recording.probes(dependency, "shared")
        if probe.claim is not None and probe.went_well
    }
    passing = {BreakerState.RECOVERING.value, BreakerState.CLOSED.value}
    for (store_id, epoch), state in known.items():
        before = known.get((store_id, epoch - 1))
        was_probed = (store_id, epoch - 1) in answered
        if before == BreakerState.HALF_OPEN.value and state in passing and not was_probed:
            yield f"I2: {dependency} recovers in epoch {epoch}, and no probe of it went well"


# --- I5 --------------------------------------------------------------------------------------


def no_more_than_the_limit(recording: Recording) -> Iterator[str]:
    """I5: calls that were let in at once, by their slots."""
    limit = recording.config.max_concurrent
    own = max(1, limit // recording.ranks)
    for dependency in recording.hosts:
        calls = recording.calls(dependency, "shared")
        admitted = [call for call in calls if call.claim is not None]
        for call in calls:
            if call.claim is None and call.kind == "collective":
                yield f"I5: rank {call.rank} calls {dependency} without a slot"
        yield from _one_call_a_claim(dependency, admitted)
        for call in admitted:
            at_s = call.began_at_s
            inside = [each for each in admitted if each.is_in_at(at_s)]
            kept = [each for each in inside if not is_forgiven(recording, each, admitted, at_s)]
            if len(kept) > limit:
                yield (
                    f"I5: {len(kept)} calls of {dependency} at once, by ranks "
                    f"{[each.rank for each in kept]}; the limit is {limit}"
                )
        for way in ("lost", "isolated"):
            yield from _own_share(dependency, recording.calls(dependency, way), own=own)


def _one_call_a_claim(dependency: str, admitted: Sequence[Served]) -> Iterator[str]:
    claims = Counter(call.claim.holder for call in admitted if call.claim is not None)
    for holder, number in claims.items():
        if number > 1:
            yield f"I5: {number} calls of {dependency} by one claim of a slot, {holder}"


def is_forgiven(
    recording: Recording, call: Served, admitted: Sequence[Served], at_s: float
) -> bool:
    """Whether a call runs on without its slot, for a reason that the faults explain."""
    assert call.claim is not None
    held_since_s = call.claim.sent_at_s
    if recording.lost_store(held_since_s, at_s):
        return True
    was_taken = any(
        other.claim is not None
        and other.claim.number == call.claim.number
        and held_since_s < other.claim.sent_at_s <= at_s
        for other in admitted
    )
    # Its last beat may have been sent just before the stop.
    silent_s = recording.admission.slot_lease_s - recording.admission.beat_every_s
    return was_taken and recording.stopped_s(call.rank, held_since_s, at_s) >= silent_s


def _own_share(dependency: str, calls: Sequence[Served], *, own: int) -> Iterator[str]:
    admitted = [call for call in calls if call.kind == "collective"]
    for call in admitted:
        mine = [e for e in admitted if e.rank == call.rank and e.is_in_at(call.began_at_s)]
        if len(mine) > own:
            yield f"I5: rank {call.rank}, alone, has {len(mine)} calls of {dependency} at once"


# --- I8 --------------------------------------------------------------------------------------


def one_verdict(recording: Recording) -> Iterator[str]:
    """I8: whoever is told a verdict of an operation is told the same, and who is not is named."""
    for seq, told in _by_operation(recording).items():
        verdicts = {each.final for each in told if each.final is not None}
        if len(verdicts) > 1:
            ways = {
                f"{final.failure or 'ok'} by {final.writer}": sorted(
                    each.rank for each in told if each.final == final
                )
                for final in verdicts
            }
            yield f"I8: {len(verdicts)} verdicts of operation {seq}: {ways}"
        for each in told:
            if each.final is None:
                yield from _is_named(each, verdicts)


def _by_operation(recording: Recording) -> dict[int, list[Told]]:
    operations: dict[int, list[Told]] = defaultdict(list)
    for each in recording.told:
        operations[each.seq].append(each)
    return operations


def _is_named(each: Told, verdicts: Iterable[FinalRecord]) -> Iterator[str]:
    if each.error != "JointUnavailableError":
        yield f"I8: rank {each.rank} raised {each.error} in operation {each.seq}"
    elif each.lost_ranks != (each.rank,):
        yield f"I8: rank {each.rank} is not named by its own error, but {each.lost_ranks} are"
    for final in verdicts:
        # The verdict of a worker that knows none itself: it says so, or rests on what it reported.
        reported = f"by {each.rank}" in (final.detail, final.error) or final.first_rank == each.rank
        if each.rank == each.worker and not (reported or each.rank in final.lost_ranks):
            yield f"I8: operation {each.seq} went on without its worker {each.rank}, not named"


# --- what is expected ------------------------------------------------------------------------


def nothing_unexpected(recording: Recording) -> Iterator[str]:
    """Calls succeed, and joint operations too, but where a fault explains that they do not."""
    yield from (f"a call failed: {error}" for error in recording.errors)
    for seq, told in _by_operation(recording).items():
        since_s = min(each.began_at_s for each in told)
        until_s = max(each.ended_at_s for each in told)
        worker = told[0].worker
        hurt = recording.stopped_ranks(since_s, until_s)
        explained = worker in hurt or recording.lost_store(since_s, until_s)
        failures = {each.error if each.final is None else each.final.failure for each in told}
        failed = sorted(failures - {""})
        if recording.has_lost_a_rank_and_the_store(until_s):
            # In another store than the one that it began in, nobody can tell whether the dead rank
            # has left with a verdict.
            explained = explained or failed == ["JointUnavailableError"]
        named = {rank for each in told if each.final is not None for rank in each.final.lost_ranks}
        # A rank that is no more has not come to the operation, so its success is none.
        explained = explained or (failed == ["lost"] and bool(named) and named <= hurt)
        if failed and not explained:
            yield f"operation {seq}, whose worker {worker} was well, ended with {failed}"
        if named - hurt - {worker}:
            yield f"operation {seq} names {sorted(named - hurt)} as lost, who were well"
