# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What has happened to a checkpoint, or to a place where checkpoints go.

``core.events`` has all events; these are in a file of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_resilience.core.event import Event


__all__ = [
    "CheckpointPublished",
    "CheckpointRemoved",
    "CheckpointRetained",
    "CheckpointSetAside",
    "DirectoryTried",
    "SaveTolerated",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPublished(Event):
    """A checkpoint is in storage, with the size that was written."""

    path: str
    size_bytes: int
    digest: str
    attempts: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved(Event):
    """A checkpoint was removed, or was already absent."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTolerated(Event):
    """A save of ``ModelCheckpoint`` has failed, and training goes on: ``limit`` in a row end it."""

    step: int
    number: int
    limit: int
    outcome: str
    first_rank: int | None
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSetAside(Event):
    """A damaged checkpoint was moved to where no search finds it; a note beside it says why."""

    path: str
    to: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryTried(Event):
    """A checkpoint directory was tried before the first step; ``refused`` as in ``core.preflight``.

    ``outcome`` is ``ok``, also where something was refused that the run does not need, or a failure
    class.
    """

    directory: str
    outcome: str
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRetained(Event):
    """A checkpoint was to be removed, and stays."""

    path: str
    reason: str
