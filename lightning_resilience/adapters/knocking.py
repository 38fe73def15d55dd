# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Does anybody listen at an address? Asked with a plain socket, which is told at once.

A name may stand for several addresses, of which the server has one. Only where every one of them
refuses is it known that no server is there: one that does not answer may be it.
"""

from __future__ import annotations

import socket
from typing import Any


__all__ = ["knock"]


def knock(address: tuple[str, int], timeout_s: float) -> None:
    """Connect to an address and hang up.

    Args:
        address: Host and port.
        timeout_s: Longest time for each address that the name stands for, in seconds.

    Raises:
        ConnectionRefusedError: The host has answered, at every address, that nobody listens there.
        OSError: It cannot be told whether anybody does.
    """
    host, port = address
    failures: list[OSError] = []
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        failure = _failure_of(socket.socket(family, kind, protocol), place, timeout_s)
        if failure is None:
            return
        failures.append(failure)
    raise min(failures, key=lambda failure: isinstance(failure, ConnectionRefusedError))


def _failure_of(client: socket.socket, place: Any, timeout_s: float) -> OSError | None:
    with client:
        client.settimeout(timeout_s)
        try:
            client.connect(place)
        except OSError as error:
            return error
    return None
