# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C18: the connection is lost while a checkpoint is written, and nobody is told.

``fsspec/s3fs#930``: the error is swallowed inside the client, which says "future exception was
never retrieved" at most; the write returns as if all had been stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.faulty_filesystem import FaultyFileSystem, Rule
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


pytestmark = [pytest.mark.integration]


def keep_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client store half of the first file that is sent as step 4, and say nothing."""
    sent = FaultyFileSystem.put_file
    lost: list[str] = []

    def put_file(fs: Any, path1: Any, path2: Any, **options: Any) -> None:
        sent(fs, path1, path2, **options)
        if str(path2).endswith("step=4.ckpt") and not lost:
            lost.append(str(path2))
            there = Path(str(path2).removeprefix("faulty://"))
            there.write_bytes(there.read_bytes()[: there.stat().st_size // 2])

    monkeypatch.setattr(FaultyFileSystem, "put_file", put_file)


@pytest.mark.parametrize("lost", ["all", "half"])
def test_what_is_not_there_is_sent_again(
    lost: str, faulty: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exception is no proof: what the storage says it has is compared with what was written."""
    rules = [Rule(operations=("put_file",), name="step=4.ckpt", swallow=True, last=1)]
    job = faulty(*(rules if lost == "all" else []))
    if lost == "half":
        keep_half(monkeypatch)

    trainer = fit(job)

    folder = Path(job.folder.removeprefix("faulty://"))
    assert trainer.global_step == job.steps
    assert names(job) == job.expected
    assert torch.load(folder / "step=4.ckpt", weights_only=True)["global_step"] == 4
    assert len(plan_in_use().calls("put_file", name="step=4.ckpt")) == 2
