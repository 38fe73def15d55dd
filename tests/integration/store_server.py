# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A ``TCPStore`` server in a process of its own, which a test may kill and freeze."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


HANG_S = 20.0
SERVER = """
import datetime, sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True,
                      datetime.timedelta(seconds=5), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Server:
    """A ``TCPStore`` server in a process of its own, to be killed."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, the second time on the same port."""
        command = [sys.executable, "-c", SERVER, str(self.port)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(HANG_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def freeze(self) -> None:
        """Stop it from answering while its sockets stay open."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)
