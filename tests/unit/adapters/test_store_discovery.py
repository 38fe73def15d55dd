# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The shared store is what the user names, then the process group's, then memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from lightning_resilience.adapters.store_discovery import open_store, store_of_default_group
from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.errors import ConfigError
from lightning_resilience.runtime.memory import MemoryStore


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


HANG_S = 20.0


@pytest.fixture
def server() -> dist.TCPStore:
    """A server on a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["tcp", "file", "hash"])
def group_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.Store]:
    """The store under a real process group of one gloo process."""
    store: dist.Store
    if request.param == "tcp":
        store = request.getfixturevalue("server")
    elif request.param == "file":
        store = dist.FileStore(str(tmp_path / "store"), 1)
    else:
        store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    yield store

    dist.destroy_process_group()


def test_without_a_group_there_is_nothing_to_find() -> None:
    """None, not an error: memory may do."""
    assert store_of_default_group() is None


def test_the_groups_store_is_reached_without_its_prefixes(group_store: dist.Store) -> None:
    """What all ranks see under the same keys, whatever kind of store the group has."""
    store = store_of_default_group(timeout_s=HANG_S)

    assert store is not None
    store.set("lr/k", b"1")
    assert group_store.get("lr/k") == b"1"
    store.close()


def test_a_wait_of_ours_does_not_lock_the_groups_client(
    group_store: dist.Store,
) -> None:
    """The group's own client answers while ours waits, and its timeout is not ours to change."""
    before: object = group_store.timeout  # type: ignore[attr-defined]  # missing in the stub only
    store = store_of_default_group(timeout_s=HANG_S)
    assert store is not None

    found = store.wait_for("never", 0.05)

    assert found is False
    after: object = group_store.timeout  # type: ignore[attr-defined]  # missing in the stub only
    assert after == before
    store.close()


@pytest.mark.usefixtures("group_store")
def test_a_group_is_preferred_to_memory() -> None:
    """Also where there is one process: it may be joined by others."""
    store = open_store(None, world_size=1)

    assert isinstance(store, TorchStore)
    store.close()


def test_a_url_is_preferred_to_the_group(
    group_store: dist.Store,
) -> None:
    """What the user names comes first."""
    named = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = open_store(f"tcp://127.0.0.1:{named.port}", world_size=2, timeout_s=HANG_S)

    store.set("k", b"1")

    assert named.check(["k"])
    assert not group_store.check(["k"])
    store.close()


def test_a_store_of_torch_is_wrapped(server: dist.TCPStore) -> None:
    """With its prefix."""
    store = open_store(dist.PrefixStore("p", server), world_size=2, timeout_s=HANG_S)

    store.set("k", b"1")

    assert server.get("p/k") == b"1"
    store.close()


def test_a_shared_store_of_the_users_stays_open() -> None:
    """What is closed at the end is a handle of our own, so a second fit finds the store open."""
    mine = MemoryStore()

    opened = open_store(mine, world_size=2)
    opened.set("key", b"value")
    opened.close()

    assert mine.get("key") == b"value"


def test_one_process_shares_with_itself() -> None:
    """No server is needed."""
    assert isinstance(open_store(None, world_size=1), MemoryStore)


def test_several_processes_without_a_store_are_an_error() -> None:
    """Each would believe itself alone; the error says what to name."""
    with pytest.raises(ConfigError, match=r"8 processes.*LIGHTNING_RESILIENCE_STORE"):
        open_store(None, world_size=8)


@pytest.mark.parametrize("url", ["", "host0:29400", "tcp://host0", "tcp://::1:29400", "tcp://h:0"])
def test_a_malformed_url_is_an_error(url: str) -> None:
    """It names the option, the value and the form that is allowed."""
    with pytest.raises(ConfigError, match=r"store=.*tcp://HOST:PORT"):
        open_store(url, world_size=1)


def test_what_is_no_store_is_an_error() -> None:
    """It names the value and what is allowed."""
    with pytest.raises(ConfigError, match=r"store is 5; allowed: a URL tcp://host:port"):
        open_store(5, world_size=1)  # type: ignore[arg-type]
