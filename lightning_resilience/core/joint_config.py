# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options of joint operations: how ranks wait for each other, and for what is away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_resilience.core.pausing import AT_SAVE_POINTS
from lightning_resilience.core.store_loss import (
    StoreTerms,
    default_defer_after_s,
    store_loss_policy,
)
from lightning_resilience.core.validation import (
    check_choice,
    check_less,
    check_seconds,
    check_whole,
    option,
)


__all__ = ["JointConfig"]

_PROCESS_GROUP_SHARE: Final = 0.8
_BEATS_PER_TIMEOUT: Final = 4
_LONGEST_BEAT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JointConfig:
    """How ranks wait for each other.

    Args:
        joint_timeout_s: Silence after which a rank is taken for lost, in seconds, > 0. None takes
            0.8 × the process group's timeout: long enough for a slow rank, and short enough to
            leave before the process group's watchdog does.
        joint_beat_s: How often a working rank shows that it lives, in seconds, > 0. None takes
            min(5, ``joint_timeout_s`` / 4).
        on_outage: What a save does while storage is ill: ``spool`` it on the node, ``wait`` for
            storage, ``skip`` the save point, or ``fail`` on all ranks.
        on_store_loss: What a rank does that cannot reach the shared store: ``wait`` until
            ``joint_timeout_s`` and then raise, ``raise`` at once, or ``defer`` saves where its
            server is gone for everybody. None defers where saves are spooled, and waits otherwise.
        defer_after_s: How long nobody must have listened at the store's address, in seconds, > 0.
            None takes min(30, ``joint_timeout_s`` / 4).
        termination_grace_s: How long a process may still run after SIGTERM or SIGUSR1, in seconds,
            > 0. None takes what torch's agent leaves, or 30, or after SIGUSR1 as long as SLURM's
            job still has.
        max_pending_saves: How many saves that were handed over to ``AsyncCheckpointIO`` may be
            unfinished, ≥ 1; another one waits.
        pause_training: When all ranks wait for an ill storage: ``at_save_points``, where they need
            it, or between two steps, looking after every so many, ≥ 1.

    Raises:
        ConfigError: An option is out of range or contradicts another.
    """

    joint_timeout_s: float | None = option(
        None, why="0.8 × the process group's timeout: leaves before its watchdog"
    )
    joint_beat_s: float | None = option(None, why="min(5, a quarter of `joint_timeout_s`)")
    on_outage: str = option(
        "spool", why="training goes on, and the node keeps the checkpoint until storage is well"
    )
    on_store_loss: str | None = option(
        None, why="`defer` where saves are spooled: training goes on; else `wait`"
    )
    defer_after_s: float | None = option(
        None, why="min(30, a quarter of `joint_timeout_s`): longer than a server's restart takes"
    )
    termination_grace_s: float | None = option(
        None, why="until SLURM's end of the job, or 30 s, which it and torchrun leave by default"
    )
    max_pending_saves: int = option(
        2, why="one is written while the next one waits; each is a copy of the checkpoint in memory"
    )
    pause_training: str | int = option(
        AT_SAVE_POINTS, why="storage is needed there; k looks after every k steps as well"
    )

    def __post_init__(self) -> None:
        for name in ("joint_timeout_s", "joint_beat_s", "termination_grace_s", "defer_after_s"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))
        check_whole("max_pending_saves", self.max_pending_saves, minimum=1)
        check_choice("on_outage", self.on_outage, choices=("spool", "wait", "skip", "fail"))
        if self.on_store_loss is not None:
            check_choice("on_store_loss", self.on_store_loss, choices=("wait", "raise", "defer"))
        store_loss_policy(self.on_store_loss, on_outage=self.on_outage)
        if isinstance(self.pause_training, str):
            check_choice("pause_training", self.pause_training, choices=(AT_SAVE_POINTS,))
        else:
            check_whole("pause_training", self.pause_training, minimum=1)
        if self.joint_timeout_s is not None and self.joint_beat_s is not None:
            check_less(
                ("joint_beat_s", self.joint_beat_s),
                ("joint_timeout_s", self.joint_timeout_s),
                why="a rank that works would be taken for lost between two beats",
            )
        if self.joint_timeout_s is not None and self.defer_after_s is not None:
            check_less(
                ("defer_after_s", self.defer_after_s),
                ("joint_timeout_s", self.joint_timeout_s),
                why="no save would ever be deferred",
            )

    def timeout_s(self, *, process_group_timeout_s: float) -> float:
        """Return ``joint_timeout_s``, or what it is by default for this process group."""
        if self.joint_timeout_s is not None:
            return self.joint_timeout_s
        return _PROCESS_GROUP_SHARE * process_group_timeout_s

    def beat_s(self, *, process_group_timeout_s: float) -> float:
        """Return ``joint_beat_s``, or what it is by default for this process group."""
        if self.joint_beat_s is not None:
            return self.joint_beat_s
        timeout_s = self.timeout_s(process_group_timeout_s=process_group_timeout_s)
        return min(_LONGEST_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)

    def store_terms(self, *, process_group_timeout_s: float) -> StoreTerms:
        """Return how a rank bears the loss of the shared store, for this process group."""
        timeout_s = self.timeout_s(process_group_timeout_s=process_group_timeout_s)
        policy = store_loss_policy(self.on_store_loss, on_outage=self.on_outage)
        return StoreTerms(
            store_patience_s=0.0 if policy == "raise" else timeout_s,
            defer_after_s=(self.defer_after_s or default_defer_after_s(timeout_s))
            if policy == "defer"
            else None,
        )
