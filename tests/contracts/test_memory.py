# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The memory store keeps the contract of ``SharedStore``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.runtime.memory import MemoryStore
from tests.contracts.shared_store import SharedStoreContract


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import SharedStore


class TestMemoryStore(SharedStoreContract):
    """Handles of one store, made by ``watcher``."""

    @pytest.fixture
    def new_store(self) -> Callable[[], SharedStore]:
        """Share the data of one store."""
        return MemoryStore().watcher

    def test_two_stores_share_nothing(self) -> None:
        """Each ``MemoryStore`` is a store of its own."""
        first, second = MemoryStore(), MemoryStore()

        first.set("k", b"1")

        assert second.get("k") is None
