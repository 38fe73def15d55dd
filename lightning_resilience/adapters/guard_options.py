# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options of a guard that stands alone: not in a joint operation, not in a ``fit``.

They are checked once, when the guard is made, and nothing is sent before they have been.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.config import build, check_relations, check_store
from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.core.validation import check_choice, check_kind
from lightning_resilience.errors import ConfigError
from lightning_resilience.ports import SharedStore


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from lightning_resilience.core.outcome import Classifier


__all__ = ["OPTIONS", "FunctionOptions", "GuardOptions", "check_travels", "guard_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """How a guard retries, breaks, classifies, and whom it shares that with.

    Args:
        retry: The retry policy.
        budget: The job's retry budget.
        breaker: The breakers' configuration.
        admission: How slots are kept.
        store: The shared store: a URL ``tcp://host:port``, an object, or None to look for one.
        run_id: Name of the run; None takes the environment's.
        classify: The user's classifier.
        when_open: ``wait`` for an ill dependency (default: no work is lost), or ``raise``.
        strict: Whether a call fails where the shared store is away (default: it goes on with what
            this process knows by itself).
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    store: SharedStore | Store | str | None = None
    run_id: str | None = None
    classify: Classifier | None = None
    when_open: str = "wait"
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOptions:
    """What a guard of functions knows besides.

    Args:
        name: Name of the dependency with the operation class, without credentials.
        operation: ``read`` or ``write``.
        common: The options that every guard has.
        collective: Whether all ranks make the calls at the same time.
        probe: A cheap real operation of the dependency, or None.
        hosts: Hosts that use the dependency, or None for the launcher's number.
    """

    name: str
    operation: str
    common: GuardOptions
    collective: bool
    probe: Callable[[], Any] | None
    hosts: int | None


_CONFIGS: Final[dict[str, type[Any]]] = {
    "retry": RetryPolicy,
    "budget": BudgetConfig,
    "breaker": BreakerConfig,
    "admission": AdmissionConfig,
}

OPTIONS: Final = tuple(each.name for each in dataclasses.fields(GuardOptions))
"""Names of the options."""


def guard_options(given: Mapping[str, Any]) -> GuardOptions:
    """Return checked options.

    Args:
        given: The options, all of them known; None stands for the default of each.

    Raises:
        ConfigError: One is out of range, or contradicts another; the text names it.
    """
    options = {name: value for name, value in given.items() if value is not None}
    for name, kind in _CONFIGS.items():
        allowed = f"a {kind.__name__} or a mapping of its options"
        value = options.get(name)
        check_kind(name, value, fits=isinstance(value, (kind, Mapping)), allowed=allowed)
        options[name] = build(kind, value)
    checked = GuardOptions(**options)
    check_relations(checked.retry, checked.breaker, JointConfig(), budget=checked.budget)
    check_kind(
        "store",
        checked.store,
        fits=_is_store(checked.store),
        allowed="a URL tcp://HOST:PORT, a torch.distributed store, or an object like SharedStore",
    )
    check_store(checked.store)
    fits = isinstance(checked.run_id, str) and bool(checked.run_id.strip())
    check_kind("run_id", checked.run_id, fits=fits, allowed="a text that is not empty")
    allowed = "a function from an exception to a failure class"
    check_kind("classify", checked.classify, fits=callable(checked.classify), allowed=allowed)
    check_choice("when_open", checked.when_open, choices=("wait", "raise"))
    check_kind("strict", checked.strict, fits=isinstance(checked.strict, bool), allowed="a bool")
    return checked


def check_travels(options: GuardOptions, *, what: str) -> None:
    """Refuse to send a guard to another process where its store cannot go.

    Args:
        options: Its options.
        what: What is sent, for the error.

    Raises:
        ConfigError: The store is an object of this process.
    """
    if not isinstance(options.store, str | None):
        message = (
            f"store is {options.store!r}, which belongs to this process; {what} that is sent to "
            "another names its store by a URL tcp://HOST:PORT."
        )
        raise ConfigError(message)


def _is_store(store: object) -> bool:
    # Who has a store of torch's has loaded torch; this file must not.
    kind = getattr(sys.modules.get("torch.distributed"), "Store", str)
    return isinstance(store, (str, SharedStore, kind))
