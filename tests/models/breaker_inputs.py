# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs that depend on the record they meet: results of this epoch and of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker import (
    AttemptFailed,
    AttemptSucceeded,
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


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.breaker import BreakerInput
    from lightning_resilience.core.records import BreakerRecord


LONG_S: Final = 1e6
HOSTS: Final = 4

INPUTS: Final[dict[str, Callable[[BreakerRecord], BreakerInput]]] = {
    "host a votes": lambda _: HostVoted(host="a", hosts=HOSTS, reason="reset"),
    "host b votes": lambda _: HostVoted(host="b", hosts=HOSTS, reason="reset"),
    "host c votes": lambda _: HostVoted(host="c", hosts=HOSTS, reason="reset"),
    "host a drops its vote": lambda _: VoteDropped(host="a"),
    "votes are cleared": lambda _: VotesCleared(),
    "a claim in time": lambda r: ProbeClaimed(holder=f"claim {r.epoch}", unchanged_s=LONG_S),
    "a claim too early": lambda r: ProbeClaimed(holder=f"early {r.epoch}", unchanged_s=0.0),
    "the probe succeeds": lambda r: ProbeSucceeded(epoch=r.epoch, holder=r.holder),
    "the probe fails": lambda r: ProbeFailed(epoch=r.epoch, holder=r.holder, reason="reset"),
    "the probe is released": lambda r: ProbeReleased(epoch=r.epoch, holder=r.holder),
    "the site is open": lambda _: HeldUpstream(upstream=5, open_s=15.0, reason="the site"),
    "the probe is held": lambda r: HeldUpstream(
        upstream=5, open_s=15.0, reason="the site", claim=(r.epoch, r.holder or "nobody")
    ),
    "an old probe is held": lambda r: HeldUpstream(
        upstream=5, open_s=15.0, reason="the site", claim=(r.epoch - 1, r.holder)
    ),
    "an old probe succeeds": lambda r: ProbeSucceeded(epoch=r.epoch - 1, holder=r.holder),
    "an old probe fails": lambda r: ProbeFailed(epoch=r.epoch - 1, holder=r.holder, reason="reset"),
    "an old probe is released": lambda r: ProbeReleased(epoch=r.epoch - 1, holder=r.holder),
    "another's probe succeeds": lambda r: ProbeSucceeded(epoch=r.epoch, holder="nobody"),
    "a call succeeds": lambda r: AttemptSucceeded(epoch=r.epoch),
    "a call fails": lambda r: AttemptFailed(epoch=r.epoch, reason="reset"),
    "an old call succeeds": lambda r: AttemptSucceeded(epoch=r.epoch - 1),
    "an old call fails": lambda r: AttemptFailed(epoch=r.epoch - 1, reason="reset"),
    "an operator opens": lambda _: ForcedOpen(reason="maintenance"),
    "an operator releases": lambda _: ForceReleased(reason="done"),
}
"""What may happen to a record, by name."""

STALE: Final = frozenset(name for name in INPUTS if name.startswith(("an old", "another's")))
"""Those that name an epoch or a holder that is not the record's."""
