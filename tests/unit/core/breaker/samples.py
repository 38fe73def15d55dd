# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Records in each state, and the one way in which these tests apply an input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import (
    AttemptFailed,
    AttemptSucceeded,
    BreakerConfig,
    BreakerState,
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
from lightning_resilience.core.records import BreakerRecord, Transition


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerInput, BreakerStep


CONFIG: Final = BreakerConfig()
EPOCH: Final = 7
HOLDER: Final = "holder"
DEPENDENCY: Final = "s3://bucket:write"
WRITER: Final = "nonce of this write"
LONG_S: Final = 1e6

# What differs from a closed record in each state.
_FIELDS: Final[dict[BreakerState, dict[str, object]]] = {
    BreakerState.CLOSED: {},
    BreakerState.OPEN: {"limit": 0},
    BreakerState.HALF_OPEN: {"limit": 0, "holder": HOLDER},
    BreakerState.RECOVERING: {"limit": 4},
    BreakerState.FORCED_OPEN: {"limit": 0},
}


def record_in(state: BreakerState, **fields: object) -> BreakerRecord:
    """Return a record in a state, with some fields replaced."""
    closed = BreakerRecord(
        store_id="store",
        epoch=EPOCH,
        generation=3,
        state=state.value,
        limit=CONFIG.max_concurrent,
        open_s=CONFIG.open_for_s,
        history=(Transition(epoch=EPOCH, state=state.value, reason="sample"),),
        reason="sample",
        writer="nonce of the write before",
    )
    return msgspec.structs.replace(closed, **(_FIELDS[state] | fields))


def apply(
    record: BreakerRecord, event: BreakerInput, *, config: BreakerConfig = CONFIG
) -> BreakerStep:
    """Apply one input."""
    return breaker.step(config, record, event, dependency=DEPENDENCY, writer=WRITER)


def vote(host: str = "host-a", *, hosts: int = 4) -> HostVoted:
    """Return a host's vote."""
    return HostVoted(host=host, hosts=hosts, reason="ConnectionResetError: reset")


def claim(unchanged_s: float = LONG_S, *, holder: str = "claimant") -> ProbeClaimed:
    """Return a claim by somebody who has seen the record unchanged for so long."""
    return ProbeClaimed(holder=holder, unchanged_s=unchanged_s)


def variants(epoch: int = EPOCH, holder: str = HOLDER) -> dict[type, list[BreakerInput]]:
    """Return every kind of input, each in every variant that a state may tell apart."""
    epochs = (epoch - 1, epoch, epoch + 1)
    return {
        HostVoted: [vote(host, hosts=hosts) for host in ("host-a", "host-b") for hosts in (1, 4)],
        VoteDropped: [VoteDropped(host=host) for host in ("host-a", "host-b")],
        VotesCleared: [VotesCleared()],
        ProbeClaimed: [claim(unchanged_s) for unchanged_s in (0.0, LONG_S)],
        ProbeSucceeded: [
            ProbeSucceeded(epoch=number, holder=name)
            for number in epochs
            for name in (holder, "other")
        ],
        ProbeFailed: [
            ProbeFailed(epoch=number, holder=name, reason="timeout")
            for number in epochs
            for name in (holder, "other")
        ],
        ProbeReleased: [
            ProbeReleased(epoch=number, holder=name)
            for number in epochs
            for name in (holder, "other")
        ],
        HeldUpstream: [
            HeldUpstream(upstream=5, open_s=15.0, reason="the site is ill", claim=claimed)
            for claimed in (None, *((number, holder) for number in epochs), (epoch, "other"))
        ],
        AttemptSucceeded: [AttemptSucceeded(epoch=number) for number in epochs],
        AttemptFailed: [AttemptFailed(epoch=number, reason="timeout") for number in epochs],
        ForcedOpen: [ForcedOpen(reason="maintenance")],
        ForceReleased: [ForceReleased(reason="done")],
    }
