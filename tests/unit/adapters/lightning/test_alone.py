# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank may do where the budget is empty, or the shared store is away: the options."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_resilience import ConfigError, ResilientCheckpointIO
from lightning_resilience.adapters.lightning import alone
from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.staging import Staged
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.events import CheckpointPublished, RetryDenied
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.core.spool import spooled_detail
from lightning_resilience.errors import BudgetExhaustedError, JointError, StoreUnavailableError
from lightning_resilience.protocols.circuit_memory import Limits
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken


RETRY = RetryPolicy(base_delay_s=0.01, throttle_base_delay_s=0.01, max_delay_s=0.02)
# One retry in half a second, where a call that fails twice needs two.
SCARCE = BudgetConfig(retry_ratio=0.0, retry_floor=1, budget_window_s=0.5)


class Sink:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def denials(self) -> int:
        """How often a retry was denied."""
        return sum(isinstance(event, RetryDenied) for event in self.events)


@pytest.fixture
def session_of(tmp_path: Path) -> Iterator[Callable[[str], tuple[Session, Sink]]]:
    """Make the session of the only rank, by its ``on_outage``, whose budget has one retry."""
    made: list[Session] = []

    def make(on_outage: str) -> tuple[Session, Sink]:
        member = Member(
            keys=Keys(run_id="run", incarnation="1"),
            rank=0,
            world_size=1,
            timeout_s=10.0,
            beat_s=1.0,
            on_outage=on_outage,
            store_patience_s=10.0,
        )
        sink = Sink()
        driver = Driver(store=MemoryStore(), clock=SystemClock(), dice=SystemDice(), sink=sink)
        policy = Policy(
            retry=RETRY, breaker=BreakerConfig(), classify=classify, limits=Limits(budget=SCARCE)
        )
        storage = Storage({}, spool=lambda: str(tmp_path))
        made.append(Session(member=member, policy=policy, driver=driver, storage=storage))
        return made[-1], sink

    yield make
    for session in made:
        session.close()


def fails_twice() -> Callable[[CancelToken], str]:
    """Make work whose first two attempts meet a reset."""
    errors: list[Exception] = [ConnectionResetError("reset"), ConnectionResetError("reset")]

    def work(_token: CancelToken) -> str:
        if errors:
            raise errors.pop()
        return "done"

    return work


def test_a_retry_that_is_denied_waits(session_of: Callable[[str], tuple[Session, Sink]]) -> None:
    """By default no joint operation and no rank fails for an empty budget; it comes later."""
    session, sink = session_of("wait")

    final = session.on_rank_zero("first", "memory://x", fails_twice(), kind="read")
    asked = Asked(session.storage, "memory://x", fails_twice())
    value = session.alone.run("second", asked, kind="read").value

    assert (final.detail, value) == ("done", "done")
    assert sink.denials() >= 1


def test_a_retry_that_is_denied_fails_under_fail(
    session_of: Callable[[str], tuple[Session, Sink]],
) -> None:
    """``on_outage='fail'`` tells all ranks of the empty budget, and whoever asks alone."""
    session, _ = session_of("fail")

    with pytest.raises(JointError, match="budget") as joint:
        session.on_rank_zero("first", "memory://x", fails_twice(), kind="read")
    with pytest.raises(BudgetExhaustedError, match="1 of 1"):
        # A write, whose circuit is another: the failures above have nearly opened the read's.
        session.alone.run(
            "second", Asked(session.storage, "memory://x", fails_twice()), kind="write"
        )

    assert isinstance(joint.value.__cause__, ConnectionResetError)


class Away(MemoryStore):
    """A store that does not answer, or not at first."""

    def __init__(self, *, times: float = math.inf) -> None:
        super().__init__()
        self._times = times

    def watcher(self) -> Away:
        """Itself."""
        return self

    def _require_open(self, operation: str, key: str) -> None:
        self._times -= 1
        if self._times >= 0:
            message = f"{operation} of {key}: away"
            raise StoreUnavailableError(message)


@pytest.fixture
def io_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ResilientCheckpointIO]]:
    """Make a ``CheckpointIO`` that is used alone, and close it."""
    monkeypatch.setattr(alone, "STORE_PATIENCE_S", 0.1)
    made: list[ResilientCheckpointIO] = []

    def make(**options: Any) -> ResilientCheckpointIO:
        checkpoint_io: ResilientCheckpointIO = ResilientCheckpointIO(**options)
        made.append(checkpoint_io)
        return checkpoint_io

    yield make
    for checkpoint_io in made:
        checkpoint_io.teardown()


def test_without_the_store_a_checkpoint_io_goes_on_alone(
    io_of: Callable[..., ResilientCheckpointIO], tmp_path: Path
) -> None:
    """The checkpoint is saved on what this process knows."""
    io_of(store=Away()).save_checkpoint({"step": 1}, f"{tmp_path}/a.ckpt")

    assert (tmp_path / "a.ckpt").exists()


def test_under_strict_a_checkpoint_io_fails_without_the_store(
    io_of: Callable[..., ResilientCheckpointIO], tmp_path: Path
) -> None:
    """Nothing is written that the job could not count."""
    checkpoint_io = io_of(store=Away(), strict=True)

    with pytest.raises(StoreUnavailableError, match="away"):
        checkpoint_io.save_checkpoint({"step": 1}, f"{tmp_path}/a.ckpt")

    assert list(tmp_path.iterdir()) == []


def test_one_store_error_is_absorbed(
    io_of: Callable[..., ResilientCheckpointIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even under ``strict``, an operation that is not answered once is made again."""
    monkeypatch.setattr(alone, "STORE_PATIENCE_S", 5.0)

    io_of(store=Away(times=1), strict=True).save_checkpoint({"step": 1}, f"{tmp_path}/a.ckpt")

    assert (tmp_path / "a.ckpt").exists()


def test_a_bad_variable_is_refused_before_a_checkpoint_io_opens_anything(
    io_of: Callable[..., ResilientCheckpointIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the variable and its value; nothing is written."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "two")
    save = partial(io_of().save_checkpoint, {"step": 1})

    with pytest.raises(ConfigError, match="GROUP_WORLD_SIZE='two'"):
        save(f"{tmp_path}/a.ckpt")

    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _group_of_eight() -> Iterator[None]:
    """A process group of eight ranks that talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_eight")
def test_checkpoint_ios_of_one_store_share_their_breakers(
    io_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing names the run; a quorum of the launcher's hosts opens a read's circuit."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    store = MemoryStore()

    ranks = [io_of(store=store)._guard().breakers for _ in range(2)]

    keys = {breakers.circuit("memory://x", "read").key for breakers in ranks}
    assert len(keys) == 1
    hosts = [ranks[0].circuit("memory://x", kind).hosts for kind in ("read", "write")]
    assert hosts == [4, 1]


def test_a_process_without_a_group_needs_nobodys_vote(
    io_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody else can be seen, its own failures open its circuits."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")

    breakers = io_of()._guard().breakers

    assert breakers.circuit("memory://x", "read").hosts == 1


class OrderOfASave:
    """A spool that remembers what it is told, in place of the real one."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def divert(self, _work: Any) -> None:
        """Remember it."""
        self.told.append("divert")

    @contextlib.contextmanager
    def saving(self, _url: str) -> Iterator[None]:
        """Remember both ends."""
        self.told.append("held back")
        yield
        self.told.append("let go")

    def saved(self, _url: str) -> None:
        """Remember it."""
        self.told.append("saved")

    def reconsider(self) -> None:
        """Remember it."""
        self.told.append("reconsider")


@pytest.mark.parametrize(
    ("digest", "expected"),
    [
        ("xxh3-128:1", ["divert", "held back", "saved", "let go", "reconsider"]),
        (spooled_detail("1"), ["divert", "held back", "let go", "reconsider"]),
    ],
    ids=["in storage", "spooled"],
)
def test_an_older_one_of_a_path_is_superseded_before_it_may_be_sent(
    digest: str, expected: list[str], session_of: Callable[[str], tuple[Session, Sink]]
) -> None:
    """Else the thread that publishes would send it after the newer one."""
    session, sink = session_of("spool")
    spool: Any = OrderOfASave()
    session.alone.spooling = spool
    staged = Staged(path="", size_bytes=1, digest=digest)

    session.alone.save(Asked(session.storage, "memory://x", lambda _token: staged))

    assert spool.told == expected
    published = [event for event in sink.events if isinstance(event, CheckpointPublished)]
    assert len(published) == ("saved" in expected)


def test_a_tuners_file_is_never_spooled(session_of: Callable[[str], tuple[Session, Sink]]) -> None:
    """The spool is not asked."""
    session, _ = session_of("spool")
    spool: Any = OrderOfASave()
    session.alone.spooling = spool

    session.alone.save(Asked(session.storage, "memory://.lr_find_1.ckpt", lambda _token: None))

    assert spool.told == []
