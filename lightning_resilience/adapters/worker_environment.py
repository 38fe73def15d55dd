# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent's workers find in their environment, lent for as long as the job takes.

Torch's agent starts its workers with the environment of its own process. Under ``torchrun`` that
process ends with the job; under ``elastic_launch`` it is the user's program, whose next job must
not take the store of the last one for a store that the user has named.
"""

from __future__ import annotations

import os
from typing import Final

from lightning_resilience.config import SITE_STORE


__all__ = ["INCARNATION", "STORE", "WorkerEnvironment"]

INCARNATION: Final = "LIGHTNING_RESILIENCE_INCARNATION"
STORE: Final = "LIGHTNING_RESILIENCE_STORE"


class WorkerEnvironment:
    """The variables that one agent has set, and what they were before. The agent's main thread."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def tell(self, *, incarnation: str, store: str | None, site_store: str | None) -> None:
        """Let the workers that are started next find these.

        Args:
            incarnation: The name of their start.
            store: URL of the job's store; None for what the environment says already.
            site_store: URL of the store of several jobs; None for the same.
        """
        told = {INCARNATION: incarnation, STORE: store, SITE_STORE: site_store}
        for name, value in told.items():
            if value is not None:
                self._before.setdefault(name, os.environ.get(name))
                os.environ[name] = value

    def restore(self) -> None:
        """Leave the environment as it was found. Idempotent."""
        while self._before:
            name, value = self._before.popitem()
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
