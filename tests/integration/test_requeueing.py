# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a requeued SLURM job removes of what it has saved before, and what it leaves alone."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.faulty_filesystem import FaultPlan, Rule
from tests.requeued_job import RequeuedJob
from tests.sharded_job import STRATEGIES, ShardedModel


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

FIRST = "hpc_ckpt_1.ckpt"
OWN = "hpc_ckpt_7.ckpt"
RESUMED = "hpc_ckpt_10.ckpt"
NEWEST = "hpc_ckpt_11.ckpt"


@pytest.fixture
def job(warm_python: WarmPython, tmp_path: Path) -> Callable[..., RequeuedJob]:
    """Make a job on storage with faults that was requeued, and would remove one checkpoint next."""

    def make(*rules: Rule, **options: Any) -> RequeuedJob:
        made = RequeuedJob(
            warm=warm_python,
            home=tmp_path,
            plan=FaultPlan.write(tmp_path / "plan", *rules),
            **{"protocol": "faulty://", **options},
        )
        made.start()
        for name in (OWN, RESUMED):
            copy_as(made, name)
        for path in (made.root / FIRST, made.manifest(FIRST)):
            path.unlink()
        return made

    return make


def copy_as(job: RequeuedJob, name: str, **said: Any) -> None:
    """Put a copy of the first checkpoint there whose manifest says something else."""
    shutil.copy(job.root / FIRST, job.root / name)
    told = json.loads(job.manifest(FIRST).read_text(encoding="utf-8"))
    job.manifest(name).write_text(json.dumps({**told, "path": name, **said}), encoding="utf-8")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("background", [False, True], ids=["at_once", "background"])
def test_of_remote_ones_the_newest_and_the_resumed_stay(
    ranks: int,
    background: bool,  # noqa: FBT001 - a parameter of a test
    job: Callable[..., RequeuedJob],
) -> None:
    """Once the newest is in storage: what was replaced goes after that, its manifest first."""
    trainer = {"plugins": [AsyncCheckpointIO()]} if background else {}
    requeued = job(ranks=ranks, trainer=trainer)

    running = requeued.start()

    assert requeued.names() == [RESUMED, NEWEST], running.told()
    assert f"{RESUMED} is not removed: this run has started from it" in running.ranks[0].text()
    assert not requeued.manifest(OWN).exists()
    saved = running.plan.calls("manifest_put_file", name=NEWEST)[-1]
    unmarked = running.plan.calls("manifest_rm_file", name=OWN)[0]
    removed = running.plan.calls("rm_file", name=OWN)[0]
    assert saved["at_s"] < unmarked["at_s"] < removed["at_s"]


def test_what_is_not_surely_its_own_stays(job: Callable[..., RequeuedJob]) -> None:
    """Of another job, of another training, later, without a manifest, or other than it says."""
    requeued = job(options={"on_outage": "wait"})
    shutil.copy(requeued.root / OWN, requeued.root / FIRST)
    shutil.copy(requeued.manifest(OWN), requeued.manifest(FIRST))
    others: dict[str, dict[str, Any]] = {
        "hpc_ckpt_2.ckpt": {"run": "4712"},
        "hpc_ckpt_3.ckpt": {"training": "another"},
        "hpc_ckpt_4.ckpt": {"step": 1000},
        "hpc_ckpt_5.ckpt": {"v": 2},
        "hpc_ckpt_6.ckpt": {"size_bytes": 1},
        "hpc_ckpt_8.ckpt": {"path": OWN},
        "hpc_ckpt_9.ckpt": {},
    }
    for name, said in others.items():
        copy_as(requeued, name, **said)
    requeued.manifest("hpc_ckpt_9.ckpt").unlink()
    requeued.manifest(FIRST).unlink()

    running = requeued.start()

    assert requeued.names() == sorted([FIRST, *others, RESUMED, NEWEST]), running.told()


def test_a_removal_that_fails_is_a_warning(job: Callable[..., RequeuedJob]) -> None:
    """It names the checkpoint, and the job is requeued; the next stop tries the others again."""
    requeued = job(Rule(operations=("rm_file",), name=OWN, error="denied"))

    running = requeued.start()

    assert requeued.names() == sorted([OWN, RESUMED, NEWEST])
    told = running.ranks[0].text()
    assert "remove by hand" in told
    assert f"{requeued.root}/{OWN} (" in told


def test_a_listing_that_fails_is_a_warning(job: Callable[..., RequeuedJob]) -> None:
    """A manifest that cannot be read now says nothing, and all stay until the next stop."""
    requeued = job(Rule(operations=("manifest_cat_file",), name=OWN, error="reset", first=2))

    running = requeued.start()

    assert requeued.names() == sorted([OWN, RESUMED, NEWEST])
    assert f"what faulty://{requeued.root}/{NEWEST} has replaced" in running.ranks[0].text()


def test_a_removal_that_hangs_does_not_keep_the_job_from_being_requeued(
    job: Callable[..., RequeuedJob],
) -> None:
    """It has a part of the time that is left, and the rest is for the request."""
    slow = Rule(operations=("rm_file",), name=OWN, slow_s=3.5)
    requeued = job(slow, options={"termination_grace_s": 8.0})

    running = requeued.start()

    assert f"{requeued.root}/{OWN} (" in running.ranks[0].text()


def test_without_time_nothing_is_looked_for(job: Callable[..., RequeuedJob]) -> None:
    """The checkpoint is saved and the job requeued; the rest stays for the next stop."""
    requeued = job(options={"termination_grace_s": 3.4})

    running = requeued.start()

    assert requeued.names() == sorted([OWN, RESUMED, NEWEST]), running.told()


@pytest.mark.parametrize("on_outage", ["spool", "wait"])
def test_what_is_not_in_storage_replaces_nothing(
    on_outage: str, job: Callable[..., RequeuedJob]
) -> None:
    """A save that waits on the node, or that was given up."""
    lost = Rule(operations=("put_file",), name=NEWEST, error="reset")
    options = {"termination_grace_s": 6.0, "on_outage": on_outage}
    requeued = job(lost, options=options)

    running = requeued.start(checks=False)

    assert requeued.names() == sorted([OWN, RESUMED]), running.told()


def test_a_checkpoint_of_all_ranks_is_removed_as_a_whole(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """A directory, with the metadata that makes it one."""
    requeued = RequeuedJob(
        warm=warm_python,
        home=tmp_path,
        protocol="faulty://",
        plan=FaultPlan.write(tmp_path / "plan"),
        training={"strategy": STRATEGIES["ModelParallel sharded"], "model": ShardedModel},
    )

    requeued.start()
    requeued.start()
    running = requeued.start()

    assert requeued.names() == ["hpc_ckpt_2.ckpt", "hpc_ckpt_3.ckpt"], running.told()
    assert not requeued.manifest("hpc_ckpt_1.ckpt").exists()
    removed = running.plan.calls("rm_file", name="hpc_ckpt_1.ckpt")
    assert removed[0]["path"].endswith("meta.pt"), removed
