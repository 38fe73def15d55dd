# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C27: ``exists`` said no on one rank and yes on the others, and they parted ways.

``KempnerInstitute/KempnerForge#49``, ``Lightning-AI/pytorch-lightning#5155``: a network filesystem
shows a new directory to one host later than to another. One rank trains from zero, or the others
wait for it in a collective that it never enters.
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

UNSEEN = 2
"""How often a file that is there is not seen."""


def see_late(_trainer: Any) -> None:
    """On rank 1, let no directory exist, and each checkpoint only from the third question on."""
    if os.environ["RANK"] == "0":
        return
    info = LocalFileSystem.info
    asked: list[str] = []

    def late_info(self: Any, path: Any, **kwargs: Any) -> Any:
        name = str(getattr(path, "path", path))
        asked.append(name)
        if name.endswith("/files") or (name.endswith(".ckpt") and asked.count(name) <= UNSEEN):
            raise FileNotFoundError(name)
        return info(self, path, **kwargs)

    LocalFileSystem.info = late_info
    LocalFileSystem.exists = lambda _self, _path, **_kwargs: False


@pytest.mark.parametrize("asked", ["last", "path"])
def test_one_rank_says_what_is_there(asked: str, warm_python: WarmPython, tmp_path: Path) -> None:
    """The rank that does not see it asks again, and both go on from the same step."""
    folder = tmp_path / "files"
    fit(
        Job(
            folder=str(folder),
            steps=2,
            ranks=1,
            options=None,
            trainer={"default_root_dir": tmp_path},
        )
    )
    shutil.move(folder / "step=2.ckpt", folder / "last.ckpt")
    path = f"{folder}/last.ckpt"

    with store_server() as port:
        running = lightning_job.start(
            warm_python,
            Job(folder=str(folder), resume=path if asked == "path" else asked, before=see_late),
            tmp_path / "job",
            port=port,
        )
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert [report["resumed"] for report in reports] == [path, path]
    assert sorted(file.name for file in folder.glob("*.ckpt")) == ["last.ckpt", "step=4.ckpt"]
    assert "this is not the checkpoint that rank 0 has chosen" in running.ranks[1].text()
