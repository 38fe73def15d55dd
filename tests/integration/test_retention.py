# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is kept although ``ModelCheckpoint`` asks for its removal, and what is there in the end."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, Model, make_data, make_model, make_trainer, store_server
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_python import WarmPython


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def test_a_remote_checkpoint_that_the_run_has_started_from_is_kept(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning would remove it once the first new one is saved; the log says that it stays."""
    job = faulty(steps=2, checkpoint={"save_top_k": 1})
    fit(job)

    with caplog.at_level("INFO", logger="lightning_resilience"):
        fit(replace(job, steps=6, resume=f"{job.folder}/step=2.ckpt"))

    assert names(job) == ["step=2.ckpt", "step=6.ckpt"]
    assert "step=2.ckpt is not removed: this run has started from it" in caplog.text


def through_a_link(folder: Path) -> str:
    """Reach the folder by another name."""
    other = folder.with_name("elsewhere")
    other.symlink_to(folder)
    return f"{other}/step=2.ckpt"


def by_a_link(folder: Path) -> str:
    """Reach the file by another name."""
    link = folder.with_name("start.ckpt")
    link.symlink_to(folder / "step=2.ckpt")
    return str(link)


SPELLINGS: dict[str, Callable[[Path], str]] = {
    "protocol": lambda folder: f"file://{folder}/step=2.ckpt",
    "folder": through_a_link,
    "link": by_a_link,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_the_run_has_started_from_is_kept_by_whatever_name(
    spelling: str, tmp_path: Path, spool: Path
) -> None:
    """By its protocol, by a folder that is a link, and by a link to the file itself."""
    del spool
    folder = tmp_path / "checkpoints"
    job = Job(folder=str(folder), ranks=1, steps=2, checkpoint={"save_top_k": 1})
    fit(job)

    fit(replace(job, steps=6, resume=SPELLINGS[spelling](folder)))

    assert names(job) == ["step=2.ckpt", "step=6.ckpt"]


def test_what_is_outside_of_the_directories_is_kept(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The books in a checkpoint that was moved name a file where it has been before."""
    job = faulty(steps=2)
    fit(job)
    first = Path(job.folder.removeprefix("faulty://"))
    moved = first.with_name("moved")
    shutil.copytree(first, moved)
    elsewhere = replace(
        job,
        folder=f"{job.folder}-2",
        steps=4,
        checkpoint={"save_top_k": 1},
        resume=f"faulty://{moved}/step=2.ckpt",
    )

    with caplog.at_level("INFO", logger="lightning_resilience"):
        fit(elsewhere)

    assert names(job) == ["step=2.ckpt"]
    assert names(elsewhere) == ["step=4.ckpt"]
    assert "is in no checkpoint callback's directory" in caplog.text


class RemovesTheNewest(Callback):
    """Asks for the removal of what was saved last, which nothing has replaced."""

    def on_train_end(self, trainer: Any, _model: Any) -> None:
        """Ask, on every rank."""
        trainer.strategy.remove_checkpoint(trainer.checkpoint_callback.best_model_path)


def test_the_last_good_one_is_kept_and_the_end_says_so(
    faulty: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody gets rid of the only one, and nobody has to find out by himself."""
    job = faulty(checkpoint={"save_top_k": 1})
    trainer = make_trainer(job)
    trainer.callbacks.append(RemovesTheNewest())

    with caplog.at_level("INFO", logger="lightning_resilience"):
        trainer.fit(make_model(), make_data())

    assert names(job) == ["step=4.ckpt"]
    assert "step=4.ckpt is not removed: the run has ended before a newer" in caplog.text


class Tunable(Model):
    """A model whose learning rate a tuner may choose."""

    lr = 0.1


@pytest.mark.parametrize("slow_s", [0.0, 0.05])
@pytest.mark.parametrize("plugins", [[], [AsyncCheckpointIO]])
def test_the_temporary_file_of_a_tuner_is_removed(
    plugins: list[Any], slow_s: float, faulty: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no callback's directory, the run goes back to it, and it is nobody's last one."""
    # The tuner's bar would leave a thread behind.
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    slow = Rule(operations=("put_file",), name=".lr_find", slow_s=slow_s)
    job = faulty(slow)
    root = f"{job.folder}-root"
    options = {"default_root_dir": root, "plugins": [plugin() for plugin in plugins]}
    trainer = make_trainer(replace(job, trainer=options))
    trainer.callbacks.insert(0, LearningRateFinder(num_training_steps=3))

    trainer.fit(Tunable(), make_data())

    assert plan_in_use().calls("put_file", name=".lr_find")
    assert names(replace(job, folder=root)) == []


# Random faults ------------------------------------------------------------------------------------


def random_rules(chance: random.Random) -> list[Rule]:
    """Return faults that pass, of saves and removals; some last for longer than one attempt."""
    return [
        Rule(
            operations=(chance.choice(["put_file", "info", "rm_file", "manifest_put_file"]),),
            name=chance.choice([".ckpt", f"step={chance.randint(1, 8)}.ckpt"]),
            error=chance.choice(["reset", "busy", "throttled"]),
            first=(first := chance.randint(1, 12)),
            last=first + chance.randint(0, 3),
        )
        for _ in range(chance.randint(2, 4))
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_in_between_the_files_are_those_of_the_books(
    seed: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Two ranks keep one checkpoint through faults that pass, at once or in the background."""
    chance = random.Random(seed)
    plan = FaultPlan.write(tmp_path / "plan", *random_rules(chance))
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        steps=8,
        every=1,
        group_timeout_s=30.0,
        checkpoint={"save_top_k": 1, "save_last": chance.random() < 0.5},
        trainer={"plugins": [AsyncCheckpointIO()] if seed % 2 else []},
    )

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    books = {Path(report[name]).name for report in reports for name in ("best", "last")}
    assert running.names() == sorted(books - {""}), running.told()
    assert set(running.steps()) == {8}
    removed = plan.calls("rm_file", name=".ckpt")
    for removal in removed:
        step = int(Path(removal["path"]).stem.partition("=")[2])
        newer = plan.calls("info", name=f"step={step + 1}.ckpt")
        assert newer[0]["at_s"] < removal["at_s"], running.told()
