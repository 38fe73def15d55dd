# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Eight ranks that Lightning has seeded alike retry at eight different times."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.events import RetryScheduled
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.protocols.circuit import Circuit
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

ATTEMPTS = 9


class Sink(list[Any]):
    """Keeps events."""

    emit = list.append


def retry_as_rank(rank: int, report: str) -> None:
    """Seed as a training script does, fail until the last attempt, and write down the delays."""
    seed_everything(42, verbose=False)
    failures = [ConnectionResetError("reset") for _ in range(ATTEMPTS - 1)]

    def work(_token: Any) -> None:
        if failures:
            raise failures.pop()

    patience = Patience(probe=work, classify=classify)
    policy = RetryPolicy(
        base_delay_s=1e-4,
        throttle_base_delay_s=1e-2,
        max_delay_s=1e-2,
        max_attempts=ATTEMPTS,
    )
    keys = Keys(run_id="run", incarnation=str(rank))
    circuit = Circuit("d", config=BreakerConfig(trip_failures=ATTEMPTS), keys=keys, host="h")
    call = GuardedCall(work=work, operation="save", target="x", policy=policy, patience=patience)
    sink, dice = Sink(), SystemDice(rank=rank)
    Driver(store=MemoryStore(), clock=SystemClock(), dice=dice, sink=sink).run(guard(circuit, call))
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()  # noqa: NPY002 - the stream that users seed
    delays = [event.delay_s for event in sink if isinstance(event, RetryScheduled)]
    streams = hashlib.sha256(pickle.dumps(states)).hexdigest()
    Path(report).write_text(json.dumps([delays, streams]), encoding="utf-8")


def test_eight_ranks_that_are_seeded_alike_retry_apart(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """All delays of all ranks differ, and no rank's own streams have moved from the others'."""
    reports = [tmp_path / str(rank) for rank in range(8)]

    ranks = [
        warm_python.start(retry_as_rank, rank, str(report), log=tmp_path / "log", environment={})
        for rank, report in enumerate(reports)
    ]
    codes = [process.wait(60) for process in ranks]

    assert codes == [0] * 8, ranks[0].text()
    delays, streams = zip(*(json.loads(report.read_text()) for report in reports), strict=True)
    assert [len(each) for each in delays] == [ATTEMPTS - 1] * 8
    assert len({delay for each in delays for delay in each}) == 8 * (ATTEMPTS - 1)
    assert len(set(streams)) == 1
