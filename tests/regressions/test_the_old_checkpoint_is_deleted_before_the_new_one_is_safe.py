# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C06: the old checkpoint was deleted before the new one was safe.

``Lightning-AI/pytorch-lightning#1150``: with ``save_top_k=1`` the old one goes for the new one, and
where that fails, is lost without a word, or is still on its way, nothing is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_resilience import CheckpointError, JointError
from tests.faulty_filesystem import Rule
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


pytestmark = [pytest.mark.integration]

BAD: dict[str, dict[str, Any]] = {
    "fails": {"error": "denied"},
    "is lost": {"swallow": True},
}


def is_final(error: BaseException) -> str | None:
    """Do not look again and again for what is lost."""
    return "permanent" if isinstance(error, CheckpointError) else None


@pytest.mark.parametrize("plugins", [[], [AsyncCheckpointIO]], ids=["at once", "in the background"])
@pytest.mark.parametrize("how", BAD)
def test_the_old_one_stays_where_the_new_one_is_not_there(
    how: str, plugins: list[Any], faulty: Callable[..., Job]
) -> None:
    """The run ends with the failure, and the last good checkpoint is still there."""
    job = faulty(
        Rule(operations=("put_file",), name="step=4.ckpt", **BAD[how]),
        checkpoint={"save_top_k": 1},
        trainer={"plugins": [plugin() for plugin in plugins]},
        options={"classify": is_final},
    )

    with pytest.raises(JointError, match=r"step=4\.ckpt"):
        fit(job)

    assert names(job) == ["step=2.ckpt"]
    assert plan_in_use().calls("rm_file", name="step=2.ckpt") == []
