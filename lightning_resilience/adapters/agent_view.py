# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How the workers of this agent have ended, as torch's agent has seen it.

Torch tells a rendezvous handler nothing of that. But the handler is called by the agent, so the
agent's own findings are in the frames that have led there: the result of its last look at the
workers, with statuses, and with what workers have left in their error files. Where a version of
torch has other names, nothing is found, and the workers' own reports have to do.
"""

from __future__ import annotations

import inspect
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final


if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


__all__ = ["WorkerExit", "failing_with", "first_rank", "stopped_by", "worker_exits"]

_MOST_FRAMES: Final = 200
_MOST_WORKERS: Final = 64
# Of the agent while it watches its workers, and of the launcher when the agent has given up.
_RESULTS: Final = ("run_result", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """One worker that has failed.

    Args:
        rank: Its global rank.
        status: Its exit status; the negative number of a signal.
        message: What it has left in its error file, in one line; empty without one.
    """

    rank: int
    status: int
    message: str


def worker_exits() -> list[WorkerExit]:
    """Return the workers of this agent that have failed, the earliest first; none where unknown."""
    failures: Any = {}
    for frame in _frames():
        found = _failures_in(frame)
        if found:
            failures = found
            break
    ordered = sorted(failures.items(), key=lambda item: getattr(item[1], "timestamp", 0))
    return [
        WorkerExit(
            rank=int(rank), status=int(getattr(failure, "exitcode", 1)), message=_message(failure)
        )
        for rank, failure in ordered[:_MOST_WORKERS]
    ]


def failing_with() -> BaseException | None:
    """Return the exception that is on its way through torch's launcher: the agent has given up."""
    return sys.exc_info()[1]


def stopped_by() -> signal.Signals | None:
    """Return the signal for which torch's agent is ending; None where it is not."""
    # Torch's handler of signals raises an exception with this.
    number = getattr(sys.exc_info()[1], "sigval", None)
    return None if number is None else signal.Signals(number)


def first_rank() -> int | None:
    """Return the lowest global rank of this agent's workers; None where unknown."""
    for frame in _frames():
        group = getattr(frame.f_locals.get("self"), "_worker_group", None)
        ranks = [int(worker.global_rank) for worker in getattr(group, "workers", ())]
        if ranks:
            return min(ranks)
    return None


def _failures_in(frame: FrameType) -> dict[int, Any]:
    for name in _RESULTS:
        found = getattr(frame.f_locals.get(name), "failures", None)
        if isinstance(found, dict) and found:
            return found
    return {}


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = inspect.currentframe()
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _message(failure: Any) -> str:
    found = getattr(failure, "message", "")
    if isinstance(found, dict):
        # torch's own format for an exception that ``@record`` has caught.
        found = found.get("message", "")
    text = str(found or "")
    # What torch says itself of a worker without an error file is no word of the worker's.
    is_torchs = text.startswith(("To enable traceback see", "Signal "))
    return "" if is_torchs else text
