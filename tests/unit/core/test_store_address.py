# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""URLs of shared stores: what agents hand on to their workers is read as it was meant."""

from __future__ import annotations

import pytest

from lightning_resilience.core.store_address import (
    EtcdAddress,
    check_store_url,
    is_etcd_url,
    parse_etcd_url,
)
from lightning_resilience.errors import ConfigError


@pytest.mark.parametrize(
    "address",
    [
        EtcdAddress(host="etcd0", port=2379),
        EtcdAddress(host="fe80::1", port=1, directory="/a/b"),
        EtcdAddress(host="etcd0", port=65535, is_secure=True),
        EtcdAddress(
            host="e", port=2379, is_secure=True, ca="/c a&b.pem", cert="/c.pem", key="/k.pem"
        ),
        EtcdAddress(host="etcd0", port=2379).of_run("a job/with?odd#name"),
    ],
)
def test_an_address_survives_its_url(address: EtcdAddress) -> None:
    """Whatever the directory and the files are called."""
    assert parse_etcd_url(address.url) == address


def test_a_url_is_readable() -> None:
    """It stands in logs and in environments."""
    address = EtcdAddress(host="fe80::1", port=2379).of_run("job/7")

    assert address.url == "etcd://[fe80::1]:2379/lightning-resilience/job%2F7"
    assert address.within("/elsewhere").url == "etcd://[fe80::1]:2379/elsewhere"


def test_runs_have_directories_of_their_own() -> None:
    """A name with a slash in it is no directory within another run's."""
    home = EtcdAddress(host="etcd0", port=2379)

    assert home.of_run("a").directory != home.of_run("a/b").directory
    assert not home.of_run("a/b").directory.startswith(home.of_run("a").directory + "/")


@pytest.mark.parametrize(
    "url",
    [
        "etcd://etcd0",
        "etcd://etcd0:0",
        "etcd://etcd0:65536/a",
        "etcd:etcd0:2379",
        "etcd://etcd0:2379/a//b",
        "etcd://etcd0:2379/a?password=secret",
        "etcd://user:secret@etcd0:2379/a",
    ],
)
def test_other_forms_are_refused_without_showing_a_secret(url: str) -> None:
    """The text says what is allowed, and which option it was."""
    with pytest.raises(ConfigError, match=r"LIGHTNING_RESILIENCE_STORE=.*etcd://HOST:PORT") as said:
        check_store_url(url, option="LIGHTNING_RESILIENCE_STORE")

    assert "secret" not in str(said.value)


def test_kinds_of_stores_are_told_apart() -> None:
    """Each is checked as what it is."""
    check_store_url("tcp://host0:29400")
    check_store_url("etcd://host0:2379")

    assert [is_etcd_url(url) for url in ("etcd://h:1", "etcds://h:1", "tcp://h:1")] == [
        True,
        True,
        False,
    ]
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        check_store_url("http://host0:2379")
