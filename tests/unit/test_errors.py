# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Errors say whose fault it is, and survive the way between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from lightning_resilience import errors
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CallTimeoutError,
    CheckpointError,
    CircuitOpenError,
    ConfigError,
    CorruptCheckpointError,
    CorruptRecordError,
    DrillFailedError,
    InvalidTransitionError,
    JointError,
    JointUnavailableError,
    PeerFailedError,
    ResilienceError,
    RetriesExhaustedError,
    ScenarioError,
    StoreError,
    StoreUnavailableError,
)


EXAMPLES: list[ResilienceError] = [
    ResilienceError("text"),
    ConfigError("text"),
    ScenarioError("text", field="faults[0].for_s", source="outage.yaml", line=7),
    CircuitOpenError("text", dependency="s3://b:write", retry_after_s=7.5, epoch=4, reason="why"),
    BudgetExhaustedError("text", dependency="s3://b:write", used=20, quota=20, window_s=60.0),
    RetriesExhaustedError(
        "text", attempts=5, reason="max_attempts=5", failure="transient", last_error="reset"
    ),
    JointError("text", op="save", seq=3, outcome="permanent", first_rank=1),
    JointUnavailableError("text", op="save", seq=3, first_rank=1, lost_ranks=(1, 4)),
    PeerFailedError("text", rank=1, kind="error", error="ValueError: bad"),
    CheckpointError("text"),
    CorruptCheckpointError("text"),
    CallTimeoutError("text"),
    InvalidTransitionError("text"),
    DrillFailedError("text", seed=7, step=12, check="I2 History"),
    StoreError("text"),
    StoreUnavailableError("text"),
    CorruptRecordError("text", key="lr/run/store_id", found_version=2),
]


def test_every_error_has_an_example() -> None:
    """The list above holds each error once."""
    assert sorted(type(error).__name__ for error in EXAMPLES) == sorted(errors.__all__)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(error: ResilienceError, protocol: int) -> None:
    """Launchers and pools send errors between processes: type, text and attributes arrive."""
    arrived = pickle.loads(pickle.dumps(error, protocol))

    assert type(arrived) is type(error)
    assert str(arrived) == str(error) == "text"
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_can_be_copied(error: ResilienceError) -> None:
    """A copy, shallow or deep, says what the original says."""
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_what_was_added_later_survives_as_well(error: ResilienceError) -> None:
    """Attributes that were set after the error was made travel with it."""
    changed = copy.copy(error)
    changed.attempts = 3  # type: ignore[attr-defined]

    assert pickle.loads(pickle.dumps(changed)).attempts == 3


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ConfigError, ValueError),
        (CallTimeoutError, TimeoutError),
        (JointUnavailableError, JointError),
        (StoreUnavailableError, StoreError),
        (CorruptRecordError, StoreError),
    ],
)
def test_errors_are_what_callers_expect(kind: type[Exception], base: type[Exception]) -> None:
    """Who catches the standard error, or the wider one, catches ours."""
    assert issubclass(kind, base)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_one_of_ours(name: str) -> None:
    """One except clause catches everything that this package raises on purpose."""
    assert issubclass(getattr(errors, name), ResilienceError)
    assert not issubclass(getattr(errors, name), KeyboardInterrupt | SystemExit)


def test_our_fault_is_not_theirs() -> None:
    """A store that does not answer is no corrupt record, and neither is a bug of ours."""
    assert not issubclass(StoreUnavailableError, CorruptRecordError)
    assert not issubclass(InvalidTransitionError, StoreError)
    assert not issubclass(CircuitOpenError, StoreError)


def test_the_tree_in_the_docstring_is_complete() -> None:
    """The module's docstring draws every error that there is."""
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in errors.__all__)
