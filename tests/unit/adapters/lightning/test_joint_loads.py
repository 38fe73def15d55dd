# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A load is joint with work on every rank: two ranks as two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.lightning.work import Asked, HandedOver
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import JointError
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken


class Sink:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Session]]:
    """Two ranks' sessions on one store."""
    store = MemoryStore()
    sessions = []
    for rank in range(2):
        member = Member(
            keys=Keys(run_id="run", incarnation="1"),
            rank=rank,
            world_size=2,
            timeout_s=10.0,
            beat_s=1.0,
            on_outage="wait",
            store_patience_s=10.0,
        )
        driver = Driver(
            store=store.watcher(), clock=SystemClock(), dice=SystemDice(rank=rank), sink=Sink()
        )
        retry = RetryPolicy(base_delay_s=0.01, throttle_base_delay_s=0.01, max_delay_s=0.02)
        policy = Policy(retry=retry, breaker=BreakerConfig(), classify=classify)
        storage = Storage({}, spool=lambda: str(tmp_path))
        sessions.append(Session(member=member, policy=policy, driver=driver, storage=storage))
    yield sessions
    for session in sessions:
        session.close()


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make the calls at the same time; return what each returned or raised."""

    def told(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except JointError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(told, calls))


def loads(
    ranks: list[Session], url: str, *asked: Callable[[CancelToken], Any]
) -> list[Callable[[], Any]]:
    """Return each rank's load."""
    return [
        partial(session.load, url, Asked(session.storage, url, ask))
        for session, ask in zip(ranks, asked, strict=True)
    ]


def missing(_token: CancelToken) -> None:
    """Be a read of a file that is not there."""
    raise FileNotFoundError


def test_each_rank_gets_what_it_has_read(ranks: list[Session], tmp_path: Path) -> None:
    """And nothing of it goes through the shared store."""
    url = str(tmp_path / "a.ckpt")

    loaded = together(loads(ranks, url, lambda _token: "zero" * 100, lambda _token: "one"))

    assert loaded == ["zero" * 100, "one"]
    key = ranks[0].member.keys.joint("final", ranks[0].operations)
    assert b"zero" not in (ranks[0].driver.store.get(key) or b"zero")


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_read_fails_both(
    failing: int, ranks: list[Session], tmp_path: Path
) -> None:
    """With one text, and the original as the cause where it arose."""
    asked: list[Callable[[CancelToken], Any]] = [lambda _token: "read"] * 2
    asked[failing] = missing

    errors = together(loads(ranks, str(tmp_path / "a.ckpt"), *asked))

    assert str(errors[0]) == str(errors[1])
    assert {error.first_rank for error in errors} == {failing}
    assert isinstance(errors[failing].__cause__, FileNotFoundError)
    assert errors[1 - failing].__cause__ is None


def test_a_load_is_a_call_that_all_ranks_make_at_once(
    ranks: list[Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is told so, and of a save that it is not."""
    url = str(tmp_path / "a.ckpt")
    calls: list[Any] = []
    for session in ranks:
        monkeypatch.setattr(session.alone, "call", noting(calls, session.alone.call))

    together(loads(ranks, url, lambda _token: None, lambda _token: None))
    save = Asked(ranks[0].storage, url, lambda _token: None)
    together([partial(ranks[0].save, url, save), partial(ranks[1].save, url, None)])

    assert [(call.operation, call.collective) for call in calls] == [
        *(("load", True), ("load", True), ("save", False))
    ]


def noting(calls: list[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes what ``inner`` returns."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(inner(*args, **kwargs))
        return calls[-1]

    return call


def test_what_is_handed_over_is_made_once_and_fails_both(
    ranks: list[Session], tmp_path: Path
) -> None:
    """It is neither repeated nor counted: whoever is handed it does both."""
    url = str(tmp_path / "a.ckpt")
    made: list[str] = []

    def fail() -> None:
        made.append(url)
        message = "of an earlier write"
        raise ConnectionResetError(message)

    work = HandedOver(ranks[0].storage, url, fail)
    errors = together(
        [
            partial(ranks[0].hand_over, "save", url, work),
            partial(ranks[1].hand_over, "save", url, None),
        ]
    )

    assert len(made) == 1
    assert str(errors[0]) == str(errors[1])
    assert isinstance(errors[0].__cause__, ConnectionResetError)
    assert ranks[0].reports() == {}
