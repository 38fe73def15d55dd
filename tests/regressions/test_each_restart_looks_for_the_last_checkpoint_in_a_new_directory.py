# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C67: a logger counts its versions, so that each restart has a directory with no ``"last"`` in it.

Nothing fails then: the run begins anew, every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.lightning_job import Job, find
from tests.single_rank import fit


if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Experiment logs directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]

WARNING = "gives every start a directory of its own"


def run(folder: Path, *, version: str | None = None, **checkpoint: Any) -> Any:
    """Train, as a start that goes on from the last checkpoint, if there is one."""
    logger = CSVLogger(str(folder), version=version)
    checkpoint = {"dirpath": None, "save_last": True, **checkpoint}
    job = Job(folder="", ranks=1, checkpoint=checkpoint, trainer={"logger": logger}, resume="last")
    return fit(job)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about the directory."""
    return [text for text in caplog.messages if WARNING in text]


def test_a_directory_that_each_start_has_anew_is_told(
    tmp_path: Path, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start says that it looks where there is nothing, and what to do about that."""
    assert spool.exists()

    directories = {find(run(tmp_path), "ModelCheckpoint").dirpath for _ in range(2)}

    assert len(directories) == 2
    assert len(told(caplog)) == 2
    assert all("dirpath" in text for text in told(caplog))


@pytest.mark.parametrize("how", ["dirpath", "version"])
def test_a_directory_that_stays_is_nothing_to_tell(
    how: str, tmp_path: Path, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start finds nothing, which is normal, and the second goes on from the first."""
    assert spool.exists()
    stays: dict[str, Any] = {
        "dirpath": {"dirpath": str(tmp_path / "checkpoints")},
        "version": {"version": "run-7"},
    }

    first, second = (run(tmp_path, **stays[how]) for _ in range(2))

    assert told(caplog) == []
    assert first.ckpt_path is None
    assert str(second.ckpt_path).endswith("last.ckpt")


def test_the_first_start_of_a_requeued_job_is_no_error(
    tmp_path: Path, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler's checkpoint is there from the second start on; plain Lightning raises."""
    assert spool.exists()
    checkpoint = {"dirpath": str(tmp_path / "checkpoints")}
    job = Job(
        folder="",
        ranks=1,
        checkpoint=checkpoint,
        trainer={"default_root_dir": str(tmp_path), "logger": False},
        resume="hpc",
    )

    first = fit(job)
    first.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    second = fit(job)

    assert "so all ranks start from the beginning" in caplog.text
    assert (first.ckpt_path, first.global_step) == (None, job.steps)
    assert str(second.ckpt_path).endswith("hpc_ckpt_1.ckpt")
