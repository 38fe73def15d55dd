# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``lightning-resilience store serve``: a shared store that lives longer than any job."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import typer

from lightning_resilience.adapters.store_server import supervise
from lightning_resilience.adapters.telemetry import audible


if TYPE_CHECKING:
    from types import FrameType


__all__ = ["serve"]


def serve(host: str, port: int) -> int:
    """Serve until this process is told to end; return its exit status.

    Args:
        host: Name or address under which clients reach this host.
        port: Port; 0 for any that is free.
    """
    signal.signal(signal.SIGTERM, _leave)
    with audible(), contextlib.suppress(KeyboardInterrupt):
        return supervise(host, port, announce=typer.echo)
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    sys.exit(0)
