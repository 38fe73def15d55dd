# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options that the callback and the ``CheckpointIO`` have in common, checked when given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import Store

from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.staging import spool_directory
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.config import build, check_store
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.outcome import with_user_classifier
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.core.validation import check_kind
from lightning_resilience.ports import SharedStore


if TYPE_CHECKING:
    from lightning_resilience.config import Environment
    from lightning_resilience.core.outcome import Classifier


__all__ = ["Options", "check_options", "check_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user has chosen; nothing is opened yet.

    Args:
        retry: The retry policy.
        breaker: The breakers' configuration.
        store: The store that all ranks share, or None to look for one.
        run_id: Name of the run, or None.
        storage_options: Options of the filesystem.
        classify: The user's classifier, or None.
        spool_dir: Parent of the directory for staged files, or None.
        given: Names of the options that were given.
    """

    retry: RetryPolicy
    breaker: BreakerConfig
    store: SharedStore | Store | str | None
    run_id: str | None
    storage_options: dict[str, Any] = field(repr=False)
    classify: Classifier | None
    spool_dir: str | None
    given: tuple[str, ...]

    @property
    def policy(self) -> Policy:
        """How to retry, break and classify."""
        return Policy(
            retry=self.retry,
            breaker=self.breaker,
            classify=with_user_classifier(self.classify),
        )

    def storage(self, environment: Environment, *, run_id: str) -> Storage:
        """Make the clients of storage, which open nothing before they are asked."""
        spool = partial(
            spool_directory, self.spool_dir or environment.spool_dir, environ={}, run_id=run_id
        )
        return Storage(self.storage_options, spool=spool)


def check_options(
    *,
    retry: RetryPolicy | Mapping[str, Any] | None = None,
    breaker: BreakerConfig | Mapping[str, Any] | None = None,
    store: SharedStore | Store | str | None = None,
    run_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    classify: Classifier | None = None,
    spool_dir: str | None = None,
) -> Options:
    """Return the options, checked; None is an option that was not given.

    Raises:
        ConfigError: An option is out of range, or of another kind than it takes.
    """
    given = [name for name, value in locals().items() if value is not None]
    built = build(RetryPolicy, retry), build(BreakerConfig, breaker)
    fits = isinstance(store, (str, SharedStore, Store))
    allowed = "a URL tcp://HOST:PORT, a torch.distributed store, or an object like SharedStore"
    check_kind("store", store, fits=fits, allowed=allowed)
    is_mapping = isinstance(storage_options, Mapping)
    check_kind("storage_options", storage_options, fits=is_mapping, allowed="a mapping")
    allowed = "a function from an exception to a failure class"
    check_kind("classify", classify, fits=callable(classify), allowed=allowed)
    return Options(
        retry=built[0],
        breaker=built[1],
        store=check_store(store),
        run_id=check_text("run_id", run_id),
        storage_options=dict(storage_options or {}),
        classify=classify,
        spool_dir=check_text("spool_dir", spool_dir),
        given=tuple(given),
    )


def check_text(name: str, value: str | None) -> str | None:
    """Return a text, or None; refuse what is neither, or empty.

    Raises:
        ConfigError: It is something else.
    """
    fits = isinstance(value, str) and bool(value.strip())
    check_kind(name, value, fits=fits, allowed="a text that is not empty")
    return value
