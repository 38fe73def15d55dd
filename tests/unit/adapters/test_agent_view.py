# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What torch's agent has seen of its workers, found in the frames that have led to the handler."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lightning_resilience.adapters.agent_view import (
    WorkerExit,
    failing_with,
    first_rank,
    stopped_by,
    worker_exits,
)


if TYPE_CHECKING:
    from pathlib import Path


def failure(tmp_path: Path, status: int, message: Any = None) -> ProcessFailure:
    """What torch makes of a worker that has failed, with or without an error file."""
    path = tmp_path / f"error{status}.json"
    if message is not None:
        path.write_text(json.dumps({"message": message}))
    return ProcessFailure(local_rank=0, pid=7, exitcode=status, error_file=str(path))


def caught(message: str, *, at_s: int) -> dict[str, Any]:
    """What torch's ``@record`` writes."""
    return {"message": message, "extraInfo": {"timestamp": str(at_s), "py_callstack": "…"}}


def seen_from(run_result: Any) -> list[WorkerExit]:
    """Look from within a call of an agent that has this result."""
    assert run_result is not None
    return _deeper()


def _deeper() -> list[WorkerExit]:
    return worker_exits()


def test_a_status_is_found_with_the_workers_rank(tmp_path: Path) -> None:
    """What torch itself says of a worker without an error file is no word of the worker's."""
    failures = {3: failure(tmp_path, 2), 5: failure(tmp_path, -9)}

    found = seen_from(RunResult(state=WorkerState.FAILED, failures=failures))

    assert {(each.rank, each.status, each.message) for each in found} == {(3, 2, ""), (5, -9, "")}


def test_an_error_file_is_found(tmp_path: Path) -> None:
    """In torch's own format, and as plain text; the earliest first."""
    failures = {
        0: failure(tmp_path, 1, caught("OSError: late", at_s=200)),
        1: failure(tmp_path, 3, caught("ValueError: bad", at_s=100)),
        2: failure(tmp_path, 4, "KeyError: text"),
    }

    found = seen_from(RunResult(state=WorkerState.FAILED, failures=failures))

    assert [(each.rank, each.message) for each in found if each.rank < 2] == [
        (1, "ValueError: bad"),
        (0, "OSError: late"),
    ]
    assert {each.message for each in found if each.rank == 2} == {"KeyError: text"}


def test_the_launchers_own_result_is_found() -> None:
    """When the agent has given up, that is the one which is there."""

    def launch_agent() -> list[WorkerExit]:
        result = SimpleNamespace(failures={1: SimpleNamespace(exitcode=4, timestamp=1, message="")})
        found = worker_exits()
        assert result.failures
        return found

    assert launch_agent() == [WorkerExit(rank=1, status=4, message="")]


def test_without_an_agent_nothing_is_known() -> None:
    """And where all is well, nothing has failed."""
    assert worker_exits() == []
    assert seen_from(RunResult(state=WorkerState.HEALTHY)) == []


def test_it_is_known_whether_the_agent_has_given_up() -> None:
    """From the exception that is on its way."""
    error = ValueError("given up")
    seen = [failing_with()]

    def launch() -> None:
        try:
            raise error
        finally:
            seen.append(failing_with())

    with pytest.raises(ValueError, match="given up"):
        launch()
    assert seen == [None, error]


def test_it_is_known_which_signal_has_stopped_the_agent() -> None:
    """By the exception of torch's own handler; any other is none."""

    def seen(error: Exception) -> signal.Signals | None:
        try:
            raise error
        except type(error):
            return stopped_by()

    assert stopped_by() is None
    assert seen(ValueError("bad")) is None
    assert seen(SignalException("stop", signal.SIGHUP)) is signal.SIGHUP


def test_it_is_known_which_workers_are_the_agents() -> None:
    """By torch's own group of them."""

    class Agent:
        def __init__(self, *ranks: int) -> None:
            workers = [SimpleNamespace(global_rank=rank) for rank in ranks]
            self._worker_group = SimpleNamespace(workers=workers)

        def run(self) -> int | None:
            return first_rank()

    assert Agent(6, 5, 7).run() == 5
    assert Agent().run() is None
    assert first_rank() is None
