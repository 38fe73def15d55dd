# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What the agents of a job are told of its end, and which rank tells them.

====================================  ============================  ================================
training is left                      the account                   is given by
====================================  ============================  ================================
by one rank before the others         what stands among the ranks   that rank, and rank 0
by all ranks together                 the exception they share      rank 0, and where its cause is
and the ranks could not agree on it   this rank's own exception     this rank
====================================  ============================  ================================

Two ranks, because one of them may end before it has told; not all of them, because a store has one
server, and all ranks leave at the same moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.incident import incident_of, is_echo, is_shared, is_stop


if TYPE_CHECKING:
    from lightning_resilience.core.incident import IncidentRecord


__all__ = ["account_of", "status_of"]


def account_of(
    error: BaseException,
    standing: IncidentRecord | None,
    *,
    rank: int,
    step: int,
    is_together: bool,
    writer: str,
) -> IncidentRecord | None:
    """Return what this rank tells the agents; None where others do.

    Args:
        error: What it leaves with.
        standing: The incident that stands among the ranks; None where there is none, or where that
            could not be told.
        rank: This rank.
        step: Training step that it has completed.
        is_together: Whether all ranks have agreed to leave at this point.
        writer: A fresh nonce.
    """
    if standing is not None:
        return standing if rank in {0, standing.rank} else None
    if not (is_together or is_shared(error)):
        return incident_of(error, is_an_echo=is_echo(error), rank=rank, step=step, writer=writer)
    first: int = getattr(error, "first_rank", None) or 0
    if rank not in {0, first}:
        return None
    return incident_of(error, is_an_echo=is_echo(error), rank=first, step=step, writer=writer)


def status_of(error: BaseException) -> int | None:
    """Return the status with which a process that was told to stop has to end; None for its own.

    Lightning's exception for that ends a process with the status of success, and agents would take
    a job that has been interrupted for one that is done.

    Args:
        error: What the process leaves with.
    """
    was_told = isinstance(error, SystemExit) and is_stop(error)
    return int(ExitCode.PREEMPTED) if was_told and not getattr(error, "code", None) else None
