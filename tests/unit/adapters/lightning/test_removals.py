# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When a removal that one rank was asked for is carried out."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.lightning.removals import Removals
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import CallTimeoutError, JointError
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.calls import Token
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken


class Sink:
    """Forgets every event."""

    def emit(self, event: Event) -> None:
        """Forget it."""


@pytest.fixture
def make_session(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Make rank 0's session; it works alone, and the other ranks have long been everywhere."""
    sessions: list[Session] = []

    def make(*, world_size: int, max_attempts: int = 5) -> Session:
        member = Member(
            keys=Keys(run_id="run", incarnation="1"),
            rank=0,
            world_size=world_size,
            timeout_s=10.0,
            beat_s=1.0,
            on_outage="wait",
            store_patience_s=10.0,
        )
        store = MemoryStore()
        for rank in range(1, world_size):
            store.set(member.keys.joint("arrived", rank), b"1000")
        driver = Driver(store=store, clock=SystemClock(), dice=SystemDice(), sink=Sink())
        retry = RetryPolicy(
            base_delay_s=0.01,
            throttle_base_delay_s=0.01,
            max_delay_s=0.02,
            max_attempts=max_attempts,
        )
        policy = Policy(retry=retry, breaker=BreakerConfig(), classify=classify)
        storage = Storage({}, spool=lambda: str(tmp_path))
        sessions.append(Session(member=member, policy=policy, driver=driver, storage=storage))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint that is to be removed."""
    path = tmp_path / "old.ckpt"
    path.touch()
    return path


def asked_to_remove(session: Session, path: Path) -> list[str]:
    """Ask for the removal, and return what has been removed so far."""
    removed: list[str] = []

    def remove(token: CancelToken) -> None:
        session.storage.remove(str(path), token)
        removed.append(path.name)

    session.remove(Asked(session.storage, str(path), remove))
    return removed


def test_the_only_rank_removes_at_once(make_session: Callable[..., Session], old: Path) -> None:
    """There is nobody to fall out of step with."""
    session = make_session(world_size=1)

    assert asked_to_remove(session, old) == ["old.ckpt"]


def test_nothing_to_remove_is_no_sign_that_storage_is_well(
    make_session: Callable[..., Session], old: Path
) -> None:
    """It was not asked, so a row of failures goes on past such a removal."""
    session = make_session(world_size=2, max_attempts=2)
    folder = f"{old.parent}/"

    def fail(_token: CancelToken) -> None:
        raise ConnectionResetError

    with pytest.raises(JointError):
        session.on_rank_zero("ask", folder, fail, kind="write")
    session.clear_up(folder)

    assert session.alone.breakers.joint_circuit(folder, "write").window.failures == 2


def test_one_of_several_ranks_waits_for_the_others(
    make_session: Callable[..., Session], old: Path
) -> None:
    """Another rank may not have been asked, so a removal takes no number of its own."""
    session = make_session(world_size=2)
    operations = session.operations

    removed = asked_to_remove(session, old)

    assert (removed, session.operations) == ([], operations)
    session.clear_up(f"{old.parent}/")
    assert removed == ["old.ckpt"]


def test_what_comes_next_finds_the_removal_done(
    make_session: Callable[..., Session], old: Path
) -> None:
    """Whoever asks outside a save point, a callback of the user's, is not left with full disks."""
    session = make_session(world_size=2)
    removed = asked_to_remove(session, old)

    exists = session.exists(str(old))

    assert (exists, removed) == (False, ["old.ckpt"])


def test_a_removal_that_fails_does_not_fail_what_comes_next(
    make_session: Callable[..., Session], tmp_path: Path
) -> None:
    """It stays to be done, and is tried again with the next operation."""
    session = make_session(world_size=2)
    refusals = [PermissionError("not now")]
    removed: list[str] = []

    def remove(token: CancelToken) -> None:
        token.raise_if_cancelled()
        if refusals:
            raise refusals.pop()
        removed.append("old.ckpt")

    session.remove(Asked(session.storage, str(tmp_path / "old.ckpt"), remove))

    first = session.exists(str(tmp_path))
    assert (first, removed) == (True, [])
    session.exists(str(tmp_path))
    assert removed == ["old.ckpt"]


def test_what_is_left_at_the_end_is_removed_then(
    make_session: Callable[..., Session], old: Path
) -> None:
    """Nothing that was asked for is forgotten where no operation follows."""
    session = make_session(world_size=2)
    removed = asked_to_remove(session, old)

    session.close()

    assert removed == ["old.ckpt"]


def test_an_abandoned_removal_takes_nothing_off_its_successors_list(
    make_session: Callable[..., Session], tmp_path: Path
) -> None:
    """One that hung and comes back late does not make another checkpoint be forgotten."""
    session = make_session(world_size=2)
    abandoned = Token()
    removed: list[str] = []

    def remove_late(token: CancelToken) -> None:
        if token is abandoned:
            # While it hung, its caller gave up and the next attempt removed the file.
            abandoned.abandon()
            del session._removals._asked[0]
        removed.append("a.ckpt")

    session.remove(Asked(session.storage, str(tmp_path / "a.ckpt"), remove_late))
    session.remove(
        Asked(session.storage, str(tmp_path / "b.ckpt"), lambda _token: removed.append("b.ckpt"))
    )

    with pytest.raises(CallTimeoutError):
        session._removals.carry_out(abandoned)

    assert "b.ckpt" not in removed
    session.clear_up(f"{tmp_path}/")
    assert removed[-1] == "b.ckpt"


def test_a_removal_that_was_interrupted_is_not_begun_again_at_the_end(
    make_session: Callable[..., Session], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever leaves does not wait for the very call that it has just left."""
    session = make_session(world_size=2)
    begun: list[str] = []

    def remove(_token: CancelToken) -> None:
        begun.append("old.ckpt")
        raise SystemExit

    session.remove(Asked(session.storage, str(tmp_path / "old.ckpt"), remove))
    with pytest.raises(SystemExit):
        session.exists(str(tmp_path))

    session.close()

    assert begun == ["old.ckpt"]
    assert "remove by hand" in caplog.text


def test_a_removal_that_waits_costs_no_operation_and_no_request(
    make_session: Callable[..., Session], old: Path
) -> None:
    """It is carried out before whatever comes next, once a newer checkpoint is verified."""
    session = make_session(world_size=2)
    session.alone.retaining.directories = lambda: [str(old.parent)]
    removed = asked_to_remove(session, old)

    session.clear_up(f"{old.parent}/")
    session.exists(str(old))
    waiting = (list(removed), session.operations)
    with session.alone.retaining.saving(f"{old.parent}/new.ckpt"):
        pass
    session.exists(str(old))

    assert waiting == ([], 2)
    assert (removed, session.operations) == (["old.ckpt"], 3)


def test_what_is_no_checkpoint_is_removed_whatever_is_known(
    make_session: Callable[..., Session], old: Path
) -> None:
    """The rest of a save that has failed is nobody's last good one."""
    session = make_session(world_size=2)
    session.alone.retaining.directories = lambda: [str(old.parent)]
    removed: list[str] = []

    session.remove_later(
        Asked(session.storage, str(old), lambda _token: removed.append("old.ckpt"))
    )
    session.exists(str(old))

    assert removed == ["old.ckpt"]


def test_a_removal_that_still_waits_at_the_end_is_not_carried_out(
    make_session: Callable[..., Session], old: Path
) -> None:
    """The last good checkpoint is there for the next start."""
    session = make_session(world_size=2)
    session.alone.retaining.directories = lambda: [str(old.parent)]
    removed = asked_to_remove(session, old)

    session.close()

    assert (removed, old.exists()) == ([], True)


def test_what_is_written_again_is_not_removed(
    make_session: Callable[..., Session], old: Path
) -> None:
    """The removal was about what had that name before."""
    session = make_session(world_size=2)
    session.alone.retaining.directories = lambda: [str(old.parent)]
    removed = asked_to_remove(session, old)

    for name in ("old.ckpt", "new.ckpt"):
        with session.alone.retaining.saving(f"{old.parent}/{name}"):
            pass
    session.exists(str(old))
    session.close()

    assert removed == []


# What one save replaces, in a time that is given --------------------------------------------------


@pytest.fixture
def replaced(make_session: Callable[..., Session], tmp_path: Path) -> Callable[..., Removals]:
    """Ask for the removal of files that one verified save has replaced."""
    session = make_session(world_size=2)
    newest = str(tmp_path / "new.ckpt")
    with session.alone.retaining.saving(newest):
        pass

    def ask(*works: Callable[[CancelToken], object]) -> Removals:
        removals = Removals(session.alone)
        for number, work in enumerate(works):
            url = str(tmp_path / f"old-{number}.ckpt")
            removals.ask(Asked(session.storage, url, work), replaced_by=newest)
        return removals

    return ask


def test_what_was_replaced_is_removed_in_the_time_that_is_given(
    replaced: Callable[..., Removals], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left, and nothing is said."""
    removed: list[int] = []

    replaced(lambda _token: removed.append(0), lambda _token: removed.append(1)).finish(5.0)

    assert removed == [0, 1]
    assert "remove by hand" not in caplog.text


@pytest.mark.parametrize("within_s", [0.0, -1.0])
def test_without_time_no_removal_is_begun(
    within_s: float, replaced: Callable[..., Removals], caplog: pytest.LogCaptureFixture
) -> None:
    """What is left is named."""
    removed: list[int] = []

    replaced(lambda _token: removed.append(0)).finish(within_s)

    assert removed == []
    assert "old-0.ckpt (there was no time left)" in caplog.text


def test_no_removal_is_begun_once_the_time_is_over(
    replaced: Callable[..., Removals], caplog: pytest.LogCaptureFixture
) -> None:
    """One that marks its progress is not cut off, and the next is left."""
    removed: list[int] = []
    ended = threading.Event()

    def slow(token: CancelToken) -> None:
        for _ in range(8):
            ended.wait(0.05)
            token.progress()
        removed.append(0)

    replaced(slow, lambda _token: removed.append(1)).finish(0.3)

    assert removed == [0]
    assert "old-1.ckpt (there was no time left)" in caplog.text
    assert "old-0.ckpt" not in caplog.text


def test_a_removal_that_hangs_is_left_behind(
    replaced: Callable[..., Removals], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for it has something else to do; all that is left is named."""
    released = threading.Event()

    replaced(lambda _token: released.wait(30.0), lambda _token: None).finish(0.1)
    released.set()

    assert "old-0.ckpt" in caplog.text
    assert "old-1.ckpt" in caplog.text
