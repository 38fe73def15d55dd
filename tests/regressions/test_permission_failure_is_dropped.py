# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C01: a permission failure while saving was dropped, and the last good checkpoint removed.

``Lightning-AI/pytorch-lightning#21800``: the save helper swallows ``PermissionError`` and returns,
training goes on, ``best_model_path`` names a file that never was, and with ``save_top_k=1`` the
good older checkpoint is deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_resilience import ResilientCheckpointIO
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, store_server
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


class UsersOwn(TorchCheckpointIO):
    """A user's own ``CheckpointIO``, which swallows what Lightning's helper swallows."""


def use_own_io(trainer: Any) -> None:
    """Plug it in; it is called as a whole, with the real path."""
    trainer.strategy.checkpoint_io = ResilientCheckpointIO(UsersOwn(), staging=False)


@pytest.mark.parametrize("own", [False, True], ids=["stock", "own"])
@pytest.mark.parametrize("top", [{"save_top_k": 1}, {"save_top_k": 0, "save_last": True}])
def test_a_dropped_permission_failure_fails_on_all_ranks_and_removes_nothing(
    own: bool,  # noqa: FBT001 - a parameter
    top: dict[str, Any],
    warm_python: WarmPython,
    tmp_path: Path,
) -> None:
    """Storage is asked whether the checkpoint is there; if not, both ranks fail, none is lost."""
    # Each save is one call: the stock IO is replaced by a put, another one opens the file.
    rule = Rule(operations=("open",) if own else ("put_file",), error="denied", first=2)
    job = Job(
        folder=f"faulty://{tmp_path}/checkpoints",
        checkpoint=top,
        before=use_own_io if own else None,
    )
    with store_server() as port:
        plan = FaultPlan.write(tmp_path / "plan", rule)
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        first, second = running.wait()

    assert (first["error"], second["error"]) == ("JointError", "JointError"), running.told()
    assert first["text"] == second["text"]
    assert running.steps() == [2]
    # What was dropped without a word may be known to pass, so it has a second chance and no third.
    assert len(plan.calls(*rule.operations)) == (3 if own else 2)
    for report in (first, second):
        paths = {report["best"], report["last"]} - {""}
        assert {path.rpartition("/")[2] for path in paths} == set(running.names())


def test_a_put_that_stores_nothing_is_not_believed(faulty: Callable[..., Job]) -> None:
    """Storage reports success and has nothing: the put is made again, and then it is there."""
    job = faulty(Rule(operations=("put_file",), swallow=True, last=2))

    fit(job)

    assert names(job) == job.expected
    puts = plan_in_use().calls("put_file", name="step=2")
    assert [call["struck"] for call in puts] == [True, True, False]
