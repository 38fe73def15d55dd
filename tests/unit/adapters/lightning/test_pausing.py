# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A pause between two steps: what one rank remembers of its breakers, and what it asks for."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lightning_resilience import ResilienceCallback
from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.lightning.namespaces_loops import idle_hooks
from lightning_resilience.adapters.lightning.pausing import Pausing
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.storage import Storage, dependency_of
from lightning_resilience.core.agenda import AgendaKind, record_of
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.events import ProbeEnded, TrainingPaused, TrainingResumed
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import BreakerRecord, decode, encode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.counted_store import CountedStore
from tests.lightning_job import make_data, make_model


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightning_resilience.core.agenda import AgendaItem
    from lightning_resilience.core.events import Event


CONFIG = BreakerConfig(
    view_max_age_s=0.05,
    probe_timeout_s=0.1,
    probe_lease_s=1.9,
    open_for_s=2.0,
    max_open_for_s=2.0,
    ramp_start=2,
)


class Kept:
    """A sink that keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)


class Rank:
    """The only rank of a job, with a breaker that it has used."""

    def __init__(self, folder: Path, *, every: int = 1) -> None:
        self.store = CountedStore()
        self.sink = Kept()
        self.asked: list[AgendaItem] = []
        member = Member(
            keys=Keys(run_id="run", incarnation="1"),
            rank=0,
            world_size=1,
            timeout_s=10.0,
            beat_s=1.0,
            on_outage="wait",
            store_patience_s=10.0,
        )
        driver = Driver(store=self.store, clock=SystemClock(), dice=SystemDice(), sink=self.sink)
        self.session = Session(
            member=member,
            policy=Policy(retry=RetryPolicy(), breaker=CONFIG, classify=classify),
            driver=driver,
            storage=Storage({}, spool=lambda: str(folder)),
        )
        self.pausing = Pausing(
            SimpleNamespace(global_step=3), self.session, ask=self.asked.append, every=every
        )
        self.url = str(folder / "a.ckpt")
        self.name = f"{dependency_of(self.url)}:write"
        self.session.save(self.url, Asked(self.session.storage, self.url, lambda _token: None))
        self.pausing.before_step()
        self.store.operations.clear()

    @property
    def circuit(self) -> Any:
        """What it remembers of the breaker."""
        return self.session.alone.breakers.circuit(self.url, "write")

    def record(self) -> BreakerRecord:
        """The shared record."""
        return decode(BreakerRecord, self.store.get(self.circuit.key) or b"", key="k")

    def change(self, **fields: Any) -> None:
        """Let the breaker be in another state, and this rank see that."""
        before = self.record()
        after = msgspec.structs.replace(before, epoch=before.epoch + 1, writer="test", **fields)
        self.store.set(self.circuit.key, encode(after))
        self.session.reports()
        self.store.operations.clear()

    def act(self) -> None:
        """Do what all ranks do for what was asked for first."""
        self.pausing(record_of(self.asked[0], rank=0, writer="w"))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """A rank that looks after every step."""
    rank = Rank(tmp_path)
    yield rank
    rank.session.close()


def test_a_look_asks_nobody(rank: Rank) -> None:
    """Whether all is well or not, what the rank has seen last is all that it needs."""
    rank.pausing.before_step()
    well = [*rank.asked]
    rank.change(state=BreakerState.OPEN.value, limit=0)
    rank.pausing.before_step()

    assert well == []
    assert [(item.kind, item.detail) for item in rank.asked] == [(AgendaKind.PAUSE, rank.name)]
    assert rank.store.operations == []


def test_a_pause_ends_with_a_probe_and_says_nothing_else_of_the_storage(rank: Rank) -> None:
    """The probe is a real request; passing the gate is none, and moves no ramp."""
    rank.change(state=BreakerState.OPEN.value, limit=0, open_s=2.0)
    rank.pausing.before_step()

    rank.act()

    record = rank.record()
    assert (record.state, record.limit) == (BreakerState.RECOVERING.value, CONFIG.ramp_start)
    kinds = [type(event) for event in rank.sink.events]
    assert kinds.index(TrainingPaused) < kinds.index(ProbeEnded) < kinds.index(TrainingResumed)


def test_what_a_rank_has_waited_for_it_does_not_ask_for_again(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another rank has waited, this one has seen nothing of the end; a new trip it has."""
    monkeypatch.setattr(rank.session, "pause", lambda _name, *, worker: worker)
    rank.change(state=BreakerState.OPEN.value, limit=0)
    rank.pausing.before_step()

    rank.act()
    rank.pausing.before_step()
    seen_once = len(rank.asked)
    rank.change(state=BreakerState.OPEN.value, limit=0)
    rank.pausing.before_step()

    assert (seen_once, len(rank.asked)) == (1, 2)


def test_a_breaker_that_a_rank_has_not_used_has_its_storage_as_a_whole(rank: Rank) -> None:
    """The rank that asks knows a place to probe; the others need only the breaker's name."""
    breakers = rank.session.alone.breakers

    assert breakers.place_of(rank.name) == (rank.url, "write")
    assert breakers.place_of("s3://bucket:read") == ("s3://bucket", "read")


@pytest.mark.parametrize("home", ["lightning.pytorch", "pytorch_lightning"])
def test_hooks_of_a_step_that_do_nothing_are_not_called(home: str) -> None:
    """Each call costs Lightning some of the step; a subclass that overrides one has it called."""

    class Own(ResilienceCallback):
        def on_before_backward(self, *_: Any) -> None:
            called.append(self.on_after_backward)

    called: list[Any] = []
    callback = Own()
    trainer = import_module(home).Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )

    trainer.fit(make_model(home), make_data())

    assert called == [None, None]
    assert callable(callback.on_after_backward)
    assert "on_validation_batch_end" not in idle_hooks(callback)


def test_a_rank_that_leaves_alone_does_its_part_of_what_all_ranks_do(rank: Rank) -> None:
    """Nobody is there to do the others' parts."""
    rank.session.failing = SimpleNamespace(  # type: ignore[assignment] # what the session asks
        leaves_alone=True
    )
    work = Asked(rank.session.storage, rank.url, lambda _token: "mine")

    assert rank.session.by_all("stage", rank.url, work) == "mine"
