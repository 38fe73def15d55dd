# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that have Lightning imported already: forked from one that does nothing else.

A fresh interpreter takes seconds to import torch and Lightning, and a test of two ranks needs two
of them. Forking the test process instead would copy its threads' locks. So one warm process imports
everything, computes nothing, and forks a child for each request.

Run as a program, this is that process; it reads one pickled request per line of its input (base64),
and writes ``started NUMBER PID`` and ``ended NUMBER CODE``. It kills its children when its input
ends.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


ROOT = Path(__file__).resolve().parents[1]
_START_S = 60.0


class Process:
    """A child of the warm process.

    Args:
        warm: The warm process.
        pid: Its process id.
        log: File with what it printed and logged.
    """

    def __init__(self, warm: WarmPython, pid: int, log: Path) -> None:
        self._warm = warm
        self.pid = pid
        self.log = log
        self.code: int | None = None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def listen(self, done: Callable[[], bool], *, within_s: float) -> None:
        """Wait until ``done``, at most ``within_s`` seconds."""
        self._warm.listen(done, within_s=within_s)

    def text(self) -> str:
        """Return what it has printed and logged so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait(self, within_s: float) -> int:
        """Return its exit code once it has ended; a negative one is a signal."""
        self._warm.listen(lambda: self.code is not None, within_s=within_s)
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            message = f"{self.log.name} still ran after {within_s:g} s:\n{self.text()}"
            raise AssertionError(message)
        return self.code


class WarmPython:
    """The warm process, seen from the tests."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_python"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        self._children: dict[int, Process] = {}
        self._logs: list[Path] = []
        self._buffer = b""

    def start(
        self, function: Callable[..., Any], *args: Any, log: Path, environment: Mapping[str, str]
    ) -> Process:
        """Run an importable function in a child, with these variables added to its environment."""
        number = len(self._logs)
        self._logs.append(log)
        request = pickle.dumps((number, function, args, str(log), dict(environment)))
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(request) + b"\n")
        self.listen(lambda: number in self._children, within_s=_START_S)
        return self._children[number]

    def listen(self, done: Callable[[], bool], *, within_s: float) -> None:
        """Take in what the warm process tells until ``done``, at most ``within_s`` seconds."""
        until_s = time.monotonic() + within_s
        assert self._process.stdout is not None
        while not done() and time.monotonic() < until_s:
            if not select.select([self._process.stdout], [], [], 0.02)[0]:
                continue
            piece = os.read(self._process.stdout.fileno(), 4096)
            assert piece, "the warm process has ended"
            *lines, self._buffer = (self._buffer + piece).split(b"\n")
            for line in lines:
                word, number, value = line.decode().split()
                if word == "started":
                    process = Process(self, int(value), self._logs[int(number)])
                    self._children[int(number)] = process
                else:
                    self._children[int(number)].code = int(value)

    def close(self) -> None:
        """End it, and every child that still runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_START_S)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """One warm process for the session."""
    warm = WarmPython()
    yield warm
    warm.close()


def _import_all() -> None:
    # Both distributions first: a callback fits those that it finds.
    homes = ("lightning.pytorch", "pytorch_lightning")
    for name in (*homes, "lightning_resilience.adapters.lightning.callback"):
        __import__(name)
    for name in ("tests.lightning_job", "torch.distributed.run", "tests.agents"):
        __import__(name)
    # Lightning imports the first in the first listing of anything, also of a local directory, and
    # nothing else runs meanwhile: on a busy machine for longer than a rank of these tests may be
    # silent. The others are what each worker of a job on S3 would import in its first request.
    for name in ("gcsfs", "s3fs", "aiobotocore.httpxsession"):
        with contextlib.suppress(ImportError):
            __import__(name)


def _serve() -> None:
    _import_all()
    # A child that collects garbage touches, and so copies, every page of what was imported: that is
    # more than half of what a rank of these tests costs.
    gc.collect()
    gc.freeze()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    buffer = b""
    while True:
        ready = select.select([0, reading], [], [])[0]
        if reading in ready:
            os.read(reading, 512)
            _reap(children)
        if 0 not in ready:
            continue
        piece = os.read(0, 65536)
        if not piece:
            break
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            _fork(line, children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        sys.stdout.write(f"ended {children.pop(pid)} {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _fork(line: bytes, children: dict[int, int]) -> None:
    number, function, args, log, environment = pickle.loads(base64.b64decode(line))
    pid = os.fork()
    if pid:
        children[pid] = number
        sys.stdout.write(f"started {number} {pid}\n")
        sys.stdout.flush()
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os._exit(_run(function, args))


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    code = 0
    try:
        function(*args)
    except SystemExit as error:
        traceback.print_exc()
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - printed for the test to read
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()
