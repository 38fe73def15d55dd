# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C25: ``ckpt_path="last"`` found nothing on remote storage, and training began from zero.

``Lightning-AI/pytorch-lightning#18261``, ``#21936``: what was found in the listing lost its
protocol, was looked for on the local disk, and was not there. A warning, and hours were lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_resilience import CheckpointError
from tests.lightning_job import Job
from tests.single_rank import fit


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.s3_server import S3Server


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


@pytest.fixture(params=["memory", "s3"])
def folder(
    request: pytest.FixtureRequest,
    spool: Path,
    s3_server: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """A folder on remote storage."""
    assert spool.exists()
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    yield f"{request.param}://{bucket}/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def job(folder: str, **options: Any) -> Job:
    """Make a job of one rank on that storage."""
    checkpoint = {"save_last": True, "filename": "newest", **options.pop("checkpoint", {})}
    return Job(folder=folder, ranks=1, checkpoint=checkpoint, **options)


def test_the_last_one_is_found_with_its_protocol(folder: str) -> None:
    """A second run goes on where the first has ended, by the name that it was saved under."""
    fit(job(folder, steps=2))

    ours = fit(job(folder, steps=2, resume="last"))
    plain = fit(job(folder, steps=2, options=None, resume="last"))

    assert plain.ckpt_path is None
    assert ours.ckpt_path == f"{folder}/last.ckpt"
    assert ours.global_step == 2


def test_a_checkpoint_of_another_name_stands_in(folder: str) -> None:
    """The directory has one that is what was saved, and the user has asked to resume."""
    fit(job(folder, steps=2, checkpoint={"save_last": False}))

    ours = fit(job(folder, steps=2, resume="last"))

    assert ours.ckpt_path == f"{folder}/newest.ckpt"


def test_one_of_another_name_without_a_manifest_is_gone_on_from(folder: str) -> None:
    """Plain Lightning has written it, it is whole, and it is all there is."""
    fit(job(folder, steps=2, options=None, checkpoint={"save_last": False}))

    ours = fit(job(folder, resume="last"))

    assert ours.ckpt_path == f"{folder}/newest.ckpt"


def test_checkpoints_of_which_none_is_chosen_are_no_warning(folder: str) -> None:
    """What nobody can go on from is neither started from nor passed over in silence."""
    options = {"save_last": False, "save_weights_only": True}
    fit(job(folder, steps=2, options=None, checkpoint=options))

    with pytest.raises(CheckpointError, match=r"1 checkpoints with other names \(newest\.ckpt\)"):
        fit(job(folder, resume="last"))
