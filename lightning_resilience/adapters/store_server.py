# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A server of a shared store that lives longer than any job: one process serves, one watches it.

The server is torch's own. It runs in a child, which ends when the pipe to its parent is closed,
whatever has become of that; the parent starts another one where it dies. What was in the store is
gone then: jobs rebuild their breakers and counts from what their processes remember.

Run as a program, this file is the child.
"""

from __future__ import annotations

import datetime as dt
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.supervision import Supervision
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["supervise"]

_END_S: Final = 5.0

_log = logging.getLogger(__name__)


def supervise(host: str, port: int, *, announce: Callable[[str], None]) -> int:
    """Serve until this process is told to end.

    Args:
        host: Name or address under which clients reach this host.
        port: Port; 0 for any that is free.
        announce: Told the URL of the store whenever a server has begun to serve.

    Returns:
        1, where no server stays up.

    Note:
        ``KeyboardInterrupt`` and ``SystemExit`` end the server and pass through.
    """
    clock, dice, supervision = SystemClock(), SystemDice(rank=0), Supervision()
    while True:
        # Bounded by the supervision, as long as no server stays.
        started_at_s = clock.now_s()
        status, port = _serve(host, port, announce)
        pause_s = supervision.pause_s(served_s=clock.now_s() - started_at_s, draw=dice.draw())
        if pause_s is None:
            _log.error("no server stays up on port %d: the last one ended with %s", port, status)
            return 1
        _log.warning("the server has ended with %s; another one in %.1f s", status, pause_s)
        clock.sleep(pause_s)


def _serve(host: str, port: int, announce: Callable[[str], None]) -> tuple[int, int]:
    """Let a child serve until it ends; return its status, and the port."""
    command = [sys.executable, "-m", __name__, str(port)]
    child = subprocess.Popen(  # noqa: S603 - this very file, with a number
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        try:
            line = child.stdout.readline().strip() if child.stdout is not None else ""
            if line:
                port = int(line)
                announce(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            return child.wait(), port
        finally:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _main(port: int) -> None:
    from torch.distributed import TCPStore  # noqa: PLC0415 - the parent needs none of it

    store = TCPStore(
        "0.0.0.0",  # noqa: S104 - it is there for other hosts
        port,
        is_master=True,
        timeout=dt.timedelta(seconds=30),
        wait_for_workers=False,
        multi_tenant=True,
    )
    print(store.port, flush=True)  # noqa: T201 - what the parent waits for
    # Until the parent closes the pipe, or is gone.
    sys.stdin.read()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
