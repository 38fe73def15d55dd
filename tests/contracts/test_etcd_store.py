# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A directory of a real etcd keeps the contract of ``SharedStore``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.etcd_store import EtcdStore
from tests.contracts.shared_store import HANG_S, SharedStoreContract
from tests.etcd_server import etcd


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import SharedStore
    from tests.etcd_server import EtcdServer


__all__ = ["etcd"]


class TestEtcdStore(SharedStoreContract):
    """Each test in a directory of its own."""

    @pytest.fixture
    def new_store(
        self, etcd: EtcdServer, request: pytest.FixtureRequest
    ) -> Callable[[], SharedStore]:
        """Reach the same directory again and again."""
        address = etcd.address()

        def new() -> EtcdStore:
            opened = EtcdStore(address, timeout_s=HANG_S)
            request.addfinalizer(opened.close)
            return opened

        return new

    def test_many_keys_are_read_together_as_few_are(self, store: SharedStore) -> None:
        """The whole directory is one request; what is not there is None, in order."""
        names = [f"k/{number}" for number in range(12)]
        for name in names[::2]:
            store.set(name, name.encode())

        found = store.multi_get(names)

        assert found == [store.get(name) for name in names]
        assert found[:2] == [b"k/0", None]
