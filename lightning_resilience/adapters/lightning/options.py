# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options that the callback and the ``CheckpointIO`` have in common, checked when given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.guard_options import OPTIONS, GuardOptions, guard_options
from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.node_cache import beside_runs
from lightning_resilience.adapters.staging import spool_directory
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.sweeping import swept_spool
from lightning_resilience.config import check_site_store
from lightning_resilience.core.outcome import with_user_classifier
from lightning_resilience.core.validation import check_kind
from lightning_resilience.protocols.circuit import Limits


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.config import Environment


__all__ = ["Options", "check_options", "check_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(GuardOptions):
    """What a user has chosen; nothing is opened yet.

    Args:
        storage_options: Options of the filesystem.
        spool_dir: Parent of the directory for staged files, or None.
        given: Names of the options that were given.
        site_store: URL of the store that several jobs share, or None.
    """

    storage_options: dict[str, Any] = field(repr=False)
    spool_dir: str | None
    given: tuple[str, ...]
    site_store: str | None = None

    @property
    def policy(self) -> Policy:
        """How to retry, break and classify."""
        return Policy(
            retry=self.retry,
            breaker=self.breaker,
            classify=with_user_classifier(self.classify),
            limits=Limits(admission=self.admission, budget=self.budget),
            strict=self.strict,
        )

    def storage(
        self, environment: Environment, *, run_id: str, nonce: Callable[[], str]
    ) -> Storage:
        """Make the clients of storage, which open nothing before they are asked.

        Args:
            environment: What it says of the directory for staged files.
            run_id: Name of the run.
            nonce: Makes names.
        """
        spool = partial(
            spool_directory, self.spool_dir or environment.spool_dir, environ={}, run_id=run_id
        )
        return Storage(
            self.storage_options,
            spool=partial(swept_spool, spool, nonce=nonce),
            run_id=run_id,
            stall_timeout_s=self.retry.stall_timeout_s,
            cache=beside_runs,
        )


def check_options(**options: Any) -> Options:
    """Return the options, checked; None is an option that was not given.

    Args:
        options: Those of ``GuardOptions``, ``storage_options``, ``spool_dir`` and ``site_store``.

    Raises:
        ConfigError: An option is out of range, or of another kind than it takes.
    """
    common = guard_options({name: options.get(name) for name in OPTIONS})
    storage_options = options.get("storage_options")
    is_mapping = isinstance(storage_options, Mapping)
    check_kind("storage_options", storage_options, fits=is_mapping, allowed="a mapping")
    return Options(
        **{name: getattr(common, name) for name in OPTIONS},
        storage_options=dict(storage_options or {}),
        spool_dir=check_text("spool_dir", options.get("spool_dir")),
        site_store=check_site_store(check_text("site_store", options.get("site_store"))),
        given=tuple(name for name, value in options.items() if value is not None),
    )


def check_text(name: str, value: str | None) -> str | None:
    """Return a text, or None; refuse what is neither, or empty.

    Raises:
        ConfigError: It is something else.
    """
    fits = isinstance(value, str) and bool(value.strip())
    check_kind(name, value, fits=fits, allowed="a text that is not empty")
    return value
