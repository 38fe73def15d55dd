# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of ``resilient::`` share: fast options, and the name registered.

An installation registers the name by its entry point; here the source tree does, whatever is
installed.
"""

from __future__ import annotations

import uuid
from typing import Any

import fsspec


BREAKER = {
    "view_max_age_s": 0.1,
    "probe_timeout_s": 0.5,
    "probe_lease_s": 2.6,
    "open_for_s": 2.7,
    "max_open_for_s": 2.7,
}
"""The shortest wait that the relations between the options allow."""


def register() -> None:
    """Make ``resilient::`` known to fsspec in this process. Idempotent."""
    from lightning_resilience.adapters.resilient_filesystem import (  # noqa: PLC0415 - as fsspec does
        ResilientFileSystem,
    )

    fsspec.register_implementation("resilient", ResilientFileSystem, clobber=True)


def fast(**options: Any) -> dict[str, Any]:
    """Return options for a run of its own with short delays; these come on top."""
    delays = {"base_delay_s": 0.01, "throttle_base_delay_s": 0.01, "max_delay_s": 0.05}
    retry = {**delays, **options.pop("retry", {})}
    return {"retry": retry, "run_id": uuid.uuid4().hex, **options}
