# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A rendezvous over etcd: what is refused before it begins, and where its records are."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import etcd as client
import pytest
import urllib3.exceptions
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
)

from lightning_resilience.adapters import rendezvous_etcd as in_etcd, rendezvous_inner as within
from lightning_resilience.adapters.rendezvous import create_handler
from lightning_resilience.adapters.rendezvous_connection import Connection
from lightning_resilience.adapters.rendezvous_held import HeldHandler
from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
from lightning_resilience.core.store_address import EtcdAddress, parse_etcd_url
from lightning_resilience.errors import ConfigError, StoreUnavailableError
from tests.handlers import status_of


@pytest.mark.parametrize("inner", ["etcd-v2", "etcd"])
def test_a_missing_client_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    """Nothing is started, and the other backends need no such package."""
    monkeypatch.setitem(sys.modules, "etcd", None)

    with pytest.raises(ConfigError, match=r"python-etcd.*lightning-resilience\[etcd\]"):
        RendezvousOptions.read({"inner": inner})

    assert RendezvousOptions.read({"inner": "static"}).inner == "static"
    parameters = RendezvousParameters("resilient", "127.0.0.1:1", "job", 1, 1, inner=inner)
    assert status_of(lambda: create_handler(parameters)) == 64


def test_a_client_that_cannot_read_a_response_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One version of urllib3 has taken away what the client asks for."""
    monkeypatch.setitem(
        sys.modules, "urllib3.response", SimpleNamespace(HTTPResponse=type("HTTPResponse", (), {}))
    )

    with pytest.raises(ConfigError, match=r"version of urllib3, as with 2\.6\.0"):
        in_etcd.require_client("etcd-v2")


@pytest.mark.parametrize(
    ("inner", "given", "url"),
    [
        ("etcd-v2", {}, "etcd://etcd0:2379/lightning-resilience/a%2Fjob"),
        ("etcd", {"etcd_prefix": "/p"}, "etcd://etcd0:2379/lightning-resilience/a%2Fjob"),
        (
            "etcd-v2",
            {"protocol": " HTTPS", "ca_cert": "/a", "ssl_cert": "/b", "ssl_cert_key": "/c"},
            "etcds://etcd0:2379/lightning-resilience/a%2Fjob?ca=%2Fa&cert=%2Fb&key=%2Fc",
        ),
        (
            "etcd",
            {"protocol": "https", "cacert": "/a", "cert": "/b"},
            "etcds://etcd0:2379/lightning-resilience/a%2Fjob?ca=%2Fa&cert=%2Fb",
        ),
    ],
)
def test_records_are_where_torch_meets(inner: str, given: dict[str, Any], url: str) -> None:
    """At its port, encrypted as it is, and with the run's name; workers get that as a URL."""
    found = in_etcd.address_in("etcd0", run_id="a/job", inner=inner, options=given)

    assert found is not None
    assert found.url == url
    assert parse_etcd_url(found.url) == found


def test_other_backends_have_no_etcd() -> None:
    """Their records are in the store of the rendezvous."""
    assert in_etcd.address_in("host0:1", run_id="job", inner="c10d", options={}) is None


@pytest.mark.parametrize(
    "error",
    [
        client.EtcdConnectionFailed("No more machines in the cluster"),
        client.EtcdKeyNotFound("gone"),
        urllib3.exceptions.ProtocolError("aborted"),
        LookupError("Key MASTER_ADDR not found in EtcdStore"),
    ],
)
def test_what_torchs_client_raises_is_understood(error: Exception) -> None:
    """It is a store that has not answered, with the reason."""
    name = type(error).__name__

    with pytest.raises(RendezvousConnectionError, match=name) as raised, in_etcd.understood():
        raise error

    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [RendezvousClosedError(), ValueError("no"), KeyboardInterrupt()])
def test_what_else_is_raised_stays_what_it_is(error: BaseException) -> None:
    """A closed rendezvous is closed, and a wrong option wrong."""
    with pytest.raises(type(error)) as raised, in_etcd.understood():
        raise error

    assert raised.value is error


def test_a_handler_without_a_client_keeps_its_store() -> None:
    """Another version of torch may have other names for it."""
    handler: Any = SimpleNamespace(_store="torch's own")

    within.own_rounds(handler, "/d")

    assert handler._store == "torch's own"


@pytest.mark.parametrize(
    ("inner", "error", "is_kept"),
    [
        ("etcd-v2", StoreUnavailableError("away"), True),
        ("etcd-v2", RendezvousConnectionError("no more machines in the cluster"), False),
        ("c10d", StoreUnavailableError("away"), False),
    ],
)
def test_a_handler_keeps_its_place_where_only_the_records_were_away(
    inner: str, error: Exception, *, is_kept: bool
) -> None:
    """A new one would be another node, and wait until the one before is forgotten."""
    parameters = RendezvousParameters("resilient", "127.0.0.1:1", "job", 1, 1)
    connection = Connection(parameters, RendezvousOptions(inner=inner), named_store=None)
    held = connection._held = HeldHandler(SimpleNamespace(), silent_s=1.0)  # type: ignore[arg-type]

    connection.failed(error)

    assert (connection._held is held) == is_kept


def test_rounds_name_themselves_apart() -> None:
    """In the store of all rounds by their number, in a store of one round without."""
    address = EtcdAddress(host="etcd0", port=2379).of_run("job")
    info: Any = SimpleNamespace(store=SimpleNamespace(prefix=f"{address.directory}/rounds/"))
    dynamic: Any = SimpleNamespace(_state_holder=SimpleNamespace(state=SimpleNamespace(round=3)))
    older: Any = SimpleNamespace()

    found, prefix = in_etcd.place_of_names(dynamic, info, address)

    assert found.directory == "/lightning-resilience/job/rounds/names"
    assert prefix == "3/"
    assert in_etcd.place_of_names(older, info, address)[1] == "0/"
