# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Saves that fail without ending training, on all ranks alike, up to a number in a row."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from lightning.pytorch import Callback

from lightning_resilience import JointError
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import (
    Job,
    Model,
    Running,
    find,
    make_data,
    make_model,
    make_trainer,
    store_server,
)
from tests.single_rank import fit, names


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration]

Jobs: TypeAlias = "dict[str, Running]"
BEST: dict[str, Any] = {"save_top_k": 1, "monitor": "step", "mode": "max"}


def tolerant(limit: int) -> dict[str, Any]:
    """Return the callback's options."""
    return {"checkpoints": {"max_consecutive_save_failures": limit}}


def denied(*places: str) -> tuple[Rule, ...]:
    """Refuse to store checkpoints with these in their names."""
    return tuple(Rule(operations=("put_file",), name=place, error="denied") for place in places)


def third_link_fails(_trainer: Any) -> None:
    """Make the third link impossible: ``save_last="link"`` does not go through fsspec."""
    link, made = os.symlink, []

    def symlink(source: Any, target: Any, **kwargs: Any) -> None:
        made.append(source)
        if "step=6" in str(source):
            raise PermissionError(source)
        link(source, target, **kwargs)

    def copy(source: Any, *_: Any, **__: Any) -> None:
        # Lightning copies where it cannot link.
        raise PermissionError(source)

    vars(os)["symlink"] = symlink
    vars(shutil)["copy"] = copy


JOBS: dict[str, tuple[tuple[Rule, ...], dict[str, Any]]] = {
    "one": (denied("step=4"), {"options": tolerant(3), "checkpoint": BEST}),
    "reset": (
        denied("step=2", "step=6"),
        {"options": tolerant(2), "checkpoint": {"save_top_k": 1}},
    ),
    "three": (
        denied("step=4", "step=6", "step=8"),
        {"options": tolerant(3), "checkpoint": BEST, "steps": 12},
    ),
    "at the end": (denied("step=8"), {"options": tolerant(3), "checkpoint": BEST}),
    "last": (
        denied("step=4", "step=6"),
        {"options": tolerant(3), "checkpoint": {**BEST, "save_last": True}},
    ),
    "link": (
        (),
        {
            "options": tolerant(2),
            "checkpoint": {"save_last": "link"},
            "before": third_link_fails,
        },
    ),
}


@pytest.fixture(scope="module")
def jobs(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Start all jobs of two ranks at the same time."""
    with contextlib.ExitStack() as servers:
        started = {}
        for name, (rules, options) in JOBS.items():
            home = tmp_path_factory.mktemp(name.replace(" ", "-"))
            folder = f"{home}/checkpoints" if name == "link" else f"faulty://{home}/checkpoints"
            started[name] = lightning_job.start(
                warm_python,
                Job(**{"folder": folder, "steps": 8, "group_timeout_s": 60.0, **options}),
                home / "job",
                port=servers.enter_context(store_server()),
                plan=FaultPlan.write(home / "plan", *rules),
            )
        yield started


def ended(running: Running, *, well: bool) -> list[dict[str, Any]]:
    """Wait for the end of a job; return the reports, with the names that its books have."""
    reports = running.wait()
    assert [report["code"] == 0 for report in reports] == [well, well], running.told()
    for report in reports:
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], [])
    return reports


def books(report: dict[str, Any]) -> set[str]:
    """Return the names of all files that a rank's ``ModelCheckpoint`` believes in."""
    paths = {report["best"], report["last"], report["kth"], *report["best_k"]}
    return {Path(path).name for path in paths if path}


def warnings(running: Running) -> list[int]:
    """Return how many warnings of a tolerated save are in each rank's log."""
    return [
        process.text().count("training goes on after a failed save") for process in running.ranks
    ]


@pytest.mark.multiprocess
def test_training_goes_on_after_a_failed_save(jobs: Jobs) -> None:
    """One of four saves fails, each rank warns once, and the books name what is there."""
    running = jobs["one"]

    reports = ended(running, well=True)

    assert running.names() == ["step=8.ckpt"]
    assert [books(report) for report in reports] == [{"step=8.ckpt"}] * 2
    assert warnings(running) == [1, 1]
    assert "at step 4, number 1 in a row, of which 3 would end it" in running.told()


@pytest.mark.multiprocess
def test_a_success_begins_the_count_anew(jobs: Jobs) -> None:
    """Every second save fails, and the run that two in a row would end goes on."""
    running = jobs["reset"]

    reports = ended(running, well=True)

    assert running.names() == ["step=8.ckpt"]
    assert [books(report) for report in reports] == [{"step=8.ckpt"}] * 2
    assert warnings(running) == [2, 2]
    assert "number 2" not in running.told()


@pytest.mark.multiprocess
def test_too_many_in_a_row_end_training_on_all_ranks_alike(jobs: Jobs) -> None:
    """The third raises at the same step, names all three, and the last good file is still there."""
    running = jobs["three"]

    reports = ended(running, well=False)

    assert [report["step"] for report in reports] == [8, 8]
    assert {report["error"] for report in reports} == {"JointError"}
    (text,) = {report["text"] for report in reports}
    assert "number 3 in a row" in text
    assert all(f"step={step}.ckpt failed on all ranks" in text for step in (4, 6, 8))
    assert running.names() == ["step=2.ckpt"]
    assert [books(report) for report in reports] == [{"step=2.ckpt"}] * 2
    assert warnings(running) == [2, 2]


@pytest.mark.multiprocess
def test_a_failed_save_that_none_makes_up_for_is_raised_at_the_end(jobs: Jobs) -> None:
    """Training is complete, and ``fit`` does not end as if all were saved."""
    running = jobs["at the end"]

    reports = ended(running, well=False)

    (text,) = {report["text"] for report in reports}
    assert text.startswith("Training has ended well, but no save has made up for")
    assert "At step 8, save of" in text
    assert [report["step"] for report in reports] == [8, 8]
    assert running.names() == ["step=6.ckpt"]
    assert [books(report) for report in reports] == [{"step=6.ckpt"}] * 2


@pytest.mark.multiprocess
def test_the_last_checkpoint_is_saved_where_that_of_the_step_fails(jobs: Jobs) -> None:
    """Each kind of save succeeds and fails by itself."""
    running = jobs["last"]

    reports = ended(running, well=True)

    assert running.names() == ["last.ckpt", "step=8.ckpt"]
    assert running.steps() == [8, 8]
    assert [books(report) for report in reports] == [{"last.ckpt", "step=8.ckpt"}] * 2
    assert warnings(running) == [2, 2]


@pytest.mark.multiprocess
def test_a_link_that_cannot_be_made_leaves_the_one_before(jobs: Jobs) -> None:
    """A failed link counts like a failed save, and "last" is never without a file."""
    running = jobs["link"]

    reports = ended(running, well=True)

    assert running.names() == ["last.ckpt", *running.job.expected]
    assert running.steps()[0] == 8
    assert [Path(report["last"]).name for report in reports] == ["last.ckpt"] * 2
    assert warnings(running) == [1, 1]


# One rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["lightning.pytorch", "pytorch_lightning"])
def test_one_rank_tolerates_as_many(home: str, faulty: Callable[..., Job]) -> None:
    """Without ranks to agree with it is the same, in both distributions."""
    job = faulty(*denied("step=2"), options=tolerant(2), checkpoint=BEST, home=home)
    trainer = make_trainer(job)

    trainer.fit(make_model(home), make_data())

    assert names(job) == ["step=4.ckpt"]
    assert Path(find(trainer, "ModelCheckpoint").best_model_path).name == "step=4.ckpt"


@pytest.mark.parametrize("error", ["denied", "expired", "odd"])
def test_a_save_that_was_given_up_counts_whatever_it_failed_with(
    error: str, faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """It need not be for good: what matters is that the policy gives up."""
    rule = Rule(operations=("put_file",), name="step=2", error=error)
    job = faulty(rule, options=tolerant(2), checkpoint=BEST)

    fit(job)

    assert names(job) == ["step=4.ckpt"]
    assert caplog.text.count("training goes on after a failed save") == 1


def test_training_goes_on_through_an_outage_that_is_not_waited_for(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The saves fail at once while the circuit is open, and what was lost is told at the end."""
    outage = {"on_outage": "fail", "breaker": {"open_for_s": 20, "max_open_for_s": 20}}
    job = faulty(Rule(error="reset", name="step"), options={**tolerant(9), **outage}, steps=6)
    trainer = make_trainer(job)

    with pytest.raises(JointError, match=r"Training has ended well.*At step 2.*step 4.*step 6"):
        trainer.fit(make_model(), make_data())

    assert (trainer.global_step, names(job)) == (6, [])
    assert find(trainer, "ModelCheckpoint").best_model_path == ""
    assert caplog.text.count("training goes on after a failed save") == 3


def test_by_default_the_first_failed_save_ends_training(faulty: Callable[..., Job]) -> None:
    """Whoever wants more has to say so."""
    with pytest.raises(JointError, match=r"step=2.ckpt failed on all ranks"):
        fit(faulty(*denied("step=2"), checkpoint=BEST))


def test_a_link_that_fails_does_not_take_the_old_one_away(
    faulty: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It points to the checkpoint before, until training has ended with the error."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "symlink", os.symlink)
        patched.setattr(shutil, "copy", shutil.copy)
        third_link_fails(None)
        job = faulty(
            folder=str(tmp_path / "local"),
            options=tolerant(2),
            checkpoint={"save_last": "link"},
            steps=6,
        )

        with pytest.raises(JointError, match=r"At step 6, link of"):
            fit(job)

    assert (tmp_path / "local" / "last.ckpt").readlink().name == "step=4.ckpt"
    assert names(job) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


def test_a_removal_that_failed_is_made_up_for(faulty: Callable[..., Job]) -> None:
    """The checkpoint is in the books, and what it replaced goes with the next one."""
    rule = Rule(operations=("rm_file",), name="step=2.ckpt", error="denied", last=1)
    job = faulty(rule, options=tolerant(2), checkpoint=BEST, steps=6)

    trainer = fit(job)

    assert names(job) == ["step=6.ckpt"]
    assert Path(find(trainer, "ModelCheckpoint").best_model_path).name == "step=6.ckpt"


class Alternating(Model):
    """A model whose checkpoints take two names in turn."""

    def training_step(self, batch: Any, index: int) -> Any:
        """Log which name it is."""
        self.log("parity", float((self.trainer.global_step + 1) // 2 % 2))
        return super().training_step(batch, index)


def test_a_name_that_is_used_again_is_not_removed_any_more(faulty: Callable[..., Job]) -> None:
    """Its removal had failed, and would now hit the checkpoint that has taken its place."""
    rule = Rule(operations=("rm_file",), name="parity", error="denied", last=2)
    checkpoint = {**BEST, "filename": "{parity:.0f}", "enable_version_counter": False}
    # Else the third save would come too soon after the first of that name, and be spooled.
    options = {**tolerant(3), "spool": {"same_path_interval_s": 0}}
    job = faulty(rule, options=options, checkpoint=checkpoint, steps=6)
    trainer = make_trainer(job)

    with pytest.raises(JointError, match="At step 4, remove of"):
        trainer.fit(Alternating(), make_data())

    assert Path(find(trainer, "ModelCheckpoint").best_model_path).name in names(job)


class Saver(Callback):
    """Saves by itself, as users do."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save where ``ModelCheckpoint`` does not."""
        if trainer.global_step == 1:
            trainer.save_checkpoint(f"{find(trainer, 'ModelCheckpoint').dirpath}/own.ckpt")


def test_a_save_of_the_users_own_is_never_tolerated(faulty: Callable[..., Job]) -> None:
    """Whoever calls ``trainer.save_checkpoint`` is told."""
    trainer = make_trainer(faulty(*denied("own.ckpt"), options=tolerant(9)))
    trainer.callbacks.append(Saver())

    with pytest.raises(JointError, match=r"own.ckpt failed on all ranks"):
        trainer.fit(make_model(), make_data())

    assert trainer.global_step == 1


class Terminated(Callback):
    """Tells its own process to stop."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Do so after the third step."""
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_save_at_a_signal_is_never_tolerated(faulty: Callable[..., Job]) -> None:
    """No later one could make up for it, and the job must not look as if it had been saved."""
    trainer = make_trainer(faulty(*denied("last"), options=tolerant(9)))
    trainer.callbacks.append(Terminated())

    with pytest.raises(JointError, match=r"last.ckpt failed on all ranks"):
        trainer.fit(make_model(), make_data())

    assert trainer.global_step == 3
