# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps training alive through outages of what a job shares, without making the outage worse.

The public names are loaded when they are first used: importing this package loads neither torch nor
Lightning nor fsspec, so that a launcher, a test or the command line may import it at no cost.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from lightning_resilience.adapters.dcp_reader import ResilientReader
    from lightning_resilience.adapters.dcp_writer import ResilientWriter
    from lightning_resilience.adapters.guard import Guard
    from lightning_resilience.adapters.lightning.callback import ResilienceCallback
    from lightning_resilience.adapters.lightning.resilient_io import ResilientCheckpointIO
    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.errors import (
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
        ResilienceError,
        RetriesExhaustedError,
        ScenarioError,
        StoreError,
        StoreUnavailableError,
    )

    __version__: str

__all__ = [
    "AdmissionConfig",
    "BreakerConfig",
    "BudgetConfig",
    "BudgetExhaustedError",
    "CallTimeoutError",
    "CheckpointError",
    "CircuitOpenError",
    "ConfigError",
    "CorruptCheckpointError",
    "CorruptRecordError",
    "Guard",
    "JointError",
    "JointUnavailableError",
    "PeerFailedError",
    "ResilienceCallback",
    "ResilienceError",
    "ResilientCheckpointIO",
    "ResilientReader",
    "ResilientWriter",
    "RetriesExhaustedError",
    "RetryPolicy",
    "ScenarioError",
    "StoreError",
    "StoreUnavailableError",
    "__version__",
]

_HOMES: Final = {
    "AdmissionConfig": "lightning_resilience.core.admission",
    "BreakerConfig": "lightning_resilience.core.breaker_config",
    "BudgetConfig": "lightning_resilience.core.budget",
    "Guard": "lightning_resilience.adapters.guard",
    "ResilienceCallback": "lightning_resilience.adapters.lightning.callback",
    "ResilientCheckpointIO": "lightning_resilience.adapters.lightning.resilient_io",
    "ResilientReader": "lightning_resilience.adapters.dcp_reader",
    "ResilientWriter": "lightning_resilience.adapters.dcp_writer",
    "RetryPolicy": "lightning_resilience.core.retry",
}
_ERRORS: Final = "lightning_resilience.errors"


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    if name == "__version__":
        value: object = import_module("importlib.metadata").version("lightning-resilience")
    else:
        value = getattr(import_module(_HOMES.get(name, _ERRORS)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
