# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C22: checkpoints for a roomy filesystem are staged in the system's temporary directory.

``fsspec/filesystem_spec#544``, ``Lightning-AI/pytorch-lightning#20243``: there is no space in
``/tmp``, a move to another filesystem is a copy, and files end up readable for their owner only.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lightning_job import Job
from tests.single_rank import fit, names


if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [pytest.mark.integration]


@pytest.fixture
def umask() -> Iterator[int]:
    """Files that this process makes may be read by its group."""
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


@pytest.mark.parametrize("ours", [False, True], ids=["plain", "ours"])
def test_checkpoints_are_staged_beside_where_they_go(
    *, ours: bool, umask: int, tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be written to the temporary directory, only plain Lightning fails."""
    del spool
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    job = Job(folder=str(tmp_path / "checkpoints"), ranks=1, options={} if ours else None)

    if not ours:
        with pytest.raises(FileNotFoundError, match="full"):
            fit(job)
        return
    fit(job)

    assert names(job) == job.expected
    modes = {stat.S_IMODE((Path(job.folder) / name).stat().st_mode) for name in job.expected}
    assert modes == {0o666 & ~umask}
