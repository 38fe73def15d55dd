# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that fail in the middle of training, for the tests of what the others do then."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from torch.distributed import TCPStore

from tests.lightning_job import HANG_S


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Running


GROUP_TIMEOUT_S = 60.0
"""Whoever waits for this has not been woken."""

PEERS_S = 5.0
"""Within this, all other ranks have left."""


class FailingSteps(Callback):
    """Lets ``training_step`` fail on some ranks.

    Args:
        ranks: These.
        step: At this step.
        act: What happens there; by default, a ``ValueError`` that names the rank.
    """

    def __init__(
        self, ranks: tuple[int, ...], step: int, act: Callable[[int], None] | None = None
    ) -> None:
        self._ranks = ranks
        self._step = step
        self._act = act or raise_value_error

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the step of the ranks that are to fail."""
        del stage
        if trainer.global_rank in self._ranks:
            pl_module.training_step = partial(self._fail, trainer, pl_module.training_step)

    def _fail(self, trainer: Any, inner: Callable[..., Any], *batch: Any) -> Any:
        if trainer.global_step == self._step:
            print(f"failing_at {time.monotonic()}", flush=True)  # noqa: T201 - read from the log
            self._act(trainer.global_rank)
        return inner(*batch)


def raise_value_error(rank: int) -> None:
    """Fail as a user's own code does."""
    message = f"a bad batch on rank {rank}"
    raise ValueError(message)


def fail(
    ranks: tuple[int, ...], step: int, trainer: Any, *, act: Callable[[int], None] | None = None
) -> None:
    """Let these ranks fail at a step."""
    trainer.callbacks.append(FailingSteps(ranks, step, act))


def failed_at_s(running: Running, rank: int) -> float:
    """Return when a rank began to fail, on the machine's monotonic clock."""
    lines = running.ranks[rank].text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("failing_at "))


def incidents_in(port: int) -> list[dict[str, Any]]:
    """Read the incidents from the store that the ranks have shared."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    return [json.loads(store.get(key)) for key in store.list_keys() if "/incident/" in key]


def incident_in(port: int) -> dict[str, Any]:
    """Read the one incident from the store that the ranks have shared."""
    (found,) = incidents_in(port)
    return found


def assert_clean(reports: list[dict[str, Any]]) -> None:
    """Assert that no rank has left a patch, a thread or a signal handler behind."""
    left = [(report["patched"], report["threads"], report["handlers"]) for report in reports]
    assert left == [([], [], [])] * len(reports)


__all__ = [
    "GROUP_TIMEOUT_S",
    "HANG_S",
    "PEERS_S",
    "FailingSteps",
    "assert_clean",
    "fail",
    "failed_at_s",
    "incident_in",
    "incidents_in",
]
