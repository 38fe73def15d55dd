# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Thousands of joint operations on one store: as many keys as after a few, and as many questions.

Two ranks' sessions, each with its own connection to a real ``TCPStore``, do what a long run does:
questions that rank 0 answers, and steps in which both have a part.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from lightning_resilience import BreakerConfig, RetryPolicy
from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.protocols.joint import Member
from lightning_resilience.protocols.joint_clean_up import CLEAN_UP_EVERY
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.counted_store import CountedStore, Outage


if TYPE_CHECKING:
    from pathlib import Path

    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken, SharedStore


pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

OPERATIONS = 3_000
# A batch that is about to be removed, the one before it, and what does not depend on the number.
MOST_KEYS = 8 * 2 * CLEAN_UP_EVERY
MOST_OPERATIONS = 20


class Sink:
    """Forgets every event."""

    def emit(self, event: Event) -> None:
        """Forget it."""


def session_on(store: SharedStore, rank: int, *, ranks: int, folder: Path) -> Session:
    """The session of one rank."""
    member = Member(
        keys=Keys(run_id="run", incarnation="1"),
        rank=rank,
        world_size=ranks,
        timeout_s=60.0,
        beat_s=5.0,
        on_outage="wait",
        store_patience_s=60.0,
    )
    policy = Policy(retry=RetryPolicy(), breaker=BreakerConfig(), classify=classify)
    return Session(
        member=member,
        policy=policy,
        driver=Driver(store=store, clock=SystemClock(), dice=SystemDice(rank=rank), sink=Sink()),
        storage=Storage({}, spool=lambda: str(folder)),
    )


def told_by(number: int, token: CancelToken) -> int:
    """Be what rank 0 tells."""
    token.progress()
    return number


def endure(session: Session, *, operations: int) -> list[str]:
    """Take part in so many operations, and return what each has ended with."""

    def part(token: CancelToken) -> str:
        token.progress()
        return "mine"

    asked = Asked(session.storage, "memory://run/x.ckpt", part)
    told = []
    for number in range(operations):
        if number % 10:
            told.append(session.hand_over("step", asked.url, asked, by_all=bool(number % 2)))
        else:
            final = session.on_rank_zero(
                "question", asked.url, partial(told_by, number), kind="read"
            )
            told.append(final.detail)
    return told


def test_two_ranks_come_through_thousands_of_operations_on_one_store(tmp_path: Path) -> None:
    """The number of keys stays what it was after the first batches, and so does what one costs."""
    server = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False
    )
    keys: list[int] = []
    counts = [Outage(), Outage()]
    third = threading.Barrier(2, lambda: keys.append(server.num_keys()), timeout=120.0)

    def run(rank: int) -> list[str]:
        store = CountedStore(TorchStore.connect("127.0.0.1", server.port), counts[rank])
        session = session_on(store, rank, ranks=2, folder=tmp_path)
        told = []
        for _ in range(3):
            told += endure(session, operations=OPERATIONS // 3)
            third.wait()
        session.close()
        return told

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    costs = [len(count.operations) / OPERATIONS for count in counts]

    print(f"keys {keys}, store operations per joint operation {costs}")  # noqa: T201 - the figures
    questions = [str(number) for number in range(0, OPERATIONS // 3, 10)] * 3
    assert first[::10] == second[::10] == questions
    assert len(keys) == 3
    assert max(keys) <= MOST_KEYS
    assert max(costs) <= MOST_OPERATIONS


def test_a_job_of_one_rank_does_so_without_a_store(tmp_path: Path) -> None:
    """Its memory is the store, and does not fill either."""
    store = MemoryStore()
    session = session_on(store, 0, ranks=1, folder=tmp_path)

    told = endure(session, operations=500)
    session.close()

    assert len(told) == 500
    assert len(store._shared.cells.values) <= MOST_KEYS
