# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options of checkpoints: what is asked of storage before training, and what may fail.

What a failure means for the ranks is decided jointly (``core.joint``); these options say what it
means for the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_resilience.core.validation import check_flag, check_whole, option


__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What checkpoints a run insists on.

    Args:
        preflight: Whether one rank tries in ``setup`` whether checkpoints can be written, read,
            listed and removed where they will go, so that a missing right is an error before the
            first step and not after the first hours.
        max_consecutive_save_failures: The how manieth failed save in a row ends the run, ≥ 1. With
            1, the first does; with more, training goes on with the checkpoint before, and a warning
            says so. A save that succeeds begins the row anew.
        allow_fresh_start: Whether a run whose ``ckpt_path`` is ``"last"`` or ``"hpc"`` begins from
            the beginning where checkpoints are there and none of them can be loaded.

    Raises:
        ConfigError: An option is out of range.
    """

    preflight: bool = option(default=True, why="a missing right is found before the first step")
    max_consecutive_save_failures: int = option(
        1, why="strict: a run that cannot save ends; more keeps training with the last good one"
    )
    allow_fresh_start: bool = option(
        default=False, why="a run that silently begins anew hides its damaged checkpoints"
    )

    def __post_init__(self) -> None:
        check_whole("max_consecutive_save_failures", self.max_consecutive_save_failures, minimum=1)
        check_flag("preflight", self.preflight)
        check_flag("allow_fresh_start", self.allow_fresh_start)
