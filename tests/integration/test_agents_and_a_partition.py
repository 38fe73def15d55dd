# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Real agents on two networks whose cable is cut, for a moment and for longer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.namespaces import VARIABLE, Cable, cable, enter


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.quota import RestartRecord
    from tests.agents import Agents

    Make = Callable[..., Agents]


__all__ = ["cable"]

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def start(agents: Make, cable: Cable, silent: int) -> Agents:
    """Start an agent at each end; a node may be silent for so many seconds."""
    job = agents(nodes="1:2", conf={"keep_alive_max_attempt": silent, "read_timeout": 3})
    for node, (name, address) in enumerate(zip(cable.names, cable.addresses, strict=True)):
        job.start(
            node,
            endpoint=f"{cable.addresses[0]}:{job.port}",
            local_addr=address,
            before=("tests.namespaces:enter",),
            environment={VARIABLE: name},
        )
    job.until_start(1, size=2)
    return job


def restarts(job: Agents, cable: Cable) -> RestartRecord:
    """Return the record of restarts, as it is where the store is."""
    with ThreadPoolExecutor(1, initializer=partial(enter, cable.names[0])) as pool:
        return pool.submit(job.restarts).result()


def test_a_short_partition_changes_nothing(agents: Make, cable: Cable) -> None:
    """A cable that is mended before anybody is missed costs no start of the workers."""
    job = start(agents, cable, silent=20)

    cable.cut()
    ends_at_s = time.monotonic() + 3.0
    job.until(lambda: time.monotonic() > ends_at_s)
    cable.mend()
    ends_at_s = time.monotonic() + 3.0
    job.until(lambda: time.monotonic() > ends_at_s)
    record = restarts(job, cable)
    job.finish()

    assert job.codes() == [0, 0]
    assert len(job.rounds()) == 1
    assert record.restarts == 0


def test_a_long_partition_is_one_loss(agents: Make, cable: Cable) -> None:
    """The side with the store goes on alone, the other one comes back, and it is counted once."""
    job = start(agents, cable, silent=3)

    cable.cut()
    alone = job.until_start(2, size=1)
    cable.mend()
    job.until(lambda: len(job.rounds()[-1]) == 2)
    record = restarts(job, cable)
    job.finish()

    assert alone[0].node == 0
    assert job.codes() == [0, 0]
    assert [each.cause for each in record.charges] == ["left"]
