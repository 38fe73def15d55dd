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
    "CheckpointSpooled",
    "CheckpointSuperseded",
    "CheckpointsUnpublished",
    "DeferralsSettled",
    "DirectoryTried",
    "DiversionFailed",
    "OperationDeferred",
    "SaveSkipped",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpooled(Event):
    """A checkpoint waits on this node, as ``file``; training goes on.

    Until storage is well; where it ``is_paced``, until its name may be written again.
    """

    path: str
    file: str
    size_bytes: int
    waiting: int
    is_paced: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSuperseded(Event):
    """A checkpoint that waited on this node is not published: a newer one, or its removal, came."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsUnpublished(Event):
    """A run has ended, and these checkpoints are on this node only: ``files`` is where."""

    paths: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiversionFailed(Event):
    """There is no other way for a call while its dependency is ill, so it waits."""

    dependency: str
    operation: str
    target: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(Event):
    """A save point of ``ModelCheckpoint`` was left out, because storage is ill."""

    step: int
    outcome: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDeferred(Event):
    """The shared store is gone for everybody, and this rank has left an operation without it."""

    op: str
    seq: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferralsSettled(Event):
    """The shared store is there again, and this rank knows how what it had deferred has ended."""

    op: str
    seq: int
    number: int
