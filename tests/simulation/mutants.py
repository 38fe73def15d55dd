# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Bugs that somebody could write, each as a small patch of the package.

They say whether the checks of a simulated world see anything: a bug that none of them finds is a
bug of the checks, or of the worlds. Each is planted alone, in a copy of the package, and must be
found by a check of the promise that it breaks.

Most are what other breakers and retry loops really do. A mutant of a part that has two guards
against one mistake removes both; the name of the second edit says so.
"""

from __future__ import annotations

from dataclasses import dataclass


__all__ = ["MUTANTS", "Edit", "Mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One replacement.

    Args:
        file: The file, from the package's folder.
        old: What is replaced; it occurs exactly once.
        new: What takes its place.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug.

    Args:
        name: Its name.
        story: What somebody has thought, in one line.
        edits: The patch.
        found_by: Beginnings of the names of the checks that may find it: of the promise it breaks.
        scenarios: Scenario files to try before the random worlds, without folder and suffix.
        of_saves: Whether it is hunted in worlds of saves, and not in those of jobs.
        of_loads: Whether it is hunted in those of loads.
        of_restarts: Whether it is hunted in worlds of restarts.
        of_sites: Whether it is hunted in those of jobs that share a site.
    """

    name: str
    story: str
    edits: tuple[Edit, ...]
    found_by: tuple[str, ...]
    scenarios: tuple[str, ...] = ()
    of_saves: bool = False
    of_loads: bool = False
    of_restarts: bool = False
    of_sites: bool = False


def _edit(file: str, old: str, new: str) -> Edit:
    return Edit(file=file, old=old, new=new)


_RECORD = (
    Mutant(
        name="no writer nonce in the breaker's record",
        story="the epoch is enough to tell two writes from each other",
        edits=(_edit("core/breaker.py", "        writer=ctx.writer,\n", "        writer='',\n"),),
        found_by=("I2",),
    ),
    Mutant(
        name="no nonce in a slot's claim",
        story="whoever holds a slot is told by the slot's number",
        edits=(
            _edit(
                "protocols/admission.py",
                "    record = cells.taken(slot, ticket=line.ticket, holder=holder)",
                "    record = cells.taken(slot, ticket=line.ticket, holder='taken')",
            ),
        ),
        found_by=("I5",),
    ),
    Mutant(
        name="a vanished key is read as unchanged",
        story="a compare-and-set that returns what I expected has found what I expected",
        edits=(
            _edit(
                "protocols/shared_cell.py",
                '    if returned == expected:\n        return Written(won=False, raw=b"")\n',
                "    if returned == expected:\n        return Written(won=True, raw=desired)\n",
            ),
        ),
        found_by=("I1", "I2", "I4", "I5"),
        scenarios=("the_store_comes_back_empty_while_a_probe_is_out",),
    ),
    Mutant(
        name="what was decided alone goes to the shared store",
        story="the store is back, so let the others know what I have decided meanwhile",
        edits=(
            _edit(
                "protocols/detour.py",
                "        return (yield Local(effect))\n",
                "        return (yield effect)\n",
            ),
        ),
        found_by=("I2",),
    ),
    Mutant(
        name="a rebuilt record has the epoch that was seen",
        story="nothing has happened but that the store was lost, so the epoch stays",
        edits=(_edit("core/breaker_record.py", "        epoch=entry.epoch,\n", ""),),
        found_by=("I2",),
    ),
    Mutant(
        name="a rebuilt record keeps the probe's permit",
        story="the record is put back exactly as it was",
        edits=(
            _edit(
                "core/breaker_record.py",
                "_OPEN if seen.state == _HALF_OPEN.value else BreakerState(seen.state)",
                "BreakerState(seen.state)",
            ),
            _edit(
                "core/breaker_record.py",
                '        votes=(),\n        holder="",\n        history=(*seen.history',
                "        votes=(),\n        history=(*seen.history",
            ),
        ),
        found_by=("I1", "I2"),
        scenarios=("the_store_comes_back_empty_while_a_probe_is_out",),
    ),
    Mutant(
        name="a store that came back empty is a new store",
        story="there is no record, so nobody has used this breaker yet",
        edits=(
            _edit(
                "protocols/circuit.py",
                "    writer: str = yield Nonce()\n    if circuit.view is None:\n",
                "    writer: str = yield Nonce()\n    if True:\n",
            ),
        ),
        found_by=("I2",),
        scenarios=("the_store_comes_back_empty_while_a_probe_is_out",),
    ),
    Mutant(
        name="a lost race is written again as it was decided first",
        story="the decision was right, only somebody else was faster",
        edits=(
            _edit(
                "protocols/shared_cell.py",
                "    for attempt in range(1, _ATTEMPTS + 1):\n",
                "    first = raw\n    for attempt in range(1, _ATTEMPTS + 1):\n",
            ),
            _edit("protocols/shared_cell.py", "change(raw, nonce)", "change(first, nonce)"),
        ),
        found_by=("I2", "I4"),
    ),
)

_PROBE = (
    Mutant(
        name="take-over without an epoch",
        story="the state stays half-open, so it is the same epoch with another holder",
        edits=(
            _edit(
                "core/breaker.py",
                'reason="the prober was silent; another took over",\n',
                'reason="the prober was silent; another took over",\n        epoch=record.epoch,\n',
            ),
        ),
        found_by=("I1", "I2"),
        scenarios=("the_prober_dies_under_traffic",),
    ),
    Mutant(
        name="a denied claim renews the lease for everybody",
        story="a denied claim is noted in the record, and the lease is timed on its bytes",
        edits=(
            _edit(
                "core/breaker.py",
                "        return _same(\n            record, f\"the prober's lease",
                "        return _with_votes(\n"
                "            ctx, record, (), reason=f\"the prober's lease",
            ),
            _edit(
                "protocols/circuit_memory.py",
                "(record.store_id, record.epoch), now_s=seen_at_s",
                "(record.store_id, record.writer), now_s=seen_at_s",
            ),
            _edit(
                "core/waiting.py",
                "    return next_probe_in_s(view, config, now_s=now_s) == 0\n",
                "    due_in_s = next_probe_in_s(view, config, now_s=now_s)\n"
                "    return due_in_s is not None and due_in_s < config.probe_lease_s / 2\n",
            ),
        ),
        found_by=("I2", "I3"),
        scenarios=("the_prober_dies_under_traffic",),
    ),
    Mutant(
        name="a denied claim renews the lease for who was denied",
        story="I have just asked, so I wait for a whole lease before I ask again",
        edits=(
            _edit(
                "protocols/probing.py",
                "    ):\n        return False\n    mine = circuit.view\n",
                "    ):\n"
                "        denied = replace(view.sighting, first_seen_at_s=claimed_at_s)\n"
                "        circuit.view = replace(view, sighting=denied)\n"
                "        return False\n"
                "    mine = circuit.view\n",
            ),
            _edit(
                "protocols/probing.py",
                "from dataclasses import dataclass\n",
                "from dataclasses import dataclass, replace\n",
            ),
            _edit(
                "core/waiting.py",
                "    return next_probe_in_s(view, config, now_s=now_s) == 0\n",
                "    due_in_s = next_probe_in_s(view, config, now_s=now_s)\n"
                "    return due_in_s is not None and due_in_s < config.probe_lease_s / 2\n",
            ),
        ),
        found_by=("I3",),
        scenarios=("the_prober_dies_under_traffic",),
    ),
    Mutant(
        name="half-open lets everybody through",
        story="half-open is a kind of closed: let us see whether it works again",
        edits=(
            _edit(
                "core/breaker_record.py",
                "PASSING: Final = frozenset({_CLOSED, _RECOVERING})",
                "PASSING: Final = frozenset({_CLOSED, _RECOVERING, _HALF_OPEN})",
            ),
        ),
        found_by=("I1", "I2", "I5"),
        scenarios=("the_prober_dies_under_traffic",),
    ),
    Mutant(
        name="a late probe's result is applied",
        story="the dependency was well a moment ago, whoever holds the permit now",
        edits=(
            _edit(
                "core/breaker.py",
                "    return (record.epoch, record.holder) != (event.epoch, event.holder)",
                "    return False",
            ),
            _edit(
                "protocols/probing.py",
                "    yield from apply_to(circuit, mine, result)\n",
                "    mine = yield from refresh(circuit)\n"
                "    yield from apply_to(circuit, mine, result)\n",
            ),
            _edit("protocols/probing.py", "import apply_to\n", "import apply_to, refresh\n"),
        ),
        found_by=("I2",),
        scenarios=("a_holder_stops_for_longer_than_its_lease",),
    ),
    Mutant(
        name="the probe is sent whatever the time",
        story="the claim was won, so there is nothing left to look at",
        edits=(
            _edit(
                "protocols/probing.py",
                "    if not is_in_time:\n",
                "    if not is_in_time and False:\n",
            ),
        ),
        found_by=("I1",),
        scenarios=("answers_are_lost_in_an_outage",),
    ),
    Mutant(
        name="a cancelled probe counts as a failed one",
        story="it did not succeed",
        edits=(
            _edit(
                "core/breaker.py",
                '    return _move(ctx, record, _OPEN, reason="the probe was cancelled")',
                '    return _reopen(ctx, record, "the probe was cancelled")',
            ),
        ),
        found_by=("I2",),
        scenarios=("a_probe_is_interrupted",),
    ),
    Mutant(
        name="a probe that was refused has failed",
        story="it raised an error",
        edits=(
            _edit("protocols/probing.py", "        if outcome.counts:\n", "        if True:\n"),
        ),
        found_by=("I2",),
        scenarios=("a_probe_is_refused",),
    ),
    Mutant(
        name="instants of two hosts are compared",
        story="the claim says when it was made, so everybody knows when its lease ends",
        edits=(
            _edit(
                "protocols/probing.py",
                "    holder: str = yield Nonce()\n    claimed_at_s: float = yield Now()\n"
                "    unchanged_s = claimed_at_s - view.sighting.first_seen_at_s\n",
                "    holder: str = yield Nonce()\n    claimed_at_s: float = yield Now()\n"
                '    holder = f"{holder}@{claimed_at_s}"\n'
                "    unchanged_s = view.record.open_s + circuit.config.probe_lease_s\n",
            ),
            _edit(
                "core/waiting.py",
                "    lease_s = _lease_s(view, config)\n    return None",
                "    lease_s = _lease_s(view, config)\n"
                '    if lease_s is not None and "@" in view.record.holder:\n'
                '        claimed_at_s = float(view.record.holder.split("@")[1])\n'
                "        return max(0.0, claimed_at_s + lease_s - now_s)\n"
                "    return None",
            ),
        ),
        found_by=("I1", "I3"),
        scenarios=("clocks_run_as_unequally_as_they_may",),
    ),
    Mutant(
        name="the lease begins when the read was sent",
        story="one instant is enough for a read",
        edits=(
            _edit(
                "protocols/circuit.py",
                "    seen_at_s: float = yield Now()\n"
                "    view = learn(circuit, raw, read_at_s=sent_at_s, seen_at_s=seen_at_s)\n"
                "    if circuit.is_sites:\n",
                "    seen_at_s: float = yield Now()\n"
                "    view = learn(circuit, raw, read_at_s=sent_at_s, seen_at_s=sent_at_s)\n"
                "    if circuit.is_sites:\n",
            ),
        ),
        found_by=("I1",),
    ),
    Mutant(
        name="everybody who is alone probes",
        story="who has no store cannot know of the others",
        edits=(
            _edit(
                "protocols/detour.py",
                "    detour.circuit.probe_share = core.ProbeShare(1 / detour.processes)\n",
                "    detour.circuit.probe_share = core.ProbeShare(1.0)\n",
            ),
        ),
        found_by=("I1",),
        scenarios=("everybody_is_alone_in_an_outage",),
    ),
    Mutant(
        name="dice alone decide who of a host probes",
        story="with a share of 1/N one is sent in N waits, on average",
        edits=(
            _edit(
                "core/detour.py",
                "        return 1 / left if self.has_sent else 2 / (left + 1)\n",
                "        return self.share\n",
            ),
        ),
        found_by=("I3",),
        scenarios=("the_processes_of_an_isolated_host_share_its_probes",),
    ),
    Mutant(
        name="what is shorter than a beat needs none",
        story="a rank that waits comes to a beat soon",
        edits=(
            _edit(
                "protocols/beating.py",
                "        due_in_s = pulse.due_in_s(now_s=now_s)\n",
                "        pulse.shown_at_s, due_in_s = now_s, pulse.beat.every_s\n",
            ),
        ),
        found_by=("I8",),
        scenarios=("who_waits_in_short_pieces_lives",),
    ),
    Mutant(
        name="what others did counts for ever",
        story="a vote is a vote",
        edits=(
            _edit(
                "protocols/circuit.py",
                "        seen = (circuit.view.record.store_id, circuit.view.record.epoch)\n",
                "",
            ),
        ),
        found_by=("I2",),
        scenarios=("who_stood_still_votes_on_nothing_that_is_over",),
    ),
    Mutant(
        name="the bell is rung for another trip",
        story="generations are counted from zero",
        edits=(
            _edit(
                "protocols/circuit.py",
                'yield Set(circuit.keys.bell(circuit.dependency, after.generation), b"1")',
                'yield Set(circuit.keys.bell(circuit.dependency, after.generation - 1), b"1")',
            ),
        ),
        found_by=("I3",),
        scenarios=("the_prober_dies_under_traffic",),
    ),
)

_TRIP = (
    Mutant(
        name="one host opens the circuit",
        story="a failure is a failure, whoever has seen it",
        edits=(_edit("core/breaker.py", "    if counted >= needed:\n", "    if True:\n"),),
        found_by=("I2",),
    ),
    Mutant(
        name="an old vote is never dropped",
        story="whoever has voted takes its vote away",
        edits=(
            _edit(
                "protocols/circuit.py",
                "if lease.is_expired(sighting, lease_s=circuit.config.window_s, now_s=now_s):",
                "if False:",
            ),
        ),
        found_by=("I2",),
        scenarios=("a_voter_dies",),
    ),
    Mutant(
        name="a late result changes a later epoch",
        story="the result is new, whenever the call began",
        edits=(
            _edit(
                "core/breaker.py",
                "    return event.epoch != record.epoch or event.store_id not in",
                "    return False and event.store_id not in",
            ),
        ),
        found_by=("I2",),
        scenarios=("late_results_after_a_trip",),
    ),
    Mutant(
        name="failures before a trip count towards the next",
        story="nobody has succeeded since",
        edits=(
            _edit(
                "protocols/circuit_memory.py",
                "        circuit.window = window.EMPTY\n    circuit.votes",
                "        pass\n    circuit.votes",
            ),
        ),
        found_by=("I2",),
        scenarios=("failures_on_both_sides_of_a_trip",),
    ),
    Mutant(
        name="the votes of a killed job count",
        story="votes are old after a while anyway",
        edits=(
            _edit(
                "protocols/circuit.py",
                "    if new_incarnation and view.record.votes:\n",
                "    if False:\n",
            ),
        ),
        found_by=("I2",),
        scenarios=("a_job_is_killed_with_votes_standing",),
    ),
)

_SLOTS = (
    Mutant(
        name="the ramp is skipped",
        story="the probe was answered, so the dependency is well",
        edits=(
            _edit(
                "core/breaker.py",
                "_ramp(ctx, record, ctx.config.ramp_start, reason",
                "_ramp(ctx, record, ctx.config.max_concurrent, reason",
            ),
        ),
        found_by=("I2", "I5"),
    ),
    Mutant(
        name="a ramp uses all slots",
        story="the limit is for the next ones",
        edits=(_edit("core/admission.py", "    usable = slots[:limit]\n", "    usable = slots\n"),),
        found_by=("I5",),
    ),
    Mutant(
        name="collective calls pass while the circuit is closed",
        story="a closed circuit lets everybody through",
        edits=(
            _edit(
                "core/admission.py",
                "    return collective or record.state != BreakerState.CLOSED.value\n",
                "    return record.state != BreakerState.CLOSED.value\n",
            ),
        ),
        found_by=("I5",),
    ),
    Mutant(
        name="a single call passes while the circuit recovers",
        story="one call more does no harm",
        edits=(
            _edit(
                "core/admission.py",
                "    return collective or record.state != BreakerState.CLOSED.value\n",
                "    return collective\n",
            ),
        ),
        found_by=("I5",),
    ),
    Mutant(
        name="a forgiven slot is freed by its old holder",
        story="whoever has taken a slot gives it back",
        edits=(
            _edit(
                "protocols/permit.py",
                "import CompareAndSet, Local, Nonce,",
                "import CompareAndSet, Local, MultiGet, Nonce,",
            ),
            _edit(
                "protocols/permit.py",
                "            written = yield from write(permit.key, expected, free)\n",
                "            held = yield MultiGet((permit.key,))\n"
                '            written = yield from write(permit.key, held[0] or b"", free)\n',
            ),
        ),
        found_by=("I5",),
        scenarios=("a_holder_stops_for_longer_than_its_lease",),
    ),
    Mutant(
        name="a slot is not given back after a failure",
        story="the result is reported, and then the slot is freed, unless something was raised",
        edits=(
            _edit(
                "protocols/settlement.py",
                "    if entry.permit is None:\n        return\n    # Without",
                "    if entry.permit is None or not outcome.ok:\n        return\n    # Without",
            ),
        ),
        found_by=("I5",),
    ),
    Mutant(
        name="nobody beats for a long call",
        story="no call takes as long as a lease",
        edits=(_edit("protocols/guard.py", "            renewal=entry.permit,\n", ""),),
        found_by=("I5",),
        scenarios=("calls_outlast_leases_while_the_store_is_away",),
    ),
    Mutant(
        name="silence is time, whoever was there to hear it",
        story="the slot has not changed since I saw it last",
        edits=(
            _edit(
                "core/lease.py",
                "    gap_s = min(longest_gap_s, max(0.0, sent_at_s - silence.looked_at_s))\n",
                "    gap_s = seen_at_s - silence.looked_at_s\n",
            ),
        ),
        found_by=("I5",),
        scenarios=("calls_outlast_leases_while_the_store_is_away",),
    ),
    Mutant(
        name="a ticket bars a free slot",
        story="first come, first served",
        edits=(_edit("core/line.py", " or _stands_still(queue, now_s=now_s)\n", "\n"),),
        found_by=("I3", "I5"),
        scenarios=("those_in_line_give_up_or_die",),
    ),
    Mutant(
        name="waiters come back as often as ever",
        story="a constant pause is simplest",
        edits=(_edit("core/line.py", "_GROWTH: Final = 1.3\n", "_GROWTH: Final = 1.0\n"),),
        found_by=("I7",),
        scenarios=("waiters_before_slots_that_hang",),
    ),
)

_RETRIES = (
    Mutant(
        name="jitter before the cap",
        story="the delay is drawn, and then it is at most the cap",
        edits=(
            _edit(
                "core/backoff.py",
                "    return draw * upper_bound_s(attempt, base_s=base_s, cap_s=cap_s)\n",
                "    grown_s = upper_bound_s(attempt, base_s=base_s, cap_s=2.0 * cap_s)\n"
                "    return min(cap_s, (0.5 + draw) * grown_s)\n",
            ),
        ),
        found_by=("I4",),
    ),
    Mutant(
        name="a retry is charged while the circuit is not closed",
        story="a retry is a retry: pay first, then ask whether it may be made",
        edits=(
            _edit(
                "core/budget.py",
                "    return record.state == BreakerState.CLOSED.value\n",
                "    return True\n",
            ),
        ),
        found_by=("I4",),
    ),
    Mutant(
        name="a retry is charged twice",
        story="once when it is decided, once when it is made",
        edits=(
            _edit(
                "core/budget.py",
                "    retries = (told.retries[0] + 1, *told.retries[1:])\n",
                "    retries = (told.retries[0] + 2, *told.retries[1:])\n",
            ),
        ),
        found_by=("I4",),
    ),
    Mutant(
        name="calls are told twice to the budget",
        story="what could not be told is kept, and what could be told as well",
        edits=(
            _edit(
                "protocols/budget.py",
                "    if not (ruling.granted and written.won):\n",
                "    if True:\n",
            ),
        ),
        found_by=("I4",),
    ),
    Mutant(
        name="a budget gives one more than it has",
        story="the quota may be used up",
        edits=(
            _edit("core/budget.py", "    if used(told) >= most:\n", "    if used(told) > most:\n"),
        ),
        found_by=("I4",),
    ),
    Mutant(
        name="the present bucket ages by all the time that it was seen",
        story="a bucket began when I first saw it",
        edits=(
            _edit(
                "core/budget.py",
                "        age = place + ended if place else 1 + quiet\n",
                "        age = place + ended\n",
            ),
        ),
        found_by=("I4",),
    ),
    Mutant(
        name="who is alone has the whole budget",
        story="the budget is the job's, and I am all that I can see of it",
        edits=(
            _edit(
                "core/budget.py",
                "    floor = config.retry_floor / processes\n",
                "    floor = config.retry_floor\n",
            ),
        ),
        found_by=("I4",),
        scenarios=("everybody_is_alone_in_an_outage",),
    ),
    Mutant(
        name="no retry is charged",
        story="there are few retries",
        edits=(
            _edit(
                "protocols/settlement.py",
                "    if view is None or not is_charged(view.record):\n",
                "    if True:\n",
            ),
        ),
        found_by=("I4",),
    ),
)

_JOINT = (
    Mutant(
        name="a late report changes the verdict",
        story="the latest report knows most",
        edits=(
            _edit(
                "protocols/joint_fence.py",
                "            return found\n",
                "            yield Set(keys[0], encode(mine))\n            return mine\n",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="a verdict is made up without the store",
        story="the store is away, but the save was probably made",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "str(joint.seq).encode())\n        raise\n",
                'str(joint.seq).encode())\n        return _terms(joint, writer="")\n',
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="each rank follows its own gate",
        story="all ranks see the same circuit",
        edits=(
            _edit(
                "protocols/joint_gate.py",
                "    gate = mine if written.won else decode(GateRecord, written.raw, key=key)\n",
                "    gate = mine\n",
            ),
        ),
        found_by=("I3", "I8"),
        scenarios=("the_store_is_split_in_a_joint_save",),
    ),
    Mutant(
        name="who loses the race for the verdict returns its own",
        story="both have read the same reports",
        edits=(
            _edit(
                "protocols/joint_fence.py",
                "            return found\n",
                "            return mine\n",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="a verdict is made in a store that is new",
        story="there is no verdict yet, so nobody has returned with one",
        edits=(
            _edit(
                "core/roll_call.py",
                "    return arrived is not None or not is_in_new_store\n",
                "    return True\n",
            ),
            _edit(
                "protocols/joint_verdict.py",
                "    if roll_call.has_gone_on(values[::2], seq=joint.seq):\n",
                "    if False:\n",
            ),
            _edit(
                "protocols/joint_fence.py",
                "        absent = roll_call.absent_ranks(numbers, seq=joint.seq)\n",
                "        absent = ()\n",
            ),
        ),
        found_by=("I8",),
        scenarios=("the_store_is_lost_after_a_verdict",),
    ),
    Mutant(
        name="a worker at work is taken for lost",
        story="the work itself is the sign of life",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "yield from with_beat(part.run(arrival.started_at_s), beat, ends=end)",
                "yield from part.run(arrival.started_at_s)",
            ),
        ),
        found_by=("I8",),
        scenarios=("a_save_outlasts_the_silence_of_a_lost_rank",),
    ),
)

_COUNTED = "        if not missing:\n            return (yield from _write_final("
_UNCOUNTED = "        if True:\n            return (yield from _write_final("

_WORKERS = (
    Mutant(
        name="the verdict is taken when the first worker has reported",
        story="all do the same, so one of them speaks for all",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "    if reported >= len(joint.workers):\n",
                "    if reported >= 1:\n",
            ),
            # The second guard: whether all reports are there.
            _edit("protocols/joint_verdict.py", _COUNTED, _UNCOUNTED),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="who waits decides by the reports that are there",
        story="a chunk has passed, so whoever has not reported will not",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "        if set(lost) == set(missing):\n",
                "        if outcomes or set(lost) == set(missing):\n",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="who has succeeded does not wait for the others",
        story="my part is done, and the others will say if theirs is not",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "    if not report.failure:\n"
                "        return (yield from await_final(member, joint, arrival))\n",
                "    if not report.failure:\n"
                "        return core.decide_final(_terms(joint, writer=''), (report,))\n",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="the least severe outcome is the verdict",
        story="the greatest of all outcomes is the worst",
        edits=(
            _edit(
                "core/joint.py",
                "    first = min(reports, key=lambda report: (",
                "    first = max(reports, key=lambda report: (",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="the first report in the list is the verdict",
        story="they have all failed for one reason, so any of them says which",
        edits=(
            _edit(
                "core/joint.py",
                "    first = min(reports, key=lambda report: ("
                "_severity(report.failure), report.rank))",
                "    first = next((report for report in reports if report.failure), reports[0])",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="ties between failures go to the highest rank",
        story="the last of equals stays when they are sorted",
        edits=(
            _edit(
                "core/joint.py",
                "(_severity(report.failure), report.rank)",
                "(_severity(report.failure), -report.rank)",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="a failure looks at no other report",
        story="I have failed, so all have, and it is known why",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "    outcomes, _missing = yield from _reports(member, joint, arrival)\n",
                "    outcomes = (report,)\n",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="add is repeated after a lost answer",
        story="every operation of the store is repeated until it is answered",
        edits=(
            _edit(
                "protocols/persistent.py",
                "_REPEATABLE = (Get, ",
                "_REPEATABLE = (Add, Get, ",
            ),
            _edit(
                "protocols/persistent.py",
                "from lightning_resilience.protocols.effects import (\n",
                "from lightning_resilience.protocols.effects import (\n    Add,\n",
            ),
            # The second guard: whether all reports are there.
            _edit("protocols/joint_verdict.py", _COUNTED, _UNCOUNTED),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="an outcome is counted before it is written",
        story="both are on their way, so their order is all the same",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                '    yield Set(member.keys.joint("out", joint.seq, member.rank), encode(report))\n'
                "    arrival.report = report\n"
                "    try:\n",
                "    arrival.report = report\n    try:\n",
            ),
            _edit(
                "protocols/joint_verdict.py",
                "        reported = 0\n    if reported",
                "        reported = 0\n"
                '    yield Set(member.keys.joint("out", joint.seq, member.rank), encode(report))\n'
                "    if reported",
            ),
            # The second guard: whether all reports are there.
            _edit("protocols/joint_verdict.py", _COUNTED, _UNCOUNTED),
        ),
        found_by=("I8",),
        scenarios=("a_rank_is_refused_and_what_it_reports_comes_late",),
    ),
    # A count that is right never passes the number of workers, so that equality alone is no bug.
    # It has to overshoot for other reasons, and then everybody waits although all have reported.
    Mutant(
        name="the count is compared by ==, and one rank counts twice",
        story="when the last one has reported, the count is the number of workers",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "    if reported >= len(joint.workers):\n",
                "    if reported == len(joint.workers):\n",
            ),
            _edit(
                "protocols/joint_verdict.py",
                'Add(member.keys.joint("count", joint.seq), 1)',
                'Add(member.keys.joint("count", joint.seq), 2 - bool(member.rank))',
            ),
        ),
        found_by=("I3",),
    ),
    Mutant(
        name="outcomes are not counted",
        story="whoever waits reads the reports anyway",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "    if reported >= len(joint.workers):\n",
                "    if False:\n",
            ),
        ),
        found_by=("I3",),
    ),
    Mutant(
        name="a report that the store has lost is not put back",
        story="I have reported, and what is written stays",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "    if mine is not None and member.rank not in reports:\n",
                "    if False:\n",
            ),
        ),
        found_by=("I8",),
        scenarios=("reports_are_lost_with_the_store",),
    ),
    Mutant(
        name="a rank that beats is taken for lost",
        story="whoever has arrived and reports nothing is silent",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                'for part in ("arrived", "beat")]',
                'for part in ("arrived", "arrived")]',
            ),
        ),
        found_by=("I8",),
    ),
)

_LEFT_OUT = "a_save_is_left_out_on_some_ranks"
_AWAITED = "        if watched_s >= member.timeout_s:\n"

_MUSTER = (
    Mutant(
        name="a success is told to those who are there",
        story="ranks without work have nothing to do with how the work has ended",
        edits=(
            _edit(
                "protocols/joint_verdict.py",
                "    if not mine.failure:\n",
                "    if False:\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_LEFT_OUT,),
    ),
    Mutant(
        name="whoever is not there at the first look is absent",
        story="the work has taken its time, so all are there by now",
        edits=(_edit("protocols/joint_muster.py", _AWAITED, "        if watched_s >= 0.0:\n"),),
        found_by=("I8",),
        scenarios=(_LEFT_OUT,),
    ),
    Mutant(
        name="absent ranks are awaited for ever",
        story="every rank comes in the end",
        edits=(_edit("protocols/joint_muster.py", _AWAITED, "        if False:\n"),),
        found_by=("I3",),
    ),
    Mutant(
        name="who waits for absent ranks gives no sign of life",
        story="only work takes long enough for a sign of life",
        edits=(
            _edit(
                "protocols/joint_muster.py",
                'Set(member.keys.joint("beat", member.rank), nonce.encode())',
                "Sleep(0.0)",
            ),
        ),
        found_by=("I8",),
    ),
    Mutant(
        name="two saves at one number are one, at whatever step",
        story="lock-step gives all ranks the same number",
        edits=(
            _edit(
                "core/joint.py",
                "    if (found.op, found.digest) == (op, digest):\n",
                "    if found.op == op:\n",
            ),
        ),
        found_by=("I8",),
    ),
)

_SAVES = (
    Mutant(
        name="the manifest is written before the checkpoint is verified",
        story="nothing was raised, so it is there",
        edits=(
            _edit(
                "core/pipeline.py",
                "    yield Do(Step.PUBLISH, staged)\n    yield Do(Step.VERIFY, staged)\n",
                "    yield Do(Step.PUBLISH, staged)\n"
                "    yield Do(Step.MARK, staged)\n"
                "    yield Do(Step.VERIFY, staged)\n",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="what was published is not verified",
        story="a storage that has dropped something would have said so",
        edits=(
            _edit(
                "core/pipeline.py",
                "    yield Do(Step.PUBLISH, staged)\n    yield Do(Step.VERIFY, staged)\n",
                "    yield Do(Step.PUBLISH, staged)\n",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="the older manifest is there while its checkpoint is replaced",
        story="the newer one replaces it in a moment",
        edits=(
            _edit(
                "core/pipeline.py",
                "        yield Do(Step.UNMARK)\n        yield from publish(staged)\n",
                "        yield from publish(staged)\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="a checkpoint is removed before its manifest",
        story="what says that it is complete is needed until it is gone",
        edits=(
            _edit(
                "core/pipeline.py",
                "    yield Do(Step.UNMARK)\n    yield Do(Step.ASK)\n    yield Do(Step.REMOVE)\n",
                "    yield Do(Step.ASK)\n    yield Do(Step.REMOVE)\n    yield Do(Step.UNMARK)\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="a checkpoint is removed before the newer one is verified",
        story="whoever asks for a removal knows that the newer one is there",
        edits=(
            _edit(
                "core/retention.py",
                "        if any(save.stage is Stage.PENDING for save in before):\n",
                "        if False:\n",
            ),
            _edit(
                "core/retention.py", "            save.stage is Stage.VERIFIED and ", "            "
            ),
        ),
        found_by=("I6",),
        of_saves=True,
    ),
    Mutant(
        name="what the run has started from is removed",
        story="it is one too many like any other",
        edits=(
            _edit(
                "core/retention.py",
                "        if removal.path in self.started_from:\n",
                "        if False:\n",
            ),
        ),
        found_by=("I6",),
        of_saves=True,
    ),
    Mutant(
        name="what a link points to is removed",
        story="a link is another checkpoint",
        edits=(
            _edit(
                "core/retention.py",
                "        if any(target == removal.path for _, target in self.links):\n",
                "        if False:\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="a directory is published in place, without a rename",
        story="its files are there in the end",
        edits=(
            _edit(
                "core/pipeline.py",
                '    if renames:\n        yield Do(Step.PUBLISH, "")\n    for name in names:\n',
                "    renames = False\n    for name in names:\n",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="every directory is a complete checkpoint",
        story="who looks into a directory has to know all formats",
        edits=(
            _edit(
                "core/shards.py",
                "    if any(complete <= set(names) for complete in _COMPLETE):\n",
                "    if True:\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="metadata is removed last",
        story="the order does not matter, all of it goes",
        edits=(
            _edit(
                "core/pipeline.py",
                "    for name in removal_order(names):\n        yield Do(Step.ASK)\n",
                "    for name in ():\n        yield Do(Step.ASK)\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="what is set aside loses its manifest first",
        story="the manifest goes before what it describes, as everywhere",
        edits=(
            _edit(
                "core/pipeline.py",
                "        yield Do(Step.NOTE)\n        if renames:\n",
                "        yield Do(Step.UNMARK)\n        yield Do(Step.NOTE)\n        if renames:\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="what is set aside is removed before it is copied",
        story="it is damaged anyway",
        edits=(
            _edit(
                "core/pipeline.py",
                "    for name in names:\n        yield Do(Step.COPY, name)\n",
                "",
            ),
        ),
        found_by=("I6",),
        of_saves=True,
    ),
    Mutant(
        name="an abandoned attempt publishes",
        story="what has come so far may as well be finished",
        edits=(
            _edit(
                "core/landings.py",
                "BEFORE_SENDING: Final = (Act.SAY, Act.ASK)",
                "BEFORE_SENDING: Final = (Act.SAY,)",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="an attempt asks first and says later that it sends",
        story="first look, then leap",
        edits=(
            _edit(
                "core/landings.py",
                "BEFORE_SENDING: Final = (Act.SAY, Act.ASK)",
                "BEFORE_SENDING: Final = (Act.ASK, Act.SAY)",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="what an abandoned attempt has sent is not waited for",
        story="nobody wants its answer any more",
        edits=(
            _edit(
                "core/landings.py",
                "    return earlier.is_sent or not earlier.is_abandoned\n",
                "    return not earlier.is_abandoned\n",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="a write does not wait for an earlier removal",
        story="what is removed was there before",
        edits=(
            _edit(
                "core/landings.py",
                "        return not later.is_removal\n",
                "        return False\n",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="what waits on the node is published over what was saved since",
        story="each save is published in its turn",
        edits=(
            _edit(
                "core/spool.py",
                "            if item.path == path and item.number < before and not item.is_sent\n",
                "            if False\n",
            ),
        ),
        found_by=("I6", "I9"),
        of_saves=True,
    ),
    Mutant(
        name="a checkpoint on the node is as good as one in storage",
        story="it is safe, so the older one may go",
        edits=(
            _edit(
                "core/retention.py",
                "            save.stage is Stage.VERIFIED and save.number >= since",
                "            save.stage in _SAFE and save.number >= since",
            ),
        ),
        found_by=("I6",),
        of_saves=True,
    ),
    Mutant(
        name="what waits is dropped by a later save of another name",
        story="the newest is enough",
        edits=(
            _edit(
                "core/spool.py",
                "            if item.path == path and item.number < before and not item.is_sent\n",
                "            if item.number < before and not item.is_sent\n",
            ),
        ),
        found_by=("I6",),
        of_saves=True,
    ),
    Mutant(
        name="a damaged checkpoint is not passed over",
        story="the newest is what the user wants",
        edits=(
            _edit(
                "core/fallback.py",
                "        if not seen.rejected and not seen.doubt:\n",
                "        if True:\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="a candidate is not compared with its manifest",
        story="it has everything that a checkpoint has",
        edits=(
            _edit(
                "core/fallback.py",
                "    if differs is None:\n        return seen\n",
                "    if differs is not None:\n        return seen\n",
            ),
            _edit("core/fallback.py", "rejected=differs, doubt", 'rejected="", doubt'),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="a directory that nobody can look into is believed",
        story="nothing is known against it",
        edits=(
            _edit(
                "core/fallback.py",
                "        if not seen.rejected and not seen.doubt:\n",
                "        if not seen.rejected:\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
    Mutant(
        name="the oldest candidate is looked at first",
        story="sorted is sorted",
        edits=(
            _edit(
                "core/candidates.py",
                "    ranked = sorted(items, key=rank, reverse=True)\n",
                "    ranked = sorted(items, key=rank)\n",
            ),
        ),
        found_by=("I9",),
        of_saves=True,
    ),
)

_GONE = "the_store_is_gone_for_good_and_saves_are_deferred"
_BACK = "the_store_comes_back_while_some_have_deferred"
_LAST = "the_store_is_lost_while_the_last_verdict_is_told"
_CUT_OFF = "one_rank_is_cut_off_and_nothing_is_deferred"

_DEFERRED = (
    Mutant(
        name="a store that is silent is taken for one that is gone",
        story="no answer is no answer",
        edits=(
            _edit(
                "core/store_loss.py",
                "        if not is_refused:\n            return Refusals()\n",
                "",
            ),
        ),
        found_by=("I8",),
        scenarios=(_CUT_OFF,),
    ),
    Mutant(
        name="the first refusal is enough to defer",
        story="nobody listens there, so why wait",
        edits=(
            _edit(
                "core/store_loss.py",
                "        return self.since_s is not None and now_s - self.since_s >= after_s\n",
                "        return self.since_s is not None\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_GONE,),
    ),
    Mutant(
        name="a deferred save is neither made nor staged",
        story="it is deferred, so it is done later",
        edits=(
            _edit(
                "protocols/joint_deferred.py",
                "    if not done.has_ended and part.instead is not None:\n",
                "    if done.has_ended and part.instead is not None:\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_GONE,),
    ),
    Mutant(
        name="those that have gone on are waited for as long as those that are late",
        story="a rank that has not come is late",
        edits=(
            _edit(
                "protocols/joint_terms.py",
                "            return member.defer_after_s\n",
                "            return member.timeout_s\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_BACK,),
    ),
    Mutant(
        name="rank 0 does not tell in the next store how the saves before have ended",
        story="whoever has deferred them knows that",
        edits=(
            _edit(
                "protocols/joint_deferred.py",
                "    if member.rank == _TELLER and member.defer_after_s is not None:\n",
                "    if member.rank != _TELLER and member.defer_after_s is None:\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_BACK,),
    ),
    Mutant(
        name="a deferred operation counts as left with its verdict",
        story="this rank is past it",
        edits=(
            _edit(
                "protocols/joint.py",
                "    except DeferredError as error:\n        member.last_seq = None\n",
                "    except DeferredError as error:\n        member.last_seq = joint.seq\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_BACK, _GONE),
    ),
    Mutant(
        name="a rank waits at its end for what it has not heard of",
        story="whoever was told that all is published need not wait",
        edits=(
            _edit(
                "drill/workload.py",
                "        is_due = end.is_due and member.defer_after_s is not None\n",
                "        is_due = end.is_due and bool(member.unsettled.deferred)\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_LAST,),
    ),
    Mutant(
        name="what is left at the end is removed where nobody was told",
        story="all have waited, so all go on to what is left",
        edits=(
            _edit(
                "core/run_end.py",
                '    return "" if is_deferred(final) else final.detail\n',
                "    return final.detail\n",
            ),
        ),
        found_by=("I8",),
        scenarios=(_LAST, _GONE),
    ),
)

_RESTARTS = (
    Mutant(
        name="each agent charges for itself",
        story="who has failed pays",
        edits=(
            _edit(
                "core/quota.py",
                "    if record.ending is not None or charged(record, closed.incarnation):\n",
                "    if record.ending is not None:\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="one restart more than the quota",
        story="a quota of three is three more attempts",
        edits=(
            _edit(
                "core/quota.py", "        if count > quota:\n", "        if count > quota + 1:\n"
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="any checkpoint counts as progress",
        story="the job has saved before",
        edits=(
            _edit(
                "core/quota.py",
                "    has_progress = checkpoint_step > record.checkpoint_step\n",
                "    has_progress = checkpoint_step >= record.checkpoint_step\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="charges age too fast",
        story="a window is about as long",
        edits=(
            _edit(
                "core/quota.py",
                "age_s=each.age_s + unchanged_s)",
                "age_s=each.age_s + 20 * unchanged_s)",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="a store that came back empty is believed",
        story="what it says is what there is",
        edits=(
            _edit(
                "protocols/restart_record.py",
                "        if seen is None or not quota.outranks(seen, there):\n",
                "        if True:\n",
            ),
            _edit("protocols/restart_record.py", "    known = memory.seen\n", "    known = None\n"),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="a restart is agreed without a charge",
        story="the charge comes later",
        edits=(
            _edit(
                "protocols/restart.py",
                "    ruling = yield from restart_record.charge(gate.memory, gate.config, closed)\n"
                "    if ruling.ending is not None:\n"
                "        return ruling.ending\n"
                "    return (yield from _go(gate, closed, ruling))\n",
                "    free = Ruling(record=quota.created(writer='none'), number=1, delays=1)\n"
                "    return (yield from _go(gate, closed, free))\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="a request to stop is charged",
        story="it has ended, has it not",
        edits=(
            _edit(
                "core/causes.py",
                "        return Cause.LEFT if left and is_called and is_own else Cause.PREEMPTED\n",
                "        return Cause.FAILED\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="a worker that says nothing was told to stop",
        story="a failure has an exception",
        edits=(
            _edit(
                "core/worker_exits.py",
                "        return IncidentKind.EXIT\n",
                "        return IncidentKind.SIGNAL\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="an outage is held against the job",
        story="it could not be restarted",
        edits=(
            _edit(
                "protocols/restart.py",
                "    return Ending(code=ExitCode.OUTAGE, reason",
                "    return Ending(code=ExitCode.DEAD_LETTERED, reason",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="the mirror is never written",
        story="the store is enough",
        edits=(
            _edit(
                "protocols/restart_record.py",
                "    if written.won and memory.mirror is not None:\n",
                "    if False:\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="the mirror is never read",
        story="a new launch is a new job",
        edits=(
            _edit(
                "protocols/restart_record.py",
                "    if known is None and memory.mirror is not None:\n",
                "    if False:\n",
            ),
        ),
        found_by=("I4", "I8"),
        of_restarts=True,
    ),
    Mutant(
        name="each agent draws its own delay",
        story="that spreads them",
        edits=(
            _edit(
                "protocols/restart.py",
                "    return decode(GoRecord, written.raw, key=key)\n",
                "    return mine\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="the last one says how the job has ended",
        story="it knows best",
        edits=(
            _edit(
                "core/quota.py",
                "    return record if record.ending is not None else _written"
                "(record, writer, ending=ending)\n",
                "    return _written(record, writer, ending=ending)\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="each agent leaves with its own reason",
        story="it has one",
        edits=(
            _edit(
                "protocols/restart_record.py",
                "    return ruling.ending or Apart(ending=ending)\n",
                "    return ending\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="who has no part in a job ends it",
        story="it has waited for as long as anybody may",
        edits=(
            _edit(
                "core/leaving.py",
                "    return present is not None and present.incarnation != own\n",
                "    return False\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="only who never had a part in a job leaves it alone",
        story="an agent that was cut off is one of them",
        edits=(
            _edit(
                "core/leaving.py",
                "    return present is not None and present.incarnation != own\n",
                "    return present is not None and not own\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="who comes has read the ending as node 0",
        story="every agent says that it has",
        edits=(
            _edit(
                "protocols/incarnation.py",
                "    if part is not None:\n"
                "        yield from acknowledge(_of(keys, part.start), part.node)\n",
                "    begun = (yield from present(keys)) if part is None else part.start\n"
                "    if begun is not None:\n"
                "        node = 0 if part is None else part.node\n"
                "        yield from acknowledge(_of(keys, begun), node)\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="a node that was taken away is charged where it is missed first",
        story="it has left",
        edits=(
            _edit(
                "core/causes.py",
                "        is_own = not incident.by_agent\n",
                "        is_own = True\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="who begins releases the job",
        story="somebody has started it again",
        edits=(
            _edit(
                "core/quota.py",
                "    if record.ending is None or not may_start_again(record.ending.code):\n",
                "    if record.ending is None:\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="a launch releases the job",
        story="somebody has started it again",
        edits=(
            _edit(
                "core/quota.py",
                "    return kept if is_held else msgspec.structs.replace(kept, ending=None)\n",
                "    return msgspec.structs.replace(kept, ending=None)\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="nobody waits for what is ill",
        story="the workers will",
        edits=(
            _edit(
                "protocols/restart.py",
                "    for dependency in gate.dependencies:\n        yield from heed(",
                "    for dependency in ():\n        yield from heed(",
            ),
            _edit(
                "protocols/restart.py",
                "        if not breaker.passes(view.record):\n            return False\n",
                "",
            ),
        ),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="nobody looks again after the delay",
        story="it was well a minute ago",
        edits=(
            _edit(
                "protocols/restart.py",
                "        if not breaker.passes(view.record):\n            return False\n",
                "",
            ),
        ),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="nobody waits for the delay",
        story="the gate has taken long enough",
        edits=(
            _edit(
                "protocols/restart.py",
                "        yield Sleep(gate.memory.rest_s(go, now_s=seen_at_s))\n",
                "",
            ),
        ),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="who begins does not wait for what is ill",
        story="there is nothing to restart",
        edits=(
            _edit(
                "protocols/restart.py",
                "        return (yield from _last_look(gate, deadline_at_s=deadline_at_s))\n"
                "    except",
                "        return None\n    except",
            ),
        ),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="who was called joins at once",
        story="nothing has failed here",
        edits=(
            _edit(
                "protocols/restart.py",
                "    closed, go = yield from _closed(gate)\n"
                "    if go is not None:\n"
                "        return go\n",
                "    closed, go = yield from _closed(gate)\n"
                "    if not gate.is_failure:\n"
                "        return GoRecord(delay_s=0, cause='grown', writer='')\n"
                "    if go is not None:\n        return go\n",
            ),
        ),
        found_by=("I8", "I10"),
        of_restarts=True,
    ),
    Mutant(
        name="the time at the gate is held against joining",
        story="it has waited for long enough",
        edits=(
            _edit(
                "core/joining.py",
                "        self.is_through = True\n        self.begin(now_s=now_s)\n",
                "        self.is_through = True\n",
            ),
            _edit(
                "core/joining.py",
                "        if answered_at_s < came_at_s:\n            return\n",
                "        if answered_at_s < now_s + came_at_s:\n            return\n",
            ),
        ),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="one lost answer after an hour at the gate is an hour of silence",
        story="the store does not answer",
        edits=(
            _edit(
                "core/joining.py",
                "        if answered_at_s < came_at_s:\n            return\n",
                "        if answered_at_s < now_s + came_at_s:\n            return\n",
            ),
        ),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="who waits in vain gives up at once",
        story="they had their time",
        edits=(_edit("core/joining.py", "_MOST_LATE: Final = 1\n", "_MOST_LATE: Final = 0\n"),),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="what a lagging agent has rebuilt is believed",
        story="it is no older",
        edits=(
            _edit(
                "core/quota.py",
                "        return seen.restarts > found.restarts\n",
                "        return seen.restarts > found.restarts and seen.epoch > found.epoch\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="a round that was given up is begun all the same",
        story="there is a record, so there is a name",
        edits=(
            _edit(
                "protocols/incarnation.py",
                "    if not found.incarnation:\n        message = (\n",
                "    if False:\n        message = (\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="node 0 names a round that the others have given up",
        story="it is node 0 that names it",
        edits=(
            _edit(
                "protocols/incarnation.py",
                "    written = yield from create(ROUND_KEY, encode(record))\n"
                "    return _named(written.raw)\n",
                "    yield Set(ROUND_KEY, encode(record))\n    return record\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="node 0 names a round as soon as it is complete",
        story="the rendezvous has just said that all are there",
        edits=(
            _edit(
                "protocols/rendezvous_round.py",
                "    if not (yield from _have_come(others, within_s=of.naming_s)):\n",
                "    if False:\n",
            ),
        ),
        found_by=("I10",),
        of_restarts=True,
    ),
    Mutant(
        name="who gives a round up takes its name away",
        story="it has waited for long enough",
        edits=(
            _edit(
                "protocols/incarnation.py",
                "    written = yield from create(ROUND_KEY, encode(none))\n"
                "    return _named(written.raw)\n",
                "    yield Set(ROUND_KEY, encode(none))\n    return _named(encode(none))\n",
            ),
        ),
        found_by=("I8",),
        of_restarts=True,
    ),
    Mutant(
        name="each agent gives a round up for itself",
        story="the others will find out",
        edits=(
            _edit(
                "protocols/incarnation.py",
                "    written = yield from create(ROUND_KEY, encode(none))\n"
                "    return _named(written.raw)\n",
                "    return _named(encode(none))\n",
            ),
        ),
        found_by=("I3", "I8"),
        of_restarts=True,
    ),
    Mutant(
        name="nodes that come are charged as ones that have left",
        story="the round is another one",
        edits=(
            _edit(
                "protocols/restart.py",
                "    if gone and go.cause == Cause.GROWN.value:\n",
                "    if go.cause == Cause.GROWN.value:\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="rounds are told apart by their number",
        story="it grows",
        edits=(
            _edit(
                "core/restart.py",
                "    return before if is_static else workers\n",
                "    return before if is_static else ''\n",
            ),
        ),
        found_by=("I8", "I10"),
        of_restarts=True,
    ),
    Mutant(
        name="workers that are told to stop are restarted at once",
        story="it is free",
        edits=(
            _edit(
                "core/quota.py",
                "Cause.PREEMPTED: record.stops - 1}",
                "Cause.PREEMPTED: 0}",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="the tenth stop in a row is restarted as soon as the second",
        story="it is delayed, is it not",
        edits=(
            _edit(
                "core/quota.py",
                "Cause.PREEMPTED: record.stops - 1}",
                "Cause.PREEMPTED: min(1, record.stops - 1)}",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="only two stops in a row are counted",
        story="the last one is known",
        edits=(_edit("core/quota.py", "stops=aged.stops + 1,", "stops=min(2, aged.stops + 1),"),),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="each agent counts the same stop",
        story="its workers were told to stop",
        edits=(
            _edit(
                "core/quota.py",
                "    if record.stopped == closed.incarnation:\n        return record\n",
                "",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
    Mutant(
        name="a stop clears the stops before it",
        story="it is another start",
        edits=(
            _edit(
                "core/quota.py",
                "    is_new = has_progress or unchanged_s >= config.restart_window_s\n",
                "    is_new = has_progress or unchanged_s >= 0\n",
            ),
        ),
        found_by=("I4",),
        of_restarts=True,
    ),
)

_LOADS = (
    Mutant(
        name="whoever has the lock reads again",
        story="it would not have been free otherwise",
        edits=(
            _edit(
                "core/fetching.py",
                "        if has_lock:\n"
                "            # Whoever had it may have made the file since that look.\n"
                "            seen = yield Do(Fetch.LOOK)\n",
                "",
            ),
        ),
        found_by=("I7",),
        of_loads=True,
    ),
    Mutant(
        name="a second reader does not wait for the first",
        story="two are faster than one",
        edits=(
            _edit(
                "core/node_cache.py",
                "silent_s >= patience_s else",
                "silent_s >= 0 else",
            ),
        ),
        found_by=("I5",),
        of_loads=True,
    ),
    Mutant(
        name="a reader that is stuck is never replaced",
        story="its lock says that it reads",
        edits=(
            _edit(
                "core/node_cache.py",
                "    return Step.TAKE_OVER if silent_s >= patience_s else Step.WAIT",
                "    return Step.WAIT",
            ),
        ),
        found_by=("I3",),
        of_loads=True,
    ),
    Mutant(
        name="a reader that goes on is replaced all the same",
        story="it has read for longer than the patience",
        edits=(
            _edit(
                "core/node_cache.py",
                "    return before if mark == before.mark else Watch(mark=mark, since_s=now_s)",
                "    return Watch(mark=mark, since_s=before.since_s)",
            ),
        ),
        found_by=("I5",),
        of_loads=True,
    ),
    Mutant(
        name="each look at a reader begins its silence anew",
        story="it was just seen to hold its lock",
        edits=(
            _edit(
                "core/node_cache.py",
                "    return before if mark == before.mark else Watch(mark=mark, since_s=now_s)",
                "    return Watch(mark=mark, since_s=now_s)",
            ),
        ),
        found_by=("I3",),
        of_loads=True,
    ),
    Mutant(
        name="silence is counted from before the mark was seen",
        story="the clock was read a moment ago",
        edits=(
            _edit(
                "core/fetching.py",
                "        now_s = yield Do(Fetch.NOW)\n        before, watch =",
                "        before, watch =",
            ),
        ),
        found_by=("I5",),
        of_loads=True,
    ),
    Mutant(
        name="what has arrived is not compared with its manifest",
        story="its length is right",
        edits=(
            _edit(
                "core/fetching.py",
                "    if manifest is not None:\n"
                "        yield Do(Fetch.CONTENTS, (manifest, contents))\n"
                "    is_described",
                "    is_described",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="what was fetched is not compared with what rank 0 has chosen",
        story="it is the manifest's, which is there to be compared with",
        edits=(
            _edit(
                "core/fetching.py",
                "    if expected is not None:\n        _compare",
                "    if expected is None:\n        _compare",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="rank 0 opens what its manifest stands for",
        story="a few kilobytes cost nothing",
        edits=(
            _edit(
                "core/resolution.py",
                "    return not is_local and not is_doubted\n",
                "    return False\n",
            ),
        ),
        found_by=("I7",),
        of_loads=True,
    ),
    Mutant(
        name="a manifest stands for what a load has found damaged as well",
        story="it is what was saved",
        edits=(
            _edit(
                "core/resolution.py",
                "    return not is_local and not is_doubted\n",
                "    return not is_local\n",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="the digest of all bytes is compared with nothing",
        story="their manifest has said what they are",
        edits=(
            _edit(
                "core/fetching.py",
                "            _compare(difference(expected, saved=saved), shown)\n",
                "",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="what an earlier start has left is used as it is",
        story="it was checked when it was fetched",
        edits=(
            _edit(
                "core/fetching.py",
                "    try:\n        yield Do(Fetch.RECHECK)\n    except",
                "    try:\n        yield Do(Fetch.BEAT)\n    except",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="what is in use is removed for want of room",
        story="what comes in is needed more",
        edits=(
            _edit(
                "core/node_cache.py",
                "(is_crowded and unused_s > limits.in_use_s)",
                "is_crowded",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="a file is read where it is, and nobody looks again",
        story="it was checked a moment ago",
        edits=(
            _edit(
                "core/fetching.py",
                "    # Not before: whoever has opened it keeps what it was then.\n"
                "    yield Do(Fetch.CONFIRM)\n",
                "",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="the oldest candidate is inspected first",
        story="the order of a listing is as good as any",
        edits=(
            _edit(
                "core/candidates.py",
                "    ranked = sorted(items, key=rank, reverse=True)",
                "    ranked = sorted(items, key=rank)",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="no older one is looked at where the newest is damaged",
        story="a person should see to it",
        edits=(
            _edit(
                "core/fallback.py",
                "(self.rejected if seen.rejected else self._doubted).append(seen)\n        marked",
                "(self.rejected if seen.rejected else self._doubted).append(seen)\n"
                "            break\n"
                "        marked",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="damaged checkpoints are no checkpoints",
        story="there is nothing to start from",
        edits=(
            _edit(
                "core/fallback.py",
                "    if not allow_fresh_start:\n        raise CheckpointError(refused)\n",
                "    if not allow_fresh_start:\n        return Choice()\n",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="of what nodes have left the oldest is published",
        story="first come, first served",
        edits=(
            _edit(
                "core/spool.py",
                "key=lambda one: (_age(one[2]), -one[0])):",
                "key=lambda one: (_age(one[2]), -one[0]), reverse=True):",
            ),
        ),
        found_by=(
            "I6",
            "I9",
        ),
        of_loads=True,
    ),
    Mutant(
        name="what a reader has refused the next one reads as well",
        story="it may have had bad luck",
        edits=(
            _edit(
                "core/fetching.py",
                "        yield Do(Fetch.REFUSE, str(error))\n",
                "",
            ),
        ),
        found_by=("I7",),
        of_loads=True,
    ),
    Mutant(
        name="what has no manifest is not read through",
        story="nothing is there to compare it with",
        edits=(
            _edit(
                "core/fetching.py",
                "    if not is_described:\n",
                "    if not is_described and expected is None:\n",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
    Mutant(
        name="a reader that has failed keeps its lock",
        story="it will try again",
        edits=(
            _edit(
                "core/fetching.py",
                "        yield Do(Fetch.RELEASE)\n        yield Do(Fetch.DISCARD)\n        raise\n",
                "        yield Do(Fetch.DISCARD)\n        raise\n",
            ),
        ),
        found_by=("I3",),
        of_loads=True,
    ),
    Mutant(
        name="a load has succeeded once one rank has it",
        story="the others will come by it as well",
        edits=(
            _edit(
                "core/joint.py",
                "    first = min(reports, key=",
                "    first = max(reports, key=",
            ),
        ),
        found_by=("I8",),
        of_loads=True,
    ),
    Mutant(
        name="what all ranks have resumed from is removed",
        story="a newer one is there and verified",
        edits=(
            _edit(
                "core/retention.py",
                "        if removal.path in self.started_from:\n",
                "        if False:\n",
            ),
        ),
        found_by=("I6",),
        of_loads=True,
    ),
    Mutant(
        name="a load that finds damage ends the start",
        story="a person should look at it",
        edits=(
            _edit(
                "core/doubts.py",
                "        if not url or not is_damage or url in self._urls or is_last:\n",
                "        if url:\n",
            ),
        ),
        found_by=("I9",),
        of_loads=True,
    ),
)

_SITES = (
    Mutant(
        name="a vote at the site counts however old it is",
        story="whoever has voted has been ill",
        edits=(
            _edit(
                "core/site.py",
                "if now_s - at_s < config.window_s\n",
                "if now_s - at_s < float('inf') or at_s\n",
            ),
        ),
        found_by=("I2",),
        of_sites=True,
    ),
    Mutant(
        name="a job that is held votes as well",
        story="its circuit is open too",
        edits=(
            _edit(
                "protocols/site.py",
                "_look(up) if mine.upstream else _vote(up, mine)",
                "_vote(up, mine)",
            ),
        ),
        found_by=("I2",),
        of_sites=True,
    ),
    Mutant(
        name="one vote is enough for the site",
        story="it is a vote of a whole job",
        edits=(
            _edit(
                "protocols/site.py",
                "        hosts=site.config.site_quorum,\n",
                "        hosts=1,\n",
            ),
        ),
        found_by=("I2",),
        of_sites=True,
    ),
    Mutant(
        name="a job probes for itself while the site's circuit is open",
        story="it has found the storage ill by itself",
        edits=(
            _edit(
                "protocols/site.py",
                "    return None if view is None or passes(view.record) else view\n",
                "    return None\n",
            ),
        ),
        found_by=("I1",),
        of_sites=True,
    ),
    Mutant(
        name="the site's probe is sent without a claim",
        story="the job's own claim is enough",
        edits=(
            _edit(
                "protocols/probing.py",
                "    if above is not None and up is not None:\n",
                "    if above is not None and up is not None and not waiting.is_probe_due(\n"
                "        above, up.circuit.config, now_s=now_s\n"
                "    ):\n",
            ),
        ),
        found_by=("I1",),
        of_sites=True,
    ),
    Mutant(
        name="nobody looks at the site before a call",
        story="whoever is ill notices by itself",
        edits=(
            _edit(
                "protocols/site.py",
                "    if up is None or not up.looks:\n        return\n",
                "    if up is not None or not up.looks:\n        return\n",
            ),
        ),
        found_by=("I11",),
        of_sites=True,
    ),
    Mutant(
        name="a job that recovers is not held",
        story="it has just found the storage well",
        edits=(
            _edit(
                "core/breaker.py",
                "        AttemptFailed: _attempt_failed,\n        HeldUpstream: _hold,\n",
                "        AttemptFailed: _attempt_failed,\n",
            ),
        ),
        found_by=("I11",),
        of_sites=True,
    ),
    Mutant(
        name="every process of a job looks at the site",
        story="each has calls of its own",
        edits=(
            _edit(
                "protocols/site.py",
                "    if up is None or not up.looks:\n        return\n",
                "    if up is None:\n        return\n",
            ),
        ),
        found_by=("I7",),
        of_sites=True,
    ),
    Mutant(
        name="the site is asked before each call",
        story="a view may be old already",
        edits=(
            _edit(
                "core/site.py",
                "    return not is_fresh or view is None or",
                "    return True or view is None or",
            ),
        ),
        found_by=("I7",),
        of_sites=True,
    ),
    Mutant(
        name="a job waits for a site that is away",
        story="it may be back in a moment",
        edits=(
            _edit(
                "protocols/site.py",
                "        link.leave_alone(now_s=lost_at_s, draw=draw)\n",
                "        link.leave_alone(now_s=lost_at_s, draw=draw)\n        yield Sleep(10.0)\n",
            ),
            _edit("protocols/site.py", "    Set,\n)", "    Set,\n    Sleep,\n)"),
        ),
        found_by=("I11",),
        of_sites=True,
    ),
    Mutant(
        name="what a job has copied from its site is never let go",
        story="the site will say when it is over",
        edits=(
            _edit(
                "protocols/probing.py",
                "    if above is not None and up is not None:\n",
                "    if mine.upstream and up is not None:\n"
                "        above = above or up.circuit.view or circuit.view\n"
                "    if above is not None and up is not None:\n",
            ),
        ),
        found_by=("I3",),
        of_sites=True,
    ),
    Mutant(
        name="what was seen of the site outlives its store",
        story="the circuit was open when somebody looked last",
        edits=(
            _edit(
                "core/site.py",
                "    return record.state == BreakerState.FORCED_OPEN.value\n",
                "    return bool(record.state)\n",
            ),
        ),
        found_by=("I2",),
        of_sites=True,
    ),
    Mutant(
        name="an agent opens the circuit for nodes that it does not let in",
        story="what they would load is ill",
        edits=(
            _edit(
                "protocols/restart.py",
                "        view = yield from refresh(dependency.circuit)\n"
                "        if not breaker.passes(view.record) or "
                "(yield from is_held(dependency.circuit)):\n",
                "        yield from heed(dependency.circuit)\n"
                "        view = yield from refresh(dependency.circuit)\n"
                "        if not breaker.passes(view.record):\n",
            ),
        ),
        found_by=("I11",),
        of_sites=True,
    ),
    Mutant(
        name="whoever has found the circuit open looks at no site",
        story="whoever probes looks there",
        edits=(
            _edit(
                "protocols/site.py",
                "        own = yield from current(circuit)\n"
                "        if not passes(own.record):\n"
                "            return\n",
                "        return\n",
            ),
        ),
        found_by=("I11",),
        of_sites=True,
    ),
    Mutant(
        name="whoever probes tidies the site up first",
        story="an old vote is no evidence",
        edits=(
            _edit(
                "protocols/circuit.py",
                "    if circuit.is_sites:\n        # Whoever looks",
                "    if False:\n        # Whoever looks",
            ),
        ),
        found_by=("I11",),
        of_sites=True,
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *_RECORD,
    *_PROBE,
    *_TRIP,
    *_SLOTS,
    *_RETRIES,
    *_JOINT,
    *_WORKERS,
    *_MUSTER,
    *_DEFERRED,
    *_SAVES,
    *_LOADS,
    *_RESTARTS,
    *_SITES,
)
"""All of them."""
