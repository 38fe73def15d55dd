# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ports that stay free until a test wants them, whatever tests run beside it.

They are below those that the kernel gives to clients, and each worker of pytest has its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket


_FIRST, _LAST = 12_000, 32_000
_SLICES = 16
_EACH = (_LAST - _FIRST) // _SLICES
_TRIES = 100


def free_port() -> int:
    """Return a port of the loopback that nobody listens at."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker % _SLICES * _EACH
    for _ in range(_TRIES):
        port = first + secrets.randbelow(_EACH)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    message = f"no port of {first} to {first + _EACH - 1} is free, of {_TRIES} that were tried"
    raise AssertionError(message)
