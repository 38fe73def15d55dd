# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options of restarts: how many, how soon, and for how long an agent waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_resilience.core.validation import (
    check_at_least,
    check_less,
    check_seconds,
    check_whole,
    option,
)


__all__ = ["MOST_CHARGES", "RestartConfig"]

MOST_CHARGES: Final = 64
"""So many restarts the record of a job counts at once: it is read again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """When a job is restarted after a failure, and when it is given up.

    Args:
        restart_quota: Restarts without progress within ``restart_window_s``, of the whole job, ≥ 0.
            One more is denied, and the job is dead-lettered.
        restart_window_s: The window, in seconds, > 0.
        killed_quota: Restarts within the window after a worker was killed by SIGKILL without
            progress, ≥ 0: it has probably run out of memory, and will again.
        same_failure_limit: So many failures in a row with the same error at the same step, ≥ 2, and
            the job is dead-lettered: it is no accident.
        membership_quota: Restarts within the window because nodes have left, ≥ 0. Nodes that come
            are not counted. With ``restart_quota``, 63 at most.
        restart_base_delay_s: Upper bound of the delay before the first restart, in seconds, > 0.
        restart_max_delay_s: Largest upper bound, in seconds, ≥ ``restart_base_delay_s``.
        gate_deadline_s: How long a restart waits for an ill dependency, in seconds, > 0; for one
            end of the workers, however often an agent has to begin anew meanwhile.
        settle_s: How long the reports of workers are waited for before a cause is told, in seconds,
            ≥ 0: the first to report is often not the first to fail.
        linger_s: How long the agent that hosts the store waits for the others to have read how the
            job has ended, in seconds, ≥ 0.

    Raises:
        ConfigError: An option is out of range.
    """

    restart_quota: int = option(3, why="three tries, then a person; progress refills it")
    restart_window_s: float = option(3600.0, why="an hour without progress is a person's problem")
    killed_quota: int = option(2, why="a worker that runs out of memory does so again")
    same_failure_limit: int = option(2, why="the same error at the same step twice is no accident")
    membership_quota: int = option(10, why="a node that comes and goes must not restart for ever")
    restart_base_delay_s: float = option(5.0, why="long enough for a node to leave its collectives")
    restart_max_delay_s: float = option(120.0, why="short beside the loading of a checkpoint")
    gate_deadline_s: float = option(1800.0, why="as `deadline_s`: half an hour idle")
    settle_s: float = option(1.0, why="a rank reports within a second of its exception")
    linger_s: float = option(30.0, why="as long as torch's agents wait for each other to leave")

    def __post_init__(self) -> None:
        for name in ("restart_quota", "killed_quota", "membership_quota"):
            check_whole(name, getattr(self, name), minimum=0)
        check_whole("same_failure_limit", self.same_failure_limit, minimum=2)
        for name in ("restart_window_s", "restart_base_delay_s", "restart_max_delay_s"):
            check_seconds(name, getattr(self, name))
        check_seconds("gate_deadline_s", self.gate_deadline_s)
        for name in ("settle_s", "linger_s"):
            check_seconds(name, getattr(self, name), zero=True)
        check_at_least(
            ("restart_max_delay_s", self.restart_max_delay_s),
            ("restart_base_delay_s", self.restart_base_delay_s),
            why="the first delay would be longer than the longest",
        )
        check_less(
            ("restart_quota + membership_quota", self.restart_quota + self.membership_quota),
            ("the number of restarts that are remembered", MOST_CHARGES),
            why="older ones would be forgotten, and the job restarted for ever",
        )
