# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whether anybody listens at an address: a refusal is known for certain, silence is not."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.knocking import knock


if TYPE_CHECKING:
    from collections.abc import Iterator


TIMEOUT_S = 0.3
PLACES = {"listens": "127.0.0.1", "refuses": "127.0.0.2", "is silent": "127.0.0.3"}


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which one address listens, one refuses, and one never answers."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((PLACES["listens"], 0)))
        number: int = listener.getsockname()[1]
        full = stack.enter_context(socket.socket())
        full.bind((PLACES["is silent"], number))
        full.listen(0)
        # Whoever comes once its line is full hears nothing.
        while True:
            client = stack.enter_context(socket.socket())
            client.settimeout(TIMEOUT_S)
            try:
                client.connect((PLACES["is silent"], number))
            except TimeoutError:
                break
        yield number


def named(monkeypatch: pytest.MonkeyPatch, *what: str) -> tuple[str, int]:
    """Let a name stand for several addresses; return what is knocked at."""

    def look_up(_host: str, port: int, *_: object) -> list[tuple[object, ...]]:
        places = [(PLACES[each], port) for each in what]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return ("store", 0)


@pytest.mark.parametrize(
    "what", [("listens",), ("refuses", "listens"), ("is silent", "listens")], ids=str
)
def test_one_address_at_which_somebody_listens_is_enough(
    monkeypatch: pytest.MonkeyPatch, port: int, what: tuple[str, ...]
) -> None:
    """The server has one of the addresses that its name stands for."""
    host, _ = named(monkeypatch, *what)

    knock((host, port), TIMEOUT_S)


@pytest.mark.parametrize("what", [("refuses",), ("refuses", "refuses")], ids=str)
def test_where_every_address_refuses_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, port: int, what: tuple[str, ...]
) -> None:
    """The host itself has said so."""
    host, _ = named(monkeypatch, *what)

    with pytest.raises(ConnectionRefusedError):
        knock((host, port), TIMEOUT_S)


@pytest.mark.parametrize(
    "what", [("is silent",), ("refuses", "is silent"), ("is silent", "refuses")], ids=str
)
def test_an_address_that_is_silent_may_be_the_servers(
    monkeypatch: pytest.MonkeyPatch, port: int, what: tuple[str, ...]
) -> None:
    """It is not known that nobody listens, whatever the other addresses say."""
    host, _ = named(monkeypatch, *what)

    with pytest.raises(OSError, match="timed out") as caught:
        knock((host, port), TIMEOUT_S)

    assert not isinstance(caught.value, ConnectionRefusedError)
