# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The connection to a site's store: lazy, and brief."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.site_store import open_site
from lightning_resilience.errors import ConfigError, StoreUnavailableError
from lightning_resilience.protocols.effects import AtSite, Get
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.ports import free_port


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.core.event import Event
    from lightning_resilience.protocols.effects import Protocol


class _Deaf:
    def emit(self, event: Event) -> None:
        """Hear nothing."""
        del event


@pytest.fixture
def driver() -> Iterator[Driver]:
    """An agent's driver that has no site yet."""
    made = Driver(store=MemoryStore(), clock=SystemClock(), dice=SystemDice(rank=0), sink=_Deaf())
    yield made
    made.close()
    if made.site is not None:
        made.site.close()


def _read() -> Protocol[bytes | None]:
    found: bytes | None = yield AtSite(Get("key"))
    return found


def test_without_a_url_there_is_no_site() -> None:
    """And nobody is asked."""
    assert open_site(None) is None


def test_a_site_where_nobody_listens_is_unavailable(driver: Driver) -> None:
    """It is the answer that a protocol can do without."""
    driver.site = open_site(f"tcp://127.0.0.1:{free_port()}")

    with pytest.raises(StoreUnavailableError):
        driver.run(_read())


def test_a_site_that_never_answers_is_unavailable(driver: Driver) -> None:
    """A server that is frozen accepts connections and says nothing; the wait for it has an end."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        driver.site = open_site(f"tcp://127.0.0.1:{frozen.getsockname()[1]}")

        with pytest.raises(StoreUnavailableError):
            driver.run(_read())


def test_an_address_of_another_form_is_refused() -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match="site_store="):
        open_site("login1")
