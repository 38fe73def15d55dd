# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All sequences of inputs up to length 8, with every rule checked after every step.

Two sequences that lead to the same record, history included, have the same continuations, so each
record is continued once; that is what makes all 20^8 sequences from each start a matter of seconds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import pytest

from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import (
    AttemptSucceeded,
    BreakerConfig,
    BreakerState,
    ForcedOpen,
    ForceReleased,
    HostVoted,
    ProbeClaimed,
    ProbeSucceeded,
)
from tests.models.breaker_inputs import HOSTS, INPUTS, LONG_S, STALE
from tests.models.breaker_invariants import check_step


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.core.records import BreakerRecord


LENGTH = 8
NONCES = itertools.count()
# A short ramp and few failures, so that eight inputs go all the way round.
CONFIG = BreakerConfig(max_concurrent=4, ramp_start=1, reopen_failures=2)


def step(record: BreakerRecord, event: breaker.BreakerInput) -> breaker.BreakerStep:
    """Apply one input with a nonce that is new for each record."""
    return breaker.step(CONFIG, record, event, dependency="d", writer=f"nonce {next(NONCES)}")


def start_in(state: BreakerState) -> BreakerRecord:
    """Return the record of a breaker that has got to a state on the shortest way."""
    record = breaker.initial(CONFIG, store_id="store", writer="first")
    ways: dict[BreakerState, tuple[breaker.BreakerInput, ...]] = {
        BreakerState.CLOSED: (),
        BreakerState.OPEN: _to_open(),
        BreakerState.HALF_OPEN: (*_to_open(), ProbeClaimed(holder="h", unchanged_s=LONG_S)),
        BreakerState.RECOVERING: (
            *_to_open(),
            ProbeClaimed(holder="h", unchanged_s=LONG_S),
            ProbeSucceeded(epoch=3, holder="h"),
        ),
        BreakerState.FORCED_OPEN: (ForcedOpen(reason="maintenance"),),
    }
    for event in ways[state]:
        record = step(record, event).record
    assert record.state == state.value
    return record


def _to_open() -> tuple[HostVoted, ...]:
    return tuple(HostVoted(host=host, hosts=HOSTS, reason="reset") for host in "ab")


def every_step(
    start: BreakerRecord,
) -> Iterator[tuple[str, BreakerRecord, breaker.BreakerInput, breaker.BreakerStep]]:
    """Yield every step of every sequence of inputs up to the length."""
    seen: set[bytes] = set()
    frontier = [start]
    for _ in range(LENGTH):
        following = []
        for record in frontier:
            for name, make in INPUTS.items():
                event = make(record)
                stepped = step(record, event)
                yield name, record, event, stepped
                key = identity(stepped.record)
                if key not in seen:
                    seen.add(key)
                    following.append(stepped.record)
        frontier = following


def identity(record: BreakerRecord) -> bytes:
    """Return everything of a record but the nonce of its write, on which nothing depends."""
    return msgspec.json.encode(msgspec.structs.replace(record, writer=""))


def recovery_of(record: BreakerRecord) -> list[str]:
    """Return the states on the way to CLOSED when everybody who held something is dead."""
    states = []
    while record.state != BreakerState.CLOSED.value:
        event: breaker.BreakerInput
        if record.state == BreakerState.FORCED_OPEN.value:
            event = ForceReleased(reason="done")
        elif record.state == BreakerState.RECOVERING.value:
            event = AttemptSucceeded(epoch=record.epoch)
        else:
            # The permit's holder never reports; somebody else claims, and only its probe counts.
            holder = f"rescuer {record.epoch}"
            record = step(record, ProbeClaimed(holder=holder, unchanged_s=60.0)).record
            assert (record.state, record.holder) == ("half_open", holder)
            event = ProbeSucceeded(epoch=record.epoch, holder=holder)
        record = step(record, event).record
        states.append(record.state)
        assert len(states) <= 5, states
    return states


@pytest.mark.parametrize("start", BreakerState)
def test_every_rule_holds_after_every_step(start: BreakerState) -> None:
    """No sequence of inputs breaks a rule, and no stale result or denied claim changes a record."""
    steps = 0

    for name, before, event, stepped in every_step(start_in(start)):
        steps += 1
        check_step(CONFIG, before, event, stepped)
        if name in STALE or name == "a claim too early":
            assert stepped.record is before, name

    assert steps > 1000


@pytest.mark.parametrize("start", BreakerState)
def test_no_lost_permit_blocks_recovery(start: BreakerState) -> None:
    """From every record there is a short way to CLOSED on which no former holder has to act."""
    records = {
        identity(stepped.record): stepped.record for *_, stepped in every_step(start_in(start))
    }

    for record in records.values():
        states = recovery_of(record)
        if record.state in {"open", "half_open"}:
            assert states == ["recovering", "recovering", "closed"]


def test_sequences_reach_everything() -> None:
    """The sequences are long enough: from CLOSED they take every legal transition."""
    taken = {
        (BreakerState(before.state), BreakerState(stepped.record.state))
        for start in BreakerState
        for _, before, _, stepped in every_step(start_in(start))
        if stepped.record.epoch != before.epoch
    }

    # With a ramp there is always something to ramp after a probe.
    assert taken == breaker.LEGAL - {(BreakerState.HALF_OPEN, BreakerState.CLOSED)}


def test_a_permit_has_one_holder() -> None:
    """Of all results that may arrive in HALF_OPEN, only those of the present holder count."""
    for _, before, event, stepped in every_step(start_in(BreakerState.OPEN)):
        if before.state == "half_open" and hasattr(event, "holder") and hasattr(event, "epoch"):
            mine = (event.epoch, event.holder) == (before.epoch, before.holder)
            assert stepped.changed is mine


def test_epochs_of_one_sequence_never_fall() -> None:
    """The epoch grows by one with each transition and stays with everything else."""
    for _, before, _, stepped in every_step(start_in(BreakerState.CLOSED)):
        moved = any(type(event).__name__ == "BreakerChanged" for event in stepped.events)
        assert stepped.record.epoch == before.epoch + moved
