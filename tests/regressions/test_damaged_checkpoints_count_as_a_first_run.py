# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C26: the only last checkpoint was not complete, was skipped, and each restart began from zero.

``NVIDIA-NeMo/Speech#10228``, ``#14994``: what is passed over is not told from what was never there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience import CheckpointError
from tests.single_rank import fit


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning_job import Job


pytestmark = pytest.mark.integration

FILES = {
    "last.ckpt": b"",
    "last-v1.ckpt": b"PK\x03\x04cut off, and longer than an archive without any part in it",
}


@pytest.fixture
def job(faulty: Callable[..., Job], tmp_path: Path) -> Job:
    """A job whose last checkpoints are all damaged."""
    (tmp_path / "checkpoints").mkdir()
    for name, data in FILES.items():
        (tmp_path / "checkpoints" / name).write_bytes(data)
    return faulty(resume="last", trainer={"default_root_dir": f"faulty://{tmp_path}"})


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_restart_is_refused_and_keeps_the_files(job: Job, tmp_path: Path) -> None:
    """Three times: what was refused once is no first run afterwards."""
    texts = []
    for _ in range(3):
        with pytest.raises(CheckpointError) as caught:
            fit(job)
        texts.append(str(caught.value))

    assert "/last.ckpt: it is empty" in texts[0]
    assert "/last-v1.ckpt: it is damaged" in texts[0]
    assert texts == [texts[0]] * 3
    assert content(tmp_path / "checkpoints") == FILES


def test_who_asks_for_a_fresh_start_gets_one_and_loses_nothing(
    job: Job, faulty: Callable[..., Job], tmp_path: Path
) -> None:
    """The damaged ones are set aside, so that the run does not write over them."""
    options: dict[str, Any] = {"checkpoints": {"allow_fresh_start": True}}
    fresh = faulty(
        resume="last",
        trainer=job.trainer,
        options=options,
        checkpoint={"save_last": True},
        steps=2,
    )

    trainer = fit(fresh)

    assert trainer.ckpt_path is None
    found = content(tmp_path / "checkpoints")
    assert len(found["last.ckpt"]) > 1000
    aside = {name: data for name, data in found.items() if "/set-aside/" in name}
    assert {data for name, data in aside.items() if not name.endswith(".json")} == {*FILES.values()}
