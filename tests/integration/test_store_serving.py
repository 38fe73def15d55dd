# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``lightning-resilience store serve``: a store that outlives jobs, and its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.errors import StoreUnavailableError


if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]
HANG_S = 60.0


@pytest.fixture
def serving() -> Iterator[subprocess.Popen[str]]:
    """The command, serving on a free port of loopback."""
    command = [sys.executable, "-m", "lightning_resilience", "store", "serve"]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def url_of(serving: subprocess.Popen[str]) -> tuple[str, int]:
    """Wait until it has begun to serve; return where."""
    assert serving.stdout is not None
    url = serving.stdout.readline().strip()
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def child_of(pid: int) -> int:
    """Return the process in which the server is."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(found[0])


def is_there(pid: int) -> bool:
    """Tell whether a process is."""
    return Path(f"/proc/{pid}/stat").exists()


def test_a_server_that_dies_is_started_again_at_the_same_place(
    serving: subprocess.Popen[str],
) -> None:
    """What was in it is gone, and clients that come again find an empty store."""
    place = url_of(serving)
    store = TorchStore.connect(*place, timeout_s=20.0)
    store.set("key", b"value")
    os.kill(child_of(serving.pid), signal.SIGKILL)

    again = url_of(serving)

    assert again == place
    assert store.get("key") is None
    store.close()


def test_it_ends_when_it_is_told_to(serving: subprocess.Popen[str]) -> None:
    """And its server with it."""
    place = url_of(serving)
    child = child_of(serving.pid)

    serving.send_signal(signal.SIGTERM)

    assert serving.wait(HANG_S) == 0
    assert not is_there(child)
    store = TorchStore.connect(*place, timeout_s=1.0)
    with pytest.raises(StoreUnavailableError):
        store.get("key")
    store.close()


def test_a_server_does_not_outlive_its_command(serving: subprocess.Popen[str]) -> None:
    """Not even where that is killed: nobody would know of it."""
    url_of(serving)
    child = child_of(serving.pid)

    serving.kill()

    ends_at_s = time.monotonic() + HANG_S
    while is_there(child) and time.monotonic() < ends_at_s:
        time.sleep(0.05)
    assert not is_there(child)
