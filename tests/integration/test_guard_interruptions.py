# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and an exit end a guarded call at once, also while it waits for half an hour."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess]

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 20.0
"""Far below the half hour for which the call would wait."""

SCRIPT = """
import logging, signal, sys
from lightning_resilience import Guard
class Listener(logging.Handler):
    def emit(self, record):
        if sys.argv[1] in record.getMessage():
            print("waits", flush=True)
logging.getLogger("lightning_resilience").addHandler(Listener())
logging.getLogger("lightning_resilience").setLevel("INFO")
def leave(number, frame):
    raise SystemExit(143)
signal.signal(signal.SIGTERM, leave)
def work():
    raise ConnectionResetError("away")
delays = {"backoff": {"base_delay_s": 900, "max_delay_s": 900}, "open": {"base_delay_s": 0.001}}
breaker = {"window_s": 3600, "open_for_s": 900, "max_open_for_s": 900}
guard = Guard("x", retry=delays[sys.argv[2]], breaker=breaker)
if sys.argv[3] == "warm":
    guard.call(len, "ab")
try:
    guard.call(work)
except BaseException as error:
    print(type(error).__name__, type(error.__cause__).__name__, flush=True)
    raise
"""
BACKOFF = ("follows in", "backoff")
OPEN = ("waits for x:read (open)", "open")


@pytest.mark.parametrize("warmth", ["cold", "warm"])
@pytest.mark.parametrize("wait", [BACKOFF, OPEN], ids=["backoff", "open circuit"])
@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGINT, "KeyboardInterrupt", -signal.SIGINT), (signal.SIGTERM, "SystemExit", 143)],
    ids=["Ctrl-C", "exit"],
)
def test_an_interruption_ends_the_wait(
    number: signal.Signals, name: str, code: int, *, wait: tuple[str, str], warmth: str
) -> None:
    """It is raised itself, in a backoff as well as before an open circuit."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *wait, warmth],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "waits\n"

        process.send_signal(number)
        try:
            ended = process.wait(BOUND_S)
        finally:
            process.kill()
        said = process.stdout.read().splitlines()

    assert said[-1].split()[0] == name
    assert ended == code
