# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What other ranks do when one fails: in our waits, in a second fit, under other launchers."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback

from tests import lightning_job
from tests.failing_ranks import GROUP_TIMEOUT_S, PEERS_S, assert_clean, fail, failed_at_s
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import (
    HANG_S,
    WAIT,
    EvaluatedModel,
    Job,
    make_data,
    make_model,
    make_trainer,
    our_threads,
    patched,
    store_server,
)


if TYPE_CHECKING:
    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


class FailsBeforeTheSave(Callback):
    """Fails on one rank at the end of a step, when the others are at the checkpoint of that step.

    Rank 0 fails before the first question about it, any other rank right before the save: a rank
    that has not come to the question would be waited for there.

    Args:
        rank: The rank.
        sign: A file that is there once the others wait.
    """

    def __init__(self, rank: int, sign: Path) -> None:
        self._rank = rank
        self._sign = sign

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Fail on rank 0, once somebody waits."""
        if self._rank == 0:
            self._fail(trainer)

    def on_save_checkpoint(self, trainer: Any, *_args: Any) -> None:
        """Fail on any other rank, once somebody waits."""
        if self._rank != 0:
            self._fail(trainer)

    def _fail(self, trainer: Any) -> None:
        if trainer.global_rank != self._rank or trainer.global_step != 2:
            return
        until_s = time.monotonic() + HANG_S
        while not self._sign.exists() and time.monotonic() < until_s:
            time.sleep(0.02)
        print(f"failing_at {time.monotonic()}", flush=True)  # noqa: T201 - read from the log
        message = f"a bad batch on rank {self._rank}"
        raise ValueError(message)


def fail_before_the_save(rank: int, sign: Path, trainer: Any) -> None:
    """Let a rank fail before it comes to a save."""
    trainer.callbacks.insert(0, FailsBeforeTheSave(rank, sign))


@pytest.mark.parametrize(
    ("failing", "waits", "options"),
    [
        pytest.param(0, "exists 5: all ranks proceed", {}, id="for another rank"),
        # By default rank 0 spools what it saves, and waits for no storage.
        pytest.param(1, "save waits for", WAIT, id="for storage"),
    ],
)
def test_a_rank_in_a_wait_of_ours_leaves_with_the_cause(
    failing: int, waits: str, options: dict[str, Any], warm_python: WarmPython, tmp_path: Path
) -> None:
    """A wait for storage or for another rank ends within seconds of a third party's failure."""
    sign = tmp_path / "sign"
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        group_timeout_s=GROUP_TIMEOUT_S,
        options=options,
        before=partial(fail_before_the_save, failing, sign),
    )
    plan = FaultPlan.write(tmp_path / "plan", Rule(operations=("put_file",), error="reset"))

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        waiting = running.ranks[1 - failing]
        running.until(lambda: waits in waiting.text(), what="the other rank waits")
        sign.touch()
        reports = running.wait()

    own, peer = reports[failing], reports[1 - failing]
    assert (own["error"], own["text"]) == ("ValueError", f"a bad batch on rank {failing}")
    assert peer["error"] == "PeerFailedError", running.told()
    assert f"Rank {failing} failed first, after step 2" in peer["text"]
    assert peer["ended_at_s"] - failed_at_s(running, failing) < PEERS_S
    assert_clean(reports)


def fit_twice(job: Job, report: str) -> None:
    """Train until a failure, and then once more in the same process."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    first = make_trainer(job)
    assert job.before is not None
    job.before(first)
    try:
        first.fit(make_model(), make_data())
    except Exception as error:  # noqa: BLE001 - looked at by the test
        found["first"] = type(error).__name__
    found["left"] = [*patched(first), *our_threads(within_s=2.0)]
    second = make_trainer(job)
    try:
        second.fit(make_model(), make_data())
    except Exception as error:  # noqa: BLE001 - looked at by the test
        found |= {"second": type(error).__name__, "notes": getattr(error, "__notes__", [])}
    found |= {"step": second.global_step, "left_again": our_threads(within_s=2.0)}
    Path(report).write_text(json.dumps(found), encoding="utf-8")


def twice(
    warm: WarmPython, home: Path, failing: tuple[int, ...]
) -> tuple[list[dict[str, Any]], Running]:
    """Run both ranks twice; these fail the first time."""
    job = Job(
        folder=f"{home}/checkpoints",
        group_timeout_s=GROUP_TIMEOUT_S,
        before=partial(fail, failing, 3),
    )
    with store_server() as port:
        running = lightning_job.start(warm, job, home / "job", port=port, function=fit_twice)
        return running.wait(), running


def test_a_second_fit_works_where_all_ranks_have_failed_by_themselves(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Nobody had to be woken, so the process group is whole, and nothing is remembered."""
    reports, running = twice(warm_python, tmp_path, (0, 1))

    assert [report["first"] for report in reports] == ["ValueError"] * 2, running.told()
    assert [report["step"] for report in reports] == [4, 4], running.told()
    assert all("second" not in report for report in reports)
    assert all(report["left"] == report["left_again"] == [] for report in reports)


def test_a_second_fit_says_that_the_group_was_ended(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """A rank that was woken has no process group any more; the next fit fails at once and why."""
    reports, running = twice(warm_python, tmp_path, (1,))

    assert [report["first"] for report in reports] == ["PeerFailedError", "ValueError"]
    assert reports[0]["second"] == "RuntimeError", running.told()
    assert "The process group of this process was ended" in running.ranks[0].text()
    assert all(report["left"] == report["left_again"] == [] for report in reports)


class LongEvaluated(EvaluatedModel):
    """A model whose rank 1 fails in its third batch, and the other goes on for minutes."""

    def test_step(self, batch: Any, _index: int) -> Any:
        """Take a millisecond, without any collective."""
        if _index == 2 and self.trainer.global_rank == 1:
            print(f"failing_at {time.monotonic()}", flush=True)  # noqa: T201 - read from the log
            message = "a bad batch on rank 1"
            raise ValueError(message)
        time.sleep(0.001)
        return super().test_step(batch, _index)

    predict_step = validation_step = test_step


def evaluate(name: str, job: Job, report: str) -> None:
    """Do something else with a Trainer than to train."""
    warnings.filterwarnings("ignore")
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    trainer = make_trainer(job)
    found: dict[str, Any] = {}
    try:
        getattr(trainer, name)(LongEvaluated(), make_data(10**5))
    except Exception as error:  # noqa: BLE001 - looked at by the test
        found = {"error": type(error).__name__, "text": str(error)}
    found |= {"ended_at_s": time.monotonic(), "patched": patched(trainer)}
    found |= {"threads": our_threads(within_s=2.0), "handlers": []}
    Path(report).write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_a_rank_that_meets_nobody_for_long_leaves_with_the_cause(
    name: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Between its batches there is no collective that could break; it learns of it all the same."""
    job = Job(folder=f"{tmp_path}/checkpoints", group_timeout_s=GROUP_TIMEOUT_S)
    with store_server() as port:
        running = lightning_job.start(
            warm_python, job, tmp_path / "job", port=port, function=partial(evaluate, name)
        )
        peer, own = running.wait()

    assert (own["error"], own["text"]) == ("ValueError", "a bad batch on rank 1"), running.told()
    assert peer["error"] == "PeerFailedError", running.told()
    assert "Rank 1 failed first" in peer["text"]
    assert peer["ended_at_s"] - failed_at_s(running, 1) < PEERS_S
    assert_clean([peer, own])


@pytest.mark.parametrize(
    ("strategy", "failing"), [("ddp_fork", 0), ("ddp_fork", 1), ("ddp_spawn", 1)]
)
def test_a_launcher_that_makes_processes_is_not_held_up(
    strategy: str, failing: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """There no callback is told of an exception, and rank 0 takes the store with it."""
    job = Job(
        folder=f"{tmp_path}/checkpoints",
        trainer={"strategy": strategy},
        before=partial(fail, (failing,), 3),
    )

    process = warm_python.start(run_launched, job, log=tmp_path / "log", environment={})
    # Two interpreters import everything anew; the group's own timeout is half an hour.
    code = process.wait(2 * HANG_S)

    assert code == 0, process.text()
    assert f"a bad batch on rank {failing}" in process.text()


def run_launched(job: Job) -> None:
    """Train from one process that starts the ranks itself, and tell what it raised."""
    warnings.filterwarnings("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    trainer = make_trainer(job)
    assert job.before is not None
    job.before(trainer)
    try:
        trainer.fit(make_model(), make_data())
    except Exception as error:  # noqa: BLE001 - looked at by the test
        print(f"raised {error}")  # noqa: T201 - read from the log
        return
    message = "no rank has failed"
    raise AssertionError(message)
