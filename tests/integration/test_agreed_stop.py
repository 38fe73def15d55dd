# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A signal to any rank stops all of them after the same step, with a checkpoint."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import lightning_job
from tests.integration.store_server import Server
from tests.lightning_job import Job, store_server
from tests.signalled_job import (
    AT,
    MANY,
    TRAINING,
    Signalled,
    left_together,
    run_with_handlers,
    signalled_job,
    stopped_together,
    tell_when_training,
)


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

# Rank 0, the last and one in between; every signal and number of ranks with each of them.
CASES = [
    (signal.SIGTERM, 4, (0,)),
    (signal.SIGTERM, 4, (2,)),
    (signal.SIGTERM, 2, (0, 1)),
    (signal.SIGUSR1, 2, (0,)),
    (signal.SIGUSR1, 2, (1,)),
    (signal.SIGUSR1, 4, (3,)),
    (signal.SIGUSR1, 4, (0, 1, 2, 3)),
    (signal.SIGTERM, 1, (0,)),
    (signal.SIGUSR1, 1, (0,)),
]


@pytest.fixture
def run(
    warm_python: WarmPython, tmp_path: Path
) -> Callable[..., tuple[Running, list[dict[str, Any]]]]:
    """Run a job in which a signal comes, to its end."""

    def run_job(signalled: Signalled, **job: Any) -> tuple[Running, list[dict[str, Any]]]:
        made = signalled_job(f"{tmp_path}/files", signalled, **job)
        with store_server() as port:
            running = lightning_job.start(
                warm_python, made, tmp_path / "job", port=port, function=run_with_handlers
            )
            return running, running.wait()

    return run_job


@pytest.mark.parametrize(("number", "ranks", "told"), CASES)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    number: signal.Signals, ranks: int, told: tuple[int, ...], run: Callable[..., Any]
) -> None:
    """All save and leave, whoever was told, and the handler of the user's has run there."""
    running, reports = run(Signalled(number, ranks=told), ranks=ranks)

    stopped_together(running, reports)
    for rank, process in enumerate(running.ranks):
        ran = f"the user's handler for {number.value} in {process.pid}" in process.text()
        assert ran == (rank in told)


def test_several_signals_are_one(run: Callable[..., Any]) -> None:
    """A scheduler that repeats itself does not cut short what the first signal has begun."""
    running, reports = run(Signalled(signal.SIGTERM, ranks=(0, 1), times=3))

    stopped_together(running, reports)


def test_a_signal_before_lightning_has_its_handlers_stops_all_ranks(
    run: Callable[..., Any],
) -> None:
    """From ``setup`` on a signal ends the job in order, and not by the default action."""
    running, reports = run(Signalled(signal.SIGTERM, ranks=(1,), where="start"))

    left_together(running, reports)


def test_a_signal_in_the_last_step_lets_the_job_end_well(run: Callable[..., Any]) -> None:
    """There is no step left in which ranks could agree, and nothing left to stop."""
    last = Signalled(signal.SIGTERM, ranks=(1,), step=AT)

    running, reports = run(last, steps=AT + 1, every=AT + 1)

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.steps() == [AT + 1]
    assert "SIGTERM was received when training had ended already" in running.ranks[1].text()
    for report in reports:
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], [])


@pytest.mark.parametrize("checkpoint", [{}, {"save_on_exception": True}], ids=["plain", "asked"])
def test_where_no_time_is_left_no_save_is_begun(
    checkpoint: dict[str, Any], run: Callable[..., Any]
) -> None:
    """All ranks leave at the same step without one, and what was saved before is intact."""
    running, reports = run(
        Signalled(signal.SIGTERM, ranks=(1,)),
        every=AT,
        options={"termination_grace_s": 1.0},
        checkpoint=checkpoint,
    )

    left_together(running, reports)
    assert running.steps() == [*range(AT, reports[0]["step"] + 1, AT)]
    assert "no checkpoint is saved" in running.ranks[0].text()
    assert "termination_grace_s" in running.ranks[1].text()


def test_a_callback_that_saves_on_exceptions_saves_on_this_one(run: Callable[..., Any]) -> None:
    """What the user has asked for is what happens, on all ranks at the same step, and once."""
    running, reports = run(
        Signalled(signal.SIGTERM, ranks=(1,)), checkpoint={"save_on_exception": True}
    )

    left_together(running, reports)
    assert AT < reports[0]["step"] < MANY
    assert running.names() == [f"step={reports[0]['step']}.ckpt"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_ask_leaves_alone_before_it_is_killed(
    rank: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Where the shared store is frozen, nobody can agree; half of the time is then enough."""
    server = Server()
    job = Job(
        folder=f"{tmp_path}/files",
        steps=10**6,
        every=10**6,
        group_timeout_s=20.0,
        options={"termination_grace_s": 6.0},
        before=tell_when_training,
    )
    running = lightning_job.start(warm_python, job, tmp_path / "job", port=server.port)
    running.until(lambda: TRAINING in running.ranks[rank].text(), what="it trains")

    server.freeze()
    running.ranks[rank].signal(signal.SIGTERM)
    running.ranks[rank].wait(lightning_job.HANG_S)
    report = running.report(rank)

    server.thaw()
    running.wait()
    server.kill()
    assert report["error"] == "SIGTERMException", running.told()
    assert "this one leaves alone" in running.ranks[rank].text()
    assert (report["patched"], report["handlers"]) == ([], [])


def test_the_other_distribution_stops_alike(run: Callable[..., Any]) -> None:
    """A Trainer of ``pytorch_lightning`` leaves with its own exception, with a checkpoint."""
    running, reports = run(Signalled(signal.SIGTERM, ranks=(1,)), home="pytorch_lightning")

    stopped_together(running, reports)


def test_a_stop_waits_for_the_end_of_an_accumulation(run: Callable[..., Any]) -> None:
    """A checkpoint has no gradients in it, so it is saved where none are accumulated."""
    running, reports = run(
        Signalled(signal.SIGTERM, ranks=(1,)), trainer={"accumulate_grad_batches": 7}
    )

    stopped_together(running, reports)
    saved = torch.load(f"{running.job.folder}/last.ckpt", weights_only=True)
    batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"]
    # An epoch of a rank has 32 batches, and ends with an update.
    assert batches % 7 == 0 or batches == 32
