# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is done about a failed save: counted, reported, and raised where it is one too many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.lightning.patches import Patches
from lightning_resilience.adapters.lightning.tolerance import Tolerance
from lightning_resilience.core.checkpoints import CheckpointConfig
from lightning_resilience.errors import JointError, PeerFailedError


if TYPE_CHECKING:
    from collections.abc import Callable


class Trainer:
    """Runs a stage."""

    def __init__(self) -> None:
        self.global_step = 7
        self.stage: Callable[[], Any] = str

    def _run_stage(self) -> Any:
        return self.stage()


class Session:
    """Counts joint operations, and keeps the events."""

    def __init__(self, limit: int, on_outage: str = "wait") -> None:
        self.checkpoints = CheckpointConfig(max_consecutive_save_failures=limit)
        self.operations = 0
        self.is_leaving = False
        self.member = SimpleNamespace(on_outage=on_outage)
        self.events: list[Any] = []
        self.driver = SimpleNamespace(sink=SimpleNamespace(emit=self.events.append))


def make(limit: int, on_outage: str = "wait") -> tuple[Trainer, Any, Tolerance]:
    """Make a tolerance with what it stands on."""
    trainer, session = Trainer(), Session(limit, on_outage)
    fake: Any = session
    return trainer, fake, Tolerance(trainer, fake, Patches())


def denied(text: str = "save failed") -> JointError:
    """Return what all ranks raise for a save that was refused."""
    error = JointError(text, op="save", seq=3, outcome="permanent", first_rank=0)
    error.in_step = True
    return error


def failing(error: BaseException) -> Callable[[], None]:
    """Return a save that fails with this."""

    def save() -> None:
        raise error

    return save


def test_by_default_the_first_failure_is_raised_as_it_is() -> None:
    """Nothing is wrapped, and nothing else is reported."""
    _, session, tolerance = make(1)
    error = denied()

    with pytest.raises(JointError) as caught:
        tolerance.attempt("top", failing(error))

    assert caught.value is error
    assert session.events == []


def test_below_the_limit_training_goes_on_with_one_report() -> None:
    """It has the step and the numbers."""
    _, session, tolerance = make(3)

    tolerance.attempt("top", failing(denied()))

    (event,) = session.events
    assert (event.step, event.number, event.limit) == (7, 1, 3)


def test_at_the_limit_it_is_raised_with_its_first_cause() -> None:
    """The cause on this rank stays the cause, and all failures are named."""
    _, session, tolerance = make(2)
    error = denied("save of B failed")
    error.__cause__ = PermissionError("Access Denied")
    tolerance.attempt("top", failing(denied("save of A failed")))

    with pytest.raises(JointError, match=r"save of B.*number 2.*At step 7, save of A") as caught:
        tolerance.attempt("top", failing(error))

    assert caught.value.__cause__ is error.__cause__
    assert len(session.events) == 1


def test_a_success_begins_the_row_anew() -> None:
    """And it leaves nothing to be told at the end."""
    trainer, session, tolerance = make(2)

    def save() -> None:
        session.operations += 1

    tolerance.attempt("top", failing(denied()))
    tolerance.attempt("top", save)
    tolerance.attempt("top", failing(denied()))
    tolerance.attempt("top", save)

    assert [event.number for event in session.events] == [1, 1]
    assert trainer._run_stage() == ""


def test_a_save_point_that_saves_nothing_is_no_success() -> None:
    """The metric was no better, so storage was not asked."""
    trainer, _, tolerance = make(2)
    tolerance.attempt("top", failing(denied()))

    tolerance.attempt("top", lambda: None)

    with pytest.raises(JointError, match="number 2 in a row"):
        tolerance.attempt("top", failing(denied()))
    with pytest.raises(JointError, match="no save has made up"):
        trainer._run_stage()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        KeyboardInterrupt(),
        PeerFailedError("gone"),
        JointError("not in step", op="save", outcome="permanent"),
    ],
)
def test_nothing_else_is_tolerated(error: BaseException) -> None:
    """Only what all ranks raise at this point is a failed save."""
    _, session, tolerance = make(9)

    with pytest.raises(type(error)) as caught:
        tolerance.attempt("top", failing(error))

    assert caught.value is error
    assert session.events == []


def test_nothing_is_tolerated_once_training_is_left() -> None:
    """No later save could make up for it."""
    _, session, tolerance = make(9)
    session.is_leaving = True
    error = denied()

    with pytest.raises(JointError) as caught:
        tolerance.attempt("last", failing(error))

    assert caught.value is error


def test_an_exception_that_ends_training_stays_what_is_raised() -> None:
    """What was tolerated before is in the log; it does not take the exception's place."""
    trainer, _, tolerance = make(9)
    tolerance.attempt("top", failing(denied()))
    trainer.stage = failing(ValueError("a bug"))

    with pytest.raises(ValueError, match="a bug"):
        trainer._run_stage()


def test_what_the_stage_returns_is_returned() -> None:
    """Where all is well, nobody notices."""
    trainer, _, _tolerance = make(9)
    trainer.stage = lambda: "result"

    assert trainer._run_stage() == "result"


@pytest.mark.parametrize(
    ("on_outage", "outcome", "is_skipped"),
    [
        ("skip", "transient", True),
        ("skip", "throttle", True),
        ("skip", "permanent", False),
        ("skip", "lost", False),
        ("wait", "transient", False),
        ("fail", "transient", False),
    ],
)
def test_under_skip_an_outage_leaves_a_save_point_out(
    on_outage: str, outcome: str, *, is_skipped: bool
) -> None:
    """As often as it takes, and nothing else: a denial is no outage."""
    _, session, tolerance = make(1, on_outage)
    error = JointError("save failed", op="save", seq=3, outcome=outcome, first_rank=0)
    error.in_step = True

    for _ in range(3):
        if is_skipped:
            tolerance.attempt("kind", failing(error))
        else:
            with pytest.raises(JointError):
                tolerance.attempt("kind", failing(error))

    assert [type(event).__name__ for event in session.events] == ["SaveSkipped"] * 3 * is_skipped


def test_a_save_that_ends_training_is_not_skipped() -> None:
    """No later one makes up for it."""
    _, session, tolerance = make(1, "skip")
    session.is_leaving = True
    error = JointError("save failed", op="save", seq=3, outcome="transient", first_rank=0)
    error.in_step = True

    with pytest.raises(JointError):
        tolerance.attempt("kind", failing(error))
