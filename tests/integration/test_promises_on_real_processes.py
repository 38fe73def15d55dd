# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Sixteen processes, faults by a seed, and the promises held against what the server has counted.

Twenty rounds on a real ``TCPStore`` and a real HTTP server, with SIGKILL, SIGSTOP and a store that
dies and comes back empty. Each round has records of its own. A schedule is its seed's, but not what
the kernel makes of it: a round that is run again strikes at the same instants, not the same lines.

The figures of each round are printed (``pytest -s``).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.integration.contention_ranks import Crew, StoreServer
from tests.integration.promise_checks import broken
from tests.integration.promise_ranks import RANKS, Storage, live
from tests.integration.promise_rounds import STRIKES, Round, again, plan


if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

SEEDS = range(1, 21)


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Crew]:
    """The processes, for all rounds."""
    crew = Crew(RANKS, live)

    yield crew

    crew.end()


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    """The store's server, which rounds may kill."""
    running = StoreServer()

    yield running

    running.kill()


@pytest.fixture
def storage() -> Iterator[Storage]:
    """What all ranks depend on."""
    with Storage() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield running
        finally:
            running.stopped.clear()
            running.shutdown()
            thread.join()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed-{seed}-")
def test_every_promise_is_kept_whatever_strikes(
    sixteen: Crew, server: StoreServer, storage: Storage, seed: int
) -> None:
    """In a round of faults no promise is broken, and whoever lives comes to its end."""
    began_s = time.monotonic()
    played = Round(seed, sixteen, storage, server)
    recording = played.play()

    ways = Counter((s.kind, s.way) for s in recording.served)
    ends = Counter(
        each.error or (each.final.failure if each.final else "") or "ok" for each in recording.told
    )
    print(  # noqa: T201 - the figures of this test
        f"seed {seed}: {time.monotonic() - began_s:.1f} s, {played.struck}, "
        f"served {dict(ways)}, operations {dict(ends)}"
    )
    breaks = broken(recording)
    assert breaks == [], f"seed {seed}: {breaks}; faults: {played.struck}. {again(seed)}"


def test_the_schedules_have_every_fault() -> None:
    """Among the rounds is every way to strike, with and without the store being lost."""
    faults = [fault for seed in SEEDS for fault in plan(seed)]

    assert {(fault.what, fault.whom) for fault in faults} == {
        ("outage", ""),
        ("store", ""),
        *STRIKES,
    }
