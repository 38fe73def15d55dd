# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Options of the rendezvous backend: texts and values, ours and those of the backend within."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.adapters.rendezvous_options import INNER, RendezvousOptions
from lightning_resilience.config import SITE_STORE
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.restart_config import RestartConfig
from lightning_resilience.errors import ConfigError


def read(**given: Any) -> RendezvousOptions:
    """Read options as torch hands them on."""
    return RendezvousOptions.read(given)


def test_without_options_there_are_defaults() -> None:
    """Torch's launcher adds a time limit of its own."""
    options = read(timeout=900)

    assert options.inner == "c10d"
    assert options.restart == RestartConfig()
    assert options.breaker == BreakerConfig()
    assert dict(options.forwarded) == {"timeout": 900}
    assert (options.keep_alive_s, options.grace_s, options.join_s) == (5.0, 15.0, 600.0)


def test_texts_become_what_the_option_is() -> None:
    """As ``--rdzv-conf`` has it; a LaunchConfig hands on values."""
    texts = read(restart_quota="5", restart_window_s="60", open_for_s="9.5")
    values = read(restart_quota=5, restart_window_s=60, open_for_s=9.5)

    assert texts == values
    assert texts.restart.restart_quota == 5
    assert texts.breaker.open_for_s == 9.5


def test_what_belongs_within_is_passed_on_as_it_was_given() -> None:
    """And what we need of it is understood."""
    options = read(
        inner="c10d", is_host="1", join_timeout="30", keep_alive_interval="2", read_timeout="7"
    )

    assert options.forwarded["is_host"] == "1"
    assert options.forwarded["read_timeout"] == "7"
    assert "inner" not in options.forwarded
    assert (options.keep_alive_s, options.grace_s, options.join_s) == (2.0, 6.0, 30.0)


def test_several_urls_of_storage_are_separated() -> None:
    """A comma separates the options themselves."""
    assert read(storage="s3://a/b; s3://c ;").storage == ("s3://a/b", "s3://c")
    assert read().storage == ()


def test_a_program_may_leave_a_text_out() -> None:
    """As None, which is no name of a directory; and a path is as good as its text."""
    nothing = dict.fromkeys(("inner", "storage", "restarts", "termination_log", "site_store"))

    assert read(**nothing) == read()
    assert read(restarts=Path("/kept")).restarts == "/kept"


def test_the_store_of_the_site_is_the_option_or_else_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One name, wherever it is given; what the command line says comes first."""
    monkeypatch.setenv(SITE_STORE, "tcp://login1:29555")

    assert read().site_store == "tcp://login1:29555"
    assert read(site_store="tcp://login2:1").site_store == "tcp://login2:1"
    monkeypatch.delenv(SITE_STORE)
    assert read().site_store is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"site_store": "login1"}, "site_store='login1'"),
        ({"site_quorum": "9"}, "site_quorum=9"),
        ({"site_stroe": "tcp://a:1"}, "Did you mean 'site_store'?"),
        ({"restart_qouta": "3"}, "Did you mean 'restart_quota'?"),
        ({"join_timout": "3"}, "Did you mean 'join_timeout'?"),
        ({"retry_ratio": "0.1"}, "It is an option of BudgetConfig."),
        ({"inner": "zookeeper"}, "inner='zookeeper'"),
        ({"inner": "static", "is_host": "1"}, "is_host"),
        ({"restart_quota": "many"}, "restart_quota='many'"),
        ({"restart_quota": "2.5"}, "restart_quota=2.5"),
        ({"restart_quota": "-1"}, "restart_quota=-1"),
        ({"gate_deadline_s": "0"}, "gate_deadline_s=0"),
        ({"inner": "etcd-v2", "is_host": "1"}, "is_host"),
        ({"inner": "etcd", "keep_alive_interval": "1"}, "keep_alive_interval"),
        ({"inner": "etcd", "ca_cert": "/ca.pem"}, "Did you mean 'cacert'?"),
        ({"join_timeout": "10m"}, "join_timeout='10m'"),
        ({"join_timeout": None}, "join_timeout=None"),
        ({"read_timeout": "nan"}, "read_timeout='nan'"),
        ({"keep_alive_interval": "5s"}, "keep_alive_interval='5s'"),
        ({"inner": "etcd", "timeout": "9m"}, "timeout='9m'"),
        ({"storage": ["s3://a", "s3://b"]}, "storage is of type list"),
        ({"restarts": 5}, "restarts is of type int"),
    ],
)
def test_what_is_not_allowed_is_refused_before_anything_starts(
    given: dict[str, Any], said: str
) -> None:
    """A misspelt limit is no limit."""
    with pytest.raises(ConfigError, match=r"resilient|allowed|range") as caught:
        read(**given)

    assert said in str(caught.value)


@pytest.mark.parametrize("inner", INNER)
def test_every_backend_of_torch_can_be_within(inner: str) -> None:
    """With the time limit that torch's launcher adds."""
    assert read(inner=inner, timeout=900).inner == inner


def test_who_names_a_round_is_waited_for_as_long_as_a_node_may_be_silent() -> None:
    """Where all come at the same time; a static rendezvous waits for nobody."""
    assert read().naming_s == 15.0
    assert read().named_s == 30.0
    assert read(join_timeout=7).naming_s == 7.0
    assert read(inner="static").naming_s == read().join_s


def test_the_older_backend_over_etcd_has_its_own_name_for_the_time_to_join() -> None:
    """What torch's launcher adds for all backends is what that one waits for."""
    assert read(inner="etcd", timeout=900).join_s == 900.0
    assert read(inner="etcd-v2", timeout=900, join_timeout=7).join_s == 7.0
