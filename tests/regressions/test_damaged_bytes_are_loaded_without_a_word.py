# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C04: a bit has flipped in a checkpoint, and it is loaded without a word.

``Lightning-AI/pytorch-lightning#21431``: ``torch.load`` compares no checksums, so the tensors have
other values, and nothing says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from lightning_resilience import CorruptCheckpointError, JointError
from tests.single_rank import fit


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning_job import Job


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

WEIGHT = "layer.weight"


def flip(path: Path) -> None:
    """Flip one bit of a weight's first number, in place."""
    weight = torch.load(path, weights_only=True)["state_dict"][WEIGHT]
    data = bytearray(path.read_bytes())
    at = data.find(weight.numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)


def test_it_is_an_error_before_a_tensor_is_used(faulty: Callable[..., Job], tmp_path: Path) -> None:
    """Plain Lightning trains on from what is not what was saved; with the callback nobody does."""
    job = replace(faulty(steps=2), folder=str(tmp_path / "checkpoints"))
    fit(job)
    path = tmp_path / "checkpoints" / "step=2.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"][WEIGHT]
    flip(path)
    changed = torch.load(path, weights_only=True)["state_dict"][WEIGHT]
    resumed = replace(job, steps=4, resume=str(path))

    plain = fit(replace(resumed, options=None, folder=str(tmp_path / "plain")))
    with pytest.raises(JointError, match=r"step=2\.ckpt") as caught:
        fit(resumed)

    assert isinstance(caught.value.__cause__, CorruptCheckpointError)
    assert not torch.equal(saved, changed)
    assert plain.global_step == 4
    assert [found.name for found in (tmp_path / "checkpoints").glob("*.ckpt")] == ["step=2.ckpt"]
