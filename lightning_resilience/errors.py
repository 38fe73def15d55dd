# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every error that this package raises on purpose.

::

    ResilienceError
    ├── ConfigError (also ValueError)      the user's options; raised before training starts
    │   └── ScenarioError                  a drill's scenario; raised before anything is simulated
    ├── CircuitOpenError                   no permit: the dependency is ill
    ├── BudgetExhaustedError               no retry: the job has made all that it may make now
    ├── RetriesExhaustedError              the policy ended; the last failure is the cause
    ├── JointError                         all ranks agreed that an operation failed
    │   └── JointUnavailableError          this rank could not learn what the others agreed
    ├── PeerFailedError                    another rank has left, so this one stops
    ├── CheckpointError                    a checkpoint is not what was written
    │   └── CorruptCheckpointError         what is there is not what was saved
    ├── CallTimeoutError (also TimeoutError)  a call was abandoned at its timeout
    ├── InvalidTransitionError             a bug of ours
    ├── DrillFailedError                   a simulated job did not keep a promise; a bug of ours
    └── StoreError
        ├── StoreUnavailableError          their fault: the shared store did not answer
        └── CorruptRecordError             a record that does not decode

The class says whose fault it is; the text says what happened, on which rank, with the numbers, and
what to do next.
"""

from __future__ import annotations

from typing import Any


__all__ = [
    "BudgetExhaustedError",
    "CallTimeoutError",
    "CheckpointError",
    "CircuitOpenError",
    "ConfigError",
    "CorruptCheckpointError",
    "CorruptRecordError",
    "DrillFailedError",
    "InvalidTransitionError",
    "JointError",
    "JointUnavailableError",
    "PeerFailedError",
    "ResilienceError",
    "RetriesExhaustedError",
    "ScenarioError",
    "StoreError",
    "StoreUnavailableError",
]


class ResilienceError(Exception):
    """Base of every error that this package raises on purpose."""

    # Exceptions with keyword-only arguments do not survive the default reduction, and launchers
    # and process pools send exceptions between processes.
    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the text and the attributes."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[ResilienceError], args: tuple[Any, ...], state: dict[str, Any]
) -> ResilienceError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(ResilienceError, ValueError):
    """An option is out of range, unknown, or contradicts another one.

    Raised before training starts. The text names the option, its value and what is allowed.
    """


class ScenarioError(ConfigError):
    """A field of a drill's scenario is unknown, out of range, or contradicts another one.

    Args:
        message: What is wrong, and what is allowed.
        field: The field, as ``faults[0].for_s``; empty where it is the whole text that is wrong.
        source: Name of the file; empty for a scenario that was made in Python.
        line: Line of the file, the first is 1, if known.
    """

    def __init__(
        self, message: str, *, field: str = "", source: str = "", line: int | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.source = source
        self.line = line


class CircuitOpenError(ResilienceError):
    """A call was refused because the dependency's circuit is open.

    Args:
        message: What happened.
        dependency: Name of the dependency, without credentials.
        retry_after_s: Seconds until the next probe at the earliest, if known.
        epoch: Epoch of the breaker's record that refused the call.
        reason: Why the circuit is open.

    Attributes:
        attempts: Attempts that were made before the circuit refused another.
        last_error: One line about the last of them, empty where none was made.
    """

    def __init__(
        self,
        message: str,
        *,
        dependency: str = "",
        retry_after_s: float | None = None,
        epoch: int = 0,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.dependency = dependency
        self.retry_after_s = retry_after_s
        self.epoch = epoch
        self.reason = reason
        self.attempts = 0
        self.last_error = ""


class BudgetExhaustedError(ResilienceError):
    """A retry was denied by the job's budget, and the policy is not to wait for it.

    ``__cause__`` is the failure that was to be retried.

    Args:
        message: What happened.
        dependency: Name of the dependency, without credentials.
        used: Retries that the whole job has made in the window.
        quota: Retries that it may make.
        window_s: The window, in seconds.

    Attributes:
        attempts: Attempts that were made before the budget denied another.
        last_error: One line about the last of them.
    """

    def __init__(
        self,
        message: str,
        *,
        dependency: str = "",
        used: int = 0,
        quota: int = 0,
        window_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.dependency = dependency
        self.used = used
        self.quota = quota
        self.window_s = window_s
        self.attempts = 0
        self.last_error = ""


class RetriesExhaustedError(ResilienceError):
    """The retry policy ended without a success; ``__cause__`` is the last failure.

    Args:
        message: What happened.
        attempts: Attempts made, the first included.
        reason: Why no further attempt is made.
        failure: Failure class of the last attempt (see ``core.outcome``).
        last_error: One line about the last attempt's failure.
    """

    def __init__(
        self,
        message: str,
        *,
        attempts: int = 0,
        reason: str = "",
        failure: str = "",
        last_error: str = "",
    ) -> None:
        super().__init__(message)
        self.attempts = attempts
        self.reason = reason
        self.failure = failure
        self.last_error = last_error


class JointError(ResilienceError):
    """All ranks agreed that a joint operation failed.

    The type and the text are the same on every rank. On the rank where the first cause arose,
    ``__cause__`` is the original exception.

    Args:
        message: What happened, with the first cause and its rank.
        op: Name of the operation, for example ``save``.
        seq: Sequence number of the operation in this incarnation.
        outcome: Failure class that won (see ``core.outcome``).
        first_rank: Lowest rank that reported the winning class.

    Attributes:
        cause: Name of the class of the first cause; empty where there was none.
        in_step: Whether every rank raises this error at this point of the program. False where the
            ranks are not in lock-step, and for ``JointUnavailableError``.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        seq: int = 0,
        outcome: str = "",
        first_rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.op = op
        self.seq = seq
        self.outcome = outcome
        self.first_rank = first_rank
        self.cause = ""
        self.in_step = False


class JointUnavailableError(JointError):
    """This rank could not learn, within the bound, what the others agreed.

    Args:
        message: What happened.
        op: Name of the operation.
        seq: Sequence number of the operation.
        outcome: Failure class, normally ``lost``.
        first_rank: The rank that could not go on, if known.
        lost_ranks: Ranks that did not answer, as far as this rank knows.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        seq: int = 0,
        outcome: str = "lost",
        first_rank: int | None = None,
        lost_ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, op=op, seq=seq, outcome=outcome, first_rank=first_rank)
        self.lost_ranks = lost_ranks


class PeerFailedError(ResilienceError):
    """Another rank has left with an exception, so this one cannot go on either.

    ``__cause__`` is what this rank met because of that, for example the error of a collective that
    broke; the other rank's own exception is in that rank's process.

    Args:
        message: What happened, with the other rank and its exception.
        rank: The rank that left first, if known.
        kind: ``error``, ``signal`` (it was told to stop) or ``echo`` (it has only noticed that
            another one was gone); empty where that is not known.
        error: One line: type and text of that rank's exception; empty where it is not known.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, kind: str = "", error: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.error = error


class CheckpointError(ResilienceError):
    """A checkpoint in storage is not what was written."""


class CorruptCheckpointError(CheckpointError):
    """What is there under a checkpoint's name is not what was saved.

    By its manifest, or, where it has none, by the checksums of its archive.
    """


class CallTimeoutError(ResilienceError, TimeoutError):
    """A call made no progress for its timeout and was abandoned.

    Its thread may still be running; its cancel token is set and its result is discarded.

    Args:
        message: What happened.
        moved: How many bytes it had written, sent or read by then; empty where none were counted.
    """

    def __init__(self, message: str, *, moved: str = "") -> None:
        super().__init__(message)
        self.moved = moved


class InvalidTransitionError(ResilienceError):
    """A state machine was asked for a transition that does not exist. A bug of ours."""


class DrillFailedError(ResilienceError):
    """A simulated job did not keep a promise. A bug of ours, or of what is being tried.

    Args:
        message: What happened, with the numbers seen and the bound.
        seed: Seed of the world; with the scenario it replays the run.
        step: Entry of the agenda at which it was seen, counted from 1.
        check: Name of the promise and of the check that has seen it.
    """

    def __init__(self, message: str, *, seed: int = 0, step: int = 0, check: str = "") -> None:
        super().__init__(message)
        self.seed = seed
        self.step = step
        self.check = check


class StoreError(ResilienceError):
    """Something is wrong with the shared store or with what is in it."""


class StoreUnavailableError(StoreError):
    """The shared store did not answer. It may have executed the operation all the same.

    Args:
        message: What happened.
        is_refused: Whether the store's own host has said that no server is there: then it is away
            for everybody. False says nothing.
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class CorruptRecordError(StoreError):
    """A record in the shared store does not decode; it is reported, never guessed at.

    Args:
        message: What happened.
        key: Key of the record.
        found_version: Version found in the record, if it could be read.
    """

    def __init__(self, message: str, *, key: str = "", found_version: int | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.found_version = found_version
