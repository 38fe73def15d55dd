# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One rank's part in a joint operation: what has waited for one, its work, and how that is told."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.work import carry_out, detail_of, hand_over
from lightning_resilience.core.joint import report_of
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.joint import Part


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.alone import Alone
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.guard import Guarded
    from lightning_resilience.protocols.joint import Joint


__all__ = ["part_of"]


def part_of(
    joint: Joint,
    work: Work,
    *,
    rank: int,
    kind: str,
    alone: Alone,
    first: Protocol[Any] | None,
) -> Part:
    """Return this rank's part.

    Args:
        joint: The operation.
        work: What this rank does in it.
        rank: This rank.
        kind: ``read`` or ``write``.
        alone: This rank's guarded calls.
        first: What comes before, and may fail; None where nothing does.
    """
    by_all = len(joint.workers) > 1

    def report(error: BaseException) -> Any:
        return report_of(error, rank=rank, outcome=joint.patience.classify(error))

    def run(started_at_s: float) -> Protocol[Guarded]:
        if first is not None:
            with contextlib.suppress(ResilienceError):
                yield from first
        if joint.circuit is None or not work.is_guarded:
            return (yield from hand_over(work, started_at_s))
        call = alone.call(joint.op, work, kind=kind, collective=by_all)
        call = replace(call, patience=joint.patience)
        return (yield from carry_out(joint.circuit, call, work, started_at_s=started_at_s))

    return Part(run=run, detail=partial(detail_of, joint.op), outcome=report)
