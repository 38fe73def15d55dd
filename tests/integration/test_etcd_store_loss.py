# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A real etcd dies, freezes, and comes back with what it held, under stores that were using it."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.etcd_client import EtcdClient
from lightning_resilience.adapters.etcd_store import EtcdStore
from lightning_resilience.core.store_address import EtcdAddress
from lightning_resilience.errors import ConfigError, CorruptRecordError, StoreUnavailableError
from tests.etcd_server import EtcdServer, etcd, require_etcd


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


__all__ = ["etcd"]

pytestmark = [pytest.mark.multiprocess]

HANG_S = 30.0


@pytest.fixture
def store(etcd: EtcdServer) -> Iterator[EtcdStore]:
    """A store that has already been used."""
    opened = EtcdStore(etcd.address(), timeout_s=HANG_S)
    opened.set("k", b"before")

    yield opened

    opened.close()


def operations(store: EtcdStore) -> list[Callable[[], object]]:
    """Every operation of the port once."""
    return [
        lambda: store.get("k"),
        lambda: store.multi_get(["k", "l"]),
        lambda: store.set("k", b"v"),
        lambda: store.delete("k"),
        lambda: store.compare_and_set("k", b"", b"v"),
        lambda: store.add("n", 1),
        lambda: store.wait_for("k", HANG_S * 3),
    ]


def test_an_etcd_that_died_is_noticed_and_found_again(etcd: EtcdServer, store: EtcdStore) -> None:
    """Every operation says so with the address; the same object works on when it is back."""
    watcher = store.watcher()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(watcher.wait_for, "never", HANG_S * 3)
        etcd.kill()
        with pytest.raises(StoreUnavailableError, match="wait_for"):
            waiting.result(HANG_S)

    errors = []
    for operation in operations(store):
        with pytest.raises(StoreUnavailableError) as raised:
            operation()
        errors.append(raised.value)
    etcd.start()

    assert all(f"etcd://127.0.0.1:{etcd.port}/" in str(error) for error in errors)
    assert all("Connection refused" in str(error) for error in errors[1:])
    # It comes back with what it held, so nobody may take it for gone.
    assert not any(error.is_refused for error in errors)
    assert store.compare_and_set("k", b"before", b"after") == b"after"
    assert store.add("n", 2) == 2
    watcher.close()


def test_a_restart_between_two_operations_is_not_even_noticed(
    etcd: EtcdServer, store: EtcdStore
) -> None:
    """What may be repeated is repeated once on a fresh connection; so is the look before a sum."""
    etcd.kill()
    etcd.start()

    assert store.compare_and_set("k", b"before", b"after") == b"after"

    etcd.kill()
    etcd.start()

    assert store.add("n", 1) == 1


def test_a_frozen_etcd_blocks_nobody_for_longer_than_the_timeout(etcd: EtcdServer) -> None:
    """Each caller has its timeout, and no thread is left behind."""
    store = EtcdStore(etcd.address(), timeout_s=0.5)
    patient = EtcdStore(store._address, timeout_s=HANG_S)
    patient.set("untouched", b"before")
    store.get("untouched")
    etcd.freeze()

    threads_before = threading.active_count()
    for operation in operations(store)[:-1]:
        with pytest.raises(StoreUnavailableError, match="failed"):
            operation()
    threads_after = threading.active_count()
    etcd.thaw()

    assert threads_after == threads_before
    assert patient.get("untouched") == b"before"
    store.close()
    patient.close()


def test_a_lost_answer_to_add_counts_once(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written and not answered is not written again."""
    store = EtcdStore(etcd.address(), timeout_s=HANG_S)
    create, lost = EtcdClient.create, []

    def lose(client: EtcdClient, key: str, value: bytes) -> Any:
        create(client, key, value)
        lost.append(key)
        client.cut()
        return create(client, key, value)

    monkeypatch.setattr(EtcdClient, "create", lose)
    with pytest.raises(StoreUnavailableError, match="may have counted"):
        store.add("n", 1)

    assert lost == ["n"]
    assert store.get("n") == b"1"
    store.close()


def test_a_counter_that_others_change_meanwhile_loses_nothing(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read and written where nobody has written since, again and again."""
    address = etcd.address()
    store, other = EtcdStore(address, timeout_s=HANG_S), EtcdStore(address, timeout_s=HANG_S)
    other.set("n", b"1")
    replace, meddled = EtcdClient.replace_at, [b"10", b"20"]

    def meddle(client: EtcdClient, key: str, value: bytes, *, index: int) -> Any:
        if meddled:
            other.set("n", meddled.pop(0))
        return replace(client, key, value, index=index)

    monkeypatch.setattr(EtcdClient, "replace_at", meddle)

    assert store.add("n", 5) == 25
    assert other.get("n") == b"25"
    store.close()
    other.close()


def test_what_is_no_number_is_told_apart_from_a_store_that_is_away(store: EtcdStore) -> None:
    """The record is corrupt, and stays as it is."""
    with pytest.raises(CorruptRecordError, match="holds no number"):
        store.add("k", 1)

    assert store.get("k") == b"before"


def test_a_forked_child_has_its_own_connection(store: EtcdStore) -> None:
    """Parent and child use the same object at once, and neither reads what the other was told."""
    child = os.fork()
    if child == 0:
        try:
            for turn in range(30):
                store.set("child", b"%d" % turn)
                assert store.get("child") == b"%d" % turn
            os._exit(0)
        finally:
            os._exit(1)
    for turn in range(30):
        store.set("parent", b"%d" % turn)
        assert store.get("parent") == b"%d" % turn

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("child") == b"29"


def test_what_a_job_leaves_goes_away(etcd: EtcdServer) -> None:
    """The directory has a time to live; whoever uses it renews that, whoever does not loses it."""
    address = etcd.address()
    store = EtcdStore(address, timeout_s=HANG_S, keep_s=2.0)
    witness = EtcdClient(EtcdAddress(host="127.0.0.1", port=etcd.port), timeout_s=HANG_S)
    store.set("k", b"1")
    other = EtcdStore(address, timeout_s=HANG_S, keep_s=3600.0)

    other.get("k")
    kept = witness._asked("GET", f"/v2/keys{address.directory}").body["node"]["ttl"]
    store.lease()
    ended = threading.Event()
    for _ in range(int(HANG_S * 10)):
        if other.get("k") is None:
            break
        ended.wait(0.1)

    assert kept > 3500
    assert other.get("k") is None
    for each in (store, other, witness):
        each.close()


def test_an_etcd_without_version_2_is_a_mistake_and_not_an_outage(tmp_path: Path) -> None:
    """It is told at once, with what to start it with."""
    require_etcd()
    server = EtcdServer(tmp_path)
    store = EtcdStore(server.address(), timeout_s=HANG_S)
    try:
        with pytest.raises(ConfigError, match="--enable-v2"):
            store.lease()
    finally:
        store.close()
        server.kill()


def test_what_is_no_etcd_is_an_outage() -> None:
    """A proxy before it that has no etcd to ask, or nothing that speaks HTTP at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in (b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops", b"mumble\r\n"):
                client, _ = listener.accept()
                with client:
                    client.recv(10_000)
                    client.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        address = EtcdAddress(host="127.0.0.1", port=listener.getsockname()[1])
        client = EtcdClient(address, timeout_s=HANG_S)
        with pytest.raises(StoreUnavailableError, match="502 'oops'"):
            client.read("k")
        client.close()
        with pytest.raises(RuntimeError, match="BadStatusLine"):
            client.read("k")
        thread.join(HANG_S)


def test_a_proxy_that_has_lost_etcd_is_an_outage_where_etcd_has_answered() -> None:
    """What was told as a mistake at the beginning ends no agent in the middle of its job."""
    body = b'{"node":{"value":"there"}}'
    good = b"HTTP/1.1 200 OK\r\nX-Etcd-Index: 7\r\nContent-Length: 26\r\n\r\n" + body
    lost = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\noops"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in (lost, good, lost, lost):
                client, _ = listener.accept()
                with client:
                    client.recv(10_000)
                    client.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        address = EtcdAddress(host="127.0.0.1", port=listener.getsockname()[1])
        first, later = (EtcdStore(address, timeout_s=HANG_S) for _ in range(2))
        with pytest.raises(ConfigError, match="--enable-v2"):
            first.lease()
        first.lease()
        for store in (first, later):
            with pytest.raises(StoreUnavailableError, match="404 'oops'"):
                store.lease()
        thread.join(HANG_S)
        first.close()
        later.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for the loopback that signs itself, with its key in the same folder."""
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl could make no certificate")
    return tmp_path / "cert.pem"


def test_an_encrypted_etcd_is_known_by_its_certificate(tmp_path: Path, certificate: Path) -> None:
    """With the authority's file it is reached, without it is not; a missing file is a mistake."""
    require_etcd()
    server = EtcdServer(tmp_path, "--enable-v2", certificate=certificate)
    try:
        place = replace(server.address(), is_secure=True)
        known = EtcdStore(replace(place, ca=str(certificate)), timeout_s=HANG_S)
        unknown = EtcdStore(place, timeout_s=HANG_S)
        lost = EtcdStore(replace(place, ca=str(tmp_path / "none")), timeout_s=HANG_S)

        known.set("k", b"1")
        assert known.get("k") == b"1"
        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            unknown.get("k")
        with pytest.raises(ConfigError, match="certificates for etcd"):
            lost.get("k")
    finally:
        server.kill()
    for each in (known, unknown, lost):
        each.close()
