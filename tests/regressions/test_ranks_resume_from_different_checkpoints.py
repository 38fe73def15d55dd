# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C24: two ranks took different checkpoints for the last one.

``Lightning-AI/pytorch-lightning#19932``, ``#14907``: each rank lists the directory and compares the
times of writing by itself, and nothing tells it what the others have found.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from tests import lightning_job
from tests.lightning_job import Job, store_server
from tests.single_rank import fit


if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def see_times_reversed(_trainer: Any) -> None:
    """On rank 1, let what was written last look as if it had been written first."""
    if os.environ["RANK"] == "0":
        return
    info, modified = LocalFileSystem.info, LocalFileSystem.modified

    def reversed_info(self: Any, path: Any, **kwargs: Any) -> Any:
        found = info(self, path, **kwargs)
        return {**found, "mtime": -found["mtime"]}

    LocalFileSystem.info = reversed_info
    LocalFileSystem.modified = lambda self, path: modified(self, path).replace(year=1999)


def test_one_rank_chooses_and_the_others_load_that(warm_python: WarmPython, tmp_path: Path) -> None:
    """Plain Lightning's ranks start from two different files, ours from one."""
    options: dict[str, dict[str, Any] | None] = {"plain": None, "ours": {}}
    for name in options:
        folder = tmp_path / name / "files"
        job = Job(folder=str(folder), steps=2, ranks=1, options=None)
        fit(Job(**{**vars(job), "trainer": {"default_root_dir": tmp_path}}))
        shutil.copy(folder / "step=2.ckpt", folder / "last.ckpt")
        (folder / "step=2.ckpt").rename(folder / "last-v1.ckpt")
        os.utime(folder / "last.ckpt", (1e9, 1e9))

    with store_server() as one, store_server() as two:
        plain, ours = (
            lightning_job.start(
                warm_python,
                Job(
                    folder=f"{tmp_path}/{name}/files",
                    options=options[name],
                    resume="last",
                    before=see_times_reversed,
                ),
                tmp_path / name,
                port=port,
            )
            for name, port in (("plain", one), ("ours", two))
        )
        without, with_it = plain.wait(), ours.wait()

    assert [report["code"] for report in with_it] == [0, 0], ours.told()
    chosen = f"{tmp_path}/ours/files/last-v1.ckpt"
    assert [report["resumed"] for report in with_it] == [chosen, chosen], ours.told()
    assert len({report["resumed"] for report in without}) == 2, plain.told()
