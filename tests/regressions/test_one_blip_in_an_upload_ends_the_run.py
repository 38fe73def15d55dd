# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C11: one rate limit, or one blip of the network, while a checkpoint is uploaded ends the run.

``ray-project/ray#47939``, ``#55350``: users write code by hand that tolerates some failures in a
row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience import JointError
from tests.faulty_filesystem import Rule
from tests.single_rank import fit, names


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


pytestmark = [pytest.mark.integration]


@pytest.mark.parametrize("error", ["reset", "throttled"])
def test_it_is_tried_again(error: str, faulty: Callable[..., Job]) -> None:
    """Plain Lightning raises what the storage raised; with the callback all is saved."""
    plain = faulty(Rule(operations=("open",), name=".ckpt", error=error, last=1), options=None)
    with pytest.raises(Exception, match=r"reset|rate limit"):
        fit(plain)
    ours = faulty(Rule(operations=("put_file",), name=".ckpt", error=error, last=2))

    trainer = fit(ours)

    assert trainer.global_step == ours.steps
    assert names(ours) == ours.expected


@pytest.mark.parametrize("failures", [2, 3])
def test_so_many_in_a_row_are_tolerated_and_no_more(
    failures: int, faulty: Callable[..., Job]
) -> None:
    """Below the limit training goes on, and a success begins anew; at it there is one error."""
    options = {"checkpoints": {"max_consecutive_save_failures": 3}}
    rules = [
        Rule(operations=("put_file",), name=f"step={step}.ckpt", error="denied")
        for step in (*range(2, 2 + failures), 6)
    ]
    job = faulty(*rules, steps=7, every=1, options=options)

    if failures < 3:
        trainer = fit(job)
        assert trainer.global_step == 7
        assert names(job) == [f"step={step}.ckpt" for step in (1, 4, 5, 7)]
    else:
        with pytest.raises(JointError, match=r"step=4\.ckpt"):
            fit(job)
        assert names(job) == ["step=1.ckpt"]
