# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ``TorchStore`` refuses, and what it leaves behind."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from lightning_resilience.adapters.torch_store import TorchStore, innermost_store
from lightning_resilience.errors import ConfigError, CorruptRecordError, StoreUnavailableError


if TYPE_CHECKING:
    from pathlib import Path


class OtherStore(Store):
    """A kind of store that torch does not have."""


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_must_be_positive_and_finite(timeout_s: float) -> None:
    """The error names the option, its value and what is allowed."""
    with pytest.raises(ConfigError, match=r"timeout_s is .*; allowed: seconds above 0"):
        TorchStore.connect("host0", 29400, timeout_s=timeout_s)


def test_an_unknown_kind_of_store_is_refused_by_name() -> None:
    """It cannot be reached a second time, so the error says what can."""
    with pytest.raises(ConfigError, match=r"OtherStore; allowed: .*tcp://host:port"):
        TorchStore.wrap(OtherStore())


def test_prefixes_are_seen_through() -> None:
    """However many there are."""
    inner = HashStore()

    assert innermost_store(PrefixStore("a", PrefixStore("b", inner))) is inner
    assert innermost_store(inner) is inner


def test_a_store_that_is_forgotten_ends_its_thread() -> None:
    """Whoever forgets ``close`` leaks nothing."""
    store = TorchStore.wrap(HashStore())
    store.set("k", b"1")
    (thread,) = [one for one in threading.enumerate() if "HashStore" in one.name]

    del store
    gc.collect()

    assert not thread.is_alive()


def test_a_counter_that_is_text_names_its_key() -> None:
    """Where the store can tell, the error is about the record and not about the store."""
    store = TorchStore.wrap(HashStore())
    store.set("k", b"text")

    with pytest.raises(CorruptRecordError) as raised:
        store.add("k", 1)

    assert raised.value.key == "k"
    store.close()


def test_our_connection_to_a_file_does_not_count_as_a_worker(tmp_path: Path) -> None:
    """The last of the file's own workers still removes it, also when ours has come and gone."""
    path = tmp_path / "store"
    foreign = FileStore(str(path), 1)
    ours = TorchStore.wrap(foreign)
    ours.set("k", b"1")
    assert path.exists()

    ours.close()
    del ours, foreign
    gc.collect()

    assert not path.exists()


def test_an_address_that_nobody_listens_at_is_named(unused_port: int) -> None:
    """The first operation says which operation, key and address, and for how long."""
    store = TorchStore.connect("127.0.0.1", unused_port, timeout_s=1.0)

    with pytest.raises(StoreUnavailableError) as first:
        store.get("the key")
    with pytest.raises(StoreUnavailableError) as second:
        store.set("the key", b"")

    for error, operation in ((first.value, "get"), (second.value, "set")):
        assert f"{operation} of 'the key' on tcp://127.0.0.1:{unused_port} failed" in str(error)
        assert "timeout 1 s" in str(error)
    store.close()
