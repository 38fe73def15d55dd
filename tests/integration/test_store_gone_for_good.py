# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The server of the shared store is killed in the middle of a training, and saves are deferred."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import pytest

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.integration.store_server import Server
from tests.integration.test_split_store import Cable
from tests.lightning_job import HANG_S, Job, store_server


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

LAST_STEP_BEFORE = 3
JOINT = {"joint_timeout_s": 20.0, "defer_after_s": 1.0}


@pytest.fixture
def group_port() -> Iterator[int]:
    """Port of the process group's own store, which stays well."""
    with store_server() as number:
        yield number


@pytest.fixture
def server() -> Iterator[Server]:
    """The shared store that is killed."""
    made = Server()
    yield made
    made.kill()


class Meeting(lightning.pytorch.Callback):
    """Stops rank 0 before some steps, for the test to do something meanwhile.

    Args:
        home: Folder of the files by which they tell each other.
        steps: Before which.
    """

    def __init__(self, home: Path, *steps: int) -> None:
        self._home = home
        self._steps = steps

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Say that the step is reached, and wait for the test."""
        step = trainer.global_step
        if step not in self._steps or not trainer.is_global_zero:
            return
        (self._home / f"reached-{step}").touch()
        until_s = time.monotonic() + HANG_S
        while not (self._home / f"go-{step}").exists():
            assert time.monotonic() < until_s, f"go-{step} did not come"
            time.sleep(0.02)


def add(home: Path, steps: tuple[int, ...], trainer: Any) -> None:
    """Give the Trainer that callback."""
    trainer.callbacks.append(Meeting(home, *steps))


class Gone:
    """A job whose shared store is killed.

    Args:
        job: The job.
        running: Its processes.
        home: Where it meets the test.
    """

    def __init__(self, job: Job, running: Running, home: Path) -> None:
        self.job = job
        self.running = running
        self.home = home

    def at(self, step: int) -> None:
        """Return once that step is reached."""
        self.running.until((self.home / f"reached-{step}").exists, what=f"step {step}")

    def go(self, step: int) -> None:
        """Let that step begin."""
        (self.home / f"go-{step}").touch()


def start(
    warm_python: WarmPython,
    place: Path,
    *rules: Rule,
    port: int,
    meets: tuple[int, ...] = (LAST_STEP_BEFORE,),
    options: dict[str, Any] | None = None,
    **how: Any,
) -> Gone:
    """Start a job of two ranks or more."""
    home = place / "job"
    home.mkdir()
    job = Job(
        **{"folder": f"faulty://{place}/checkpoints", **how},
        group_timeout_s=40.0,
        options={"on_outage": "spool", "joint": JOINT, **(options or {})},
        before=partial(add, home, meets),
    )
    plan = FaultPlan.write(place / "plan", *rules)
    return Gone(job, lightning_job.start(warm_python, job, home, port=port, plan=plan), home)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_goes_on_to_its_end_without_the_store(
    warm_python: WarmPython, tmp_path: Path, group_port: int, server: Server, ranks: int
) -> None:
    """Every checkpoint is in storage, the ranks believe the same, and the end says what it was."""
    store = {"store": f"tcp://127.0.0.1:{server.port}"}
    gone = start(*(warm_python, tmp_path), port=group_port, options=store, ranks=ranks)

    gone.at(3)
    server.kill()
    gone.go(3)
    reports = gone.running.wait()

    assert [report["code"] for report in reports] == [0] * ranks, gone.running.told()
    assert gone.running.names() == gone.job.expected
    assert gone.running.steps() == [2, 4]
    assert len({(report["best"], tuple(report["best_k"])) for report in reports}) == 1
    log = gone.running.ranks[0].text()
    assert "is left without a verdict, and training goes on: nobody listens" in log
    assert "the shared store was gone at the end of the run" in log


@pytest.mark.parametrize(("protocol", "save_last"), [("faulty://", True), ("", "link")])
def test_links_and_removals_need_no_store_either(
    warm_python: WarmPython,
    tmp_path: Path,
    group_port: int,
    server: Server,
    protocol: str,
    save_last: Any,
) -> None:
    """Only the newest is there in the end, and ``last.ckpt`` is it."""
    gone = start(
        *(warm_python, tmp_path),
        port=group_port,
        options={"store": f"tcp://127.0.0.1:{server.port}"},
        folder=f"{protocol}{tmp_path}/checkpoints",
        steps=6,
        checkpoint={"save_top_k": 1, "save_last": save_last},
    )

    gone.at(3)
    server.kill()
    gone.go(3)
    reports = gone.running.wait()

    assert [report["code"] for report in reports] == [0, 0], gone.running.told()
    assert gone.running.names() == ["last.ckpt", "step=6.ckpt"], gone.running.told()
    assert gone.running.steps() == [6, 6]
    assert len({(report["best"], report["last"]) for report in reports}) == 1


def test_what_cannot_be_published_either_is_left_with_a_statement(
    warm_python: WarmPython, tmp_path: Path, group_port: int, server: Server
) -> None:
    """Storage is ill as well: the checkpoint lies on the node, and the next start publishes it."""
    store = {"store": f"tcp://127.0.0.1:{server.port}", "spool": {"flush_timeout_s": 1.0}}
    ill = Rule(operations=("put_file",), name="step=4", error="reset", lasting_s=HANG_S)
    gone = start(warm_python, tmp_path, ill, port=group_port, options=store)

    gone.at(3)
    server.kill()
    gone.go(3)
    reports = gone.running.wait()

    assert [report["code"] for report in reports] == [0, 0], gone.running.told()
    assert gone.running.names() == ["step=2.ckpt"]
    log = gone.running.ranks[0].text()
    assert "1 checkpoint could not be published before the end of the run" in log
    assert "step=4.ckpt lies at" in log


def test_what_was_deferred_is_settled_in_the_next_store(
    warm_python: WarmPython, tmp_path: Path, group_port: int, server: Server
) -> None:
    """The server comes back empty: the ranks agree again, and nothing is left to be settled."""
    store = {"store": f"tcp://127.0.0.1:{server.port}"}
    gone = start(*(warm_python, tmp_path), port=group_port, options=store, meets=(3, 5), steps=6)
    gone.at(3)
    server.kill()
    gone.go(3)
    gone.at(5)
    server.start()
    gone.go(5)
    reports = gone.running.wait()

    assert [report["code"] for report in reports] == [0, 0], gone.running.told()
    assert gone.running.names() == gone.job.expected
    assert len({(report["best"], tuple(report["best_k"])) for report in reports}) == 1
    for process in gone.running.ranks:
        assert "is left without a verdict" in process.text()
        assert "that had been left without it" in process.text()
    assert "was gone at the end" not in gone.running.ranks[0].text()


def cut_off(home: Path, port: int, trainer: Any) -> None:
    """Let rank 1 reach the store on a way of its own."""
    if os.environ["RANK"] == "1":
        os.environ["LIGHTNING_RESILIENCE_STORE"] = f"tcp://127.0.0.1:{port}"
    add(home, (LAST_STEP_BEFORE,), trainer)


def test_a_rank_that_hears_nothing_defers_nothing(
    warm_python: WarmPython, tmp_path: Path, group_port: int, server: Server
) -> None:
    """One rank has no way to a store that is well: it raises, and no rank goes on without it."""
    cable = Cable(server.port)
    home = tmp_path / "job"
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        group_timeout_s=40.0,
        options={"on_outage": "spool", "joint": {"joint_timeout_s": 6.0, "defer_after_s": 1.0}},
        before=partial(cut_off, home, cable.port),
    )
    home.mkdir()
    url = {"LIGHTNING_RESILIENCE_STORE": f"tcp://127.0.0.1:{server.port}"}
    try:
        running = lightning_job.start(warm_python, job, home, port=group_port, environment=url)
        running.until((home / "reached-3").exists, what="step 3")
        cable.cut()
        (home / "go-3").touch()
        reports = running.wait()
    finally:
        cable.close()

    assert [report["error"] for report in reports] == ["JointError", "JointUnavailableError"], (
        running.told()
    )
    assert not any("without a verdict" in process.text() for process in running.ranks)


def test_a_server_that_does_not_answer_is_not_gone(
    warm_python: WarmPython, tmp_path: Path, group_port: int, server: Server
) -> None:
    """A frozen server refuses nobody: the save waits for it, and goes well once it thaws."""
    store = {"store": f"tcp://127.0.0.1:{server.port}"}
    gone = start(warm_python, tmp_path, port=group_port, options=store)

    gone.at(3)
    server.freeze()
    gone.go(3)
    gone.running.until(
        lambda: "exists: the shared store has not answered" in gone.running.ranks[1].text(),
        what="the wait for the store",
    )
    # Longer than it would take to defer.
    time.sleep(2 * JOINT["defer_after_s"])
    server.thaw()
    reports = gone.running.wait()

    assert [report["code"] for report in reports] == [0, 0], gone.running.told()
    assert gone.running.names() == gone.job.expected
    assert not any("without a verdict" in process.text() for process in gone.running.ranks)
