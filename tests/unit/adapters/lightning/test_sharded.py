# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a strategy raises while its ranks are in lock-step, and what is refused before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from lightning_resilience.adapters.lightning.patches import Patches
from lightning_resilience.adapters.lightning.sharded import hook_sharded
from lightning_resilience.adapters.lightning.sharded_save import run_in_lock_step
from lightning_resilience.core.shards import Saving


class Strategy:
    """A strategy that has no storage options, as all have that shard."""

    def save_checkpoint(self, _checkpoint: Any, _path: Any, storage_options: Any = None) -> None:
        """Refuse."""
        assert storage_options is not None
        raise TypeError("not supported")

    def load_checkpoint(self, _path: Any) -> None:
        """Load nothing."""

    def remove_checkpoint(self, _path: Any) -> None:
        """Remove nothing."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what another rank has said."""
        return f"{obj} of rank {src}"


def test_each_rank_has_its_own_path_for_as_long_as_the_strategy_works() -> None:
    """Afterwards it hears rank 0 again."""
    strategy = Strategy()

    inside = run_in_lock_step(strategy, lambda: strategy.broadcast("mine"))

    assert inside == ("mine", None)
    assert strategy.broadcast("mine") == "mine of rank 0"


def test_what_the_strategy_raises_is_kept_for_the_others() -> None:
    """They are told of it first, in the operation that comes next."""
    error = OSError("the disk is full")

    def write() -> None:
        raise error

    assert run_in_lock_step(Strategy(), write) == (None, error)


def test_of_the_failures_that_torch_collects_the_lowest_ranks_is_kept() -> None:
    """The collection itself is no Exception, and would pass for a request to stop."""
    errors: Any = {3: (OSError("third"), None), 1: (OSError("first"), None)}

    def write() -> None:
        raise CheckpointException("write", errors)

    assert run_in_lock_step(Strategy(), write) == (None, errors[1][0])


def test_a_request_to_stop_is_none_of_the_strategys_failures() -> None:
    """It is raised at once."""

    def write() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_lock_step(Strategy(), write)


@pytest.mark.parametrize("saving", [Saving.SHARDED, Saving.GATHERED])
def test_storage_options_are_refused_as_by_the_strategy_itself(saving: Saving) -> None:
    """Before any rank has gone anywhere."""
    strategy: Any = Strategy()
    session: Any = SimpleNamespace()
    hook_sharded(strategy, session, Patches(), saving=saving)

    with pytest.raises(TypeError, match="not supported"):
        strategy.save_checkpoint({}, "s3://bucket/a.ckpt", {"key": "k"})
