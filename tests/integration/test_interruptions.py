# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end every wait at once, as Lightning would, and leave nothing behind.

Where a save waits for storage, the job says ``on_outage="wait"``: by default it is spooled, and
rank 0 waits for storage in the background, or at the end.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_resilience.protocols import joint
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.integration.store_server import Server
from tests.lightning_job import (
    WAIT,
    Job,
    Running,
    make_data,
    make_model,
    make_trainer,
    store_server,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NAMES: dict[int, str] = {signal.SIGINT: "SystemExit", signal.SIGTERM: "SIGTERMException"}
"""How Lightning leaves ``fit``: after Ctrl-C it exits with code 1."""
PROMPT_S = 1.0
PEER_S = 5.0

OUTAGE = Rule(operations=("put_file",), error="reset")
TRAINED = "`Trainer.fit` stopped: `max_steps=2` reached"
HANG = Rule(operations=("put_file",), hang=True)
HANGING_REMOVAL = Rule(operations=("rm_file",), hang=True)


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a store server that outlives the ranks."""
    with store_server() as number:
        yield number


@pytest.fixture
def start(warm_python: WarmPython, tmp_path: Path, port: int) -> Callable[..., Running]:
    """Start a job on storage that does not come back."""

    def start_job(rule: Rule, **job: Any) -> Running:
        # Longer than any wait of the test: nothing but the signal ends it.
        made = Job(folder=f"faulty://{tmp_path}/checkpoints", **{"group_timeout_s": 40.0, **job})
        plan = FaultPlan.write(tmp_path / "plan", rule)
        return lightning_job.start(warm_python, made, tmp_path / "job", port=port, plan=plan)

    return start_job


def interrupt(running: Running, rank: int, number: int) -> float:
    """Send the signal; return when, on the clock that all processes share."""
    sent_at_s = time.monotonic()
    running.ranks[rank].signal(number)
    return sent_at_s


def left_as_lightning_does(
    running: Running, rank: int, number: int, *, sent_at_s: float, hanging: int = 0
) -> dict[str, Any]:
    """Check that a rank has left at once, with Lightning's own exception and nothing behind it."""
    code = running.ranks[rank].wait(lightning_job.HANG_S)
    report = running.report(rank)
    assert report["error"] == NAMES[number], running.told()
    assert code == (1 if number == signal.SIGINT else 0)
    assert report["ended_at_s"] - sent_at_s < PROMPT_S, running.told()
    assert report["threads"] == ["lightning-resilience-call"] * hanging
    assert (report["patched"], report["handlers"]) == ([], [])
    return report


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait_for_an_open_circuit(
    number: int, start: Callable[..., Running]
) -> None:
    """The rank that waits for storage leaves in under a second, and its peer hears of it."""
    running = start(OUTAGE, options=WAIT)
    running.until(lambda: "save waits for" in running.ranks[0].text(), what="rank 0 waits")

    sent_at_s = interrupt(running, 0, number)

    left_as_lightning_does(running, 0, number, sent_at_s=sent_at_s)
    peer = running.wait()[1]
    assert peer["ended_at_s"] - sent_at_s < PEER_S, running.told()
    assert (peer["error"], peer["outcome"], peer["first_rank"]) == ("JointError", "cancelled", 0)
    assert "It was interrupted" in peer["text"]
    assert (peer["patched"], peer["threads"], peer["handlers"]) == ([], [], [])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait_for_a_call_that_hangs(
    number: int, start: Callable[..., Running]
) -> None:
    """A call that does not come back is left behind in under a second, and the peer hears of it."""
    running = start(HANG, options={"retry": {"stall_timeout_s": 100.0}})
    running.until(lambda: bool(running.plan.calls("put_file")), what="rank 0 hangs")

    sent_at_s = interrupt(running, 0, number)

    left_as_lightning_does(running, 0, number, sent_at_s=sent_at_s, hanging=1)
    peer = running.wait()[1]
    assert peer["ended_at_s"] - sent_at_s < PEER_S, running.told()
    assert (peer["error"], peer["outcome"], peer["first_rank"]) == ("JointError", "cancelled", 0)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait_for_a_removal_that_hangs(
    number: int, start: Callable[..., Running]
) -> None:
    """A removal that was interrupted is not begun again on the way out."""
    running = start(
        HANGING_REMOVAL,
        checkpoint={"save_top_k": 1},
        options={"retry": {"stall_timeout_s": 30.0}},
    )
    running.until(lambda: bool(running.plan.calls("rm_file")), what="rank 0 hangs")

    sent_at_s = interrupt(running, 0, number)

    left_as_lightning_does(running, 0, number, sent_at_s=sent_at_s, hanging=1)
    assert len(running.plan.calls("rm_file")) == 1
    assert "remove by hand: faulty://" in running.ranks[0].text()
    peer = running.wait()[1]
    assert (peer["error"], peer["outcome"], peer["first_rank"]) == ("JointError", "cancelled", 0)


def test_sigterm_to_all_ranks_lets_a_long_save_end_and_then_all_of_them(
    start: Callable[..., Running],
) -> None:
    """The checkpoint that is on its way arrives, and no rank ends with a transport error."""
    running = start(Rule(operations=("put_file",), slow_s=0.4, last=1))
    running.until(lambda: bool(running.plan.calls("put_file")), what="rank 0 saves")

    for rank in range(2):
        interrupt(running, rank, signal.SIGTERM)

    reports = running.wait()
    assert [report["error"] for report in reports] == ["SIGTERMException"] * 2, running.told()
    assert running.names() == ["step=2.ckpt"]
    assert all(
        (report["patched"], report["threads"], report["handlers"]) == ([], [], [])
        for report in reports
    )


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait_for_another_rank(
    number: int, start: Callable[..., Running]
) -> None:
    """A rank that waits for another leaves in under a second, and the other hears of it."""
    running = start(OUTAGE, options=WAIT)
    running.until(lambda: "save waits for" in running.ranks[0].text(), what="rank 0 waits")

    sent_at_s = interrupt(running, 1, number)
    left_as_lightning_does(running, 1, number, sent_at_s=sent_at_s)
    peer = running.wait()[0]
    assert peer["ended_at_s"] - sent_at_s < PEER_S, running.told()
    assert peer["error"] == "PeerFailedError", running.told()
    assert "Rank 1 was told to stop first" in peer["text"]
    assert (peer["patched"], peer["threads"], peer["handlers"]) == ([], [], [])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait_for_what_is_spooled(
    number: int, start: Callable[..., Running]
) -> None:
    """The end of training waits for storage, and whoever is told to leave says what it leaves."""
    running = start(OUTAGE, steps=2)
    running.until(lambda: TRAINED in running.ranks[0].text(), what="rank 0 has trained")

    sent_at_s = interrupt(running, 0, number)

    left_as_lightning_does(running, 0, number, sent_at_s=sent_at_s)
    assert "1 checkpoint could not be published" in running.ranks[0].text()
    peer = running.wait()[1]
    assert peer["ended_at_s"] - sent_at_s < PEER_S, running.told()
    assert (peer["error"], peer["outcome"], peer["first_rank"]) == ("JointError", "cancelled", 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_as_a_rank_comes_to_the_end_is_told_to_the_other(
    rank: int, start: Callable[..., Running]
) -> None:
    """Training is over, and the rank has not said yet that it waits with the others."""
    running = start(OUTAGE, steps=2, before=partial(interrupt_at_the_end, rank=rank))

    reports = running.wait()

    assert reports[rank]["error"] == "SystemExit", running.told()
    peer = reports[1 - rank]
    assert peer["error"] in {"JointError", "PeerFailedError"}, running.told()
    assert peer["ended_at_s"] - reports[rank]["ended_at_s"] < PEER_S, running.told()
    assert all((each["patched"], each["handlers"]) == ([], []) for each in reports)


def interrupt_at_the_end(_trainer: Any, rank: int) -> None:
    """Press Ctrl-C as this rank asks the store for its place in the last operation."""
    if os.environ["RANK"] != str(rank):
        return
    names = vars(joint)
    inner = names["arrive"]

    def arrive(member: Any, operation: Any) -> Any:
        if operation.op == "flush":
            os.kill(os.getpid(), signal.SIGINT)
        return (yield from inner(member, operation))

    names["arrive"] = arrive


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_the_wait_for_a_store_that_is_frozen(
    rank: int, number: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """A store that neither answers nor refuses does not hold up a rank that is to leave."""
    server = Server()
    job = Job(folder=f"faulty://{tmp_path}/checkpoints", group_timeout_s=40.0, options=WAIT)
    plan = FaultPlan.write(tmp_path / "plan", OUTAGE)
    running = lightning_job.start(warm_python, job, tmp_path / "job", port=server.port, plan=plan)
    running.until(lambda: "save waits for" in running.ranks[0].text(), what="rank 0 waits")

    server.freeze()
    sent_at_s = interrupt(running, rank, number)
    running.ranks[rank].wait(lightning_job.HANG_S)
    report = running.report(rank)

    server.thaw()
    interrupt(running, 1 - rank, signal.SIGTERM)
    running.wait()
    server.kill()
    assert report["error"] == NAMES[number], running.told()
    # The wait itself, last words, a last look at the breakers, and the end of two connections.
    assert report["ended_at_s"] - sent_at_s < PROMPT_S + 4.0


def test_sigterm_to_all_ranks_ends_them_all(start: Callable[..., Running]) -> None:
    """What a scheduler does, a SIGTERM to every rank, ends every rank in under a second."""
    running = start(OUTAGE, options=WAIT)
    running.until(lambda: "save waits for" in running.ranks[0].text(), what="rank 0 waits")

    sent_at_s = [interrupt(running, rank, signal.SIGTERM) for rank in (1, 0)]

    left_as_lightning_does(running, 1, signal.SIGTERM, sent_at_s=sent_at_s[0])
    left_as_lightning_does(running, 0, signal.SIGTERM, sent_at_s=sent_at_s[1])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait_of_a_job_of_one_rank(
    number: int, start: Callable[..., Running]
) -> None:
    """Without other ranks and without a shared store it is the same."""
    running = start(OUTAGE, ranks=1, options=WAIT)
    running.until(lambda: "save waits for" in running.ranks[0].text(), what="rank 0 waits")

    sent_at_s = interrupt(running, 0, number)

    left_as_lightning_does(running, 0, number, sent_at_s=sent_at_s)


def test_a_checkpoint_that_is_saved_on_the_exception_may_wait_again(
    start: Callable[..., Running],
) -> None:
    """SIGTERM ends the wait, not the save that the user asked for on exceptions."""
    running = start(
        Rule(operations=("put_file",), name="step=2", error="reset", lasting_s=100),
        ranks=1,
        every=2,
        checkpoint={"save_on_exception": True, "filename": "{step}"},
        options={**WAIT, "retry": {"base_delay_s": 0.2}},
        trainer={"max_steps": 2},
        before=rename_on_exception,
    )
    running.until(lambda: "save waits for" in running.ranks[0].text(), what="rank 0 waits")

    interrupt(running, 0, signal.SIGTERM)
    (report,) = running.wait()

    assert report["error"] == "SIGTERMException", running.told()
    assert report["notes"] == []
    # The circuit is open, so the second save waits for its probe, which other names answer.
    assert running.names() == ["rescued.ckpt"]


def rename_on_exception(trainer: Any) -> None:
    """Give the checkpoint on an exception a name of its own."""
    callback = lightning_job.find(trainer, "ModelCheckpoint")
    inner = callback.on_exception

    def on_exception(*args: Any) -> None:
        callback.filename = "rescued"
        inner(*args)

    callback.on_exception = on_exception


class Terminated(Callback):
    """A SIGTERM while a step is being computed, when nothing waits."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Send it to this process."""
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_checkpoint_for_sigterm_is_not_interrupted_by_the_same_signal(
    faulty: Callable[..., Job],
) -> None:
    """Lightning stops at the end of the step; the checkpoint that it then saves is saved."""
    trainer = make_trainer(faulty(checkpoint={"save_on_exception": True}, steps=8))
    trainer.callbacks.insert(0, Terminated())

    with pytest.raises(SIGTERMException):
        trainer.fit(make_model(), make_data())

    folder = Path(trainer.checkpoint_callback.dirpath.removeprefix("faulty://"))
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["step=2.ckpt", "step=3.ckpt"]


def test_ctrl_c_ends_the_wait_for_a_load(start: Callable[..., Running], tmp_path: Path) -> None:
    """Every rank waits for storage by itself then; SIGTERM ends the process, as without us."""
    (tmp_path / "checkpoints").mkdir()
    torch.save({}, tmp_path / "checkpoints" / "step=2.ckpt")
    running = start(
        # Rank 0 has looked at it before.
        Rule(operations=("info",), name="step=2", error="reset", first=2),
        resume=f"faulty://{tmp_path}/checkpoints/step=2.ckpt",
    )
    running.until(
        lambda: all("load waits for" in rank.text() for rank in running.ranks), what="all wait"
    )

    sent_at_s = [interrupt(running, rank, signal.SIGINT) for rank in (1, 0)]

    left_as_lightning_does(running, 1, signal.SIGINT, sent_at_s=sent_at_s[0])
    left_as_lightning_does(running, 0, signal.SIGINT, sent_at_s=sent_at_s[1])


def test_ctrl_c_ends_the_wait_for_the_search(start: Callable[..., Running], tmp_path: Path) -> None:
    """Rank 0 waits for storage, and rank 1 for rank 0."""
    (tmp_path / "checkpoints").mkdir()
    # The first listing is that of the checkpoint callback, the second is for the spool.
    running = start(Rule(operations=("ls",), error="reset", first=3), resume="last")
    running.until(lambda: "resolve waits for" in running.ranks[0].text(), what="rank 0 waits")
    running.until(lambda: "resolve 5: waiting" in running.ranks[1].text(), what="rank 1 waits")

    sent_at_s = [interrupt(running, rank, signal.SIGINT) for rank in (1, 0)]

    left_as_lightning_does(running, 1, signal.SIGINT, sent_at_s=sent_at_s[0])
    left_as_lightning_does(running, 0, signal.SIGINT, sent_at_s=sent_at_s[1])
