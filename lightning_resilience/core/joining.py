# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent does when it cannot join, and what it answers while it cannot ask.

==================================  ================================================================
joining has failed because          then
==================================  ================================================================
the store cannot be reached, or     again with a new client, after a pause with full jitter, until
its name is not known yet           ``join_timeout`` has passed since the first attempt
nodes were missed in a round that   again with the same client, which gives the node's place up at
was complete                        once, as long as above
others have not come in time        once more: who was held up at the gate comes late; then enough
the store belongs to another job    again for half a minute, since that job may just be ending; then
                                    the other job is named
the rendezvous is closed            no more: its run id is used up
==================================  ================================================================

An agent whose workers are well asks whether nodes are waiting. Where the store does not answer, it
says what it knew last, for as long as a node may be silent: one lost answer ends no job. After that
the workers are restarted by way of the gate, which has the patience for an outage: a store that
comes back empty knows nobody, and all have to join anew.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from lightning_resilience.core.backoff import delay_s
from lightning_resilience.core.evidence import one_line
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.quota import Ending
from lightning_resilience.core.records import VERSION


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "Cadence",
    "JoinFailure",
    "Joining",
    "OwnerRecord",
    "Watch",
    "ending_of",
    "foreign_text",
    "may_host",
    "text_of",
]

_BASE_S: Final = 0.2
_CAP_S: Final = 10.0
_FOREIGN_S: Final = 30.0
_MOST_LATE: Final = 1
_MOST_LATE_IN_ALL: Final = 8
_HELD_SHARE: Final = 0.25
"""Of the time to join: longer than that nobody is at the gate where nothing is ill."""


class JoinFailure(str, enum.Enum):
    """Why joining has failed."""

    UNREACHABLE = "unreachable"
    LATE = "late"
    FOREIGN = "foreign"
    CLOSED = "closed"


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Whose store this is; written once by the agent that hosts it.

    Args:
        v: Version of the format.
        run_id: Its run.
        host: The host that it is on.
        pid: The process that it is in.
        writer: Nonce of this write.
    """

    v: int = VERSION
    run_id: str
    host: str
    pid: Annotated[int, msgspec.Meta(ge=0)]
    writer: str


def foreign_text(owner: OwnerRecord | None, run_id: str, *, endpoint: str) -> str:
    """Return why a store must not be used; empty where it may: one that nobody owns is for all.

    Args:
        owner: Whose store it is, as it says itself.
        run_id: This job's run.
        endpoint: Where the store is.
    """
    if owner is None or owner.run_id == run_id:
        return ""
    return (
        f"The store at {endpoint} belongs to another job: run {owner.run_id!r}, on host "
        f"{owner.host}, process {owner.pid}. It would take this job's store away when it ends. "
        "Give each job on a host a port of its own (--rdzv-endpoint), or serve one store for all."
    )


def may_host(options: Mapping[str, Any], *, backend: str) -> bool:
    """Tell whether a node may find out by itself that the store is its own to host.

    Args:
        options: Options of torch's backend, as they were given.
        backend: Its name.
    """
    return backend == "c10d" and "is_host" not in options and "store_type" not in options


def text_of(error: BaseException) -> str:
    """Return an error in one line, with its cause: torch says there what has happened."""
    cause = error.__cause__
    return one_line(error) if cause is None else f"{one_line(error)} ({one_line(cause)})"


def ending_of(
    failure: JoinFailure, text: str, *, is_first: bool, elapsed_s: float, endpoint: str
) -> Ending:
    """Return how a job ends that cannot join.

    Args:
        failure: Why the last attempt has failed.
        text: What was raised, in one line.
        is_first: Whether this agent has never joined.
        elapsed_s: For how long it has tried, in seconds.
        endpoint: Where the store should be.
    """
    if failure is JoinFailure.CLOSED:
        by = "an earlier run" if is_first else "another agent, while this one was restarting"
        reason = f"The rendezvous of this run id was closed by {by}: {text}."
        return Ending(code=ExitCode.CLOSED, reason=reason)
    if failure is JoinFailure.FOREIGN:
        return Ending(code=ExitCode.USAGE, reason=text)
    reason = f"This agent could not join at {endpoint} within {elapsed_s:.0f} s: {text}."
    if failure is JoinFailure.UNREACHABLE and is_first:
        reason += (
            " With inner=c10d a node hosts the store: where none has found that the endpoint is "
            "its own, set is_host=1 in --rdzv-conf on that node."
        )
    return Ending(code=ExitCode.OUTAGE, reason=reason)


@dataclass(slots=True, kw_only=True)
class Joining:
    """One agent's attempts to join one round. One thread.

    Each attempt passes the gate first: what the job shares may have become ill since the last one.

    Args:
        join_s: How long it tries to reach the store, in seconds.
        started_at_s: When it began, on its own clock.
        attempts: Failed attempts so far.
        late: How often others have not come in time, since the gate has held this agent up.
        late_in_all: How often in all.
        late_at_s: When they have not come last, on its own clock.
        is_through: Whether it has passed the gate since others were waited for in vain.
    """

    join_s: float
    started_at_s: float
    attempts: int = 0
    late: int = 0
    late_in_all: int = 0
    late_at_s: float = float("-inf")
    is_through: bool = False

    def begin(self, *, now_s: float) -> None:
        """Begin anew, with all time left."""
        self.started_at_s, self.attempts = now_s, 0

    def passed(self, *, came_at_s: float, now_s: float) -> None:
        """Take note that the gate was passed: the time at it is not held against joining.

        Args:
            came_at_s: When this attempt came to the gate, on its own clock.
            now_s: Now.
        """
        if self.is_through:
            self.started_at_s += now_s - came_at_s
            return
        self.is_through = True
        self.begin(now_s=now_s)
        if now_s - self.late_at_s > _HELD_SHARE * self.join_s:
            # What has held it up has held up the others: now they come.
            self.late = 0

    def held(self, *, came_at_s: float, answered_at_s: float, now_s: float) -> None:
        """Take note that the store has failed at the gate: it was silent from its last answer on.

        Whoever waits at the gate for an hour, and then loses one answer, has not been without a
        store for an hour.

        Args:
            came_at_s: When this attempt came to the gate, on its own clock.
            answered_at_s: When the store has answered last.
            now_s: Now.
        """
        if answered_at_s >= came_at_s:
            self.begin(now_s=now_s)

    def pause_s(self, failure: JoinFailure, *, now_s: float, draw: float) -> float | None:
        """Return how long to wait before the next attempt; None where there is none.

        Args:
            failure: Why the last one has failed.
            now_s: Now, on its own clock.
            draw: A uniform number in [0, 1) that no other agent has.
        """
        if failure is JoinFailure.CLOSED:
            return None
        self.attempts += 1
        pause_s = delay_s(self.attempts, base_s=_BASE_S, cap_s=_CAP_S, draw=draw)
        if failure is JoinFailure.LATE:
            self.late, self.late_in_all, self.late_at_s = self.late + 1, self.late_in_all + 1, now_s
            # Others may be held up by what has become ill since: they are joined when it is well.
            self.is_through = False
            is_enough = self.late > _MOST_LATE or self.late_in_all > _MOST_LATE_IN_ALL
            return None if is_enough else pause_s
        bound_s = min(_FOREIGN_S, self.join_s) if failure is JoinFailure.FOREIGN else self.join_s
        rest_s = self.started_at_s + bound_s - now_s
        return None if rest_s <= 0 else min(pause_s, rest_s)


@dataclass(slots=True, kw_only=True)
class Cadence:
    """When something is due that is done once in a while only. One thread.

    Args:
        every_s: How often, in seconds.
        next_at_s: When next, on this process's clock.
    """

    every_s: float
    next_at_s: float = float("-inf")

    def is_due(self, *, now_s: float) -> bool:
        """Tell whether it is due now; where so, the next time is set."""
        if now_s < self.next_at_s:
            return False
        self.next_at_s = now_s + self.every_s
        return True


@dataclass(slots=True, kw_only=True)
class Watch:
    """What an agent whose workers are well answers. One thread.

    Args:
        grace_s: How long it answers what it knew last, in seconds.
        waiting: Nodes that were waiting at the last answer.
        silent_since_s: Since when the store has not answered; None while it does.
    """

    grace_s: float
    waiting: int = 0
    silent_since_s: float | None = None
    attempts: int = 0
    """Attempts to reach a store that is silent."""
    tries_at_s: float = float("-inf")

    def answered(self, waiting: int, *, lost: int) -> int:
        """Take note of an answer; return how many nodes wait, as the agent is to see it.

        Args:
            waiting: Nodes that wait to join.
            lost: Nodes that are not there any more. To be without them is a new round as well.
        """
        self.silent_since_s, self.attempts = None, 0
        self.waiting = max(waiting, min(1, lost))
        return self.waiting

    def may_try(self, *, now_s: float, draw: float) -> bool:
        """Tell whether to try now to reach a store that is silent; where so, the next time is set.

        Args:
            now_s: Now, on its own clock.
            draw: A uniform number in [0, 1) that no other agent has.
        """
        if now_s < self.tries_at_s:
            return False
        self.attempts += 1
        self.tries_at_s = now_s + delay_s(self.attempts, base_s=_BASE_S, cap_s=_CAP_S, draw=draw)
        return True

    def silent(self, *, now_s: float) -> int:
        """Take note that there was no answer; return how many nodes wait, as far as is known."""
        if self.silent_since_s is None:
            self.silent_since_s = now_s
        if now_s - self.silent_since_s >= self.grace_s:
            return 1
        return self.waiting
