# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The real breaker and a naive one agree on every sequence of inputs, with every config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings, strategies as st

from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import (
    AttemptFailed,
    AttemptSucceeded,
    BreakerConfig,
    BreakerInput,
    ForcedOpen,
    ForceReleased,
    HeldUpstream,
    HostVoted,
    ProbeClaimed,
    ProbeFailed,
    ProbeReleased,
    ProbeSucceeded,
    VoteDropped,
    VotesCleared,
)
from lightning_resilience.core.site import look_again_s
from tests.models.breaker_invariants import check_step
from tests.models.breaker_model import NaiveBreaker


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord


HOSTS = [f"host-{number}" for number in range(10)]


@st.composite
def configs(draw: st.DrawFn) -> BreakerConfig:
    """Return any config whose options fit together."""
    max_concurrent = draw(st.integers(1, 40))
    open_for_s = draw(st.sampled_from([8.0, 10.0, 25.0]))
    return BreakerConfig(
        quorum_fraction=draw(st.sampled_from([0.01, 0.1, 0.14, 0.25, 0.5, 1.0])),
        view_max_age_s=1.0,
        open_for_s=open_for_s,
        max_open_for_s=open_for_s * draw(st.sampled_from([1.0, 1.5, 4.0, 7.0])),
        probe_timeout_s=1.0,
        probe_lease_s=draw(st.sampled_from([3.25, 5.0])),
        reopen_failures=draw(st.integers(1, 4)),
        max_concurrent=max_concurrent,
        ramp_start=draw(st.integers(1, max_concurrent)),
    )


# How far the epoch that an input names is from the record's: mostly not at all.
offsets = st.sampled_from([0, 0, 0, 0, 0, -1, 1, -3])
others = st.sampled_from([False] * 5 + [True])
hosts = st.sampled_from(HOSTS)
# Near every length of an open wait and a lease that the configs have, and far from all.
ages = st.sampled_from([0.0, 3.2, 3.25, 5.0, 7.9, 8.0, 10.0, 15.9, 16.0, 20.0, 40.0, 1e6, 1e6])
KINDS = [
    *["vote"] * 5,
    *["claim", "probed well", "called well"] * 3,
    *["probe failed", "call failed"] * 2,
    *["drop", "clear", "probe released", "force", "release", "held", "probe held"],
]
moves = st.tuples(
    st.sampled_from(KINDS), offsets, others, hosts, ages, st.sampled_from([1, 2, 4, 10, 50])
)
Move = tuple[str, int, bool, str, float, int]


def input_of(move: Move, record: BreakerRecord, config: BreakerConfig) -> BreakerInput:
    """Return the input that a move stands for when it meets a record."""
    kind, offset, by_other, host, unchanged_s, number = move
    held_s = look_again_s(config, draw=1 / number)
    epoch = record.epoch + offset
    holder = "somebody else" if by_other else record.holder
    inputs: dict[str, BreakerInput] = {
        "vote": HostVoted(host=host, hosts=number, reason="reset"),
        "drop": VoteDropped(host=host),
        "clear": VotesCleared(),
        "claim": ProbeClaimed(holder=f"claim at {record.epoch}", unchanged_s=unchanged_s),
        "probed well": ProbeSucceeded(epoch=epoch, holder=holder),
        "probe failed": ProbeFailed(epoch=epoch, holder=holder, reason="reset"),
        "probe released": ProbeReleased(epoch=epoch, holder=holder),
        "called well": AttemptSucceeded(epoch=epoch),
        "call failed": AttemptFailed(epoch=epoch, reason="reset"),
        "held": HeldUpstream(upstream=number, open_s=held_s, reason="the site is ill"),
        "probe held": HeldUpstream(
            upstream=number,
            open_s=held_s,
            reason="the site is ill",
            claim=(epoch, holder or "nobody"),
        ),
        "force": ForcedOpen(reason="maintenance"),
        "release": ForceReleased(reason="done"),
    }
    return inputs[kind]


def agree(record: BreakerRecord, model: NaiveBreaker) -> None:
    """Assert that a record says what the model says."""
    assert (record.state, record.epoch) == (model.mode, model.epoch)
    assert record.generation == model.trips
    assert list(record.votes) == model.voters
    assert record.holder == (model.prober or "")
    assert record.limit == model.allowed
    assert record.failures == model.stumbles
    assert record.open_s == model.wait_s
    told = [(entry.epoch, entry.state) for entry in record.history]
    assert told == model.story[-breaker.HISTORY_LENGTH :]


@settings(max_examples=300)
@given(configs(), st.lists(moves, max_size=60))
def test_the_breaker_is_what_a_person_would_tell(config: BreakerConfig, story: list[Move]) -> None:
    """After every input the shared record says what the naive breaker says."""
    model = NaiveBreaker(config)
    record = breaker.initial(config, store_id="store", writer="first")

    for number, move in enumerate(story):
        event = input_of(move, record, config)
        stepped = breaker.step(config, record, event, dependency="d", writer=f"nonce {number}")
        changed = model.tell(event)

        assert stepped.changed is changed
        check_step(config, record, event, stepped)
        record = stepped.record
        agree(record, model)


@settings(max_examples=100)
@given(st.lists(moves, min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=20))
def test_late_results_change_nothing(story: list[Move], late: list[int]) -> None:
    """Results that arrive again after their epoch, in any order, leave no trace."""
    config = BreakerConfig()
    plain = breaker.initial(config, store_id="store", writer="first")
    past: list[BreakerInput] = []
    disturbed = plain

    for number, move in enumerate(story):
        event = input_of(move, plain, config)
        writer = f"nonce {number}"
        plain = breaker.step(config, plain, event, dependency="d", writer=writer).record
        disturbed = breaker.step(config, disturbed, event, dependency="d", writer=writer).record
        epoch = getattr(event, "epoch", None)
        if epoch is not None:
            past.append(event)
        for index in late:
            old = past[index] if index < len(past) else None
            if old is not None and getattr(old, "epoch", 0) != disturbed.epoch:
                disturbed = breaker.step(
                    config, disturbed, old, dependency="d", writer="late"
                ).record

        assert disturbed == plain
