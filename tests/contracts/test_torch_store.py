# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every kind of ``torch.distributed`` store keeps the contract of ``SharedStore``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from lightning_resilience.adapters.torch_store import TorchStore
from tests.contracts.shared_store import HANG_S, SharedStoreContract


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lightning_resilience.ports import SharedStore


class TorchStoreContract(SharedStoreContract):
    """The contract over ``foreign``, each handle a ``TorchStore`` of its own."""

    @pytest.fixture
    def foreign(self) -> Store:
        """The store of torch that is wrapped."""
        raise NotImplementedError

    @pytest.fixture
    def new_store(
        self, foreign: Store, request: pytest.FixtureRequest
    ) -> Callable[[], SharedStore]:
        """Wrap the same store again and again."""

        def new() -> TorchStore:
            opened = TorchStore.wrap(foreign, timeout_s=HANG_S)
            request.addfinalizer(opened.close)
            return opened

        return new

    def test_torch_itself_reads_what_we_wrote(self, store: SharedStore, foreign: Store) -> None:
        """Keys and values are torch's own: no prefix or wrapping is added."""
        store.set("k", b"\x00\xff")

        assert foreign.get("k") == b"\x00\xff"


def server() -> TCPStore:
    """A server on a free port of the loopback, with a client in this process."""
    return TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False
    )


class TestTCPStore(TorchStoreContract):
    """A server in this process, reached over the loopback."""

    @pytest.fixture
    def foreign(self) -> Store:
        """A server on a free port."""
        return server()

    def test_an_address_and_a_prefix_reach_the_same_keys(
        self, foreign: TCPStore, store: SharedStore
    ) -> None:
        """``connect`` with a prefix is what ``PrefixStore`` is."""
        connected = TorchStore.connect(foreign.host, foreign.port, prefix="p")

        connected.set("k", b"1")

        assert store.get("p/k") == b"1"
        assert PrefixStore("p", foreign).get("k") == b"1"
        connected.close()

    def test_the_client_that_was_handed_in_is_not_used(
        self, foreign: TCPStore, store: SharedStore
    ) -> None:
        """A store wrapped is a server reached again: waiting does not lock its own client."""
        watcher = TorchStore.wrap(foreign)

        assert watcher.wait_for("never", 0.01) is False
        timeout: object = foreign.timeout  # type: ignore[attr-defined]  # missing in the stub only
        assert timeout == timedelta(seconds=5)
        assert store.get("never") is None
        watcher.close()


class TestPrefixStore(TorchStoreContract):
    """Two prefixes over a server."""

    @pytest.fixture
    def foreign(self) -> Store:
        """Keys under ``outer/inner/``."""
        return PrefixStore("inner", PrefixStore("outer", server()))


class TestHashStore(TorchStoreContract):
    """A store of this process."""

    @pytest.fixture
    def foreign(self) -> Store:
        """An empty one."""
        return HashStore()


class TestPrefixOverHashStore(TorchStoreContract):
    """A prefix over a store of this process."""

    @pytest.fixture
    def foreign(self) -> Store:
        """An empty one."""
        return PrefixStore("p", HashStore())


class TestFileStore(TorchStoreContract):
    """A store in a file that several processes open."""

    @pytest.fixture
    def foreign(self, tmp_path: Path) -> Store:
        """A new file."""
        return FileStore(str(tmp_path / "store"), -1)


class TestPrefixOverFileStore(TorchStoreContract):
    """A prefix over a store in a file."""

    @pytest.fixture
    def foreign(self, tmp_path: Path) -> Store:
        """A new file."""
        return PrefixStore("p", FileStore(str(tmp_path / "store"), -1))
