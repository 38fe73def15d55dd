# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Never run: type checkers read it, and so see the public names as a user's code does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import assert_type

import lightning_resilience
from lightning_resilience import (
    AdmissionConfig,
    BreakerConfig,
    BudgetConfig,
    BudgetExhaustedError,
    CallTimeoutError,
    CheckpointError,
    CircuitOpenError,
    ConfigError,
    CorruptCheckpointError,
    CorruptRecordError,
    JointError,
    JointUnavailableError,
    PeerFailedError,
    ResilienceCallback,
    ResilienceError,
    ResilientCheckpointIO,
    ResilientReader,
    ResilientWriter,
    RetriesExhaustedError,
    RetryPolicy,
    ScenarioError,
    StoreError,
    StoreUnavailableError,
)


if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

assert_type(lightning_resilience.__version__, str)

policy = RetryPolicy(base_delay_s=1, max_delay_s=30.0, max_attempts=5, deadline_s=1800)
assert_type(policy.max_attempts, int)
assert_type(policy.max_delay_s, float)
breaker = BreakerConfig(trip_failures=3, window_s=600, open_for_s=10, max_open_for_s=60)
assert_type(breaker.trip_failures, int)
budget = BudgetConfig(retry_ratio=0.1, retry_floor=20, budget_window_s=60)
assert_type(budget.retry_floor, int)
admission = AdmissionConfig(slot_lease_s=30, beat_every_s=5)
assert_type(admission.slot_lease_s, float)
RetryPolicy(5)  # type: ignore[call-arg]  # options have names
RetryPolicy(max_attempts="five")  # type: ignore[arg-type]
RetryPolicy(max_retries=4)  # type: ignore[call-arg]
policy.max_attempts = 6  # type: ignore[misc]  # configs are frozen

callback: Callback = ResilienceCallback(retry=policy, breaker=breaker, on_outage="wait")
Trainer(callbacks=[ResilienceCallback(), callback])
checkpoint_io = ResilientCheckpointIO(retry=policy, breaker=breaker, staging=None)
Trainer(plugins=[checkpoint_io, ResilientCheckpointIO(TorchCheckpointIO(), staging=False)])
ResilientCheckpointIO(staging="no")  # type: ignore[arg-type]

writer: StorageWriter = ResilientWriter(
    "s3://bucket/step-1", retry=policy, joint={"on_outage": "fail"}
)
reader: StorageReader = ResilientReader("s3://bucket/step-1", breaker=breaker, joint=False)
ResilientWriter("s3://bucket/step-1", joint=False)  # type: ignore[arg-type]  # torch tells who is alone
ResilientReader()  # type: ignore[call-arg]


def narrow(error: ResilienceError) -> None:
    """Every error has its facts as typed attributes."""
    if isinstance(error, JointUnavailableError):
        assert_type(error.lost_ranks, tuple[int, ...])
    elif isinstance(error, JointError):
        assert_type(error.first_rank, int | None)
    elif isinstance(error, CircuitOpenError):
        assert_type(error.retry_after_s, float | None)
    elif isinstance(error, RetriesExhaustedError):
        assert_type(error.attempts, int)
    elif isinstance(error, BudgetExhaustedError):
        assert_type(error.quota, int)
    elif isinstance(error, CorruptRecordError):
        assert_type(error.key, str)
    elif isinstance(error, ScenarioError):
        assert_type(error.line, int | None)


def tell(error: PeerFailedError) -> None:
    """The error of a rank that stops for another's names it."""
    assert_type(error.rank, int | None)
    assert_type(error.kind, str)


def handle(error: Exception) -> str:
    """Errors can be caught by what a user already catches."""
    try:
        raise error
    except ConfigError as wrong:
        as_value_error: ValueError = wrong
        return str(as_value_error)
    except CallTimeoutError as slow:
        as_timeout: TimeoutError = slow
        return str(as_timeout)
    except StoreUnavailableError as gone:
        as_store_error: StoreError = gone
        return str(as_store_error)
    except CorruptCheckpointError as damaged:
        as_wrong: CheckpointError = damaged
        return str(as_wrong)
    except CheckpointError as wrong:
        return str(wrong)
