# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the others when it leaves, what it learns, and what its user sees."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_resilience.adapters.lightning.failing import Failing
from lightning_resilience.adapters.telemetry import LoggingSink
from lightning_resilience.core.incident import IncidentRecord, PeerInterruption
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import decode
from lightning_resilience.errors import JointError, PeerFailedError, StoreUnavailableError
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


KEYS = Keys(run_id="run", incarnation="1")
INCIDENT = KEYS.joint("incident", 0)
HAS_NOTES = sys.version_info >= (3, 11)
ECHO = RuntimeError("[/third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
HANG_S = 10.0


class Gone(MemoryStore):
    """A store that does not answer."""

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Fail."""
        del key, expected, desired
        message = "no answer"
        raise StoreUnavailableError(message)

    def set(self, key: str, value: bytes) -> None:
        """Fail."""
        self.compare_and_set(key, b"", value)


@pytest.fixture
def rank() -> Iterator[Callable[..., Failing]]:
    """Make ranks that share a store."""
    made: list[Failing] = []
    shared = MemoryStore()

    def make(number: int, store: MemoryStore | None = None, **options: Any) -> Failing:
        driver = Driver(
            store=store or shared,
            clock=SystemClock(),
            dice=SystemDice(rank=number),
            sink=LoggingSink(rank=number),
            **options,
        )
        member = Member(
            keys=KEYS,
            rank=number,
            world_size=3,
            timeout_s=5.0,
            beat_s=1.0,
            on_outage="wait",
            store_patience_s=1.0,
        )
        made.append(Failing(member, driver=driver, step=lambda: 7))
        make.store = shared  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for failing in made:
        failing.close()


def standing(rank: Any) -> IncidentRecord | None:
    """Return the incident that stands."""
    raw = rank.store.get(INCIDENT)
    return None if raw is None else decode(IncidentRecord, raw, key=INCIDENT)


def learnt(failing: Failing) -> PeerFailedError:
    """Return what the rank's waits end with, once it has learnt of another."""
    pause = threading.Event()
    for _ in range(int(HANG_S / 0.02)):
        try:
            failing.check()
        except PeerInterruption as interruption:
            return interruption.error
        pause.wait(0.02)
    message = "it has not learnt of another rank"
    raise AssertionError(message)


def test_the_first_to_leave_keeps_its_exception_and_is_recorded(rank: Any) -> None:
    """It raises what it would have raised, without a note, and the record has rank and step."""
    error = ValueError("bad")

    assert rank(1).leave(error) is error

    assert getattr(error, "__notes__", []) == []
    found = standing(rank)
    assert found is not None
    assert (found.rank, found.kind, found.step, found.error) == (1, "error", 7, "ValueError: bad")


def test_a_later_exception_of_its_own_gets_a_note(rank: Any) -> None:
    """A rank with a cause of its own shows it, and says who was first."""
    one, two = rank(0), rank(1)
    one.leave(ValueError("first"))
    error = TypeError("second")

    assert two.leave(error) is error

    notes = getattr(error, "__notes__", [])
    assert len(notes) == HAS_NOTES
    assert all("Rank 0 failed first" in note for note in notes)


def test_an_echo_gives_way_to_an_error_that_names_the_rank(rank: Any) -> None:
    """A broken transport is the cause of what its user sees, not more."""
    one, two = rank(0), rank(1)
    one.leave(ValueError("first"))

    shown = two.leave(ECHO)

    assert isinstance(shown, PeerFailedError)
    assert (shown.rank, shown.error) == (0, "ValueError: first")
    assert shown.__cause__ is ECHO


def test_what_all_ranks_share_is_no_incident(rank: Any) -> None:
    """A joint verdict, and a stop that was agreed on, are told to nobody."""
    one, two = rank(0), rank(1)
    verdict, stop = JointError("all ranks"), SIGTERMException()
    two.agree()

    assert one.leave(verdict) is verdict
    assert two.leave(stop) is stop

    assert standing(rank) is None
    assert not one.leaves_alone
    assert not two.leaves_alone


def test_a_rank_leaves_once(rank: Any) -> None:
    """An exception on the way out changes nothing of what was told."""
    failing = rank(0)
    failing.leave(ValueError("first"))
    later = OSError("in a callback")

    assert failing.leave(later) is later

    found = standing(rank)
    assert found is not None
    assert found.error == "ValueError: first"
    assert failing.leaves_alone


def test_others_learn_of_it_in_their_waits_until_they_leave_themselves(rank: Any) -> None:
    """A wait ends with the cause; what is saved on the way out may wait again."""
    one, two = rank(0), rank(1)
    one.leave(ValueError("first"))

    error = learnt(two)
    assert isinstance(two.leave(PeerInterruption(error)), PeerFailedError)

    two.check()
    assert "Rank 0 failed first, after step 7, with ValueError: first" in str(error)


def test_another_thread_is_not_interrupted(rank: Any) -> None:
    """What a background thread writes for this rank has its own end."""
    one, two = rank(0), rank(1)
    one.leave(ValueError("first"))
    learnt(two)
    raised: list[BaseException] = []

    def check() -> None:
        try:
            two.check()
        except BaseException as error:  # noqa: BLE001 - looked at below
            raised.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    thread.join(HANG_S)

    assert raised == []


def test_two_that_were_told_to_stop_leave_each_with_its_own_exception(rank: Any) -> None:
    """A scheduler's signal to all ranks is not shown as one rank's failure."""

    def told_to_stop() -> None:
        raise SIGTERMException

    one, two = rank(0), rank(1, interrupt=told_to_stop)
    one.leave(SIGTERMException())

    with pytest.raises(SIGTERMException):
        learnt(two)


def test_a_store_that_is_away_costs_a_log_line(rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The exception is shown as it is, and the log says that nobody was told."""
    failing = rank(1, Gone())
    error = ValueError("bad")

    assert failing.leave(error) is error

    assert "the other ranks could not be told of ValueError: bad" in caplog.text
